"""A program bound to streams, prepared once and issued many times.

Copies, waits and records between two compute commands are one call into the transfer engine. The order is that of the
program, command by command, because a wait for an event sees only records that were issued before it; an event still
holds its record of the run before until then. What the CPU does runs on a thread of its own, which is told how far the
host is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from torch import Tensor

from flexengine.native.transfer_operations import (
    Await,
    Copy,
    Operation,
    Raise,
    Record,
    StreamHandle,
    Transfers,
    Wait,
    WordValue,
)
from flexengine.runtime.arena import Arenas
from flexengine.runtime.execution.cpu_work import CpuWork, nothing_awaited
from flexengine.runtime.execution.notifier import CompletionNotifier
from flexengine.runtime.execution.row_copies import RowCopies, Rows, most_regions
from flexengine.schedule.commands import THREAD_STREAMS, Command, CopyRegion, Program, Signal, Stream
from flexengine.schedule.following import threaded_commands
from flexengine.schedule.slots import Memory

Streams = Mapping[Stream, StreamHandle]
Call = Callable[[Command], None]
WordsOf = Callable[[Signal], list[WordValue]]
"""The words of host memory, by address, that a signal stands for, and the values that they reach or get."""


class IssuedSegment(NamedTuple):
    """Prepared operations [first, last), and the command that is called after them; None ends the program."""

    first: int
    last: int
    command: Command | None


class IssuedCommand(NamedTuple):
    """A command's prepared operations [first, last); one that is no copy is called at `call_at` among them."""

    first: int
    call_at: int
    last: int
    command: Command


class HostFence(NamedTuple):
    """Holds the host back: `wait` returns when a command may be issued.

    indices: of the commands that it is for; None: all.
    """

    wait: Call
    indices: Collection[int] | None = None

    def hold(self, command: Command) -> None:
        """Return when a command may be issued: at once where the fence is not for it."""
        if self.indices is None or command.index in self.indices:
            self.wait(command)


NO_FENCE = HostFence(lambda command: None, ())
"""A fence for no command."""


class Copies(NamedTuple):
    """What copies of a program are for the transfer engine."""

    program: Program
    arenas: Mapping[str, Tensor]
    streams: Streams

    def __call__(self, command: Command, regions: tuple[CopyRegion, ...]) -> Iterator[Copy]:
        """A copy for each region, and empty ones where other rows would have more of them."""
        slots = self.program.slots
        empty = [region._replace(num_bytes=0) for region in command.copies[:1]]
        for region in (*regions, *empty * (most_regions(command) - len(regions))):
            target, source = slots[region.target], slots[region.source]
            yield Copy(
                self.streams[command.stream],
                self.arenas[target.memory],
                target.offset + region.target_offset,
                self.arenas[source.memory],
                source.offset + region.source_offset,
                region.num_bytes,
            )


