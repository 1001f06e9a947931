"""What fits where? Plans models on cards of several sizes: a Markdown table of tokens/s and the longest sequence.

python -m bench.what_fits [MODEL ...] --host-mem-gib 128 --json out.json

Speed is that of full fine-tuning in sequences of 2048 tokens, 131072 to a step. The longest sequence is the largest
power of two, up to what the model was made for, for which a plan fits.
"""

import argparse
import json
from dataclasses import replace
from typing import NamedTuple

from bench.environment import write_json
from flexengine.hardware.presets import preset, with_memory
from flexengine.hardware.profile import HardwareProfile
from flexengine.metrics import GIB
from flexengine.models.registry import open_model
from flexengine.models.spec import ModelSpec
from flexengine.plan import Numerics, PlanError, Request
from flexengine.planner.feasibility.shortage import Feasibility, ShortageError
from flexengine.planner.planner import make_plan
from flexengine.planner.problem import Problem

MODELS = ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "llama-2-13b", "llama-3.1-70b")
SEQ_LEN, BATCH_TOKENS = 2048, 131072
LEFT_BYTES = GIB // 2
"""Of what CUDA reports on a card, left to a desktop and to whatever else runs there."""


class Column(NamedTuple):
    """A size of GPU memory, and the card whose rates stand for it."""

    gpu_gib: int
    card: str

    @property
    def head(self) -> str:
        """The column's title."""
        return f"{self.gpu_gib} GiB ({self.card})"


COLUMNS = (
    Column(16, "rtx-4090"),  # as if the card had 16 GiB
    Column(24, "rtx-4090"),
    Column(32, "rtx-5090"),
    Column(48, "l40s"),
    Column(80, "h100-80"),
)


def what_fits(model: ModelSpec, column: Column, host_gib: float, numerics: Numerics) -> dict[str, object]:
    """One cell: the predicted speed and the longest sequence, or what is needed."""
    profile = with_memory(preset(column.card), host_total_bytes=int(host_gib * GIB))
    budget = min(
        column.gpu_gib * GIB, profile.memory.gpu_total_bytes - LEFT_BYTES
    )  # cards show less than their name says
    request = Request(SEQ_LEN, BATCH_TOKENS, budget, int(host_gib * GIB), numerics=numerics)
    case: dict[str, object] = {"gpu_gib": column.gpu_gib, "card": column.card, "gpu_budget_gib": round(budget / GIB, 1)}
    try:
        predicted = make_plan(model, request, profile).predicted
    except ShortageError as error:
        return {**case, "fits": False, "fits_with": [remedy.flags for remedy in error.remedies]}
    return {
        **case,
        "fits": True,
        "tokens_per_s": round(BATCH_TOKENS / predicted.step_s, 1),
        "step_s": round(predicted.step_s, 3),
        "speed_of_light_share": round(predicted.speed_of_light_s / predicted.step_s, 3),
        "gpu_gib_used": round(predicted.gpu_bytes / GIB, 2),
        "host_gib_used": round(predicted.host_bytes / GIB, 2),
        "limited_by": predicted.limiter,
        "longest_seq_len": longest_sequence(model, request, profile),
    }


def longest_sequence(model: ModelSpec, request: Request, profile: HardwareProfile) -> int:
    """The largest power of two that fits, up to the model's positions; the batch grows with it where it must."""
    lengths = [request.max_seq_len]
    while 2 * lengths[-1] <= model.max_position_embeddings:
        lengths.append(2 * lengths[-1])
    for length in reversed(lengths):
        longer = replace(request, max_seq_len=length, max_global_batch_tokens=max(BATCH_TOKENS, length))
        try:
            if Feasibility(Problem(model, longer, profile)).fits():
                return length
        except PlanError:  # sizes that contradict each other
            continue
    return request.max_seq_len


def markdown(rows: dict[str, list[dict[str, object]]]) -> str:
    """The table."""
    lines = ["| model | " + " | ".join(column.head for column in COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    lines += [f"| {model} | " + " | ".join(map(cell, cells)) + " |" for model, cells in rows.items()]
    return "\n".join(lines)


def cell(case: dict[str, object]) -> str:
    """ "2606 tokens/s, up to 128K tokens", or what would be needed."""
    if not case["fits"]:
        needed = case["fits_with"]
        return f"needs `{needed[0]}`" if isinstance(needed, list) and needed else "does not fit"
    longest, speed = case["longest_seq_len"], case["tokens_per_s"]
    assert isinstance(longest, int)
    assert isinstance(speed, float)
    return f"{speed:,.0f} tokens/s, up to {longest // 1024}K"


def main() -> None:
    """Plan the models named on the command line, or a fixed list, on all columns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="*", default=MODELS, help="names of model presets")
    parser.add_argument("--host-mem-gib", type=float, default=128, help="host memory of every machine, in GiB")
    parser.add_argument("--optimizer-state-dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--json", default=None, help="write the figures to this file")
    args = parser.parse_args()
    numerics = Numerics(state=args.optimizer_state_dtype)
    rows: dict[str, list[dict[str, object]]] = {}
    for name in args.model:
        model = open_model(f"preset:{name}").spec
        rows[name] = []
        for column in COLUMNS:
            rows[name].append(what_fits(model, column, args.host_mem_gib, numerics))
            print(json.dumps({"model": name, **rows[name][-1]}), flush=True)
    print(f"\n{markdown(rows)}")
    settings = {
        "host_gib": args.host_mem_gib,
        "seq_len": SEQ_LEN,
        "batch_tokens": BATCH_TOKENS,
        "state": numerics.state,
    }
    write_json(args.json, {"settings": settings, "rows": rows})


if __name__ == "__main__":
    main()
