"""How long does planning take, and how near is the plan to the bound? One JSON line per model, card and budgets.

python -m bench.planner [MODEL CARD GPU_GIB HOST_GIB DRIVE_GIB]... --json out.json

Seconds are of the wall and of the process (what other processes take of a shared machine counts only in the first).
"""

import argparse
import json
import time

from bench.environment import write_json
from flexengine.hardware.presets import preset
from flexengine.metrics import GIB
from flexengine.models.registry import open_model
from flexengine.plan import Numerics, PlanError, Request
from flexengine.planner.bound.speed_of_light import speed_of_light
from flexengine.planner.planner import make_plan

CASES = (
    ("llama-3.2-1b", "rtx-4090", 4, 60, 0),
    ("llama-3.2-1b", "rtx-4090", 8, 60, 0),
    ("llama-3.2-3b", "h100-80", 12, 110, 0),
    ("llama-3.1-8b", "rtx-4090", 24, 110, 0),
    ("llama-3.1-8b", "h200", 24, 110, 0),
    ("llama-3.1-8b", "h100-80", 48, 110, 0),
    ("llama-3.1-70b", "h100-80", 80, 1000, 0),
    ("llama-3.1-70b", "h100-80", 80, 700, 0),
    ("llama-3.1-70b", "rtx-4090", 24, 700, 0),
    ("llama-3.1-405b", "h100-80", 80, 4000, 0),
    ("llama-3.1-405b", "h200", 140, 4000, 0),
    ("llama-3.1-70b", "h100-80", 70, 200, 920),
)
"""(model, card, GiB of GPU memory, of host memory and of a drive)."""


def measure(model_name: str, card: str, gpu_gib: float, host_gib: float, drive_gib: float) -> dict[str, object]:
    """One case with bf16 states and gradients, 131072 tokens a step in sequences of 2048."""
    model, profile = open_model(f"preset:{model_name}").spec, preset(card)
    gpu, host, drive = (int(gib * GIB) for gib in (gpu_gib, host_gib, drive_gib))
    request = Request(2048, 131072, gpu, host, numerics=Numerics(state="bfloat16"), max_drive_bytes=drive)
    case = {"model": model_name, "card": card, "gpu_gib": gpu_gib, "host_gib": host_gib, "drive_gib": drive_gib}
    case["blocks"] = len(model.blocks)
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    try:
        plan, error = make_plan(model, request, profile), ""
    except PlanError as refused:
        plan, error = None, str(refused)
    took = {"plan_s": time.perf_counter() - start_s, "plan_cpu_s": time.process_time() - start_cpu_s}
    case |= {name: round(seconds, 2) for name, seconds in took.items()}
    if plan is None:
        return {**case, "error": error}
    bound = speed_of_light(model, request, profile)
    return {
        **case,
        "chunk_tokens": plan.chunk_tokens,
        "chunks_per_round": plan.chunks_per_round,
        "step_s": round(plan.predicted.step_s, 4),
        "bound_share": round(plan.predicted.speed_of_light_s / plan.predicted.step_s, 3),
        "bound_limits": list(bound.limits) if bound is not None else [],
        "recompute_share": round(plan.predicted.recompute_share, 4),
    }


def main() -> None:
    """Measure the cases named on the command line, or a fixed list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="*", help="MODEL CARD GPU_GIB HOST_GIB DRIVE_GIB, repeated")
    parser.add_argument("--json", default=None, help="write the figures to this file")
    args = parser.parse_args()
    if len(args.case) % 5:
        parser.error("cases are MODEL CARD GPU_GIB HOST_GIB DRIVE_GIB, the last 0 where there is no drive")
    columns = [args.case[i::5] for i in range(5)]
    given = [(m, card, float(g), float(h), float(d)) for m, card, g, h, d in zip(*columns, strict=True)]
    rows = []
    for case in given or CASES:
        rows.append(measure(*case))
        print(json.dumps(rows[-1]), flush=True)
    write_json(args.json, {"rows": rows})


if __name__ == "__main__":
    main()
