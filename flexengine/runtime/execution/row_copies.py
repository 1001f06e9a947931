"""What copies of activations move: the rows that the chunks of a run have, not those of full chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flexengine.schedule.commands import Command, CopyRegion, Program, RowCopy
from flexengine.schedule.program_builder import merge_regions

Rows = Sequence[int]
"""Tokens of each chunk of a run; none for full chunks."""


class RowCopies:
    """The copies of a program that move rows of chunks, and what they move now: at first that of full chunks."""

    def __init__(self, program: Program) -> None:
        self.commands = [command for command in program.commands if isinstance(command.args, RowCopy)]
        self._rows: tuple[int, ...] = ()

    def change(self, rows: Rows) -> Iterator[tuple[Command, tuple[CopyRegion, ...]]]:
        """Take over the rows of the next run; yields the copies that move something else from then on."""
        before, self._rows = self._rows, tuple(rows)
        if self._rows == before:
            return
        for command in self.commands:
            chunk = command.args.chunk
            if (before[chunk] if before else 0) != (rows[chunk] if rows else 0):
                yield command, regions_of(command, rows)


def regions_of(command: Command, rows: Rows) -> tuple[CopyRegion, ...]:
    """What a copy of rows moves, where tensors adjoin together."""
    return merge_regions(command.args.regions(rows[command.args.chunk])) if rows else command.copies


def most_regions(command: Command) -> int:
    """How many regions a copy has at the most, whichever rows it moves."""
    return len(command.args.tensors) if isinstance(command.args, RowCopy) else len(command.copies)
