"""Proves that programs of several ranks are right together, whatever rank runs ahead.

It looks at two steps of all ranks, who take rounds in turn, and at what touches the node's memory:

- waits: the rank that a command asks raises every cell that it awaits far enough, and nobody waits in a circle;
- order: of two commands that touch a common byte, one of them writing, one surely ends before the other starts, by the
  order of streams, by waits within a rank and by cells;
- contents: a gradient is fetched as the round before left it, and updated as the last round left it; weights are read
  as the step before updated them; nothing is added twice or left out;
- shares: together the ranks update every element of every trained group once.
`checker` proves each program by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from flexengine.schedule.checker import ProgramError
from flexengine.schedule.commands import Command, Program, Stream, UpdateTile
from flexengine.schedule.following import cpu_waits
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering import RoundShape, lower_round, lower_update
from flexengine.schedule.relay import Share, executor_of

NUM_STEPS = 2
"""Enough to see each kind of program after each other kind."""


class RankRun(NamedTuple):
    """One run of a program on a rank. step: from 0. number: of the round in the step; of its last one in an update."""

    program: Program
    step: int
    number: int
    updates: bool


def runs_of_ranks(layout: Layout, shape: RoundShape, num_rounds: int) -> list[list[RankRun]]:
    """What each rank runs in two steps of so many rounds of one shape."""
    size = layout.plan.request.ranks
    rounds = [lower_round(layout, shape, first=first) for first in (True, False)]
    last = executor_of(num_rounds - 1, size)
    found = []
    for rank in range(size):
        update = lower_update(layout, share=Share(rank, size), last=rank == last)
        numbers = [number for number in range(num_rounds) if executor_of(number, size) == rank]
        one = [RankRun(rounds[number > 0], 0, number, updates=False) for number in numbers]
        one.append(RankRun(update, 0, num_rounds - 1, updates=True))
        found.append([run._replace(step=step) for step in range(NUM_STEPS) for run in one])
    return found


def check_ranks(layout: Layout, shape: RoundShape, num_rounds: int) -> None:
    """Raise ProgramError unless the programs of all ranks are proven right together."""
    check_runs(layout, runs_of_ranks(layout, shape, num_rounds), num_rounds)


def check_runs(layout: Layout, runs: Sequence[Sequence[RankRun]], num_rounds: int) -> None:
    """As `check_ranks`, of programs that are lowered already."""
    check_shares(layout, runs)
    events = _Events(runs, num_rounds)
    order = events.in_order()
    _check_memory(layout, events, order, num_rounds)


def check_shares(layout: Layout, runs: Sequence[Sequence[RankRun]]) -> None:
    """Check that the ranks' updates of a step cover each element of what is trained once."""
    updated: dict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
    for command in (c for rank in runs for run in rank if run.updates and run.step == 0 for c in run.program.commands):
        if isinstance(command.args, UpdateTile):
            tile = command.args
            updated[tile.group, tile.segment].append((tile.start, tile.start + tile.count))
    for group, spec in enumerate(layout.model.groups):
        for segment in () if spec.frozen else layout.groups[group].segments:
            reached = 0
            for start, end in [*sorted(updated[group, segment.name]), (segment.numel, segment.numel)]:
                if start != reached:
                    twice = "twice" if start < reached else "by no rank"
                    raise ProgramError(f"elements {start}..{reached} of {spec.name} {segment.name} are updated {twice}")
                reached = end


class _Event(NamedTuple):
    """A command in a run of a rank. lane: what runs its events one after the other; position: its place there."""

    rank: int
    run: RankRun
    command: Command
    lane: int
    position: int

    @property
    def label(self) -> str:
        """The command in words, with its rank, round and step."""
        return f"{self.command.label} (rank {self.rank}, round {self.run.number} of step {self.run.step})"


