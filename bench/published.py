"""Who would be faster on cards that we do not have? Plans what other engines have published, on the cards' presets.

python -m bench.published [ENGINE ...] --json out.json    # a minute of one core a row
python -m bench.published --bounds                        # bounds alone, a second

Every row has the published card, memory, tokens per step and numerics as far as they were stated, as flags of
`flexengine plan`. Its tokens/s are PREDICTED from published figures of the card; the published ones were measured by
others, on hosts that we do not know.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

from bench.environment import write_json
from flexengine.commands.plan import Asked, machine, request_of
from flexengine.commands.plan_flags import parse
from flexengine.hardware.profile import HardwareProfile
from flexengine.models.registry import open_model
from flexengine.models.spec import ModelSpec
from flexengine.plan import PlanError, Request
from flexengine.planner.bound.speed_of_light import speed_of_light_s
from flexengine.planner.ranks.plan import plan_for_ranks
from flexengine.request import described

LLMQ = "https://github.com/IST-DASLab/llmq (README, Speed)"
SUROGATE = "https://github.com/invergent-ai/surogate (docs/reference/benchmarks.md)"
SHADOWSPILL = "https://github.com/als244/shadowspill (docs/internal/plans/lora_models_1008/PERF_SCALE.md)"
ROUNDPIPE = "https://github.com/ITcarrot/RoundPipe (README)"
FREE_BYTES_PER_S, FREE_LAUNCH_S = 1e18, 1e-12


class Published(NamedTuple):
    """A run that was published. flags: of `flexengine plan`, the published request or ours of the same work; other:
    in which way its work is less than ours, so that a bound of ours says nothing of it."""

    engine: str
    tokens_per_s: float
    flags: str
    source: str
    other: str = ""


def _llmq(card: str, size: str, bf16: float, fp8: float) -> list[Published]:
    """The two rows of a model in llmq's tables: masters and states in bf16, steps of 524288 tokens."""
    flags = (
        f"--model preset:qwen2.5-{size} --gpu {card} --host-mem-gib 512 --optimizer-state-dtype bfloat16"
        " --master-dtype bfloat16 --max-seq-len 1024 --max-global-batch-tokens 524288"
    )
    return [Published("llmq", bf16, flags, LLMQ), Published("llmq", fp8, f"{flags} --matmul-dtype fp8", LLMQ)]


def _lora(model: str, card: str, rank: int, host_gib: int, seq_len: int, tokens: int, more: str = "") -> str:
    return (
        f"--model preset:{model} --gpu {card} --host-mem-gib {host_gib} --mode lora --lora-rank {rank}"
        f" --max-seq-len {seq_len} --max-global-batch-tokens {tokens} {more}"
    ).strip()


def _full(model: str, card: str, gpu_gib: float, host_gib: int, seq_len: int, tokens: int) -> str:
    return (
        f"--model preset:{model} --gpu {card} --max-gpu-mem-gib {gpu_gib:g} --host-mem-gib {host_gib}"
        f" --optimizer-state-dtype bfloat16 --max-seq-len {seq_len} --max-global-batch-tokens {tokens}"
    )


