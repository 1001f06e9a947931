"""Two programs in a row, the CPU still at work on the first: which commands of the second wait for which of its.

On the GPU a program starts when the one before has ended. Commands of the CPU may still run; only what touches the same
bytes waits for them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np

from flexengine.schedule.commands import HOST_STREAMS, LASTING_STREAMS, THREAD_STREAMS, Access, Command, Program, Stream
from flexengine.schedule.slots import Slot

BEYOND: dict[str, int] = {"host": 0, "node": 1 << 60, "drive": 1 << 61}
"""Where each memory begins that threads of the host touch, in one numbering of all; farther apart than any is large."""


def _address(slot: Slot) -> int:
    """The first byte of a slot, in one numbering."""
    return slot.offset + BEYOND.get(slot.memory, 0)


class _Touched:
    """Ranges of memory that commands of the host's threads touch, and which of these have to be waited for.

    rows: start, end, the command's index, and whether those that read, and those that write there, have to wait for it;
    int64 [ranges, 5].
    """

    def __init__(self, rows: np.ndarray) -> None:
        start, self._end, self._index, *awaited = rows[np.argsort(rows[:, 0], kind="stable")].T
        self._awaited = tuple(each.astype(bool) for each in awaited)
        self._starts: list[int] = start.tolist()
        self._ends_until: list[int] = np.maximum.accumulate(self._end).tolist()  # of a range and all before it

    def touching(self, slot: Slot, *, writing: bool) -> frozenset[int]:
        """The commands that whoever reads, or writes, a slot has to wait for."""
        first = _address(slot)
        near = slice(bisect_right(self._ends_until, first), bisect_left(self._starts, first + slot.num_bytes))
        here = (self._end[near] > first) & self._awaited[writing][near]
        return frozenset(self._index[near][here].tolist())


def cpu_commands(program: Program) -> list[Command]:
    """Commands of the CPU, which go on beside all others and beyond the program's end on the GPU.

    The first waits for the GPU, so that earlier programs have ended by then; no other stream waits for any of them.
    """
    found = [command for command in program.commands if command.stream is Stream.CPU]
    ours = {command.index for command in found}
    assert not found or found[0].waits, f"{found[0].label} waits for nothing"
    waiting = [c.label for c in program.commands if c.stream not in HOST_STREAMS and ours & set(c.waits)]
    assert not waiting, f"{waiting[0]} waits for the CPU within a program"
    return found


def host_commands(program: Program) -> list[Command]:
    """Commands of the CPU, and the copies from and to a drive that they need; no stream of the GPU waits for these.

    Those of earlier programs have ended before, as of `cpu_commands`.
    """
    if not cpu_commands(program):
        return []
    found = [command for command in program.commands if command.stream in HOST_STREAMS]
    ours = {command.index for command in found}
    waiting = [c.label for c in program.commands if c.stream not in HOST_STREAMS and ours & set(c.waits)]
    assert not waiting, f"{waiting[0]} waits for the host within a program"
    return found


def lasting_commands(program: Program) -> list[Command]:
    """Those that may still run when a program has ended on the GPU: `host_commands`, and writes to a drive of what the
    GPU has left."""
    host_commands(program)
    return [command for command in program.commands if command.stream in LASTING_STREAMS]


def threaded_commands(program: Program) -> list[Command]:
    """Those of threads of the host: `lasting_commands`, and reads of a drive that copies to the GPU wait for."""
    host_commands(program)
    return [command for command in program.commands if command.stream in THREAD_STREAMS]


def cpu_waits(before: Program, after: Program) -> dict[int, frozenset[int]]:
    """For commands of `after`, by index, the commands of the CPU in `before` that they must wait for.

    They read what such a command writes, or write what it reads or writes.
    """
    return CpuWaits(before).of(after)


class WaitsBetween:
    """Remembers `cpu_waits` of pairs of programs."""

    def __init__(self) -> None:
        self._known: dict[tuple[Program, Program], dict[int, frozenset[int]]] = {}

    def of(self, before: Program, after: Program) -> dict[int, frozenset[int]]:
        """`cpu_waits` of two programs."""
        if (before, after) not in self._known:
            self._known[before, after] = cpu_waits(before, after)
        return self._known[before, after]

    def forget(self, program: Program) -> None:
        """Drop what is known of a program."""
        self._known = {pair: waits for pair, waits in self._known.items() if program not in pair}


class CpuWaits:
    """Finds what programs after one program must wait for; programs of one layout share what is known of its slots."""

    def __init__(self, before: Program) -> None:
        self._touched = _touched(before)
        self._slots: tuple[Slot, ...] = ()
        self._to_read: dict[int, frozenset[int]] = {}
        self._to_write: dict[int, frozenset[int]] = {}

    def of(self, after: Program) -> dict[int, frozenset[int]]:
        """For commands of `after`, by index, what they must wait for."""
        if self._slots is not after.slots:
            self._slots, self._to_read, self._to_write = after.slots, {}, {}
        waits: dict[int, frozenset[int]] = {}
        for command in after.commands:
            for accesses, known in ((command.reads, self._to_read), (command.writes, self._to_write)):
                for slot, _ in accesses:
                    found = known.get(slot)
                    if found is None:
                        found = known[slot] = self._commands_of(slot, writing=known is self._to_write)
                    if found:
                        waits[command.index] = waits.get(command.index, frozenset()) | found
        return waits

    def _commands_of(self, slot: int, *, writing: bool) -> frozenset[int]:
        """The commands that whoever reads, or writes, a slot must wait for."""
        place = self._slots[slot]
        return self._touched.touching(place, writing=writing) if place.memory in BEYOND else frozenset()


def _touched(program: Program) -> _Touched:
    places: dict[tuple[int, int], dict[int, bool]] = {}
    for command in lasting_commands(program):
        for accesses, writes in ((command.reads, False), (command.writes, True)):
            for slot, _ in accesses:
                place = program.slots[slot]
                if place.memory in BEYOND:
                    first = _address(place)
                    here = places.setdefault((first, first + place.num_bytes), {})
                    here[command.index] = here.get(command.index, False) or writes
    rows = [(*place, *row) for place, writes in places.items() for row in _awaited(program, writes)]
    return _Touched(np.array(rows, dtype=np.int64).reshape(-1, 5))


def _awaited(program: Program, writes: dict[int, bool]) -> list[tuple[int, bool, bool]]:
    """Of commands that touch one range, in their order, with whether they write: which of them are left to wait for.

    Thousands may take turns there. Whoever waits for the last has waited for those that it waits for itself. Gives the
    index, and whether those that read, and those that write, wait for it.
    """
    found = []
    by_any, by_writers = set[int](), set[int]()  # commands that a later one here waits for: any, or one that writes
    for index in reversed(writes):
        row = (index, writes[index] and index not in by_writers, index not in by_any)
        found += [row] if any(row[1:]) else []
        here = [wait for wait in program.commands[index].waits if wait in writes]
        by_any.update(here)
        if writes[index] or index in by_writers:
            by_writers.update(here)
    return found


def followed(before: Program, after: Program) -> Program:
    """Join both into one program, to be priced and drawn. The slots of `before` begin with those of `after`.

    `after` starts on every stream of the GPU when all of them have ended `before`, and waits for the CPU where it must.
    """
    shift, waits = len(before.commands), cpu_waits(before, after)
    ends: dict[Stream, int] = {c.stream: c.index for c in before.commands if c.stream not in LASTING_STREAMS}
    started: set[Stream] = set()
    commands = list(before.commands)
    for command in after.commands:
        needed = {wait + shift for wait in command.waits} | waits.get(command.index, frozenset())
        if command.stream not in started:
            started.add(command.stream)
            needed |= {index for stream, index in ends.items() if stream is not command.stream}
        commands.append(command.moved(command.index + shift, tuple(sorted(needed))))
    initial = {**dict(after.initial), **dict(before.initial)}
    contents = tuple(Access(slot, content) for slot, content in initial.items())
    return Program(f"{before.name}, {after.name}", before.slots, tuple(commands), contents)