class _Events:
    """All events of all ranks, and which must have ended when another starts."""

    def __init__(self, runs: Sequence[Sequence[RankRun]], num_rounds: int) -> None:
        self._num_rounds, self._size = num_rounds, len(runs)
        self.all: list[_Event] = []
        self.before: list[list[int]] = []
        self._lanes: dict[tuple[int, str, int], int] = {}
        self._ends: list[list[int]] = []  # by lane, its events
        self._raised: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)  # (cell, rank) -> (value, event)
        for rank, of_rank in enumerate(runs):
            self._add_rank(rank, of_rank)
        for index, event in enumerate(self.all):
            self.before[index] += self._awaited(event)

    def _add_rank(self, rank: int, runs: Sequence[RankRun]) -> None:
        ends: dict[Stream, int] = {}
        by_cpu: tuple[Program, int] | None = None  # the last program with work of the CPU, and its first event
        for run in runs:
            first, started, left = len(self.all), set[Stream](), dict(ends)
            waits = {} if by_cpu is None else cpu_waits(by_cpu[0], run.program)
            of_cpu: list[int] = []  # a command of the CPU may run when those before it in the program may, too
            for command in run.program.commands:
                before = [first + wait for wait in command.waits]
                if command.stream is Stream.CPU:
                    of_cpu += before
                    before = list(of_cpu)
                elif command.stream not in started:
                    started.add(command.stream)
                    before += left.values()  # a program starts when the one before has ended on all streams of the GPU
                if by_cpu is not None:
                    before += [by_cpu[1] + wait for wait in waits.get(command.index, ())]
                index = self._add(rank, run, command, before)
                if command.stream is not Stream.CPU:
                    ends[command.stream] = index
            if any(command.stream is Stream.CPU for command in run.program.commands):
                by_cpu = run.program, first

    def _add(self, rank: int, run: RankRun, command: Command, before: list[int]) -> int:
        # the CPU takes groups in any order, and those of one group one after the other
        on_cpu = command.stream is Stream.CPU
        key = (rank, command.stream.value, command.args.group if on_cpu else -1)
        lane = self._lanes.setdefault(key, len(self._lanes))
        if lane == len(self._ends):
            self._ends.append([])
        index = len(self.all)
        self.all.append(_Event(rank, run, command, lane, len(self._ends[lane])))
        self.before.append(before + self._ends[lane][-1:])
        self._ends[lane].append(index)
        for signal in command.signals:
            raised, value = self._raised[signal.cell, rank], self._value(run, signal.clock) - signal.lag
            if signal.of != "own" or (raised and raised[-1][0] >= value):
                raise ProgramError(f"{self.all[index].label} raises cell {signal.cell} to {value} again")
            raised.append((value, index))
        return index

    def _value(self, run: RankRun, clock: str) -> int:
        """The running number of the round, or of the update that the step ends with, from 1 on."""
        return run.step + 1 if clock == "update" else run.step * self._num_rounds + run.number + 1

    def _awaited(self, event: _Event) -> Iterator[int]:
        """The events that raise what an event awaits."""
        last = executor_of(self._num_rounds - 1, self._size)
        rows = {"own": [event.rank], "previous": [(event.rank - 1) % self._size], "last": [last]}
        for signal in event.command.awaits:
            if event.command.stream is Stream.CPU:
                raise ProgramError(f"{event.label} awaits a cell, which commands of the CPU cannot")
            value = self._value(event.run, signal.clock) - signal.lag
            for row in rows.get(signal.of, range(self._size)) if value > 0 else ():
                raising = (index for reached, index in self._raised[signal.cell, row] if reached >= value)
                index = next(raising, None)
                if index is None:
                    raise ProgramError(
                        f"{event.label} awaits {value} in cell {signal.cell} of rank {row}, which never comes"
                    )
                yield index

    def in_order(self) -> list[int]:
        """All events, each after those that it must come after. Raises: ProgramError where they wait in a circle."""
        after: list[list[int]] = [[] for _ in self.all]
        missing = [len(before) for before in self.before]
        for index, before in enumerate(self.before):
            for other in before:
                after[other].append(index)
        order = [index for index, count in enumerate(missing) if not count]
        for index in order:
            for other in after[index]:
                missing[other] -= 1
                if not missing[other]:
                    order.append(other)
        if len(order) < len(self.all):
            stuck = next(event.label for index, event in enumerate(self.all) if missing[index])
            raise ProgramError(f"ranks wait for each other in a circle; {stuck} is the first that never starts")
        return order

    def clocks(self, order: list[int]) -> np.ndarray:
        """By event: of each lane, the last position that has surely ended when the event has. [events, lanes]"""
        clocks = np.full((len(self.all), len(self._ends)), -1, dtype=np.int32)
        for index in order:
            event = self.all[index]
            if self.before[index]:
                clocks[index] = clocks[self.before[index]].max(axis=0)
            clocks[index, event.lane] = event.position
        return clocks