FP16_SUMS = (
    "its products sum in float16 (allow_fp16_accumulation in benchmark/train.py), for which GeForce cards have twice"
    " the rate; weights are one step old, and nothing is clipped"
)
KT = "https://github.com/kvcache-ai/ktransformers (doc/en/SFT, KTransformers-Fine-Tuning_User-Guide.md)"
ROWS = (
    *_llmq("rtx-pro-6000", "0.5b", 85e3, 90e3),
    *_llmq("rtx-pro-6000", "1.5b", 32e3, 36e3),
    *_llmq("rtx-pro-6000", "3b", 17e3, 22e3),
    *_llmq("rtx-pro-6000", "7b", 8.08e3, 11.6e3),
    *_llmq("h100-80", "0.5b", 144e3, 155e3),
    *_llmq("h100-80", "1.5b", 58e3, 68e3),
    *_llmq("h100-80", "3b", 30e3, 39e3),
    *_llmq("h100-80", "7b", 13.87e3, 19.2e3),
    *_llmq("rtx-4090", "0.5b", 40e3, 49e3),
    *_llmq("rtx-4090", "1.5b", 14e3, 19e3),
    *_llmq("rtx-4090", "7b", 2778, 4329),
    *_llmq("l40s", "0.5b", 42e3, 48e3),
    *_llmq("l40s", "1.5b", 17e3, 20e3),
    *_llmq("l40s", "3b", 8.9e3, 11e3),
    *_llmq("l40s", "7b", 3968, 5144),
    *_llmq("rtx-5090", "0.5b", 55e3, 70e3),
    *_llmq("rtx-5090", "1.5b", 17e3, 27e3),
    *_llmq("rtx-5090", "3b", 8.6e3, 13e3),
    *_llmq("rtx-5090", "7b", 3.1e3, 4.4e3),
    Published("surogate", 3.8e3, _lora("qwen3-8b", "rtx-5090", 16, 128, 2048, 16384), SUROGATE),
    Published("surogate", 5.4e3, _lora("qwen3-8b", "rtx-5090", 16, 128, 2048, 16384, "--matmul-dtype fp8"), SUROGATE),
    Published("surogate", 10.2e3, _lora("qwen3-8b", "h100-80", 16, 128, 2048, 16384), SUROGATE),
    Published("surogate", 11.6e3, _lora("qwen3-8b", "h100-80", 16, 128, 2048, 16384, "--matmul-dtype fp8"), SUROGATE),
    Published("surogate", 30.1e3, _lora("qwen3-0.6b", "rtx-5090", 16, 128, 2048, 16384), SUROGATE),
    Published("surogate", 53.9e3, _lora("qwen3-0.6b", "h100-80", 16, 128, 2048, 16384), SUROGATE),
    Published(
        "surogate", 0.5e3, _lora("qwen3-30b-a3b", "rtx-5090", 16, 128, 2048, 16384, "--base-dtype nf4"), SUROGATE
    ),
    Published("Unsloth", 3.5e3, _lora("qwen3-8b", "rtx-5090", 16, 128, 2048, 16384), SUROGATE),
    Published("Unsloth", 8.9e3, _lora("qwen3-8b", "h100-80", 16, 128, 2048, 16384), SUROGATE),
    Published(
        "Soup",
        113,
        _lora("llama-3.1-8b", "h100-80", 16, 64, 512, 512, "--base-dtype nf4 --max-gpu-mem-gib 4"),
        "https://pypi.org/project/soup-cli/ 0.77.0 (benchmarks, H100: 3.32 GB)",
    ),
    *(
        Published(
            "NeMo AutoModel",
            rate,
            _lora(model, "h100-80", 16, 128, 4096, 131072),
            "https://github.com/NVIDIA-NeMo/Automodel (docs/performance-summary.mdx)",
        )
        for model, rate in (("llama-3.1-8b", 12473), ("qwen2.5-7b", 14110))
    ),
    Published(
        "KTransformers",
        530,
        _lora("deepseek-v2-lite", "rtx-4090", 8, 64, 512, 8192, "--lora-targets all-linear all-experts"),
        KT,
    ),
    Published("KTransformers", 40.4, _lora("deepseek-v3", "rtx-4090", 8, 1024, 512, 8192, "--base-dtype fp8"), KT),
    Published(
        "KTransformers",
        147.9,
        _lora("qwen3-235b-a22b", "rtx-5090", 8, 560, 2048, 4096, "--gpus 2"),
        "https://github.com/kvcache-ai/ktransformers (papers/kt-ft; adapters of experts, too)",
    ),
    Published(
        "Horizon-LM",
        1334,  # 259 TFLOP/s
        _full("qwen2.5-32b", "h100-80", 79, 480, 1024, 98304),
        "https://github.com/DLYuanGod/Horizon-LM (README: 259 TFLOP/s)",
    ),
    *(
        Published("RoundPipe", rate, _full(model, "rtx-4090", 23, host, 2048, 131072), ROUNDPIPE, FP16_SUMS)
        for model, host, rate in (("qwen3-1.7b", 512, 8881), ("llama-3.1-8b", 512, 3142), ("qwen3-32b", 768, 740))
    ),
    *(
        Published("ShadowSpill", rate, _full(model, "rtx-5090", 16, 112, 1024, 65536), SHADOWSPILL)
        for model, rate in (("llama-3.1-8b", 3556), ("olmoe-1b-7b", 13767), ("qwen3.5-9b", 3440))
    ),
    *(
        Published(
            "ShadowSpill", rate, _lora(model, "rtx-5090", 32, 112, 1024, 65536, "--max-gpu-mem-gib 16"), SHADOWSPILL
        )
        for model, rate in (("llama-3.1-8b", 4859), ("olmoe-1b-7b", 16903), ("qwen3.5-9b", 4365))
    ),
    *(
        Published(
            "FlexTrain",
            rate,
            _full("llama-3.1-8b", "rtx-5090", gpu_gib, 192, 1024, 65536),
            "https://github.com/als244/flextrain",
        )
        for gpu_gib, rate in ((24, 3652), (16, 3572))
    ),
)


