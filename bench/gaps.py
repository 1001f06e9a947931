"""Where does the compute stream wait, and which commands take longer than priced? One step, command by command.

    python -m bench.gaps --preset llama-3.1-8b --caps 24 --host-gib 110 --tokens-per-step 8192 --json out.json
    torchrun --nproc-per-node 2 -m bench.gaps --tokens-per-step 262144 --host-gib 220 --json two.json

Flags are those of bench.step; of several caps the first counts. Of --warmup and --steps steps it prints seconds, norms,
seconds of the thread that issues, and the host's before the first program of a step, while it issues each, after each
until the next, and at the end. Then one more is timed. By cause: the seconds that compute was idle before a command,
which came to an end when another stream's command did (`h2d: copy`), or when none did and the host had yet to issue it
(`issue`). By kind of command and of layer: how many, their seconds, and those that the simulator gives them. By kind of
command that is no copy: what the issuing thread takes for them per step after the warmup, and what they are priced at.
Of several GPUs these are rank 0's, and every rank's seconds of idle compute are told by the stream it waited for, so
that those of `relay_in`, `relay_out` and `comm` are what the transport costs.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from bench.environment import require_native_code, write_json
from bench.job_flags import job_from
from bench.step import of_all, one_batch, parse, printer
from flexengine.api import PlannedRun, build, prepare_job
from flexengine.optim import AdamW
from flexengine.parallel.team import is_first, leave
from flexengine.plan import Plan
from flexengine.planner.cost.cost_model import CostModel
from flexengine.reports.text_format import align_columns
from flexengine.runtime.engine import Engine
from flexengine.schedule.commands import Command, LayerCall, Stream
from flexengine.schedule.simulator import Rates, simulate
from flexengine.schedule.timeline import TimedRun

SOON_S = 60e-6
"""A command that starts within this time of another's end has waited for that one."""


def cause(command: Command, run: TimedRun, idle_from_s: float) -> str:
    """What a command of compute waited for: the stream and kind of what ended last of it, or the host."""
    ended_s, index = max(((run.spans_s[wait][1], wait) for wait in command.waits), default=(0.0, -1))
    if ended_s <= idle_from_s:
        return "issue"
    other = run.program.commands[index]
    named = f"{other.stream.value}: {other.kind}"
    return named if run.spans_s[command.index][0] - ended_s < SOON_S else f"issue after {named}"


def idle_seconds(runs: Iterable[TimedRun]) -> dict[tuple[str, str], list[float]]:
    """The gaps of the compute stream by cause and by the kind of command that ended them."""
    gaps: dict[tuple[str, str], list[float]] = defaultdict(list)
    for run in runs:
        free_s = None
        for command in run.program.commands:
            if command.stream is not Stream.COMPUTE:
                continue
            start_s, end_s = run.spans_s[command.index]
            if free_s is not None and start_s > free_s:
                gaps[cause(command, run, free_s), command.kind].append(start_s - free_s)
            free_s = end_s
    return gaps


def by_stream(gaps: Mapping[tuple[str, str], Sequence[float]]) -> dict[str, float]:
    """Seconds that compute was idle, by the stream it waited for, or `issue`."""
    seconds: dict[str, float] = defaultdict(float)
    for (why, _), found in gaps.items():
        seconds[why.split(":")[0].split(" ")[0]] += sum(found)
    return dict(seconds)


def planned_rates(plan: Plan, cost: CostModel) -> Rates:
    """Rates for programs that ran, whose layers are priced for full chunks of the plan's longest sequences."""
    rates, sizes = cost.rates(), (plan.chunk_tokens, plan.request.max_seq_len, cost.compute_bytes)

    def compute_s(command: Command) -> float:
        if not isinstance(command.args, LayerCall):
            return rates.compute_s(command)
        return cost.work_s(command.args.program.stages(command.kind)[command.args.stage].work(*sizes))

    return rates._replace(compute_s=compute_s)


def kind_of(command: Command) -> str:
    """What a command does, and to which kind of layer: `backward block` of `backward block.3 chunk 0`."""
    name = command.name
    return " ".join(filter(None, (name.verb, name.subject, name.owner.split(".")[0])))


