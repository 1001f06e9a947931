"""What do parts of experts win? Plans models with whole blocks and with their experts in parts, at several budgets.

python -m bench.in_parts --json out.json

Steps of 65536 tokens in sequences of 2048 on a preset of an H200 with 2000 GiB of host memory. `planned` is what the
planner takes of the two.
"""

import argparse
import json
from typing import NamedTuple

from bench.environment import write_json
from flexengine.hardware.presets import preset, with_memory
from flexengine.metrics import GIB
from flexengine.models.freezing import with_frozen
from flexengine.models.in_parts import in_parts
from flexengine.models.registry import open_model
from flexengine.models.spec import ModelSpec
from flexengine.plan import Plan, Request
from flexengine.planner.planner import make_plan
from flexengine.planner.problem import Problem
from flexengine.planner.search import Search

HOST_GIB, SEQ_LEN, BATCH_TOKENS = 2000, 2048, 65536


class Case(NamedTuple):
    """A preset, a budget of GPU memory, and what is frozen."""

    model: str
    gpu_gib: int
    freeze: tuple[str, ...] = ()


CASES = (
    *(Case("mixtral-8x7b", gib) for gib in (24, 16, 12, 8)),
    *(Case("qwen3-30b-a3b", gib) for gib in (24, 8)),
    Case("gpt-oss-120b", 16),
    Case("deepseek-v3", 24, ("blocks",)),
)


def measured(case: Case) -> dict[str, object]:
    """Predicted seconds of a step with whole blocks, in parts, and as planned; None where nothing fits."""
    profile = with_memory(preset("h200"), host_total_bytes=HOST_GIB * GIB)
    model = with_frozen(open_model(f"preset:{case.model}").spec, case.freeze)
    request = Request(SEQ_LEN, BATCH_TOKENS, case.gpu_gib * GIB, int(0.95 * HOST_GIB) * GIB)

    def seconds(arranged: ModelSpec) -> float | None:
        return _seconds(Search(Problem(model, request, profile), arranged).plan())

    planned = make_plan(model, request, profile)
    return {
        **case._asdict(),
        "whole_s": seconds(model),
        "in_parts_s": seconds(in_parts(model)),
        "planned": "in parts" if planned.in_parts else "whole",
        "planned_s": _seconds(planned),
        "speed_of_light_s": round(planned.predicted.speed_of_light_s, 2),
        "host_gib": round(planned.predicted.host_bytes / GIB, 1),
    }


def _seconds(plan: Plan | None) -> float | None:
    return None if plan is None else round(plan.predicted.step_s, 2)


def main() -> None:
    """Plan all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default=None, help="write the figures to this file")
    args = parser.parse_args()
    rows = []
    for case in CASES:
        rows.append(measured(case))
        print(json.dumps(rows[-1]), flush=True)
    settings = {"gpu": "h200", "host_gib": HOST_GIB, "seq_len": SEQ_LEN, "batch_tokens": BATCH_TOKENS}
    write_json(args.json, {"settings": settings, "rows": rows})


if __name__ == "__main__":
    main()
