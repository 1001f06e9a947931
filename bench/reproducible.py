"""What do sizes by the rule of --reproducible cost, and from which GPU memory on do they fit?

    python -m bench.reproducible --json out.json

Plans full fine-tuning on presets of cards with free sizes and with those of the rule, without a GPU.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

from bench.environment import write_json
from flexengine.hardware.presets import preset, with_memory
from flexengine.metrics import GIB, format_bytes
from flexengine.models.registry import open_model
from flexengine.plan import Numerics, Request
from flexengine.planner.ranks.plan import plan_for_ranks


class Case(NamedTuple):
    """A model on a card with budgets in GiB, and the longest sequence."""

    model: str
    card: str
    gpu_gib: float
    host_gib: float
    seq_len: int = 2048


CASES = (
    Case("llama-3.2-1b", "rtx-3090", 6, 128),
    Case("llama-3.2-3b", "rtx-4090", 16, 128),
    Case("llama-3.1-8b", "rtx-4090", 23, 128),
    Case("llama-3.1-8b", "h100-80", 24, 128),
    Case("llama-3.1-8b", "h100-80", 78, 128),
    Case("llama-3.1-8b", "h100-80", 24, 128, seq_len=16384),
    Case("qwen3-30b-a3b", "h200", 24, 400),
)
TOKENS = 131072


def measured(case: Case) -> dict:
    """Plan a case both ways."""
    model = open_model(f"preset:{case.model}").spec
    profile = with_memory(preset(case.card), host_total_bytes=int(case.host_gib * GIB))
    request = Request(
        case.seq_len, TOKENS, int(case.gpu_gib * GIB), int(case.host_gib * GIB), numerics=Numerics(state="bfloat16"),
        reproducible=True,
    )  # fmt: skip
    plan = plan_for_ranks(model, request, profile)
    p = plan.predicted
    print(
        f"{case.model} on {case.card}, {case.gpu_gib} GiB, sequences of {case.seq_len}: {p.step_s:.2f} s in"
        f" {plan.num_rounds} rounds of {plan.chunks_per_round} x {plan.chunk_tokens} tokens, {p.free_step_s:.2f} s with"
        f" free sizes ({p.step_s / p.free_step_s - 1:+.1%}); from {format_bytes(p.least_gpu_bytes)} on",
        flush=True,
    )
    return {
        **case._asdict(),
        "chunk_tokens": plan.chunk_tokens,
        "chunks_per_round": plan.chunks_per_round,
        "rounds": plan.num_rounds,
        "step_s": p.step_s,
        "free_step_s": p.free_step_s,
        "least_gpu_gib": p.least_gpu_bytes / GIB,
    }


def main() -> None:
    """Plan all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default=None, help="write the figures to this file")
    args = parser.parse_args()
    write_json(args.json, {"tokens_per_step": TOKENS, "rows": [measured(case) for case in CASES]})


if __name__ == "__main__":
    main()
