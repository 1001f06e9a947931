"""Split transport: the ranks of a node walk the same layers at the same time, and each moves a share of what all need.

A *wave* is as many rounds as there are ranks, one on each. Every rank fetches its share of a group's weights over its
own link, and all of them gather the rest from each other. When a layer has ended its backward, every rank sends each
piece of its accumulator to the rank that owns it. The owner adds the pieces of all rounds to the stored gradient in the
order of rounds, rounding each time, as one rank does round after round: so the bits are those of one rank.

In the last wave of a batch some ranks may have no round of their own. They run the wave's first round as well, so that
all take part in every collective; nobody adds what they send.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from flexengine.schedule.commands import CopyRegion
from flexengine.schedule.fixed_slots import part_elements
from flexengine.schedule.layer_program import ALIGNMENT
from flexengine.schedule.parts import Part
from flexengine.schedule.pieces import Piece, PieceRun

SECTION_BYTES = 256 * 2**20
"""Bytes of an accumulator that are exchanged at once, to all ranks together. Smaller sections take less GPU memory for
what arrives, and cost more commands."""
KNOWN_PARTS = 512
"""Parts whose pieces are remembered: planning lays a model out thousands of times, and experts have many runs."""
OWN_SQUARES, ALL_SQUARES = "squares of this rank's pieces", "squares of all pieces"
"""What the table of partial sums of squares holds in a round, and when ranks have added up theirs."""


def shared_bytes(num_bytes: int, size: int) -> int:
    """Bytes of each of `size` ranks' equal share of a slot; what is left over at its end every rank fetches."""
    return num_bytes // (size * ALIGNMENT) * ALIGNMENT


def end_of(regions: Sequence[CopyRegion]) -> int:
    """The first byte of the target slot that no copy reaches."""
    return max((region.target_offset + region.num_bytes for region in regions), default=0)


def own_regions(regions: Sequence[CopyRegion], rank: int, size: int) -> list[CopyRegion]:
    """What a rank copies itself: its share of the target slot, and the bytes that are left over."""
    wanted = own_ranges(end_of(regions), rank, size)
    return [found for first, last in wanted for region in regions for found in _within(region, first, last)]


def own_ranges(end: int, rank: int, size: int) -> list[tuple[int, int]]:
    """The bytes (first, last + 1) of a target slot that a rank copies itself, of so many."""
    share = shared_bytes(end, size)
    return [(rank * share, (rank + 1) * share), (size * share, end)]


def _within(region: CopyRegion, first: int, last: int) -> list[CopyRegion]:
    """The part of a copy that goes to bytes [first, last) of its target slot, if any."""
    start, end = max(first, region.target_offset), min(last, region.target_offset + region.num_bytes)
    if start >= end:
        return []
    skipped = start - region.target_offset
    return [CopyRegion(region.source, region.source_offset + skipped, region.target, start, end - start)]


@lru_cache(maxsize=KNOWN_PARTS)
def owned_pieces(part: Part, size: int, element_bytes: int, in_sections: bool = True) -> tuple[Piece, ...]:
    """Cut a part into sections, or one, and each section into a piece for every rank: piece p belongs to rank p % size.

    Squares of gradients add up over shares of a run (`part_elements`), so pieces end where a share does: no sum
    changes. A piece may be empty. element_bytes: of the accumulator.
    """
    runs = sorted(part.runs, key=lambda run: run.start)
    starts = [run.start for run in runs]
    end = max((run.start + run.numel for run in runs), default=0)
    count = size * (max(1, -(-end * element_bytes // SECTION_BYTES)) if in_sections else 1)

    def cut(wanted: int) -> int:
        """The nearest place before `wanted` where a piece may end."""
        run = runs[max(0, bisect_right(starts, wanted) - 1)]
        share = part_elements(run.numel)
        return min(run.start + run.numel, run.start + max(0, wanted - run.start) // share * share)

    cuts = [0, *(cut(end * number // count) for number in range(1, count)), end]
    pieces = []
    for first, last in pairwise(cuts):
        overlaps = ((run, max(first, run.start), min(last, run.start + run.numel)) for run in runs)
        own = tuple(PieceRun(run, start - run.start, stop - start) for run, start, stop in overlaps if start < stop)
        pieces.append(Piece(first, own))
    return tuple(pieces)


class Section(NamedTuple):
    """Pieces of a part that are exchanged at once, one for each rank in the order of ranks.

    first: the element of the part that it begins with. counts: elements of the accumulator that go to each rank.
    """

    number: int
    first: int
    counts: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def received_elements(self) -> int:
        """Elements of a slot for what any rank receives."""
        return len(self.counts) * max(self.counts)


def sections_of(pieces: Sequence[Piece], size: int) -> list[Section]:
    """The sections of a part that `owned_pieces` has cut."""
    last = max((piece.start + piece.numel for piece in pieces if piece.runs), default=0)
    ends = [*(piece.start for piece in pieces[1:]), last]
    counts = [end - piece.start for piece, end in zip(pieces, ends, strict=True)]
    firsts = range(0, len(pieces), size)
    return [
        Section(i, pieces[p].start, tuple(counts[p : p + size]), tuple(pieces[p : p + size]))
        for i, p in enumerate(firsts)
    ]