class BoundProgram:
    """One program over the arenas, ready to be issued again and again; `close` when it has run for the last time.

    timed: also record an event before and after every command on its stream. words: signals of commands on the GPU are
    awaited and raised by its streams, and these are the words of one run; `set_words` gives those of every run.
    """

    def __init__(
        self, program: Program, arenas: Arenas, streams: Streams, transfers: Transfers, timed: bool = False,
        words: WordsOf | None = None,
    ) -> None:  # fmt: skip
        self.program, self._streams, self._transfers = program, streams, transfers
        self.host_commands = threaded_commands(program)
        self._of_host = {command.index for command in self.host_commands}
        self._words: dict[Signal, list[list[int]]] = {}  # by signal and word, the operations that it is part of
        self._addresses: dict[int, int] = {}  # of words on the device, by those on the host
        by_host = (c for c in program.commands if c.signals and c.stream not in THREAD_STREAMS)
        self._signalling = [] if words is not None else list(by_host)
        self._notifier: CompletionNotifier | None = None
        self._cpu_work: CpuWork | None = None
        self._arenas = _whole_arenas(program, arenas)
        self._row_copies, self._copies = RowCopies(program), Copies(program, self._arenas, streams)
        self._first_copy: dict[int, int] = {}  # by command, the operation of its first region
        told = {command.index for command in self._signalling}
        self._signals = self._create_signals(told.union(*(command.waits for command in program.commands)))
        self._joins = dict(zip(streams, transfers.create_events(len(streams)), strict=True))
        self._begin, *self._clock = transfers.create_events(1 + 2 * len(program.commands), True) if timed else [0]
        self._issued: list[IssuedCommand] = []
        self._prepared = transfers.prepare(self._operations(words))
        self._segments = self._make_segments()

    def _create_signals(self, awaited: Collection[int]) -> dict[int, int]:
        """Create an event for every command of the GPU that something waits for.

        The thread that waits for the CPU's commands sleeps meanwhile: an update has all cores but the host's.
        """
        by_cpu = {wait for command in self.host_commands for wait in command.waits}
        signals = dict[int, int]()
        for blocking in (False, True):
            wanted = (index for index in awaited if index not in self._of_host)
            indices = sorted(index for index in wanted if (index in by_cpu) == blocking)
            signals |= zip(indices, self._transfers.create_events(len(indices), blocking=blocking), strict=True)
        return signals

    def run(self, call: Call, fence: HostFence = NO_FENCE) -> None:
        """Issue everything but the CPU's commands; `call` launches a command that is no copy, on its stream.

        fence: passed before the commands that it is for; where it is for all, they go over one by one.
        """
        if fence.indices is None:
            return self.run_in_ranges(call, lambda label: nullcontext(), fence)
        stops = [issued for issued in reversed(self._issued) if issued.command.index in fence.indices]
        for begin, last, command in self._segments:
            first, end = begin, len(self.program.commands) if command is None else command.index
            while stops and stops[-1].command.index <= end:
                stop = stops.pop()
                self._transfers.submit(self._prepared, first, stop.first)
                self._tell(stop.command.index - 1)
                fence.wait(stop.command)
                first = stop.first
            self._transfers.submit(self._prepared, first, last)
            if command is not None:
                self._tell(command.index - 1)
                call(command)
        self._tell(len(self.program.commands))

    def run_in_ranges(
        self, call: Call, range_of: Callable[[str], AbstractContextManager], fence: HostFence = NO_FENCE
    ) -> None:
        """As `run`, each command inside the range of its label; more calls into the transfer engine, the same order."""
        submit, prepared = self._transfers.submit, self._prepared
        submit(prepared, 0, self._issued[0].first if self._issued else 0)
        for first, call_at, last, command in self._issued:
            with range_of(command.label):
                fence.hold(command)
                submit(prepared, first, call_at)
                if not command.copies:
                    call(command)
                submit(prepared, call_at, last)
            self._tell(command.index)
        submit(prepared, self._issued[-1].last if self._issued else 0, prepared.num_operations)

    def set_words(self, words: WordsOf) -> None:
        """Say what the streams await and raise in the next run."""
        changes = []
        for signal, operations in self._words.items():
            for (address, value), of_word in zip(words(signal), operations, strict=True):
                word = WordValue(self._device_address(address), value)
                changes += [(operation, word) for operation in of_word]
        self._transfers.set_words(self._prepared, changes)

    def set_rows(self, rows: Rows) -> None:
        """Say how many rows each chunk has in the next run: copies of activations move no others."""
        for command, regions in self._row_copies.change(rows):
            copies = enumerate(self._copies(command, regions), self._first_copy[command.index])
            self._transfers.set_copies(self._prepared, copies)

    def _device_address(self, address: int) -> int:
        if address not in self._addresses:
            found = self._transfers.word_address(address)
            assert found is not None, "who makes streams wait for words has asked whether they can"
            self._addresses[address] = found
        return self._addresses[address]

    def cpu_work(
        self, call: Call, num_threads: int, before: CpuWork | None,
        earlier: Mapping[int, Collection[int]] | None = None, arrived: Callable[[Command], bool] = nothing_awaited,
    ) -> CpuWork:  # fmt: skip
        """The commands of the host's threads as work that calls `call` for each when what it waits for has ended.

        Order: start it before `run`, which tells it how far the host is.

        Events that they wait for are not recorded again by a later run before that: what records them touches bytes
        that the waiting command touches, so that it waits for it (`cpu_waits`).
        """
        work = CpuWork(self.program, self.host_commands, call, num_threads, self._ready, before, earlier, arrived)
        self._cpu_work = work
        return work

    def notifier(self, tell: Call) -> CompletionNotifier:
        """What calls `tell` for each command that other ranks wait for, when it has ended on the GPU.

        Order: as of `cpu_work`; and only `run` with a fence tells it how far the host is.
        """
        self._notifier = CompletionNotifier(self._signalling, self.wait_for, tell)
        return self._notifier

    def _ready(self, command: Command) -> None:
        for wait in command.waits:
            if wait not in self._of_host:
                self.wait_for(wait)

    def _tell(self, index: int) -> None:
        """Tell the threads that wait for it that all commands up to this one have been issued."""
        if self._notifier is not None:
            self._notifier.issued(index)
        if self._cpu_work is not None:
            self._cpu_work.issued(index)

    def wait_for(self, index: int) -> None:
        """Block the host until a command of the last run has finished.

        One that no other waits for has no event: a later one may imply it. Then the next on its stream that has one, or
        the stream's end, tells of it.
        """
        self._transfers.synchronize(self._ending(index))

    def _ending(self, index: int) -> int:
        """The first event on a command's stream that is recorded when the command has ended."""
        stream = self.program.commands[index].stream
        later = (c.index for c in self.program.commands[index:] if c.stream is stream and c.index in self._signals)
        following = next(later, None)
        return self._joins[stream] if following is None else self._signals[following]

    def timings(self) -> list[tuple[float, float]]:
        """(start, end) of every command of the last run, in seconds since it began. Order: it has finished."""
        spans = [(0.0, 0.0)] * len(self.program.commands)
        free: dict[Stream, float] = dict.fromkeys(THREAD_STREAMS, 0.0)
        for command in self.program.commands:
            if command.stream not in THREAD_STREAMS:
                events = self._clock[2 * command.index : 2 * command.index + 2]
                begin, end = (self._transfers.elapsed_s(self._begin, event) for event in events)
                spans[command.index] = (begin, end)
        ran = {} if self._cpu_work is None else self._cpu_work.spans
        for command in sorted(self.host_commands, key=lambda command: ran[command.index]):
            # those of a stream follow each other, and start when what they wait for has ended
            begin, end = ran[command.index]
            start = max([free[command.stream], *(spans[wait][1] for wait in command.waits)])
            free[command.stream] = start + end - begin
            spans[command.index] = (start, free[command.stream])
        return spans

    def began_s(self, zero: int) -> float:
        """Seconds from the event `zero`, made with timing, to the beginning of the last run. Order: it has finished."""
        return self._transfers.elapsed_s(zero, self._begin)

    def close(self) -> None:
        """Give the events back. Order: the last run has finished."""
        timing = [self._begin, *self._clock] if self._clock else []
        self._transfers.release_events([*self._signals.values(), *self._joins.values(), *timing])

    # -- in the program's order --------------------------------------------------------------------------------------

    def _operations(self, words: WordsOf | None) -> list[Operation]:
        operations: list[Operation] = []
        if self._clock:  # before the streams join, so that nothing starts before it
            operations.append(Record(self._streams[Stream.COMPUTE], self._begin))
        operations += self._join_streams()
        for command in self.program.commands:
            if command.stream in THREAD_STREAMS:
                continue
            first = len(operations)
            operations += self._waits(command)
            if words is not None:
                self._add_words(operations, command.awaits, Await(self._streams[command.stream]), words)
            operations += self._before(command)
            self._first_copy[command.index] = len(operations)
            operations += self._copies(command, command.copies)
            call_at = len(operations)
            operations += self._after(command)
            if words is not None:
                self._add_words(operations, command.signals, Raise(self._streams[command.stream]), words)
            operations += self._told(command)
            self._issued.append(IssuedCommand(first, call_at, len(operations), command))
        return operations + list(self._join_streams())

    def _waits(self, command: Command) -> Iterator[Operation]:
        stream = self._streams[command.stream]
        return (Wait(stream, self._signals[wait]) for wait in command.waits if wait not in self._of_host)

    def _add_words(
        self, operations: list[Operation], signals: Iterable[Signal], operation: Await | Raise, words: WordsOf
    ) -> None:
        """Append an operation for each word of signals, and note which of all operations it is."""
        for signal in signals:
            of_words = self._words.setdefault(signal, [[] for _ in words(signal)])
            for of_word in of_words:
                of_word.append(len(operations))
                operations.append(operation)

    def _before(self, command: Command) -> Iterator[Operation]:
        if self._clock:
            yield Record(self._streams[command.stream], self._clock[2 * command.index])

    def _after(self, command: Command) -> Iterator[Operation]:
        if self._clock:
            yield Record(self._streams[command.stream], self._clock[2 * command.index + 1])

    def _told(self, command: Command) -> Iterator[Operation]:
        if command.index in self._signals:
            yield Record(self._streams[command.stream], self._signals[command.index])

    def _join_streams(self) -> Iterator[Operation]:
        """Operations that make every stream wait for what all others have been given so far."""
        for name, stream in self._streams.items():
            yield Record(stream, self._joins[name])
        for name, stream in self._streams.items():
            yield from (Wait(stream, event) for other, event in self._joins.items() if other != name)

    def _make_segments(self) -> list[IssuedSegment]:
        calls = [issued for issued in self._issued if not issued.command.copies]
        starts = [0, *(issued.call_at for issued in calls)]
        ends = [*starts[1:], self._prepared.num_operations]
        commands = [*(issued.command for issued in calls), None]
        return [IssuedSegment(*segment) for segment in zip(starts, ends, commands, strict=True)]


def _whole_arenas(program: Program, arenas: Arenas) -> dict[str, Tensor]:
    """The part of each arena that a program's slots reach, as bytes."""
    ends: dict[Memory, int] = {}
    for slot in (slot for slot in program.slots if slot.memory != "drive"):
        ends[slot.memory] = max(ends.get(slot.memory, 0), slot.end)
    return {memory: arenas.bytes_view(memory, 0, end) for memory, end in ends.items()}


def holding(program: Program, fence: HostFence, work: CpuWork) -> HostFence:
    """The fence, which also holds what waits for reads of a drive, as no stream of the GPU knows of these."""
    threaded = {command.index for command in program.commands if command.stream in THREAD_STREAMS}
    reads = {c.index: threaded.intersection(c.waits) for c in program.commands if c.index not in threaded}
    reads = {index: waits for index, waits in reads.items() if waits}
    if not reads:
        return fence

    def wait(command: Command) -> None:
        fence.hold(command)
        work.wait(reads.get(command.index, ()))

    return HostFence(wait, None if fence.indices is None else {*fence.indices, *reads})
