"""Are plans as good as they were? Plans of real requests against stored ones, and what must hold between plans.

python -m bench.golden_plans --write                     plan all requests and store what was found
python -m bench.golden_plans --compare [--only TEXT]     plan them again: seconds against those stored, CPU seconds
python -m bench.golden_plans --budgets [--count N]       a larger budget is never slower
python -m bench.golden_plans --pins [--only TEXT]        no pinned size and no `recompute` beats the free plan

All of it needs no GPU and runs in one process. `--only` keeps the requests whose id contains a text, `--json` writes
the figures to a file. The exit status is 1 where a bound does not hold.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.environment import write_json
from bench.golden_cases import CASES, SHORT_STEPS, Case
from bench.plan_bars import check_budgets, check_pins

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "planner" / "golden_plans.json"
MEAN_RATIO, WORST_RATIO = 1.003, 1.02
"""New over stored seconds: on average, and of any request."""
NOT_AVERAGED = frozenset(case.id for case in SHORT_STEPS)
"""Requests whose stored plans are far from the best: gains there must not pay for losses elsewhere."""


def measured(case: Case) -> dict[str, Any]:
    """The row of one request: the request in short and its plan's figures."""
    plan = case.plan()
    return {
        **case.to_json(),
        "step_s": plan.predicted.step_s,
        "gpu_bytes": plan.predicted.gpu_bytes,
        "host_bytes": plan.predicted.host_bytes,
        "chunk_tokens": plan.chunk_tokens,
        "chunks_per_round": plan.chunks_per_round,
    }


def stored(only: str = "") -> list[dict[str, Any]]:
    """The stored rows whose id contains a text."""
    rows = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return [row for row in rows if only in row["id"]]


def compared(row: dict[str, Any]) -> dict[str, Any]:
    """A stored request planned again: new figures beside the stored seconds, bytes above the budgets, CPU seconds."""
    case = Case.from_json(row)
    start_s = time.process_time()
    new = measured(case)
    cpu_s = time.process_time() - start_s
    excess = max(0, new["gpu_bytes"] - case.request.max_gpu_bytes, new["host_bytes"] - case.request.max_host_bytes)
    ratio = new["step_s"] / row["step_s"]
    return {**new, "stored_step_s": row["step_s"], "ratio": ratio, "excess_bytes": excess, "plan_cpu_s": cpu_s}


def mean_ratio(rows: Sequence[dict[str, Any]]) -> float:
    """New over stored seconds on average, of the requests that are averaged; 1 where there are none."""
    ratios = [row["ratio"] for row in rows if row["id"] not in NOT_AVERAGED]
    return statistics.fmean(ratios) if ratios else 1.0


def broken_bounds(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What compared plans break, in words; nothing where all bounds hold."""
    found = [f"{r['id']}: {r['excess_bytes']} bytes above a budget" for r in rows if r["excess_bytes"]]
    for row in rows:
        if row["ratio"] > WORST_RATIO:
            seconds = f"{row['step_s']:.4f} s, stored are {row['stored_step_s']:.4f} s"
            found.append(f"{row['id']}: {seconds}: {row['ratio']:.4f} times, at most {WORST_RATIO}")
    mean = mean_ratio(rows)
    if mean > MEAN_RATIO:
        found.append(f"mean of new over stored seconds is {mean:.4f}, at most {MEAN_RATIO}")
    return found


def write() -> None:
    """Plan all requests and store their rows."""
    rows = []
    for case in CASES:
        rows.append(measured(case))
        print(f"{rows[-1]['step_s']:10.4f} s  {case.id}", flush=True)
    GOLDEN.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {len(rows)} plans to {GOLDEN}")


def compare(only: str, path: str | None) -> list[str]:
    """Plan the stored requests again, print a line for each and a summary; returns what is broken."""
    rows = []
    for row in stored(only):
        rows.append(new := compared(row))
        sizes = f"{new['chunk_tokens']}x{new['chunks_per_round']}"
        figures = f"{new['step_s']:10.4f} s, stored {new['stored_step_s']:10.4f} s, ratio {new['ratio']:.4f}"
        print(f"{figures}, {new['plan_cpu_s']:5.2f} CPU s, {sizes:>9}  {new['id']}", flush=True)
    if not rows:
        raise SystemExit(f"no stored request has {only!r} in its id; see the ids in {GOLDEN}")
    summary = {
        "requests": len(rows),
        "mean_ratio": mean_ratio(rows),
        "worst_ratio": max(row["ratio"] for row in rows),
        "most_excess_bytes": max(row["excess_bytes"] for row in rows),
        "cpu_s": sum(row["plan_cpu_s"] for row in rows),
    }
    print(
        f"{summary['requests']} requests: mean ratio {summary['mean_ratio']:.4f}, worst {summary['worst_ratio']:.4f},"
        f" {summary['most_excess_bytes']} bytes above budgets, {summary['cpu_s']:.1f} CPU s in all"
    )
    write_json(path, {**summary, "rows": rows})
    return broken_bounds(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", action="store_true", help="store the plans of today's search")
    mode.add_argument("--compare", action="store_true", help="compare with the stored plans")
    mode.add_argument("--budgets", action="store_true", help="compare plans of random pairs of budgets")
    mode.add_argument("--pins", action="store_true", help="compare pinned plans with free ones")
    parser.add_argument("--only", default="", metavar="TEXT", help="requests whose id contains it")
    parser.add_argument("--count", type=int, default=200, help="pairs of budgets (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the pairs of budgets (default: 0)")
    parser.add_argument("--json", default=None, help="write the figures to this file")
    args = parser.parse_args()
    if args.write:
        return write()
    if args.compare:
        broken = compare(args.only, args.json)
    elif args.budgets:
        broken = check_budgets(args.count, args.seed, args.json)
    else:
        broken = check_pins(args.only, args.json)
    print("\n".join(broken) or "all bounds hold")
    raise SystemExit(1 if broken else 0)


if __name__ == "__main__":
    main()