class Row(NamedTuple):
    """A published run as the planner sees it."""

    model: ModelSpec
    request: Request
    profile: HardwareProfile

    @classmethod
    def of(cls, run: Published) -> Row:
        """What its flags ask for, on its card's preset."""
        namespace, job, objective = parse(run.flags.split())
        model = described(open_model(namespace.model, needs_weights=False).spec, job)
        asked = Asked(model, job, namespace, run.flags, objective)
        profile = machine(asked, namespace.gpu)
        return cls(asked.model, request_of(asked, job, profile), profile)

    @property
    def tokens(self) -> int:
        """Of a step, of all cards."""
        return self.request.max_global_batch_tokens

    def bound_tokens_per_s(self) -> float:
        """The most that any plan of ours could reach with our kernels; infinite where the bound is unknown."""
        seconds = speed_of_light_s(self.model, self.request, self.profile)
        return self.tokens / seconds if seconds else float("inf")

    def card_tokens_per_s(self) -> float:
        """The most that the card's rates of products, attention and copies over its link allow, whatever the kernels
        between them move: what a preset alone must answer for."""
        free = self.profile.changed(memory_bytes_per_s=FREE_BYTES_PER_S, launch_s=FREE_LAUNCH_S)
        return self._replace(profile=free).bound_tokens_per_s()


def planned(run: Published, bounds_only: bool) -> dict[str, object]:
    """What a plan of a published request promises, beside what was published."""
    row = Row.of(run)
    found: dict[str, object] = {**run._asdict(), "bound": round(row.bound_tokens_per_s(), 1)}
    found["card_bound"] = round(row.card_tokens_per_s(), 1)
    if bounds_only:
        return found
    try:
        step = plan_for_ranks(row.model, row.request, row.profile).predicted
    except PlanError as error:
        return {**found, "refused": str(error).splitlines()[0]}
    rate = row.tokens / step.step_s
    return {**found, "predicted": round(rate, 1), "ratio": round(rate / run.tokens_per_s, 2), "limiter": step.limiter}


def table(rows: list[dict[str, object]]) -> str:
    """The Markdown table."""
    head = "| engine | request | published tokens/s | predicted | ratio | our bound | the card's bound |"
    lines = [head, "|---" * 7 + "|"]
    lines += [
        f"| {row['engine']} | `{row['flags']}` | {row['tokens_per_s']:,} | {row.get('predicted', '')}"
        f" | {row.get('ratio', '')} | {row['bound']} | {row['card_bound']} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Plan the published requests of the engines that are named, or of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engines = sorted({run.engine for run in ROWS})
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help=f"of {', '.join(engines)}")
    parser.add_argument("--bounds", action="store_true", help="bounds alone, without plans")
    parser.add_argument("--json", default=None, help="write the figures to this file")
    flags = parser.parse_args()
    rows = [planned(run, flags.bounds) for run in ROWS if not flags.engines or run.engine in flags.engines]
    print(table(rows))
    write_json(flags.json, {"predicted": "from published figures of the cards", "rows": rows})


if __name__ == "__main__":
    main()
