"""Plans within budgets that leave little: models in full and long sequences, as a table of speeds.

python -m bench.tight_budgets --json out.json
python -m bench.tight_budgets --rows 9 10    # the last two alone

Full fine-tuning with 8-bit states and rounded masters, without clipping; every step is one call. Some rows of sequences
are exact but for bf16 states, with clipping; some train adapters of rank 16; some keep inputs of layers in FP8.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import NamedTuple

from bench.environment import write_json
from flexengine.hardware.presets import preset
from flexengine.metrics import GIB
from flexengine.models.keep_dtype import with_coded_inputs
from flexengine.models.lora import with_lora
from flexengine.models.registry import open_model
from flexengine.options.lora import LoRA
from flexengine.plan import KeepDtype, Numerics, PlanError, Request
from flexengine.planner.planner import make_plan


class Row(NamedTuple):
    """A request: budgets in GiB, tokens of a step and of a sequence. small: 8-bit states and rounded masters."""

    model: str
    card: str
    gpu_gib: float
    host_gib: float
    tokens: int
    seq_len: int
    small: bool = True
    mode: str = "full"
    keep: KeepDtype = "compute"


ROWS = (
    Row("llama-3.1-8b", "rtx-4090", 24, 32, 65536, 1024),
    Row("qwen3-14b", "rtx-4090", 24, 64, 65536, 1024),
    Row("qwen3-32b", "rtx-4090", 24, 128, 65536, 1024),
    Row("qwen3-30b-a3b", "rtx-4090", 24, 128, 65536, 1024),
    Row("llama-3.1-70b", "rtx-4090", 24, 320, 65536, 1024),
    Row("llama-3.1-8b", "h200", 24, 110, 131072, 131072, small=False),
    Row("llama-3.1-8b", "h200", 24, 110, 262144, 262144, small=False),
    Row("llama-3.1-8b", "h200", 24, 110, 524288, 524288),
    Row("llama-3.1-8b", "h200", 24, 110, 1 << 20, 1 << 20, small=False, mode="lora"),
    Row("llama-3.1-8b", "h200", 24, 110, 524288, 524288, small=False, keep="fp8-inputs"),
    Row("llama-3.1-8b", "h200", 24, 110, 1 << 20, 1 << 20, small=False, mode="lora", keep="fp8-inputs"),
)


def planned(row: Row) -> dict[str, object]:
    """What the planner finds for a row, or what it says."""
    small, exact = Numerics(master="stochastic", state="int8"), Numerics(state="bfloat16")
    numerics = replace(small if row.small else exact, keep=row.keep)
    budgets = int(row.gpu_gib * GIB), int(row.host_gib * GIB)
    request = Request(
        row.seq_len, row.tokens, *budgets, numerics=numerics, clipping=not row.small, whole_steps=row.small
    )
    began = time.process_time()
    model = open_model(f"preset:{row.model}", needs_weights=False).spec
    try:
        model = with_coded_inputs(with_lora(model, LoRA()) if row.mode == "lora" else model, row.keep)
        plan = make_plan(model, request, preset(row.card))
    except PlanError as error:
        return {**row._asdict(), "says": str(error)}
    found = plan.predicted
    return {
        **row._asdict(),
        "tokens_per_s": round(row.tokens / found.step_s),
        "step_s": round(found.step_s, 2),
        "bound_s": round(found.speed_of_light_s, 2),
        "gpu_gib_used": round(found.gpu_bytes / GIB, 2),
        "host_gib_used": round(found.host_bytes / GIB, 2),
        "segment_blocks": plan.request.segment_blocks or 1,
        "gradients": plan.request.gpu_updates,
        "hidden_home": plan.request.hidden_home,
        "planning_cpu_s": round(time.process_time() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--rows", type=int, nargs="+", default=range(len(ROWS)), help="numbers of rows")
    rows, args = [], parser.parse_args()
    for number in args.rows:
        rows.append(planned(ROWS[number]))
        print(rows[-1], flush=True)
    write_json(args.json, {"rows": rows})


if __name__ == "__main__":
    main()
