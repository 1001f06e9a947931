"""Parts of a parameter group that cross the link one by one, each into a slot of its own.

A group that is not cut is one part, part 0, and lies in a slot as in its home. One that is cut has part 0, all that is
not cut, and parts 1, 2, ...: the same share each of every parameter that is.
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
    whole = sorted((offset, name) for name, offset in offsets.items())
    if group.num_parts == 1:
        return _numbered([[Piece(name, first, first, shapes[name]) for first, name in whole]])
    found = [_packed([(first, name, shapes[name]) for first, name in whole if name not in group.cut])]
    for part in range(group.num_parts):
        shares = []
        for first, name in whole:
            if name in group.cut:
                rows, *rest = shapes[name]
                shape = (rows // group.num_parts, *rest)
                shares.append((first + part * math.prod(shape), name, shape))
        found.append(_packed(shares))
    return _numbered(found)


def _packed(pieces: list[tuple[int, str, tuple[int, ...]]]) -> list[Piece]:
    """Pieces (first element, name, shape) one after the other."""
    packed, end = [], 0
    for first, name, shape in pieces:
        start = end + (first - end) % ALIGNED_ELEMENTS
        packed.append(Piece(name, first, start, shape))
        end = start + math.prod(shape)
    return packed


def _numbered(parts: list[list[Piece]]) -> tuple[Part, ...]:
    """The same with their runs."""
    found, number = [], 0
    for pieces in parts:
        runs: list[Run] = []
        for piece in pieces:
            last = runs[-1] if runs else None
            if last and (last.first + last.numel, last.start + last.numel) == (piece.first, piece.start):
                runs[-1] = last._replace(numel=last.numel + piece.numel)
            else:
                runs.append(Run(piece.first, piece.start, piece.numel, number))
                number += 1
        found.append(Part(tuple(pieces), tuple(runs), max((r.start + r.numel for r in runs), default=0)))
    return tuple(found)
