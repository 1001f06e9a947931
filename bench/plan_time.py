"""How long does planning take? Prints one JSON line per case: model, budgets, seconds, and the predicted step.

python -m bench.plan_time [MODEL GPU_GIB HOST_GIB]... --json out.json
"""

import argparse
import json
import time

from bench.environment import write_json
from flexengine.hardware.presets import preset
from flexengine.metrics import GIB
from flexengine.models.registry import open_model
from flexengine.plan import Numerics, PlanError, Request
from flexengine.planner.search import make_plan

CASES = (
    ("llama-3.2-1b", 4, 60),
    ("llama-3.1-8b", 24, 110),
    ("llama-3.1-70b", 80, 1000),
    ("llama-3.1-405b", 80, 4000),
)


def measure(model_name: str, gpu_gib: float, host_gib: float, hardware: str) -> dict[str, object]:
    """One case with bf16 states and gradients, 131072 tokens a step in sequences of 2048."""
    model = open_model(f"preset:{model_name}").spec
    numerics = Numerics(state="bfloat16")
    request = Request(2048, 131072, int(gpu_gib * GIB), int(host_gib * GIB), numerics=numerics)
    case = {"model": model_name, "gpu_gib": gpu_gib, "host_gib": host_gib, "hardware": hardware}
    start = time.perf_counter()
    try:
        plan = make_plan(model, request, preset(hardware))
    except PlanError as error:
        return {**case, "plan_s": round(time.perf_counter() - start, 2), "error": str(error)}
    return {
        **case,
        "plan_s": round(time.perf_counter() - start, 2),
        "blocks": len(model.blocks),
        "chunk_tokens": plan.chunk_tokens,
        "round_tokens": plan.round_tokens,
        "step_s": round(plan.predicted.step_s, 3),
        "speed_of_light_s": round(plan.predicted.speed_of_light_s, 3),
        "recompute_share": round(plan.predicted.recompute_share, 4),
    }


def main() -> None:
    """Measure the cases named on the command line, or a fixed list."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", nargs="*", help="MODEL GPU_GIB HOST_GIB, repeated")
    parser.add_argument("--hardware", default="h200", help="a hardware preset")
    parser.add_argument("--json", default=None, help="write the figures to this file")
    args = parser.parse_args()
    if len(args.case) % 3:
        parser.error("cases are triples: MODEL GPU_GIB HOST_GIB")
    given = [(m, float(g), float(h)) for m, g, h in zip(args.case[::3], args.case[1::3], args.case[2::3], strict=True)]
    rows = []
    for case in given or CASES:
        rows.append(measure(*case, args.hardware))
        print(json.dumps(rows[-1]), flush=True)
    write_json(args.json, {"rows": rows})


if __name__ == "__main__":
    main()
