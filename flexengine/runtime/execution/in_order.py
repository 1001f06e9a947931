"""Copies and other commands of a program as the CPU runs them, one at a time."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from flexengine.runtime.arena import Arenas
from flexengine.runtime.execution.bound_program import Call
from flexengine.runtime.execution.row_copies import RowCopies, Rows
from flexengine.schedule.commands import DRIVE_STREAMS, Command, CopyRegion, Program

Copies = dict[int, list[tuple[Tensor, Tensor]]]
"""By command, byte views (target, source) of what it copies."""


class InOrder:
    """Runs single commands over a pair of arenas. Views of copies are made once per program."""

    def __init__(self, arenas: Arenas) -> None:
        self._arenas = arenas
        self._copies: dict[Program, tuple[Copies, RowCopies]] = {}

    def bind(self, program: Program, rows: Rows = ()) -> Copies:
        """What the copies of a program move, for chunks of so many rows."""
        if program not in self._copies:
            copying = [c for c in program.commands if c.copies and c.stream not in DRIVE_STREAMS]
            self._copies[program] = {c.index: self._views(program, c.copies) for c in copying}, RowCopies(program)
        copies, of_rows = self._copies[program]
        copies |= {command.index: self._views(program, regions) for command, regions in of_rows.change(rows)}
        return copies

    def forget(self, program: Program) -> None:
        """Drop what is bound to a program that will not run again."""
        self._copies.pop(program, None)

    def execute(self, command: Command, handler: Call, copies: Copies) -> None:
        """Run a command to its end."""
        if command.copies:
            for target, source in copies[command.index]:
                target.copy_(source)
        else:
            handler(command)

    def _views(self, program: Program, regions: Iterable[CopyRegion]) -> list[tuple[Tensor, Tensor]]:
        return [
            (
                self._bytes(program, r.target, r.target_offset, r.num_bytes),
                self._bytes(program, r.source, r.source_offset, r.num_bytes),
            )
            for r in regions
        ]

    def _bytes(self, program: Program, slot: int, offset: int, num_bytes: int) -> Tensor:
        place = program.slots[slot]
        return self._arenas.bytes_view(place.memory, place.offset + offset, num_bytes)
