"""Pieces of a stored gradient: several ranks relay it piece by piece, so that none waits for all of it.

One rank moves each part of a gradient whole. Of several, each part is cut into pieces of at most PIECE_BYTES. Squares
of gradients add up over shares of a run (`part_elements`), so pieces end where a share does: no sum changes.
"""

from __future__ import annotations

from typing import NamedTuple

from flexengine.schedule.fixed_slots import part_elements
from flexengine.schedule.parts import ALIGNED_ELEMENTS, Part, Run

PIECE_BYTES = 64 * 2**20
"""Stored bytes of a piece: 1.2 ms of a link of 55 GB/s. Smaller ones shorten what ranks wait for each other, and cost
more commands."""


class PieceRun(NamedTuple):
    """Elements [before, before + numel) of a run."""

    run: Run
    before: int
    numel: int

    @property
    def first(self) -> int:
        """The first element in the group."""
        return self.run.first + self.before

    @property
    def start(self) -> int:
        """The first element in the part."""
        return self.run.start + self.before


class Range(NamedTuple):
    """`numel` elements that follow each other from `first` on in the group, and from `start` on in a piece."""

    first: int
    start: int
    numel: int


class Piece(NamedTuple):
    """Runs of a part, or shares of them, that are relayed together. `start`: the element of the part it begins at."""

    start: int
    runs: tuple[PieceRun, ...]

    @property
    def numel(self) -> int:
        """Elements of a slot for it."""
        return max((run.start + run.numel for run in self.runs), default=0) - self.start

    @property
    def ranges(self) -> list[Range]:
        """Its elements, runs that adjoin as one."""
        found: list[Range] = []
        for run in self.runs:
            here = Range(run.first, run.start - self.start, run.numel)
            last = found[-1] if found else Range(-1, -1, 0)
            if (last.first + last.numel, last.start + last.numel) == here[:2]:
                found[-1] = last._replace(numel=last.numel + here.numel)
            else:
                found.append(here)
        return found


def whole_piece(part: Part) -> Piece:
    """All of a part."""
    return Piece(0, tuple(PieceRun(run, 0, run.numel) for run in part.runs))


def pieces_of(part: Part, element_bytes: int) -> tuple[Piece, ...]:
    """Cut a part into pieces of at most PIECE_BYTES, but of one share of a run at least."""
    most = PIECE_BYTES // element_bytes
    if part.numel <= most:
        return (whole_piece(part),)
    found: list[Piece] = []
    for run in sorted(part.runs, key=lambda run: run.start):
        before = 0
        while before < run.numel:
            start = run.start + before
            taken = _fitting(run, before, found[-1].start + most - start) if found else 0
            if not taken:
                found.append(Piece(start - start % ALIGNED_ELEMENTS, ()))
                taken = _fitting(run, before, found[-1].start + most - start)
                taken = taken or min(part_elements(run.numel), run.numel - before)
            found[-1] = found[-1]._replace(runs=(*found[-1].runs, PieceRun(run, before, taken)))
            before += taken
    return tuple(found)


def _fitting(run: Run, before: int, room: int) -> int:
    """How many elements of a run from `before` on fit in so many: all that are left, or whole shares."""
    left, share = run.numel - before, part_elements(run.numel)
    return left if left <= room else max(0, room) // share * share
