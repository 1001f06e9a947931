"""Is the planner's choice the best? Its plan against 20 plans made by hand, run on the same card under the same cap.

    python -m bench.hand_sweep --model preset:llama-3.2-3b --caps 12 24 --json out.json

The 20 points of the sweep: five chunk and round sizes, times two ways to recompute (everything; or only what does not
fit on the GPU), times two residencies (all weights streamed; or as many blocks as fit, in half of what is left when
there are activations to keep as well). The planner's plan runs first and last, so that a drifting clock shows.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from bench.environment import write_json
from bench.job_flags import add_job_flags, job_from
from bench.step import one_batch
from flexengine.api import PlannedRun, build, prepare_job
from flexengine.optim import AdamW
from flexengine.plan import GroupPlan, LayerPlan, Plan
from flexengine.planner.cost.cost_model import step_seconds
from flexengine.planner.problem import Problem
from flexengine.schedule.layout import Layout
from flexengine.schedule.save_sets import savable_ops

SIZES = ((4096, 4), (8192, 1), (8192, 2), (8192, 4), (16384, 2))
"""(tokens of a chunk, chunks of a round)."""
RESIDENT = GroupPlan("gpu", "gpu", "host")


class Point(NamedTuple):
    """One plan of the sweep, or why there is none."""

    chunk_tokens: int
    chunks_per_round: int
    recompute: str
    residency: str
    plan: Plan | None


def points(prepared: PlannedRun) -> Iterator[Point]:
    """The sweep under a prepared run's budgets."""
    for size in SIZES:
        for recompute in ("everything", "what does not fit"):
            for residency in ("streamed", "what fits"):
                yield Point(*size, recompute, residency, hand_made(prepared, size, recompute, residency))


def hand_made(prepared: PlannedRun, size: tuple[int, int], recompute: str, residency: str) -> Plan | None:
    """Resident blocks first, then kept activations, each as many as fit; None when not even none of them fits."""
    blocks = len(prepared.source.spec.blocks)

    def plan(resident: int, kept: int) -> Plan:
        return with_counts(prepared, size, resident, kept)

    if not fits(prepared, plan(0, 0)):
        return None
    keeps = recompute != "everything"
    resident = 0
    if residency != "streamed":
        resident = most(blocks, lambda n: fits(prepared, plan(n, 0)))
        resident = resident // 2 if keeps else resident
    kept = most(blocks, lambda n: fits(prepared, plan(resident, n))) if keeps else 0
    return plan(resident, kept)


def with_counts(prepared: PlannedRun, size: tuple[int, int], resident: int, kept: int) -> Plan:
    """The first blocks are resident; the last ones keep all their outputs on the GPU, the others only their inputs,
    which wait on the host."""
    spec, request = prepared.source.spec, prepared.plan.request
    blocks = len(spec.blocks)
    keep = LayerPlan(savable_ops(spec.blocks[0].ops), (), "gpu")
    layers = (
        LayerPlan(),
        *(keep if i >= blocks - kept else LayerPlan((), (), "host") for i in range(blocks)),
        LayerPlan(),
    )
    block_groups = [layer.groups[0] for layer in spec.layers if layer.kind == "block"]
    groups = tuple(RESIDENT if g in block_groups[:resident] else GroupPlan() for g in range(len(spec.groups)))
    return Plan(spec.name, request, *size, layers, groups, optimizer_tile=1 << 23, share_edge_slots=True)


def fits(prepared: PlannedRun, plan: Plan) -> bool:
    """Within both budgets, exactly."""
    problem = Problem(prepared.source.spec, plan.request, prepared.profile)
    return problem.fits(problem.layout(plan))


def most(limit: int, works: Callable[[int], bool]) -> int:
    """The largest count up to `limit` that works, by bisection; 0 does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if works(middle) else (low, middle - 1)
    return low


def measure(prepared: PlannedRun, plan: Plan, steps: int) -> float:
    """Median seconds of a step after one to warm up."""
    engine = build(replace(prepared, plan=plan), AdamW(lr=1e-4))
    batch = one_batch(engine)
    seconds = []
    for _ in range(1 + steps):
        start_s = time.perf_counter()
        engine.train_step(input_ids=batch, labels=batch)  # which plans predict
        seconds.append(time.perf_counter() - start_s)
    engine.close()
    return statistics.median(seconds[1:])


def sweep(args: argparse.Namespace, cap_gib: float) -> dict:
    """The planner's plan and all points under one cap."""
    prepared = prepare_job(args.model, job_from(args, max_gpu_mem_gib=cap_gib, optimizer_state_dtype="bfloat16"))
    planned = [measure(prepared, prepared.plan, args.steps)]
    rows = []
    for point in points(prepared):
        row = {**point._asdict(), "plan": None}
        if point.plan is not None:
            row["step_s"] = measure(prepared, point.plan, args.steps)
            row["predicted_step_s"] = step_seconds(Layout(prepared.source.spec, point.plan), prepared.profile).step_s
        rows.append(row)
        print(cap_gib, {k: v for k, v in row.items() if k != "plan"}, flush=True)
    planned.append(measure(prepared, prepared.plan, args.steps))
    best = min((row["step_s"] for row in rows if "step_s" in row), default=None)
    return {
        "cap_gib": cap_gib,
        "planned_step_s": statistics.mean(planned),
        "planned_runs_s": planned,
        "predicted_step_s": prepared.plan.predicted.step_s,
        "planned_chunk_tokens": prepared.plan.chunk_tokens,
        "planned_chunks_per_round": prepared.plan.chunks_per_round,
        "best_by_hand_s": best,
        "planned_over_best": statistics.mean(planned) / best if best else None,
        "points": [{k: v for k, v in row.items() if k != "plan"} for row in rows],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="preset:llama-3.2-3b")
    parser.add_argument("--caps", nargs="+", type=float, default=[12.0, 24.0], help="GPU budgets in GiB")
    parser.add_argument("--steps", type=int, default=2)
    sizes = ("max_seq_len", "max_global_batch_tokens", "max_host_mem_gib")
    add_job_flags(parser, *sizes, "device", "dtype", max_global_batch_tokens=32768, max_host_mem_gib=110.0)
    parser.add_argument("--json", default=None, help="write the figures to this file")
    args = parser.parse_args()
    results = []
    for cap in args.caps:
        results.append(sweep(args, cap))
        write_json(args.json, {"model": args.model, "caps": results})
        last = results[-1]
        best = (
            "no point fits" if last["best_by_hand_s"] is None else f"best of the sweep {last['best_by_hand_s']:.3f} s"
        )
        print(f"cap {cap:g} GiB: planned {last['planned_step_s']:.3f} s, {best}")


if __name__ == "__main__":
    main()
