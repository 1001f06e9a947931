"""Prices a step of several ranks of one node: when every command of every rank would start and end.

Streams, cells and the host's issue order commands as `ranks_order` says; each rank's link is as `simulator` has it. All
copies share the rate of the node's host memory, and the CPU works the slower the more of it they take. Whatever streams
a program has, its copies share the link by the direction in which they go. GPUs are taken to wait for cells themselves:
a host that polls would also issue later commands late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import accumulate
from math import inf
from typing import NamedTuple

from flexengine.plan import Request
from flexengine.schedule.commands import Command, Program, Stream, cpu_priority, streams_of
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering import RoundShape, lower_round, lower_update
from flexengine.schedule.packing import full_round, later_rounds
from flexengine.schedule.ranks_order import Events, RankRun, RunEvents
from flexengine.schedule.shares import Share
from flexengine.schedule.simulator import Rates, Timing, cpu_share
from flexengine.schedule.step_parts import until_gpu_ends

SIGNAL_S = 50e-6
"""From the end of a command that raises a cell to the start of one on another rank that awaits it: assumed."""
MOST_DRAWN = 2
"""Rounds of one shape that are simulated on each rank, beside the first; more take what the last of them does."""


@dataclass(frozen=True)
class TimedRankRun:
    """A run of a program on a rank: when it begins, its times from then on, and how often it runs on end in a step.

    What the CPU does may end after the run has ended on the GPU. shape: of the round that it is.
    """

    run: RankRun
    start_s: float
    timing: Timing
    repeats: int = 1
    shape: RoundShape | None = None

    @property
    def end_s(self) -> float:
        """When the GPU has ended it."""
        return self.start_s + self.until_gpu_ends.total_s

    @cached_property
    def until_gpu_ends(self) -> Timing:
        """Its times cut off when the GPU has ended it; the CPU is busy for all seconds of its work."""
        cut = until_gpu_ends(self.run.program, self.timing)
        return cut._replace(busy_s=self.timing.busy_s)


class RanksStep(NamedTuple):
    """A step of all ranks: the runs of each in order, and the seconds of the step with all repeats."""

    ranks: list[list[TimedRankRun]]
    step_s: float


def simulate_ranks(layout: Layout, rates: Rates) -> RanksStep:
    """Simulate a full step of a plan of several ranks: the update of the step before, then all rounds.

    So what the CPU updates goes on under the first round, as it does in training. All ranks wait for the norm, so that
    a step begins for all of them when the rank of the last round has ended it.
    rates: of one rank's GPU and link, and of the node's CPU and host memory, as `Rates` has them.
    """
    shapes = _rounds_of_a_rank(layout)
    runs = _runs(layout, [shape for shape, _ in shapes])
    size = layout.plan.request.ranks
    ranks = simulate_runs(runs, size * len(shapes), rates)
    parts = [(None, 1), *shapes]  # the update comes first
    ranks = [
        [replace(timed, repeats=count, shape=shape) for timed, (shape, count) in zip(rank, parts, strict=True)]
        for rank in ranks
    ]
    step_s = max(rank[-1].end_s for rank in ranks)
    for place, (_, count) in enumerate(parts):
        if count > 1:
            step_s += (count - 1) * max(rank[place].end_s - rank[place - 1].end_s for rank in ranks)
    return RanksStep(ranks, step_s)


def _rounds_of_a_rank(layout: Layout) -> list[tuple[RoundShape, int]]:
    """The rounds that every rank runs in a step as they are simulated: shapes, and how many on end are alike."""
    plan = layout.plan
    sizes: tuple[Request, int, int] = (plan.request.of_rank, plan.chunk_tokens, plan.chunks_per_round)
    found = [(full_round(*sizes), 1)]
    for shape, count in later_rounds(*sizes):
        drawn = min(count, MOST_DRAWN)
        found += [(shape, 1)] * (drawn - 1) + [(shape, count - drawn + 1)]
    return found


def _runs(layout: Layout, shapes: Sequence[RoundShape]) -> list[list[RankRun]]:
    """What each rank runs: its update at the end of step 0, then a round of each shape in step 1."""
    size = layout.plan.request.ranks
    known: dict[tuple[RoundShape, bool], Program] = {}
    found = []
    for rank in range(size):
        update = lower_update(layout, share=Share(rank, size), last=rank == size - 1)
        runs = [RankRun(update, 0, size * len(shapes) - 1, updates=True)]
        for place, shape in enumerate(shapes):
            number = place * size + rank
            key = shape, number == 0
            if key not in known:
                known[key] = lower_round(layout, shape, first=number == 0)
            runs.append(RankRun(known[key], 1, number, updates=False))
        found.append(runs)
    return found


def simulate_runs(runs: Sequence[Sequence[RankRun]], num_rounds: int, rates: Rates) -> list[list[TimedRankRun]]:
    """Simulate what each rank runs; num_rounds: of a step, of all ranks."""
    simulation = _Simulation(Events(runs, num_rounds), rates)
    simulation.run()
    found: list[list[TimedRankRun]] = [[] for _ in runs]
    for number, one in enumerate(simulation.events.runs):
        found[one.rank].append(simulation.timed(number, one))
    return found


class _Copy:
    """A copy or an update by the CPU at work: what is left of it, in bytes or seconds, and its speed."""

    __slots__ = ("event", "left", "speed")

    def __init__(self, event: int, left: float) -> None:
        self.event, self.left, self.speed = event, left, 0.0


class _Link:
    """What is at work on a rank at a time: copies by direction (Stream.H2D, Stream.D2H), and its CPU."""

    def __init__(self) -> None:
        self.copies: dict[Stream, list[_Copy]] = {Stream.H2D: [], Stream.D2H: []}
        self.cpu: _Copy | None = None
        self.cpu_ready: list[int] = []


class _Simulation:
    """Starts every event when all before it have ended and the host has issued it.

    Kernels take seconds that nothing changes. Copies and the CPU have speeds that change whenever one of them, on any
    rank, starts or ends.
    """

    def __init__(self, events: Events, rates: Rates) -> None:
        self.events, self.rates = events, rates
        count = len(events.all)
        self.start, self.end = [0.0] * count, [-1.0] * count
        self._after: list[list[int]] = [[] for _ in range(count)]
        for index, before in enumerate(events.before):
            for other in before:
                self._after[other].append(index)
        self._missing = [len(before) for before in events.before]
        self._ready_s = [0.0] * count
        self._run_of = [number for number, run in enumerate(events.runs) for _ in run.events]
        self._issued = {program: self._issue_times(program) for program in {r.run.program for r in events.runs}}
        self._begin: dict[int, float] = {}
        self._amounts: dict[Command, tuple[Stream, float]] = {}
        self._links = [_Link() for _ in range(1 + max(run.rank for run in events.runs))]
        self._timers: list[tuple[float, int, bool]] = []  # (when, event, whether it ends then or starts)
        self._now = self._last = 0.0  # _last: when what is left of copies was counted
        self._next = inf  # when the first of them ends
        self._changed = False

    def _issue_times(self, program: Program) -> list[float]:
        return list(accumulate(map(self.rates.issue_s, program.commands)))

    def timed(self, number: int, run: RunEvents) -> TimedRankRun:
        """The times of a run, from its begin on."""
        begin, busy_s = self._begin[number], dict.fromkeys(streams_of(run.run.program), 0.0)
        starts, ends = ([times[i] - begin for i in run.events] for times in (self.start, self.end))
        for command, start_s, end_s in zip(run.run.program.commands, starts, ends, strict=True):
            busy_s[command.stream] += end_s - start_s
        return TimedRankRun(run.run, begin, Timing(starts, ends, max(ends, default=0.0), busy_s))

    def run(self) -> None:
        """Run all events."""
        for index, missing in enumerate(self._missing):
            if not missing:
                self._ready(index)
        while True:
            self._set_speeds()
            self._now = min(self._timers[0][0] if self._timers else inf, self._next)
            if self._now == inf:
                break
            while self._timers and self._timers[0][0] <= self._now:
                _, index, ends = heappop(self._timers)
                (self._finish if ends else self._start)(index)
            if self._next <= self._now:
                self._finish_copies()
        stuck = next((event.label for event, end in zip(self.events.all, self.end, strict=True) if end < 0), None)
        assert stuck is None, f"{stuck} never ends"

    # -- starts and ends ---------------------------------------------------------------------------------------------

    def _ready(self, index: int) -> None:
        """Start an event when the host has issued it; all before it have ended."""
        number = self._run_of[index]
        run = self.events.runs[number]
        if number not in self._begin:
            self._begin[number] = max((self.end[other] for other in run.after), default=0.0)
        issued = self._begin[number] + self._issued[run.run.program][index - run.events.start]
        at = max(issued, self._ready_s[index])
        if at > self._now:
            heappush(self._timers, (at, index, False))
        else:
            self._start(index)

    def _start(self, index: int) -> None:
        event = self.events.all[index]
        link, (kind, amount) = self._links[event.rank], self._amount(event.command, event.run.program)
        if kind is Stream.CPU:
            link.cpu_ready.append(index)
            if link.cpu is None:
                self._start_cpu(link)
            return
        self.start[index] = self._now
        if kind is Stream.COMPUTE:
            heappush(self._timers, (self._now + amount, index, True))
            return
        link.copies[kind].append(_Copy(index, amount))
        self._changed = True

    def _start_cpu(self, link: _Link) -> None:
        """Start what comes first by priority of the updates that a rank's CPU may run."""
        if link.cpu_ready:
            index = min(link.cpu_ready, key=lambda i: cpu_priority(self.events.all[i].command))
            link.cpu_ready.remove(index)
            event = self.events.all[index]
            self.start[index] = self._now
            link.cpu = _Copy(index, self._amount(event.command, event.run.program)[1])
            self._changed = True

    def _finish(self, index: int) -> None:
        self.end[index] = self._now
        rank = self.events.all[index].rank
        for other in self._after[index]:
            told = self._now if self.events.all[other].rank == rank else self._now + SIGNAL_S
            self._ready_s[other] = max(self._ready_s[other], told)
            self._missing[other] -= 1
            if not self._missing[other]:
                self._ready(other)

    def _finish_copies(self) -> None:
        """End those copies, and updates by the CPU, of which nothing is left."""
        self._count_down()
        nothing_s = 1e-12 * max(1.0, self._now)  # less than this the clock cannot tell
        for link in self._links:
            for copies in link.copies.values():
                for copy in [copy for copy in copies if copy.left <= nothing_s * copy.speed]:
                    copies.remove(copy)
                    self._finish(copy.event)
            if link.cpu is not None and link.cpu.left <= nothing_s * link.cpu.speed:
                done, link.cpu = link.cpu, None
                self._finish(done.event)
                if link.cpu is None:
                    self._start_cpu(link)
        self._changed = True

    # -- amounts and speeds ------------------------------------------------------------------------------------------

    def _amount(self, command: Command, program: Program) -> tuple[Stream, float]:
        """What a command takes, by kind: seconds of compute or of the CPU; bytes one way, latency counted as bytes."""
        found = self._amounts.get(command)
        if found is None:
            if command.stream is Stream.CPU:
                found = Stream.CPU, self.rates.cpu_s(command)
            elif not command.regions:
                found = Stream.COMPUTE, self.rates.compute_s(command)
            else:
                way = Stream.D2H if program.slots[command.regions[0].source].memory == "gpu" else Stream.H2D
                latency = self.rates.copy_latency_s * len(command.regions)
                found = way, command.copy_bytes + latency * self.rates.alone_bytes_per_s[way]
            self._amounts[command] = found
        return found

    def _count_down(self) -> None:
        """Count what is left of all that has a speed, as of now."""
        seconds, self._last = self._now - self._last, self._now
        for link in self._links:
            for copies in link.copies.values():
                for copy in copies:
                    copy.left -= seconds * copy.speed
            if link.cpu is not None:
                link.cpu.left -= seconds * link.cpu.speed

    def _set_speeds(self) -> None:
        """Where something has started or ended, share links and host memory among all that is at work."""
        if not self._changed:
            return
        self._changed = False
        self._count_down()
        wanted = [(link, way, self._way_speed(link, way)) for link in self._links for way in (Stream.H2D, Stream.D2H)]
        total = sum(speed for _, _, speed in wanted)
        limited = min(1.0, self.rates.host_bytes_per_s / max(total, 1.0))
        self._next = inf
        for link, way, speed in wanted:
            for copy in link.copies[way]:
                copy.speed = limited * speed / len(link.copies[way])
                self._next = min(self._next, self._now + copy.left / copy.speed)
        share = cpu_share(limited * total, self.rates.host_bytes_per_s)
        for link in self._links:
            if link.cpu is not None:
                link.cpu.speed = share
                self._next = min(self._next, self._now + link.cpu.left / share)

    def _way_speed(self, link: _Link, way: Stream) -> float:
        """Bytes per second of a direction of a rank's link, if host memory had no limit."""
        if not link.copies[way]:
            return 0.0
        other = Stream.D2H if way is Stream.H2D else Stream.H2D
        rate = (self.rates.duplex_bytes_per_s if link.copies[other] else self.rates.alone_bytes_per_s)[way]
        beside = self.rates.beside_cpu_bytes_per_s
        return rate if beside is None or link.cpu is None else min(rate, beside[way])
