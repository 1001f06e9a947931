"""What a batch of 55% of a step's tokens is predicted to take, over the full step: dense, adapters, experts.

    python -m bench.ragged [--only 14b] [--card h100-80]

Sequences have log-normal lengths. Weights cross the link in every round and the CPU updates all parameters however few
tokens there are, so that a share below that of the tokens is not to be had. Prints JSON, a case a line; needs no GPU.
"""

from __future__ import annotations

import argparse
import json
from typing import Any, NamedTuple

from bench.plan_accuracy import lengths_of
from flexengine.api import prepare
from flexengine.hardware.presets import preset
from flexengine.run.step_prediction import StepPredictor
from flexengine.schedule.packing import pack

TOKENS_SHARE, SEQ_LEN, HOST_GIB = 0.555, 2048, 180
ADAPTERS = {"mode": "lora"}
OF_EXPERTS = {"mode": "lora", "lora_targets": "all"}
FULL = {"optimizer_state_dtype": "bfloat16"}


class Case(NamedTuple):
    """A model under a GPU budget in GiB, with so many tokens a step."""

    model: str
    gpu_gib: float
    tokens: int
    options: dict[str, Any]


CASES = [
    *(Case("llama-3.1-8b", gib, 131072, FULL) for gib in (12, 16, 24)),
    *(Case("qwen3-14b", gib, 32768, ADAPTERS) for gib in (12, 16, 24)),
    *(Case("qwen3-30b-a3b", gib, 65536, OF_EXPERTS) for gib in (12, 16, 24)),
]


def row_of(case: Case, card: str) -> dict[str, Any]:
    """Plan a case, and predict the full step and one of fewer tokens."""
    budgets = {"max_gpu_mem_gib": case.gpu_gib, "max_host_mem_gib": HOST_GIB}
    sizes = {"max_seq_len": SEQ_LEN, "max_global_batch_tokens": case.tokens}
    run = prepare(f"preset:{case.model}", hardware=preset(card), **budgets, **sizes, **case.options)
    plan, lengths = run.plan, lengths_of(case.tokens, SEQ_LEN, ragged=True)
    while sum(lengths) > TOKENS_SHARE * case.tokens:
        lengths.pop()
    rounds = pack(lengths, plan.chunk_tokens, plan.chunks_per_round)
    step_s = StepPredictor(plan, run.source.spec, run.profile).step_s(lengths)
    return {
        "model": case.model,
        "mode": case.options.get("mode", "full"),
        "gpu_gib": case.gpu_gib,
        "rounds": [[chunk.tokens for chunk in chunks] for chunks in rounds],
        "rounds_of_full_step": plan.num_rounds,
        "share_of_tokens": round(sum(lengths) / case.tokens, 3),
        "full_step_s": round(plan.predicted.step_s, 3),
        "share_of_step": round(step_s / plan.predicted.step_s, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="the step of a batch of 55% of the tokens over the full one")
    parser.add_argument("--only", default="", help="part of a model's name")
    parser.add_argument("--card", default="h100-80", help="preset of the machine")
    args = parser.parse_args()
    for case in (case for case in CASES if args.only in case.model):
        print(json.dumps(row_of(case, args.card)), flush=True)


if __name__ == "__main__":
    main()