class _Touch(NamedTuple):
    """Bytes [start, end) of the node's memory that an event reads or writes, of a slot of this role and owner."""

    start: int
    end: int
    writes: bool
    role: str
    owner: str


def _touches(event: _Event) -> list[_Touch]:
    """What an event touches of the node's memory, reads first."""
    slots, found = event.run.program.slots, list[_Touch]()

    def add(slot: int, offset: int, num_bytes: int, writes: bool) -> None:
        place = slots[slot]
        if place.memory == "node" and num_bytes:
            start = place.offset + offset
            found.append(_Touch(start, start + num_bytes, writes, place.key.role, str(place.key.owner)))

    for region in event.command.regions:
        add(region.source, region.source_offset, region.num_bytes, writes=False)
        add(region.target, region.target_offset, region.num_bytes, writes=True)
    return sorted(found, key=lambda touch: touch.writes)


def _update_touches(layout: Layout, event: _Event) -> list[_Touch]:
    """The same of an update by the CPU, which works where planes lie."""
    tile, slots = event.command.args, event.run.program.slots
    segment = next(s for s in layout.groups[tile.group].segments if s.name == tile.segment)
    found = []
    for plane in segment.planes:
        slot, offset = tile.planes[plane.kind]
        start = slots[slot].offset + offset
        touch = _Touch(
            start, start + plane.num_bytes(tile.count), False, plane.kind, layout.model.groups[tile.group].name
        )
        found += [touch] if plane.kind == "grad" else [touch, touch._replace(writes=True)]
    return sorted(found, key=lambda touch: touch.writes)


def _check_memory(layout: Layout, events: _Events, order: list[int], num_rounds: int) -> None:
    """Check order and contents of all that touches the node's memory."""
    touches: dict[int, list[_Touch]] = {}
    for index, event in enumerate(events.all):
        by_cpu = event.command.stream is Stream.CPU
        touches[index] = _update_touches(layout, event) if by_cpu else _touches(event)
    borders = sorted({border for found in touches.values() for touch in found for border in touch[:2]})
    places = {border: place for place, border in enumerate(borders)}
    frozen = {group.name for group in layout.model.groups if group.frozen}
    memory = _NodeBytes(len(borders), events, order)
    for index in order:
        run = events.all[index].run
        for touch in touches[index]:
            if touch.role == "grad":
                held = run.step, run.number - (not run.updates and not touch.writes)
            elif touch.role == "norm_squares" or touch.owner in frozen:
                held = (run.step if touch.role == "norm_squares" else 0), 0
            else:
                held = run.step + touch.writes, 0
            memory.touch(index, range(places[touch.start], places[touch.end]), touch, held)


class _NodeBytes:
    """The node's memory, cut where anything that is touched begins or ends: who touched it last, and what it holds."""

    def __init__(self, count: int, events: _Events, order: list[int]) -> None:
        self._events, self._clocks = events, events.clocks(order)
        self._writer = [-1] * count
        self._readers: list[dict[int, int]] = [{} for _ in range(count)]  # since the last write, by lane
        self._held: list[tuple[int, int] | None] = [None] * count  # None: as loaded

    def touch(self, index: int, places: range, touch: _Touch, held: tuple[int, int]) -> None:
        """Have an event read what the bytes should hold, (step, round), or write that."""
        lane = self._events.all[index].lane
        for place in places:
            self._require(self._writer[place], index, touch)
            if touch.writes:
                for reader in self._readers[place].values():
                    self._require(reader, index, touch)
                self._writer[place], self._readers[place], self._held[place] = index, {}, held
                continue
            loaded = (0, 0) if touch.role not in ("grad", "norm_squares") else None
            found = self._held[place] or loaded
            if found != held:
                label = self._events.all[index].label
                raise ProgramError(
                    f"{label} expects {touch.role} of {touch.owner} after {held} (step, round), not {found}"
                )
            self._readers[place][lane] = index

    def _require(self, earlier: int, index: int, touch: _Touch) -> None:
        if earlier < 0 or earlier == index:
            return
        before, event = self._events.all[earlier], self._events.all[index]
        if self._clocks[index, before.lane] < before.position:
            raise ProgramError(
                f"{event.label} does not wait for {before.label}, and both touch {touch.role} of {touch.owner}"
            )
