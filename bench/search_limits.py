"""What does each limit of the search cost and gain? Doubles one at a time and plans a sample of requests again.

python -m bench.search_limits [--only TEXT] [--halve] --json out.json

Prints, for every limit, the mean of new over old seconds of a step and the planning time over that of today's limits.
It needs no GPU. `searches` and `spare_bytes` of several ranks are left out: they only matter where a plan does not fit.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import fields, replace
from typing import Any

from bench.environment import write_json
from bench.golden_cases import CASES, Case
from flexengine.planner.limits import LIMITS, SearchLimits
from flexengine.planner.planner import find_plan
from flexengine.planner.problem import Problem

SAMPLE = (
    "llama-3.2-1b rtx-4090 8+60GiB 32768x2048 no-clipping",
    "llama-3.2-1b a100-40 6+60GiB 4096x2048 fp32-states",
    "llama-3.1-8b h200 24+110GiB 8192x2048 no-clipping",
    "gemma-3-4b rtx-4090 12+60GiB 32768x2048 no-clipping",
)
OF_RANKS = ("searches", "spare_bytes")


def changed(name: str, factor: float) -> SearchLimits:
    """Today's limits with one of them times a factor; of what is a share above 1, what is above."""
    value: Any = getattr(LIMITS, name)
    if name == "race":
        rounds = [race._replace(blocks=max(1, int(race.blocks * factor))) for race in value]
        return replace(LIMITS, race=tuple(rounds))
    if isinstance(value, int):
        return replace(LIMITS, **{name: max(1, round(value * factor))})
    return replace(LIMITS, **{name: min(1.0, value * factor) if value < 1 else 1 + (value - 1) * factor})


def planned(cases: list[Case], limits: SearchLimits) -> tuple[list[float], float]:
    """Seconds of the steps, and CPU seconds of planning them all."""
    start_s, found = time.process_time(), []
    for case in cases:
        plan = find_plan(Problem(case.spec, case.request, case.profile, limits))
        assert plan is not None, "stored requests fit"
        found.append(plan.predicted.step_s)
    return found, time.process_time() - start_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="limits whose name contains it")
    parser.add_argument("--halve", action="store_true", help="halve limits instead")
    parser.add_argument("--json", default=None, help="write the figures to this file")
    args = parser.parse_args()
    cases = [case for case in CASES if case.id in SAMPLE]
    planned(cases, LIMITS)  # fills what is cached for all
    before, cpu_s = planned(cases, LIMITS)
    rows = []
    for name in (field.name for field in fields(SearchLimits)):
        if args.only not in name or name in OF_RANKS:
            continue
        seconds, took_s = planned(cases, changed(name, 0.5 if args.halve else 2.0))
        ratios = [new / old for new, old in zip(seconds, before, strict=True)]
        row = {"limit": name, "step": statistics.fmean(ratios), "best": min(ratios), "worst": max(ratios)}
        rows.append({**row, "planning": took_s / cpu_s})
        print(
            f"{name:22} step {row['step']:.5f} ({row['best']:.4f} to {row['worst']:.4f}), time {took_s / cpu_s:.2f}",
            flush=True,
        )
    write_json(args.json, {"requests": [case.id for case in cases], "plan_cpu_s": cpu_s, "rows": rows})


if __name__ == "__main__":
    main()
