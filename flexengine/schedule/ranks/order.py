"""The commands of all ranks together: what each rank runs, and which commands must have ended when another starts.

By the order of streams, by waits within a rank and by semaphores. `checker` proves that this order is enough;
`simulator` tells when each command starts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from flexengine.schedule.checker import ProgramError
from flexengine.schedule.commands import LASTING_STREAMS, THREAD_STREAMS, Command, Stream
from flexengine.schedule.following import CpuWaits
from flexengine.schedule.ranks.rank_run import RankRun
from flexengine.schedule.ranks.split_commands import AddTables, ExchangeParts, GatherOwned, GatherShares

COLLECTIVES = (GatherShares, GatherOwned, ExchangeParts, AddTables)


class Event(NamedTuple):
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


def _of_all_ranks(event: Event) -> tuple:
    """What is the same of a collective on all ranks. Raises: ProgramError where it is told of another rank."""
    args, run = event.command.args, event.run
    if isinstance(args, GatherShares | GatherOwned | ExchangeParts):
        if args.rank != event.rank:
            raise ProgramError(f"{event.label} is that of rank {args.rank}")
        args = args._replace(rank=0)
    return event.command.name, run.step, run.number, run.updates, type(args), args


class RunEvents(NamedTuple):
    """The events of one run of a rank. after: the last one of each stream before it, which it starts after."""

    rank: int
    run: RankRun
    events: range
    after: tuple[int, ...]


class Events:
    """All events of all ranks, and which must have ended when another starts. runs: by rank, then in order."""

    def __init__(self, runs: Sequence[Sequence[RankRun]], num_rounds: int) -> None:
        self._num_rounds, self._size = num_rounds, len(runs)
        self.all: list[Event] = []
        self.before: list[list[int]] = []
        self.runs: list[RunEvents] = []
        self._lanes: dict[tuple[int, str, int], int] = {}
        self._ends: list[list[int]] = []  # by lane, its events
        self._raised: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(
            list
        )  # (semaphore, rank) -> (value, event)
        self._exchanged: dict[int, dict[int, int]] = defaultdict(dict)  # step -> rank -> its last exchange
        self._begins: dict[tuple[int, int], int] = {}  # (step, rank) -> the first event after its exchange has begun
        for rank, of_rank in enumerate(runs):
            self._add_rank(rank, of_rank)
        self._join_collectives()
        awaited: dict[tuple, list[int]] = defaultdict(list)  # by rank and run, of the CPU's commands so far
        for index, event in enumerate(self.all):
            if event.command.stream is Stream.CPU and not event.run.is_of_nodes:
                # they become ready in the order of the program
                so_far = awaited[event.rank, event.run.step, event.run.number, event.run.updates]
                so_far += self._awaited(event)
                self.before[index] += so_far
            elif event.command.awaits:
                self.before[index] += self._awaited(event)
            if self._exchanged and event.run.updates:
                self.before[index] += self._exchanged_before(index)

    def _join_collectives(self) -> None:
        """Have each collective start on all ranks when what comes before it has ended on all of them.

        Raises: ProgramError unless all ranks make the same ones, each in its own place.
        """
        by_rank: list[list[int]] = [[] for _ in range(self._size)]
        for index, event in enumerate(self.all):
            if isinstance(event.command.args, COLLECTIVES):
                by_rank[event.rank].append(index)
        for together in zip_longest(*by_rank):
            events = [None if index is None else self.all[index] for index in together]
            if len({None if e is None else _of_all_ranks(e) for e in events}) > 1:
                labels = ", ".join("nothing" if event is None else event.label for event in events)
                raise ProgramError(f"ranks should take part in one collective, but have {labels}")
            before = [other for index in together for other in self.before[index]]
            for index in together:
                self.before[index] = list(before)

    def _add_rank(self, rank: int, runs: Sequence[RankRun]) -> None:
        ends: dict[Stream, int] = {}
        by_cpu: tuple[CpuWaits, int] | None = None  # of the last program with work of the CPU, and its first event
        worked: list[int] = []  # its events of the CPU, and of a drive's streams that may outlast the program
        joined: list[int] = []  # and of the one with such work before it, which end before it begins
        for run in runs:
            if run.is_of_nodes:
                self._add_of_nodes(rank, run)
                continue
            first, started, left = len(self.all), set[Stream](), dict(ends)
            waits = {} if by_cpu is None else by_cpu[0].of(run.program)  # of threads of the host
            # a command of the CPU may run when those before it in the program may, too, and all of earlier programs
            of_cpu = list(worked)
            for command in run.program.commands:
                before = [first + wait for wait in command.waits]
                if command.stream is Stream.CPU:
                    of_cpu += before
                    before = list(of_cpu)
                elif command.stream not in started:
                    started.add(command.stream)
                    # a program starts when the one before has ended on all streams of the GPU; where that was the
                    # second in a row with work of the CPU, the host has waited for the first one's
                    before += (*left.values(), *joined, *(worked if command.stream in LASTING_STREAMS else ()))
                if by_cpu is not None and command.index in waits:
                    before += [by_cpu[1] + wait for wait in waits[command.index]]
                self._add(rank, run, command, before)
            last = {command.stream: first + place for place, command in enumerate(run.program.commands)}
            ends |= {stream: index for stream, index in last.items() if stream not in THREAD_STREAMS}
            self.runs.append(RunEvents(rank, run, range(first, len(self.all)), tuple(left.values())))
            if any(stream in THREAD_STREAMS for stream in last):
                joined, by_cpu = worked, (CpuWaits(run.program), first)
                worked = [first + c.index for c in run.program.commands if c.stream in LASTING_STREAMS]

    def _add_of_nodes(self, rank: int, run: RankRun) -> None:
        """Add what a thread of the host does beside a round: it waits for semaphores, and for no stream."""
        first = len(self.all)
        if run.exchanges:
            self._begins[run.step, rank] = first
        for command in run.program.commands:
            index = self._add(rank, run, command, [])
            if run.exchanges:
                self._exchanged[run.step][rank] = index
        self.runs.append(RunEvents(rank, run, range(first, len(self.all)), ()))

    def _exchanged_before(self, index: int) -> list[int]:
        """The last exchanges of all ranks, which have ended them together before any goes on to its update."""
        event = self.all[index]
        together = self._begins.get((event.run.step, event.rank), len(self.all)) <= index
        return list(self._exchanged[event.run.step].values()) if together else []

    def _add(self, rank: int, run: RankRun, command: Command, before: list[int]) -> int:
        # the CPU takes groups in any order, and those of one group one after the other
        group = command.args.group if command.stream is Stream.CPU and not run.is_of_nodes else -1
        key = (rank, "network" if run.is_of_nodes else command.stream, group)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = len(self._lanes)
            self._ends.append([])
        index, ends = len(self.all), self._ends[lane]
        self.all.append(Event(rank, run, command, lane, len(ends)))
        self.before.append(before + ends[-1:])
        ends.append(index)
        for signal in command.signals:
            raised, value = self._raised[signal.semaphore, rank], self._value(run, signal.clock) - signal.lag
            again = bool(raised) and raised[-1][0] == value and self._drops(raised[-1][1], run)
            if signal.of != "own" or (raised and raised[-1][0] >= value and not again):
                raise ProgramError(f"{self.all[index].label} raises semaphore {signal.semaphore} to {value} again")
            raised.append((value, index))
        return index

    def _drops(self, earlier: int, run: RankRun) -> bool:
        """Whether a run updates again what an earlier event of its step has updated speculatively."""
        before = self.all[earlier].run
        return run.updates and not before.updates and run.step == before.step

    def _value(self, run: RankRun, clock: str) -> int:
        """The running number of the round, or of the update that the step ends with, from 1 on."""
        return run.step + 1 if clock == "update" else run.step * self._num_rounds + run.number + 1

    def _awaited(self, event: Event) -> Iterator[int]:
        """The events that raise what an event awaits."""
        last = (self._num_rounds - 1) % self._size
        rows = {"own": [event.rank], "previous": [(event.rank - 1) % self._size], "last": [last]}
        for signal in event.command.awaits:
            value = self._value(event.run, signal.clock) - signal.lag
            named = [signal.of] if isinstance(signal.of, int) else rows.get(signal.of, range(self._size))
            for row in named if value > 0 else ():
                raising = (index for reached, index in self._raised[signal.semaphore, row] if reached >= value)
                index = next(raising, None)
                if index is None:
                    raise ProgramError(
                        f"{event.label} awaits {value} in semaphore {signal.semaphore} of rank {row}, which never comes"
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
