"""Builds a program command by command, and derives every wait from hazards on slots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from flexengine.ops.base import Work
from flexengine.schedule.commands import (
    STREAM_INDEX,
    STREAMS,
    Access,
    Command,
    CommandName,
    CopyRegion,
    Program,
    Signal,
    Stream,
)
from flexengine.schedule.slots import Slot


class ProgramBuilder:
    """Appends commands and derives their waits.

    Every slot remembers its last writer and its readers since; a command waits for the last writer of what it reads and
    for the last writer and readers of what it writes, through every slot that overlaps in memory. A vector clock per
    command drops waits that earlier waits already imply, so that every wait left is necessary. cpu_groups: of the
    model, where other streams wait for the CPU, which runs groups in any order: each is a stream of its own then.
    """

    def __init__(
        self, name: str, slots: tuple[Slot, ...], overlaps: list[tuple[int, ...]], cpu_groups: int = 0
    ) -> None:
        self.name, self.slots, self.overlaps = name, slots, overlaps
        self.commands: list[Command] = []
        self.initial: dict[int, str] = {}
        self._writer = [-1] * len(slots)
        self._readers: list[dict[int, int]] = [{} for _ in slots]  # the last one of every stream since the last write
        self._streams: list[int] = []
        self._clocks: list[np.ndarray] = []
        self._cpu_groups, num_lanes = cpu_groups, len(STREAMS) + cpu_groups
        self._cpu_ready = np.full(num_lanes, -1)
        self._stream_clock = list(np.full((num_lanes, num_lanes), -1))

    def last_writer(self, slot: int) -> int:
        """Index of the last command that wrote the slot, -1 when none has."""
        return self._writer[slot]

    def overwritten(self, slot: int) -> None:
        """Have `last_writer` take the latest command for a writer of the slot, as one of another rank's program is."""
        self._writer[slot] = len(self.commands) - 1

    def holds(self, slot: int, content: str) -> None:
        """State that a slot holds `content` before the program starts."""
        self.initial.setdefault(slot, content)

    def add(
        self,
        kind: str,
        name: CommandName,
        stream: Stream,
        reads: list[Access],
        writes: list[Access],
        work: Work = Work(),  # noqa: B008 (an immutable NamedTuple)
        args: Any = None,
    ) -> Command:
        """Append a command that copies nothing; returns it with its derived waits."""
        waits = self._enter(stream, reads, writes, args)
        command = Command(len(self.commands), kind, name, stream, tuple(reads), tuple(writes), waits, work, args=args)
        self.commands.append(command)
        return command

    def add_copy(
        self, name: CommandName, stream: Stream, reads: list[Access], writes: list[Access],
        copies: tuple[CopyRegion, ...], args: Any = None,
    ) -> Command:  # fmt: skip
        """Append a copy along these regions; returns it with its derived waits."""
        waits = self._enter(stream, reads, writes, args)
        command = Command(
            len(self.commands), "copy", name, stream, tuple(reads), tuple(writes), waits, copies=copies, args=args
        )
        self.commands.append(command)
        return command

    def _enter(self, stream: Stream, reads: list[Access], writes: list[Access], args: Any) -> tuple[int, ...]:
        """Note what the next command reads and writes; returns its waits."""
        index, own = len(self.commands), STREAM_INDEX[stream]
        if self._cpu_groups and stream is Stream.CPU:
            own = len(STREAMS) + args.group
        clock = self._stream_clock[own].copy()
        if own >= len(STREAMS):  # all of the CPU's become ready in the order of the program
            np.maximum(clock, self._cpu_ready, out=clock)
        waits = self._derive_waits(own, clock, reads, writes)
        for wait in waits:
            np.maximum(clock, self._clocks[wait], out=clock)
            if own >= len(STREAMS):
                np.maximum(self._cpu_ready, self._clocks[wait], out=self._cpu_ready)
        clock[own] = index
        self._clocks.append(clock)
        self._streams.append(own)
        self._stream_clock[own] = clock
        for slot, _ in writes:
            self._writer[slot] = index
            self._readers[slot] = {}
        for slot, _ in reads:
            self._readers[slot][own] = index
        return waits

    def copy(
        self, name: CommandName, stream: Stream, content: str, regions: list[CopyRegion], args: Any = None
    ) -> Command:
        """Append a copy of `content` along `regions`, adjoining regions merged."""
        merged = merge_regions(regions)
        reads = [Access(s, content) for s in dict.fromkeys(r.source for r in merged)]
        writes = [Access(s, content) for s in dict.fromkeys(r.target for r in merged)]
        return self.add_copy(name, stream, reads, writes, merged, args)

    def between_ranks(self, index: int, awaits: tuple[Signal, ...] = (), signals: tuple[Signal, ...] = ()) -> None:
        """Have an appended command await semaphores of other ranks and raise own ones, beside those it does."""
        command = self.commands[index]
        awaits, signals = (*command.awaits, *awaits), (*command.signals, *signals)
        self.commands[index] = replace(command, awaits=awaits, signals=signals)

    def build(self) -> Program:
        """The finished program."""
        initial = tuple(Access(slot, content) for slot, content in self.initial.items())
        return Program(self.name, self.slots, tuple(self.commands), initial)

    def _derive_waits(self, own: int, clock: np.ndarray, reads: list[Access], writes: list[Access]) -> tuple[int, ...]:
        """What the next command of a stream waits for, beside what its clock implies."""
        latest: dict[int, int] = {}
        streams = self._streams
        for access, _ in (*reads, *writes):
            for slot in self.overlaps[access]:
                writer = self._writer[slot]
                if writer >= 0 and writer > latest.get(streams[writer], -1):
                    latest[streams[writer]] = writer
        for access, _ in writes:
            for slot in self.overlaps[access]:
                for stream, reader in self._readers[slot].items():
                    if reader > latest.get(stream, -1):
                        latest[stream] = reader
        needed = [i for stream, i in latest.items() if stream != own and i > clock[stream]]
        # a wait that another wait of this command implies is dropped too
        if len(needed) > 1:
            needed = [i for i in needed if not any(j != i and self._clocks[j][streams[i]] >= i for j in needed)]
        return tuple(sorted(needed))


def merge_regions(regions: list[CopyRegion]) -> tuple[CopyRegion, ...]:
    """Regions with adjoining ends on both sides as one; empty ones dropped."""
    merged: list[CopyRegion] = []
    for r in regions:
        if r.num_bytes == 0:
            continue
        if merged:
            last = merged[-1]
            adjoining = (
                last.source == r.source
                and last.target == r.target
                and last.source_offset + last.num_bytes == r.source_offset
                and last.target_offset + last.num_bytes == r.target_offset
            )
            if adjoining:
                merged[-1] = last._replace(num_bytes=last.num_bytes + r.num_bytes)
                continue
        merged.append(r)
    return tuple(merged)
