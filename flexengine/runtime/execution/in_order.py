"""Copies and other commands of a program as the CPU runs them, one at a time."""

from __future__ import annotations

from torch import Tensor

from flexengine.runtime.arena import Arenas
from flexengine.runtime.execution.bound_program import Call
from flexengine.schedule.commands import Command, Program

Copies = dict[int, list[tuple[Tensor, Tensor]]]
"""By command, byte views (target, source) of what it copies."""


class InOrder:
    """Runs single commands over a pair of arenas. Views of copies are made once per program."""

    def __init__(self, arenas: Arenas) -> None:
        self._arenas = arenas
        self._copies: dict[Program, Copies] = {}

    def bind(self, program: Program) -> Copies:
        """What the copies of a program move."""
        if program not in self._copies:
            self._copies[program] = {
                c.index: [(self._bytes(program, r.target, r.target_offset, r.num_bytes),
                           self._bytes(program, r.source, r.source_offset, r.num_bytes)) for r in c.copies]
                for c in program.commands
                if c.copies
            }  # fmt: skip
        return self._copies[program]

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

    def _bytes(self, program: Program, slot: int, offset: int, num_bytes: int) -> Tensor:
        place = program.slots[slot]
        return self._arenas.bytes_view(place.memory, place.offset + offset, num_bytes)
