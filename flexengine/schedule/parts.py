"""Parts of a parameter group that cross the link one by one, each into a slot of its own.

A group that is not cut is one part, part 0, and lies in a slot as in its home. In a group that is cut, part 0 has the
parameters that stay whole; parts 1, 2, ... have equal shares of every other parameter. Gradients are rounded, and their
squares added up, run by run. Runs are the same in both cases, so the bits of the gradient norm are too.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from flexengine.models.spec import GroupSpec

ALIGNED_ELEMENTS = 128
"""A parameter lies in its slot as far beyond a multiple of this as in the group: both addresses have one alignment."""


class PartParam(NamedTuple):
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
    """What a slot holds at one time: parameters, the runs of elements that make them up, and the slot's elements."""

    params: tuple[PartParam, ...]
    runs: tuple[Run, ...]
    numel: int


def parts_of(group: GroupSpec, offsets: dict[str, int]) -> tuple[Part, ...]:
    """Parts of a group whose parameters start at these elements, in the order in which forward needs them."""
    shapes = {p.name: p.shape for p in group.params}
    whole = [PartParam(name, first, first, shapes[name]) for name, first in offsets.items()]
    whole.sort(key=lambda param: param.first)
    runs = _runs(group, whole)
    if group.num_parts == 1:
        return (_part(whole, runs),)
    cut = [param for param in whole if param.name in group.cut]
    shares = [[_share(param, number, group.num_parts) for param in cut] for number in range(group.num_parts)]
    uncut = [param for param in whole if param.name not in group.cut]
    return tuple(_part(_packed(params), runs) for params in (uncut, *shares))


def _share(param: PartParam, number: int, parts: int) -> PartParam:
    """Cut a parameter into equal parts by rows; returns one of them."""
    rows, *rest = param.shape
    share = PartParam(param.name, param.first, 0, (rows // parts, *rest))
    return share._replace(first=param.first + number * share.numel)


def _packed(params: list[PartParam]) -> list[PartParam]:
    """Lay parameters one after the other, each aligned as in its group."""
    packed, end = [], 0
    for param in params:
        start = end + (param.first - end) % ALIGNED_ELEMENTS
        packed.append(param._replace(start=start))
        end = start + param.numel
    return packed


def _runs(group: GroupSpec, whole: list[PartParam]) -> list[Run]:
    """The runs of a group: the shares of every parameter that may be cut, and whatever lies between them.

    They are the same whether the group is in parts or not.
    """
    found: list[tuple[int, int]] = []
    joins = False
    for param in whole:
        shares = group.divisions if param.name in group.cut else 1
        numel = param.numel // shares
        if joins and shares == 1:
            found[-1] = (found[-1][0], found[-1][1] + numel)
        else:
            found += [(param.first + i * numel, numel) for i in range(shares)]
        joins = shares == 1
    return [Run(first, first, numel, number) for number, (first, numel) in enumerate(found)]


def _part(params: list[PartParam], runs: list[Run]) -> Part:
    """A part of these parameters, with the runs that begin in one of them."""
    own = tuple(
        run._replace(start=param.start + run.first - param.first)
        for param in params
        for run in runs
        if param.first <= run.first < param.first + param.numel
    )
    return Part(tuple(params), own, max((param.start + param.numel for param in params), default=0))