def by_kind(runs: Sequence[TimedRun], rates: Rates) -> dict[tuple[str, str], dict[str, float]]:
    """Measured and simulated seconds of commands, by stream and kind."""
    measured: dict[tuple[str, str], list[float]] = defaultdict(list)
    priced: dict[tuple[str, str], float] = defaultdict(float)
    for run in runs:
        timing = simulate(run.program, rates)
        for command, (start_s, end_s) in zip(run.program.commands, run.spans_s, strict=True):
            key = command.stream.value, kind_of(command)
            measured[key].append(end_s - start_s)
            priced[key] += timing.end_s[command.index] - timing.start_s[command.index]
    return {
        key: {"count": len(found), "measured_s": sum(found), "median_s": statistics.median(found),
              "simulated_s": priced[key]}
        for key, found in sorted(measured.items())
    }  # fmt: skip


def note_programs(engine: Engine, at_s: list[float]) -> None:
    """Have the times before and after the issue of every program added to a list."""
    run = engine.runner.run

    def noted(*args: Any, **options: Any) -> None:
        at_s.append(time.perf_counter())
        run(*args, **options)
        at_s.append(time.perf_counter())

    engine.runner.run = noted  # type: ignore[method-assign]


@contextmanager
def noted_calls(engine: Engine) -> Iterator[dict[str, list[float]]]:
    """Collect the seconds of every command that this thread hands to the driver, by kind, until the block ends."""
    handlers, found, issuer = engine.handlers.by_kind, defaultdict[str, list[float]](list), threading.get_ident()
    before = dict(handlers)

    def noted(kind: str, call: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: Any) -> None:
            start_s = time.perf_counter()
            call(*args)
            if threading.get_ident() == issuer:  # the CPU's commands have a thread of their own
                found[kind].append(time.perf_counter() - start_s)

        return timed

    handlers.update({kind: noted(kind, call) for kind, call in handlers.items()})
    try:
        yield found
    finally:
        handlers.update(before)


def issue_rows(
    found: Mapping[str, Sequence[float]], num_steps: int, runs: Sequence[TimedRun], rates: Rates
) -> list[dict]:
    """What the issuing thread takes for each kind of command per step, and what the simulator gives it for them."""
    priced: dict[str, float] = defaultdict(float)
    for run in runs:
        for command in run.program.commands:
            if not command.copies and command.stream is not Stream.CPU:
                priced[command.kind] += rates.issue_s(command)
    return [
        {"kind": kind, "count": len(seconds) / num_steps, "seconds": sum(seconds) / num_steps, "priced_s": priced[kind],
         "median_s": statistics.median(seconds)}
        for kind, seconds in sorted(found.items())
    ]  # fmt: skip


def steps(
    engine: Engine, batch: dict[str, torch.Tensor], count: int, say: Callable[[str], None], at_s: list[float]
) -> list[dict]:
    """Train so many steps; returns wall seconds, those of the thread that issues, and the host's before its first
    program, of the issue of each and after each. at_s: of `note_programs`."""
    rows = []
    for _ in range(count):
        at_s.clear()
        wall_s, thread_s = time.perf_counter(), time.thread_time()
        out, result = engine.train_step(batch)
        row = {"step_s": time.perf_counter() - wall_s, "thread_s": time.thread_time() - thread_s}
        parts_s = [end - start for start, end in pairwise((wall_s, *at_s, wall_s + row["step_s"]))]
        row |= {
            "before_s": parts_s[0],
            "issue_s": sum(parts_s[1::2]),
            "after_s": sum(parts_s[2:-1:2]),
            "end_s": parts_s[-1],
        }
        rows.append({**row, "loss": out.loss, "grad_norm": result.grad_norm})
        say(", ".join(f"{name} {value:.4f}" for name, value in rows[-1].items()))
    return rows


