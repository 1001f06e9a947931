"""Prices a step of several ranks of one node: when every command of every rank would start and end.

Streams, semaphores and the host's issue order commands as `order` says; each rank's link is as that of one rank. All
copies share the rate of the node's host memory, and the CPU works the slower the more of it they take. Whatever streams
a program has, its copies share the link by the direction in which they go. GPUs are taken to wait for semaphores
themselves: a host that polls would also issue later commands late. What nodes add up moves at the network's rate, and
takes its part of host memory meanwhile. Ranks share the rate of the node's drive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from flexengine.schedule.commands import Program, Stream, cpu_priority, streams_of
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering.kinds import RoundKind, UpdateWay, Wave
from flexengine.schedule.lowering.shape import RoundShape
from flexengine.schedule.ranks.links import (
    COMPUTE,
    CPU,
    FROM_DRIVE,
    NETWORK,
    NUM_WAYS,
    TO_DRIVE,
    Clock,
    CommandWork,
    Way,
)
from flexengine.schedule.ranks.node_exchange import lower_exchange
from flexengine.schedule.ranks.order import Events, RunEvents
from flexengine.schedule.ranks.rank_run import RankRun
from flexengine.schedule.ranks.runs import Lowered, step_of_rank
from flexengine.schedule.ranks.transports import transport_of
from flexengine.schedule.shares import Share
from flexengine.schedule.simulator import Rates, Timing, cpu_share
from flexengine.schedule.step_parts import full_step, unfinished_updates, until_gpu_ends

SIGNAL_S = 50e-6
"""From the end of a command that raises a semaphore to the start of one on another rank that awaits it: assumed."""
NETWORK_TOUCHES = 6
"""Bytes of host memory that are read or written for each that the network moves one way: as many arrive, sockets copy
both, and shares are added. Assumed, not measured."""
MOST_DRAWN = 2
"""Rounds like the first that are simulated on each rank beside it, and one of each other shape; more take what the last
of them does."""
_OF_DRIVE = {FROM_DRIVE, TO_DRIVE}


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
        """Its times cut off when the GPU has ended it; the CPU is busy for all seconds of its work.

        What is left of a speculation comes first in the next step, and is not counted twice.
        """
        cut = until_gpu_ends(self.run.program, self.timing)
        return cut if _speculates(self.run.program) else cut._replace(busy_s=self.timing.busy_s)


class RanksStep(NamedTuple):
    """A step of all ranks: the runs of each in order, and the seconds of the step with all repeats.

    exchange_s: in which the network is at work while several nodes add up gradients. exchange_wait_s: of these, in
    which all else waits.
    """

    ranks: list[list[TimedRankRun]]
    step_s: float
    exchange_s: float = 0.0
    exchange_wait_s: float = 0.0


def simulate_ranks(layout: Layout, rates: Rates, alike: int | None = None) -> RanksStep:
    """Simulate a full step of a plan of several ranks: the update of the step before, then all rounds.

    So what the CPU updates goes on under the first round, as it does in training. All ranks wait for the norm, so that
    a step begins for all of them when the rank of the last round has ended it. Where a plan speculates, the CPU begins
    in the last round, and what is left of that comes first. A step ends when nodes have added up all gradients, too.
    rates: of one rank's GPU and link, and of the node's CPU and host memory, as `Rates` has them.
    alike: simulate only so many ranks of a split plan, all of which do the same at the same time.
    """
    shapes = _rounds_of_a_rank(layout)
    size, transport = layout.plan.request.ranks, transport_of(layout.plan)
    few = min(alike or size, size) if transport.ranks_alike else size
    rates, layouts, lowered = _rates_of_few(rates, few / size), transport.layouts(layout, few), Lowered()
    left: list[dict[int, float]] | None = None
    if layout.plan.speculates:
        shape, count = shapes.pop()
        shapes += [*([(shape, count - 1)] if count > 1 else []), (shape, 1)]
        left = _left_of_speculation(layouts, shape, len(shapes) == 1, lowered, rates)
    runs = _runs(layouts, [shape for shape, _ in shapes], lowered, left)
    ranks = simulate_runs(runs, (1 if layout.plan.cuts_rounds else size) * len(shapes), rates)
    exchanges = [rank.pop() for rank in ranks] if layout.plan.request.nodes > 1 else []
    gathers = [rank.pop(1) for rank in ranks] if layout.node_states else []
    parts = [(None, 1), *((transport.full_wave(shape, size), count) for shape, count in shapes)]  # the update is first
    ranks = [
        [replace(timed, repeats=count, shape=shape) for timed, (shape, count) in zip(rank, parts, strict=True)]
        for rank in ranks
    ]
    step_s = max(rank[-1].end_s for rank in ranks)
    wait_s = max((timed.start_s + timed.timing.total_s - step_s for timed in exchanges), default=0.0)
    for place, (_, count) in enumerate(parts):
        if count > 1:
            step_s += (count - 1) * max(rank[place].end_s - rank[place - 1].end_s for rank in ranks)
    busy = [[timed.timing.busy_s.get(Stream.CPU, 0.0) for timed in each] for each in (exchanges, gathers)]
    network_s = sum(max(seconds, default=0.0) for seconds in busy)
    return RanksStep(ranks, step_s + max(0.0, wait_s), network_s, max(0.0, wait_s))


def _rates_of_few(rates: Rates, share: float) -> Rates:
    """The rates for a share of the ranks, which have as much of what all of them share."""
    drive = {way: (share * alone, share * both) for way, (alone, both) in (rates.drive_bytes_per_s or {}).items()}
    return rates._replace(host_bytes_per_s=rates.host_bytes_per_s * share, drive_bytes_per_s=drive)


def _rounds_of_a_rank(layout: Layout) -> list[tuple[RoundShape, int]]:
    """The rounds that every rank runs in a step as they are simulated: shapes, and how many on end are alike."""
    plan = layout.plan
    (opening, _), *later = full_step(plan if plan.cuts_rounds else replace(plan, request=plan.request.of_rank))
    found = [(opening, 1)]
    for shape, count in later:
        drawn = min(count, MOST_DRAWN if shape == opening else 1)
        found += [(shape, 1)] * (drawn - 1) + [(shape, count - drawn + 1)]
    return found


def _left_of_speculation(
    layouts: Sequence[Layout], shape: RoundShape, first: bool, lowered: Lowered, rates: Rates
) -> list[dict[int, float]]:
    """By rank, groups that the CPU has yet to update when GPU and network have ended the last round, and what part."""
    transport, request = transport_of(layouts[0].plan), layouts[0].plan.request
    size = request.ranks
    wave, runs = transport.full_wave(shape, size), list[list[RankRun]]()
    for rank, one in enumerate(layouts):
        kind = RoundKind(True, first, "speculative", Wave(rank, size, size, 0 if first else size - 1))
        program = lowered[one, wave, kind] = transport.lower_round(one, wave, kind)
        runs.append([RankRun(program, 0, 0, updates=False, rounds=range(size))])
        if request.nodes > 1:
            runs[rank].append(RankRun(lower_exchange(one, Share(rank, size)), 0, 0, False, range(size), exchanges=True))
    ended = simulate_runs(runs, size, rates)
    exchanged_s = max((other.start_s + other.timing.total_s for _, *others in ended for other in others), default=0.0)
    return [unfinished_updates(t.run.program, t.timing, exchanged_s - t.start_s) for t, *_ in ended]


def _speculates(program: Program) -> bool:
    """Whether the CPU updates in a program before the norm is known."""
    return any(command.name.verb == "speculate" for command in program.commands)


def _runs(
    layouts: Sequence[Layout], shapes: Sequence[RoundShape], lowered: Lowered, left: Sequence[dict[int, float]] | None
) -> list[list[RankRun]]:
    """What each simulated rank runs: its update at the end of step 0, beside what nodes then gather, then a round of
    each shape in step 1, and beside the last one what several nodes add up.

    left: by rank, of what the CPU updates speculatively in the last round; None = it does not.
    """
    plan, found = layouts[0].plan, list[list[RankRun]]()
    all_rounds = [shape for shape in shapes for _ in range(1 if plan.cuts_rounds else plan.request.ranks)]
    for rank, one in enumerate(layouts):
        way: UpdateWay = "after_norm" if left is None else "committed"
        runs = step_of_rank(one, rank, all_rounds, way, None if left is None else left[rank], lowered)
        rounds = [run._replace(step=1) for run in runs if not (run.updates or run.gathers)]
        found.append([*(run for run in runs if run.updates or run.gathers), *rounds])
    return found


def simulate_runs(runs: Sequence[Sequence[RankRun]], num_rounds: int, rates: Rates) -> list[list[TimedRankRun]]:
    """Simulate what each rank runs; num_rounds: of a step, of all ranks."""
    simulation = _Simulation(Events(runs, num_rounds), rates)
    simulation.run()
    found: list[list[TimedRankRun]] = [[] for _ in runs]
    for number, one in enumerate(simulation.events.runs):
        found[one.rank].append(simulation.timed(number, one))
    return found


class _Simulation:
    """Starts every event when all before it have ended and the host has issued it.

    Kernels take seconds that nothing changes. The rate of a rank's link changes where one of its copies starts or ends.
    Host memory slows all copies down alike, and these the CPUs of all ranks: copies and CPUs have clocks that run
    slower then, so that nothing else need be counted.
    """

    def __init__(self, events: Events, rates: Rates) -> None:
        self.events, self.rates = events, rates
        count, ranks = len(events.all), 1 + max(run.rank for run in events.runs)
        self.start, self.end = [0.0] * count, [-1.0] * count
        self._after: list[list[int]] = [[] for _ in range(count)]
        for index, before in enumerate(events.before):
            for other in before:
                self._after[other].append(index)
        self._missing = [len(before) for before in events.before]
        self._ready_s = [0.0] * count
        works = {program: CommandWork.of(program, rates) for program in {run.run.program for run in events.runs}}
        self._of_runs = [works[run.run.program] for run in events.runs]
        self._run_of = [number for number, run in enumerate(events.runs) for _ in run.events]
        self._rank = [event.rank for event in events.all]
        self._begin: dict[int, float] = {}
        self._ways = [Way() for _ in range(NUM_WAYS * ranks)]  # those of one rank in a row
        self._of_drive = [range(way, len(self._ways), NUM_WAYS) for way in (FROM_DRIVE, TO_DRIVE)]
        self._uses_drive = any(not _OF_DRIVE.isdisjoint(work.kinds) for work in works.values())
        self._rates = [0.0] * len(self._ways)  # of all copies of a way, if host memory had no limit
        self._exchanging = set[int]()  # events that move bytes between nodes
        self._copy_end = [inf] * len(self._ways)  # of the clock of copies, the first in a way
        self._cpu_ready: list[list[int]] = [[] for _ in range(ranks)]
        self._cpu_event = [-1] * ranks
        self._cpu_end = [inf] * ranks  # of the clock of CPUs
        self._timers: list[tuple[float, int, bool]] = []  # (when, event, whether it ends then or starts)
        self._now = 0.0
        self._copying, self._updating = Clock(), Clock()
        self._changed: set[int] = set()  # ranks

    def timed(self, number: int, run: RunEvents) -> TimedRankRun:
        """The times of a run, from its begin on; of one without commands, from 0."""
        begin, busy_s = self._begin.get(number, 0.0), dict.fromkeys(streams_of(run.run.program), 0.0)
        of_run = slice(run.events.start, run.events.stop)
        starts, ends = ([at_s - begin for at_s in times[of_run]] for times in (self.start, self.end))
        for command, start_s, end_s in zip(run.run.program.commands, starts, ends, strict=True):
            busy_s[command.stream] += end_s - start_s
        return TimedRankRun(run.run, begin, Timing(starts, ends, max(ends, default=0.0), busy_s))

    def run(self) -> None:
        """Run all events."""
        for index, missing in enumerate(self._missing):
            if not missing:
                self._ready(index)
        while self._advance():
            pass
        stuck = next((event.label for event, end in zip(self.events.all, self.end, strict=True) if end < 0), None)
        assert stuck is None, f"{stuck} never ends"

    def _advance(self) -> bool:
        """Go on to when something starts or ends next; False where nothing does."""
        if self._changed:
            self._set_speeds()
        copying, updating, timers = self._copying, self._updating, self._timers
        copies_s = copying.seconds_to(min(self._copy_end))
        cpu_s = updating.seconds_to(min(self._cpu_end))
        timer_s = timers[0][0] - self._now if timers else inf
        passed = min(copies_s, cpu_s, timer_s)
        if passed == inf:
            return False
        self._now = timers[0][0] if passed == timer_s else self._now + passed
        copying.now += passed * copying.speed
        updating.now += passed * updating.speed
        while timers and timers[0][0] <= self._now:
            _, index, ends = heappop(timers)
            (self._finish if ends else self._start)(index)
        if copies_s <= passed:
            self._finish_copies()
        if cpu_s <= passed:
            self._finish_updates()
        return True

    # -- starts and ends ---------------------------------------------------------------------------------------------

    def _ready(self, index: int) -> None:
        """Start an event when the host has issued it; all before it have ended."""
        number = self._run_of[index]
        run = self.events.runs[number]
        if number not in self._begin:
            self._begin[number] = max((self.end[other] for other in run.after), default=0.0)
        issued = self._begin[number] + self._of_runs[number].issued_s[index - run.events.start]
        at = max(issued, self._ready_s[index])
        if at > self._now:
            heappush(self._timers, (at, index, False))
        else:
            self._start(index)

    def _start(self, index: int) -> None:
        number, rank = self._run_of[index], self._rank[index]
        work, place = self._of_runs[number], index - self.events.runs[number].events.start
        kind, amount = work.kinds[place], work.amounts[place]
        if kind == CPU:
            self._cpu_ready[rank].append(index)
            if self._cpu_event[rank] < 0:
                self._start_cpu(rank)
            return
        self.start[index] = self._now
        if kind in (COMPUTE, NETWORK):
            heappush(self._timers, (self._now + amount, index, True))
            if kind == NETWORK:
                self._exchanging.add(index)
                self._changed.add(rank)
            return
        way = self._ways[NUM_WAYS * rank + kind]
        way.count_down(self._copying.now)
        way.events.append(index)
        way.left.append(amount)
        self._changed.add(rank)

    def _start_cpu(self, rank: int) -> None:
        """Start what comes first by priority of the updates that a rank's CPU may run."""
        ready = self._cpu_ready[rank]
        if ready:
            index = min(ready, key=lambda i: cpu_priority(self.events.all[i].command))
            ready.remove(index)
            number = self._run_of[index]
            seconds = self._of_runs[number].amounts[index - self.events.runs[number].events.start]
            self.start[index] = self._now
            self._cpu_event[rank], self._cpu_end[rank] = index, self._updating.now + seconds
            self._changed.add(rank)

    def _finish(self, index: int) -> None:
        now, rank = self._now, self._rank[index]
        self.end[index] = now
        if index in self._exchanging:
            self._exchanging.remove(index)
            self._changed.add(rank)
        for other in self._after[index]:
            told = now if self._rank[other] == rank else now + SIGNAL_S
            self._ready_s[other] = max(self._ready_s[other], told)
            self._missing[other] -= 1
            if not self._missing[other]:
                self._ready(other)

    def _finish_copies(self) -> None:
        """End the copies of which nothing is left."""
        due = self._copying.due
        for number, end in enumerate(self._copy_end):
            if end <= due:
                self._copy_end[number] = inf
                self._changed.add(number // NUM_WAYS)
                for index in self._ways[number].take_ended(due):
                    self._finish(index)

    def _finish_updates(self) -> None:
        """End what the CPUs have done."""
        due = self._updating.due
        for rank, end in enumerate(self._cpu_end):
            if end <= due:
                done, self._cpu_event[rank], self._cpu_end[rank] = self._cpu_event[rank], -1, inf
                self._changed.add(rank)
                self._finish(done)
                if self._cpu_event[rank] < 0:
                    self._start_cpu(rank)

    # -- speeds ------------------------------------------------------------------------------------------------------

    def _set_speeds(self) -> None:
        """Where something has started or ended, share the rank's link, and host memory among all that is at work."""
        for rank in self._changed:
            for number, rate in enumerate(self._link_rates(rank), NUM_WAYS * rank):
                way = self._ways[number]
                way.count_down(self._copying.now)
                self._copy_end[number] = way.set_rate(rate)
                self._rates[number] = rate
        self._changed.clear()
        by_network = NETWORK_TOUCHES * self.rates.network_bytes_per_s if self._exchanging else 0.0
        total = sum(self._rates) + len(self._exchanging) * by_network
        limited = min(1.0, self.rates.host_bytes_per_s / max(total, 1.0))
        self._copying.speed = limited
        self._updating.speed = cpu_share(limited * total, self.rates.host_bytes_per_s)
        if self._uses_drive:
            self._share_drive()

    def _share_drive(self) -> None:
        """Share the rates of the drive among all that is read, and all that is written; host memory is no limit."""
        counts = [sum(len(self._ways[number].events) for number in numbers) for numbers in self._of_drive]
        for stream, numbers, count in zip((Stream.DRIVE_IN, Stream.DRIVE_OUT), self._of_drive, counts, strict=True):
            for number in numbers if count else ():
                way, rates = self._ways[number], self.rates.drive_bytes_per_s
                assert rates is not None, "a plan with planes on a drive has its rates"
                rate = rates[stream][min(counts) > 0] * len(way.events) / count
                way.count_down(self._copying.now)
                self._copy_end[number] = way.set_rate(rate / self._copying.speed)

    def _link_rates(self, rank: int) -> tuple[float, float]:
        """Bytes per second of both directions of a rank's link, if host memory had no limit."""
        to_gpu, to_host = self._ways[NUM_WAYS * rank].events, self._ways[NUM_WAYS * rank + 1].events
        found = self.rates.duplex_bytes_per_s if to_gpu and to_host else self.rates.alone_bytes_per_s
        h2d, d2h = found[Stream.H2D] if to_gpu else 0.0, found[Stream.D2H] if to_host else 0.0
        beside = self.rates.beside_cpu_bytes_per_s
        if beside is None or self._cpu_event[rank] < 0:
            return h2d, d2h
        return min(h2d, beside[Stream.H2D]), min(d2h, beside[Stream.D2H])
