"""Who would be faster on cards that we do not have? Plans what other engines have published, on the cards' presets.

python -m bench.published --json out.json

Every request has the published card, memory, tokens per step and numerics as far as they were stated; its tokens/s are
PREDICTED from published figures of the card: once on its preset, once at the rate of products that others have measured
on such a card. The published ones were measured by others, on hosts that we do not know.
"""

import argparse
from typing import NamedTuple

from bench.environment import write_json
from flexengine.hardware.presets import matmul_curve, preset, with_memory
from flexengine.hardware.profile import HardwareProfile
from flexengine.metrics import GIB
from flexengine.models.lora import with_lora
from flexengine.models.registry import open_model
from flexengine.options.lora import LoRA
from flexengine.plan import Numerics, PlanError, Request
from flexengine.planner.planner import make_plan

MEASURED_FLOPS_PER_S = {"rtx-4090": 160e12, "rtx-5090": 235e12}
"""bf16 products of 8192^3 through torch, measured by others: https://github.com/zzc0721/torch-performance-test-data,
issues 78 (160.2), and 96, 124 and pull request 15 (234.9, 234.7 and 236.0)."""


class Published(NamedTuple):
    """A run that was published. gpu_gib, host_gib: its memory, or ours for its card. batch_tokens: of a step."""

    engine: str
    model: str
    card: str
    tokens_per_s: float
    gpu_gib: float
    host_gib: float
    seq_len: int = 1024
    batch_tokens: int = 65536
    lora_rank: int = 0
    note: str = ""


RUNS = (
    Published(
        "RoundPipe", "llama-3.1-8b", "rtx-4090", 3142, 23, 128, 2048, 131072,
        note="weights one step old; batch and host assumed",
    ),
    *(
        Published("ShadowSpill", model, "rtx-5090", rate, 16, 112)
        for model, rate in (("llama-3.1-8b", 3556), ("olmoe-1b-7b", 13767), ("qwen3.5-9b", 3440))
    ),
    *(
        Published("ShadowSpill", model, "rtx-5090", rate, 16, 112, lora_rank=32)
        for model, rate in (("llama-3.1-8b", 4859), ("olmoe-1b-7b", 16903), ("qwen3.5-9b", 4365))
    ),
    Published("FlexTrain", "llama-3.1-8b", "rtx-5090", 3652, 24, 192),
    Published("FlexTrain", "llama-3.1-8b", "rtx-5090", 3572, 16, 192),
)  # fmt: skip


def at_rate(profile: HardwareProfile, flops_per_s: float) -> HardwareProfile:
    """A preset with another rate of products, and of attention, whose rate it takes from that of products."""
    gain = flops_per_s / profile.matmul.peak_flops_per_s
    return profile.changed(
        peak_matmul_flops_per_s=flops_per_s,
        matmul_flops_per_s=matmul_curve(flops_per_s, profile.memory.bytes_per_s),
        attention_forward_flops_per_s=tuple((n, gain * rate) for n, rate in profile.attention.forward_flops_per_s),
        attention_backward_flops_per_s=tuple((n, gain * rate) for n, rate in profile.attention.backward_flops_per_s),
    )


def planned(run: Published) -> dict[str, object]:
    """The plan of a published request, beside what was published."""
    row: dict[str, object] = dict(run._asdict())
    profile = with_memory(preset(run.card), host_total_bytes=int(run.host_gib * GIB))
    faster = predicted(run, at_rate(profile, MEASURED_FLOPS_PER_S[run.card]))
    return {**row, **predicted(run, profile), "at_measured_rate": faster.get("predicted_over_published")}


def predicted(run: Published, profile: HardwareProfile) -> dict[str, object]:
    """What a plan of the request promises on a machine, or why there is none."""
    spec = open_model(f"preset:{run.model}").spec
    if run.lora_rank:
        spec = with_lora(spec, LoRA(rank=run.lora_rank))
    budgets = int(run.gpu_gib * GIB), int(run.host_gib * GIB)
    request = Request(run.seq_len, run.batch_tokens, *budgets, numerics=Numerics(state="bfloat16"))
    try:
        plan = make_plan(spec, request, profile)
    except PlanError as error:
        return {"predicted_tokens_per_s": None, "refused": str(error).splitlines()[0]}
    step = plan.predicted
    rate = run.batch_tokens / step.step_s
    return {
        "predicted_tokens_per_s": round(rate, 1),
        "predicted_over_published": round(rate / run.tokens_per_s, 3),
        "bound_share": round(step.speed_of_light_s / step.step_s, 3),
        "bound_tokens_per_s": round(run.batch_tokens / step.speed_of_light_s, 1),
        "round": f"{plan.chunks_per_round} x {plan.chunk_tokens}",
        "limited_by": step.limiter,
    }


def table(rows: list[dict[str, object]]) -> str:
    """The Markdown table."""
    head = "| engine | model | card | GiB | published tokens/s | predicted | ratio | ratio at measured products |"
    lines = [head, "|---" * 8 + "|"]
    for row in rows:
        model = f"{row['model']}, LoRA {row['lora_rank']}" if row["lora_rank"] else row["model"]
        found = row["predicted_tokens_per_s"], row.get("predicted_over_published")
        memory = f"{row['gpu_gib']:g} + {row['host_gib']:g}"
        lines.append(f"| {row['engine']} | {model} | {row['card']} | {memory} | {row['tokens_per_s']:,} |"
                     f" {found[0] or 'refused'} | {found[1] or ''} | {row['at_measured_rate'] or ''} |")  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    """Plan every published request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default=None, help="write the figures to this file")
    path = parser.parse_args().json
    rows = [planned(run) for run in RUNS]
    print(table(rows))
    write_json(path, {"predicted": "from published figures of the cards", "rows": rows})


if __name__ == "__main__":
    main()