def measure(args: argparse.Namespace, planned: PlannedRun) -> dict:
    """Train, time one step, and account for it."""
    engine = build(planned, AdamW(lr=args.lr))
    plan, batch, say = engine.plan, one_batch(engine), printer(planned.team)
    at_s: list[float] = []
    note_programs(engine, at_s)
    told = steps(engine, batch, args.warmup, say, at_s)
    with noted_calls(engine) as calls:
        told += steps(engine, batch, args.steps, say, at_s)
    engine.measure_next_step(keep_runs=True)
    timed = steps(engine, batch, 1, say, at_s)[0]
    runs = list(engine.take_timed_runs())
    rates = planned_rates(plan, CostModel.of(plan.request, planned.profile, plan.chunk_tokens))
    kinds = by_kind(runs, rates)
    gaps, on_gpu = idle_seconds(runs), planned.device.type == "cuda"
    graphs = 0 if engine.replay is None else engine.replay.num_graphs
    allocator = torch.cuda.memory_stats(planned.device) if on_gpu else {}
    peaks = engine.memory_peaks()
    engine.close()
    return {
        "predicted_step_s": plan.predicted.step_s,
        "predicted_after_clipping_s": plan.predicted.after_clipping_s or plan.predicted.step_s,
        "issue_s": planned.profile.host.issue_s,
        "profile": planned.profile.to_dict(),
        "steps": told,
        "timed_step": timed,
        "gpu_bytes": peaks.gpu_bytes,
        "predicted_gpu_bytes": plan.predicted.gpu_bytes,
        "most_allocated_bytes": allocator.get("allocated_bytes.all.peak"),
        "most_reserved_bytes": allocator.get("reserved_bytes.all.peak"),
        "arena_bytes": engine.arenas.capacity["gpu"],
        "device_allocations": allocator.get("num_device_alloc"),
        "allocations_again": allocator.get("num_alloc_retries"),
        "graphs": graphs,
        "idle_by_stream": of_all(planned.team, by_stream(gaps)),
        "idle": [
            {"cause": why, "before": kind, "seconds": sum(found), "count": len(found)}
            for (why, kind), found in sorted(gaps.items(), key=lambda item: -sum(item[1]))
        ],
        "issued": issue_rows(calls, args.steps, runs, rates),
        "commands": [{"stream": stream, "kind": kind, **row} for (stream, kind), row in kinds.items()],
    }


def table(found: dict) -> str:
    """The gaps, longest first, and the commands."""
    idle = [("compute waits for", "before", "s", "times")]
    idle += [(row["cause"], row["before"], f"{row['seconds']:.4f}", str(row["count"])) for row in found["idle"]]
    idle += [("rank", "waits for", "s", "")]
    idle += [
        (str(rank), stream, f"{seconds:.4f}", "")
        for rank, told in enumerate(found["idle_by_stream"])
        for stream, seconds in sorted(told.items(), key=lambda item: -item[1])
    ]
    kinds = [("stream", "kind", "count", "s", "median ms", "simulated s")]
    kinds += [
        (row["stream"], row["kind"], str(row["count"]), f"{row['measured_s']:.4f}", f"{1e3 * row['median_s']:.3f}",
         f"{row['simulated_s']:.4f}")
        for row in found["commands"]
    ]  # fmt: skip
    issued = [("issued", "per step", "ms per step", "median ms", "priced ms per step")]
    issued += [
        (row["kind"], f"{row['count']:g}", *(f"{1e3 * row[name]:.3f}" for name in ("seconds", "median_s", "priced_s")))
        for row in found["issued"]
    ]
    return "\n".join([*align_columns(idle), "", *align_columns(kinds), "", *align_columns(issued)])


def main() -> None:
    args = parse()
    require_native_code("bench.gaps")
    cap = None if args.caps[0] == "none" else float(args.caps[0])
    planned = prepare_job(args.model, job_from(args, max_gpu_mem_gib=cap))
    say = printer(planned.team)
    say(planned.describe())
    found = measure(args, planned)
    say(table(found))
    say(str({name: found[name] for name in found if isinstance(found[name], int | float)}))
    if is_first(planned.team):
        write_json(args.json, found)
    leave()


if __name__ == "__main__":
    main()
