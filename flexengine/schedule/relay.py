"""Several ranks on one host copy: who runs which round, and the cells by which commands of ranks wait for each other.

Rounds of a step are numbered over all its calls, and rank `number % size` runs a round. A stored gradient is relayed
through the node's memory: the rank of a round fetches what the round before left there, and leaves the sum. So it is
added up in the order of rounds, whatever the number of ranks. After the last round each rank updates its share.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

from flexengine.schedule.commands import Signal
from flexengine.schedule.group_storage import Segment
from flexengine.schedule.layout import Layout

Thing = TypeVar("Thing")

SHARE_ELEMENTS = 64
"""Shares begin at multiples of so many elements: ranks write no common cache line of a plane of 16 bits or more."""


def executor_of(round_number: int, size: int) -> int:
    """The rank that runs a round of a step, counted from 0."""
    return round_number % size


class Cells:
    """Numbers of the cells that ranks raise: pieces of gradients relayed, groups updated, the norm's squares stored."""

    def __init__(self, layout: Layout) -> None:
        self._first_pieces = [0, *accumulate(sum(map(len, parts)) for parts in layout.pieces)]
        self._pieces = layout.pieces
        self._num_groups = len(layout.groups)

    @property
    def count(self) -> int:
        """How many cells there are."""
        return self._norm + 1

    @property
    def _norm(self) -> int:
        return self._first_pieces[-1] + self._num_groups

    def _of_piece(self, group: int, part: int, piece: int) -> int:
        return self._first_pieces[group] + sum(map(len, self._pieces[group][:part])) + piece

    def of_gradient(self, group: int) -> range:
        """The cells that a round raises when it has stored pieces of a group's gradient."""
        return range(self._first_pieces[group], self._first_pieces[group + 1])

    def relayed(self, group: int, part: int, piece: int) -> Signal:
        """This rank has stored a piece of a part's gradient in this round."""
        return Signal(self._of_piece(group, part, piece), "own", "round")

    def relayed_before(self, group: int, part: int, piece: int) -> Signal:
        """The rank of the round before has stored a piece of a part's gradient."""
        return Signal(self._of_piece(group, part, piece), "previous", "round", lag=1)

    def updated(self, group: int) -> Signal:
        """This rank has updated its share of a group."""
        return Signal(self._first_pieces[-1] + group, "own", "update")

    def updated_before(self, group: int) -> Signal:
        """All ranks have updated a group in the step before."""
        return Signal(self._first_pieces[-1] + group, "all", "update", lag=1)

    def norm(self) -> Signal:
        """This rank, which ran the last round, has stored the sums of squares."""
        return Signal(self._norm, "own", "update")

    def norm_of_last(self) -> Signal:
        """The rank of the last round has stored the sums of squares."""
        return Signal(self._norm, "last", "update")


class Share(NamedTuple):
    """The part of every segment that one of `size` ranks updates."""

    rank: int = 0
    size: int = 1

    def every(self, things: Sequence[Thing]) -> Sequence[Thing]:
        """Every `size`-th thing, from the `rank`-th on."""
        return things[self.rank :: self.size]

    def of(self, segment: Segment) -> tuple[int, int]:
        """(start, elements) of a segment that is updated element by element; blocks of states stay whole."""
        if self.size == 1:
            return 0, segment.numel
        block = 1 if segment.rule is None else segment.rule.block
        unit = block * -(-SHARE_ELEMENTS // block)
        units = -(-segment.numel // unit)
        start, end = (min(segment.numel, unit * (units * rank // self.size)) for rank in (self.rank, self.rank + 1))
        return start, end - start

    def tiles(self, segment: Segment, most: int) -> list[tuple[int, int]]:
        """Cut the share into pieces (start, elements) of at most `most` elements, as `Segment.tiles` does."""
        if self.size == 1:
            return segment.tiles(most)
        if segment.matrices:  # matrices stay whole, so that a share is some of the pieces
            pieces = segment.tiles(most)
            return pieces[len(pieces) * self.rank // self.size : len(pieces) * (self.rank + 1) // self.size]
        (first, count), size = self.of(segment), segment.tile_elements(most)
        return [(start, min(size, first + count - start)) for start in range(first, first + count, size)]


ALONE = Share()
