"""Would ranks that own experts be faster than ranks that own blocks? By arithmetic, beside plans of today's transports.

python -m bench.expert_parallel [--only MODEL ...] [--json FILE]

Both move the same weights: each of a block's bytes crosses one link once a pass, for the tokens of all ranks. They
differ in what ranks hand over. Ranks that own blocks hand over a row of the hidden state for each block, through the
host. Ranks that own experts send a token's row to every other rank that owns one of its experts, and each of these
experts sends one back: a row each, as sums keep their bits only where they are added in the order of experts. Both
twice, as backward does the same. The least that either could take is the busiest of a GPU, without recomputation, its
link without hand-overs, and the CPU, if these never waited. Sums keep their bits only where each expert's
product is of one rank's chunk, so that the host issues experts' commands for the chunk of every rank in every block.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from bench.environment import rounded, write_json
from flexengine.hardware.nodes import with_gpus
from flexengine.hardware.presets import preset
from flexengine.hardware.profile import HardwareProfile
from flexengine.metrics import GIB
from flexengine.models.registry import open_model
from flexengine.models.spec import ModelSpec
from flexengine.ops.experts.experts import GroupedLinear
from flexengine.options.job import Job
from flexengine.plan import Numerics, Plan, PlanError, Request
from flexengine.planner.ranks.plan import plan_for_ranks
from flexengine.planner.variants import issue_seconds
from flexengine.request import described
from flexengine.schedule.group_storage import DTYPE_BYTES

KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "adapters": {"mode": "lora", "lora_targets": ("all-linear", "all-experts")},
    "nf4": {"mode": "lora", "lora_targets": ("all-linear", "all-experts"), "base_dtype": "nf4"},
}
PASSES = 2
"""Forward and backward: weights are fetched, and rows exchanged, in both."""


class Row(NamedTuple):
    """A request: tokens of each GPU, host memory of all."""

    model: str
    kind: str
    card: str
    gpu_gib: float
    host_gib: float
    tokens: int
    gpus: int = 2


ROWS = (
    Row("qwen3-235b-a22b", "adapters", "rtx-5090", 30, 590, 4096),
    Row("qwen3-235b-a22b", "nf4", "rtx-5090", 30, 590, 4096),
    Row("qwen3-30b-a3b", "adapters", "h100-80", 24, 220, 4096),
    Row("qwen3-30b-a3b", "full", "h200", 130, 480, 4096, 4),
    Row("gpt-oss-20b", "adapters", "rtx-4090", 22, 120, 8192),
    Row("olmoe-1b-7b", "full", "rtx-4090", 22, 200, 8192),
    Row("deepseek-v2-lite", "full", "h200", 130, 480, 4096, 4),
)


def asked(row: Row) -> tuple[ModelSpec, Request, HardwareProfile]:
    """What is trained by all GPUs of a row, and on which node."""
    tokens, kind = row.gpus * row.tokens, KINDS[row.kind]
    job = Job(max_seq_len=2048, max_global_batch_tokens=tokens, max_gpu_mem_gib=row.gpu_gib, **kind)
    numerics = Numerics(state="bfloat16", base=kind.get("base_dtype", "compute"))
    request = Request(
        2048, tokens, int(row.gpu_gib * GIB), int(row.host_gib * GIB), numerics=numerics, ranks=row.gpus,
        whole_steps=True,
    )  # fmt: skip
    model = described(open_model(f"preset:{row.model}", needs_weights=False).spec, job)
    return model, request, preset(row.card)


def issue_factor(model: ModelSpec, gpus: int) -> float:
    """How many times as long a host issues commands where a GPU runs a block's experts for each GPU's chunk in turn."""
    found = [sum(op.divisions > 1 for op in layer.ops) / len(layer.ops) for layer in model.blocks]
    of_experts = sum(found) / len(found)
    return 1.0 - of_experts + gpus * of_experts


def rows_of_tokens(model: ModelSpec) -> Iterator[int]:
    """By block with experts, how many of them take each token."""
    for layer in model.blocks:
        counts = [op.per_token for op in layer.ops if isinstance(op, GroupedLinear)]
        if counts:
            yield counts[0]


def least(model: ModelSpec, in_stages: Plan, node: HardwareProfile) -> dict[str, float]:
    """Seconds of the busiest stream of a plan in stages, which others would take, too, of exchanges of rows, and of a
    host that issues blocks' commands: a chunk of each rank for its own blocks, or its own for all but experts."""
    request, told = in_stages.request, in_stages.predicted
    gpus, tokens = request.ranks, request.max_global_batch_tokens // request.ranks
    row_bytes = model.hidden_size * DTYPE_BYTES[request.numerics.compute]
    issue_s = issue_seconds(model, in_stages, node) / gpus
    sent = sum((gpus - 1) * min(1.0, taken / gpus) + taken * (gpus - 1) / gpus for taken in rows_of_tokens(model))
    exchanged = PASSES * tokens * row_bytes * sent
    rate = node.link.peer_bytes_per_s or node.host.bytes_per_s / (2 * gpus)  # of the host, which stores and reads them
    return {
        "issue_s": issue_s,
        "experts_issue_s": issue_s * issue_factor(model, gpus),
        "least_s": max(told.once_s, *(told.busy_s.get(stream, 0.0) for stream in ("h2d", "d2h", "cpu"))),
        "handed_s": max(told.busy_s.get(stream, 0.0) for stream in ("relay_in", "relay_out")),
        "exchange_s": exchanged / rate,
    }


def planned_s(model: ModelSpec, request: Request, node: HardwareProfile) -> tuple[float, Plan | None]:
    """Predicted seconds of a request's plan, and the plan; 0 where none fits."""
    try:
        plan = plan_for_ranks(model, request, node)
    except PlanError:
        return 0.0, None
    return plan.predicted.step_s, plan


def measured(row: Row) -> dict[str, Any]:
    """The figures of a row, seconds to three digits."""
    model, request, card = asked(row)
    node, found = with_gpus(card, row.gpus), dict[str, Any]()
    alone = replace(request, ranks=1)
    found["one_same_tokens_s"], _ = planned_s(model, alone, card)
    found["one_s"], _ = planned_s(model, replace(alone, max_global_batch_tokens=row.tokens), card)
    found["all_s"], plan = planned_s(model, request, node)
    found["transport"] = "none" if plan is None else plan.transport
    if plan is not None and not plan.owns_blocks:
        found["stages_s"], plan = planned_s(model, replace(request, transport="stages"), node)
    if plan is not None:
        assert plan.owns_blocks, "it was asked for, or found fastest"
        found |= least(model, plan, node)
    return {**row._asdict(), **rounded(found, 3)}


def main() -> None:
    """Print a line for each request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=None, help="models, all unless named")
    parser.add_argument("--json", default=None, help="write the figures to this file")
    args = parser.parse_args()
    rows = []
    for row in ROWS:
        if args.only is None or row.model in args.only:
            rows.append(measured(row))
            print(rows[-1], flush=True)
    write_json(args.json, {"rows": rows})


if __name__ == "__main__":
    main()
