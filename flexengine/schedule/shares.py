"""Which elements of a group one of several ranks updates, and where it keeps what ranks divide of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

from flexengine.schedule.group_storage import GroupStorage, Plane, Segment
from flexengine.schedule.layer_program import align
from flexengine.schedule.slots import PlaneKind

Thing = TypeVar("Thing")

SHARE_ELEMENTS = 64
"""Shares begin at multiples of so many elements: ranks write no common cache line of a plane of 16 bits or more."""

FLAT = ("weights", "grad")
"""Planes in which a group is one array, whatever its segments."""


class Share(NamedTuple):
    """The part of every segment that one of `size` ranks updates.

    cuts: of a group with shards, the first element of each rank's, and the end; else ranks cut each segment alike.
    node: the rank's, by which it finds what its node updates where nodes divide the optimizer states.
    """

    rank: int = 0
    size: int = 1
    cuts: tuple[int, ...] = ()
    node: int = 0

    def every(self, things: Sequence[Thing]) -> Sequence[Thing]:
        """Every `size`-th thing, from the `rank`-th on."""
        return things[self.rank :: self.size]

    def of(self, segment: Segment) -> tuple[int, int]:
        """(start, elements) of a segment that is updated element by element; blocks of states stay whole."""
        if self.size == 1:
            return 0, segment.numel
        if self.cuts:
            first, numel = segment.first_element, segment.numel
            start, end = (min(max(0, cut - first), numel) for cut in self.cuts[self.rank : self.rank + 2])
            return start, end - start
        block = 1 if segment.rule is None else segment.rule.block
        unit = block * -(-SHARE_ELEMENTS // block)
        units = -(-segment.numel // unit)
        start, end = (min(segment.numel, unit * (units * rank // self.size)) for rank in (self.rank, self.rank + 1))
        return start, end - start

    def span(self, segment: Segment, most: int) -> tuple[int, int]:
        """The elements (start, count) that all of `tiles` cover together."""
        if not segment.matrices:
            return self.of(segment)
        tiles = self.tiles(segment, most)
        return (tiles[0][0], sum(count for _, count in tiles)) if tiles else (0, 0)

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


class SharePart(NamedTuple):
    """The bytes of one segment that a rank keeps of a divided plane: where in its own, and where in the whole one."""

    start: int
    whole_start: int
    num_bytes: int


Division = tuple[tuple[SharePart, ...], ...]
"""How ranks divide a plane, by rank; empty where none does."""


class DealtStates(NamedTuple):
    """The planes of a group that `size` ranks divide: each keeps those of the elements that it updates.

    All ranks have the same slots, which are as large as the largest share. most: elements of a tile of the update.
    cuts: of a share of the whole group; weights and gradients then lie in one piece, as in their planes.
    """

    stored: GroupStorage
    size: int
    most: int
    cuts: tuple[int, ...] = ()

    def num_bytes(self, kind: PlaneKind) -> int:
        """Bytes that each rank keeps of one of the planes."""
        if kind in FLAT:
            return max(self.bytes_of_ranks(kind))
        return max(end for _, end in self._ranges(kind).values())

    def bytes_of_ranks(self, kind: PlaneKind) -> tuple[int, ...]:
        """Bytes of each rank's share of weights or gradients."""
        width = self.stored.element_bytes(kind)
        return tuple(width * (end - start) for start, end in pairwise(self.cuts))

    def place(self, segment: Segment, plane: Plane, share: Share) -> tuple[int, int, int]:
        """Where a rank keeps its part of a segment's plane: the first byte in its slot, first element, elements."""
        share = share._replace(cuts=self.cuts)
        first, count = share.span(segment, self.most)
        if plane.kind in FLAT:
            skipped = max(0, segment.first_element - self.cuts[share.rank])
            return plane.num_bytes(skipped), first, count
        return self._ranges(plane.kind)[segment.name][0], first, count

    def division(self, kind: PlaneKind) -> Division:
        """How ranks divide one of the planes."""
        return tuple(tuple(self._parts(kind, Share(rank, self.size))) for rank in range(self.size))

    def _parts(self, kind: PlaneKind, share: Share) -> Iterator[SharePart]:
        for segment in self.stored.segments:
            for plane in (plane for plane in segment.planes if plane.kind == kind):
                begin, first, count = self.place(segment, plane, share)
                yield SharePart(begin, plane.start + plane.num_bytes(first), plane.num_bytes(count))

    def _ranges(self, kind: PlaneKind) -> dict[str, tuple[int, int]]:
        """By segment, where its states begin and end in a slot with the largest share."""
        found, end = {}, 0
        for segment in self.stored.segments:
            plane = next((plane for plane in segment.planes if plane.kind == kind), None)
            if plane is not None:
                spans = (Share(rank, self.size, self.cuts).span(segment, self.most) for rank in range(self.size))
                start, end = align(end), align(end) + plane.num_bytes(max(count for _, count in spans))
                found[segment.name] = start, end
        return found


class FrozenShards(NamedTuple):
    """The weights of a frozen group that `size` ranks divide, byte by byte: nobody updates them."""

    total_bytes: int
    size: int

    def bytes_of_ranks(self, kind: PlaneKind) -> tuple[int, ...]:
        """Bytes of each rank's share."""
        ends = [*(align(self.total_bytes * rank // self.size) for rank in range(self.size)), self.total_bytes]
        return tuple(min(end, self.total_bytes) - min(start, self.total_bytes) for start, end in pairwise(ends))

    def num_bytes(self, kind: PlaneKind) -> int:
        """Bytes of a slot for any rank's share."""
        return max(self.bytes_of_ranks(kind))

    def division(self, kind: PlaneKind) -> Division:
        """How ranks divide the weights."""
        counts = self.bytes_of_ranks(kind)
        return tuple((SharePart(0, sum(counts[:rank]), count),) for rank, count in enumerate(counts))
