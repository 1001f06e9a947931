"""Parts of a parameter group that cross the link one by one, each into a slot of its own.

A group that is not cut is one part, part 0, and lies in a slot as in its home. One that is cut has part 0, all that is
not cut, and parts 1, 2, ...: the same share each of every parameter that is. Gradients are rounded, and their squares
added up, run by run, which are the same in both cases.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from flexengine.models.spec import GroupSpec

ALIGNED_ELEMENTS = 128
"""A piece lies in its slot as far beyond a multiple of this as in the group, so that its address is aligned alike."""


class Piece(NamedTuple):
    """A parameter of a part: its elements start at `first` in the group and at `start` in the part."""

    name: str
    first: int
    start: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Run(NamedTuple):
    """Elements that follow each other in the group and in the part; `number` counts the group's runs."""

    first: int
    start: int
    numel: int
    number: int


class Part(NamedTuple):
    """What shares a slot: its parameters, the same as runs, and how many elements the slot has."""

    pieces: tuple[Piece, ...]
    runs: tuple[Run, ...]
    numel: int


def parts_of(group: GroupSpec, offsets: dict[str, int]) -> tuple[Part, ...]:
    """Parts of a group whose parameters start at these elements, in the order in which forward needs them."""
    shapes = {p.name: p.shape for p in group.params}
    whole = [Piece(name, first, first, shapes[name]) for name, first in offsets.items()]
    whole.sort(key=lambda piece: piece.first)
    runs = _runs(group, whole)
    if group.num_parts == 1:
        return (_part(whole, runs),)
    cut = [piece for piece in whole if piece.name in group.cut]
    shares = [[_share(piece, number, group.num_parts) for piece in cut] for number in range(group.num_parts)]
    uncut = [piece for piece in whole if piece.name not in group.cut]
    return tuple(_part(_packed(pieces), runs) for pieces in (uncut, *shares))


def _share(piece: Piece, number: int, parts: int) -> Piece:
    """One of equal parts of a parameter."""
    rows, *rest = piece.shape
    share = Piece(piece.name, piece.first, 0, (rows // parts, *rest))
    return share._replace(first=piece.first + number * share.numel)


def _packed(pieces: list[Piece]) -> list[Piece]:
    """The pieces one after the other."""
    packed, end = [], 0
    for piece in pieces:
        start = end + (piece.first - end) % ALIGNED_ELEMENTS
        packed.append(piece._replace(start=start))
        end = start + piece.numel
    return packed


def _runs(group: GroupSpec, whole: list[Piece]) -> list[Run]:
    """Those of a group where it lies, the same whether it is in parts or not: shares of what may be cut, and whatever
    lies between."""
    found: list[tuple[int, int]] = []
    joins = False
    for piece in whole:
        shares = group.divisions if piece.name in group.cut else 1
        numel = piece.numel // shares
        if joins and shares == 1:
            found[-1] = (found[-1][0], found[-1][1] + numel)
        else:
            found += [(piece.first + i * numel, numel) for i in range(shares)]
        joins = shares == 1
    return [Run(first, first, numel, number) for number, (first, numel) in enumerate(found)]


def _part(pieces: list[Piece], runs: list[Run]) -> Part:
    """Pieces with the runs that begin in one of them."""
    own = tuple(
        run._replace(start=piece.start + run.first - piece.first)
        for piece in pieces
        for run in runs
        if piece.first <= run.first < piece.first + piece.numel
    )
    return Part(tuple(pieces), own, max((piece.start + piece.numel for piece in pieces), default=0))
