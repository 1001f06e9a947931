"""Packed sequences as whole tiles, so many at a time that what they take is bounded whatever the lengths.

The plain path takes segments, sequences of like length side by side, a few tiles of each at a time; rows are copied
sequence by sequence, as lengths are known on the host. Kernels take runs of consecutive sequences, all tiles of some
key heads: tile i of sequence b lies in slot cu[b] // TILE + b + i, less that of the run's first, which no other tile
does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.ops.delta.tiles import TILE, Sizes

SEGMENT_TILES = 32
"""Tiles of all sequences of a segment: 2048 tokens."""
SIDE_BY_SIDE = 8
"""Sequences of one segment at the most; their states go from tile to tile together."""
STATE_BYTES = 288 << 20
"""Most bytes of all tiles' states that kernels hold at a time, unless one sequence and one key head have more: 8192
tokens of 32 heads of 128 columns, and some room for slots that are not full. The delta rule's buffers take 1.2 GiB."""

PART_HEADS = 16
"""Most heads whose gradients of B and C one program adds up; more programs have fewer to do."""


class Segment(NamedTuple):
    """The same tiles of several sequences: (first row, rows) of each within the chunk, and the number of tiles, beyond
    the end of some. Sequences come longest first, so that those which end early are last."""

    spans: tuple[tuple[int, int], ...]
    tiles: int

    @property
    def count(self) -> int:
        """Number of sequences."""
        return len(self.spans)


def batches(seq_lens: Sequence[int]) -> list[list[Segment]]:
    """Segments of sequences that go together, first to last; the others of a batch need nothing of them."""
    starts, end = [], 0
    for length in seq_lens:
        starts.append((length, end))
        end += length
    left, found = sorted(starts, key=lambda span: (-span[0], span[1])), []
    while left:
        longest = _tiles(left[0][0])
        together = [span for span in left[:SIDE_BY_SIDE] if 2 * _tiles(span[0]) >= longest]
        left = left[len(together) :]
        found.append(_segments(together, SEGMENT_TILES // len(together)))
    return found


def _tiles(tokens: int) -> int:
    return -(-tokens // TILE)


def _segments(sequences: list[tuple[int, int]], tiles: int) -> list[Segment]:
    """Segments of `tiles` tiles of each sequence (tokens, first row)."""
    segments, step = [], tiles * TILE
    for done in range(0, sequences[0][0], step):
        spans = tuple((first + done, min(step, tokens - done)) for tokens, first in sequences if tokens > done)
        segments.append(Segment(spans, _tiles(max(rows for _, rows in spans))))
    return segments


def gather(x: Tensor, segment: Segment, dtype: torch.dtype) -> Tensor:
    """Rows of x [T, D] as [sequences, tiles * TILE, D], zeros beyond a sequence's end."""
    rows = segment.tiles * TILE
    if segment.count == 1 and segment.spans[0][1] == rows:
        first, _ = segment.spans[0]
        return x[None, first : first + rows].to(dtype)
    out = torch.zeros(segment.count, rows, x.shape[1], dtype=dtype, device=x.device)
    for target, (first, count) in zip(out, segment.spans, strict=True):
        target[:count] = x[first : first + count]
    return out


def scatter(rows: Tensor, segment: Segment, out: Tensor) -> None:
    """The reverse of `gather`: out [T, D] gets the rows of the segment's sequences."""
    for source, (first, count) in zip(rows, segment.spans, strict=True):
        out[first : first + count] = source[:count]


def tile_heads(sizes: Sizes) -> int:
    """Slots of value heads that kernels take at a time."""
    return max(1, STATE_BYTES // (4 * sizes.key_dim * sizes.value_dim))


def in_parts(sizes: Sizes) -> Sizes:
    """Sizes by parts, equally many heads of one group each, in the place of groups: kernels take whole parts."""
    part = next(count for count in range(min(PART_HEADS, sizes.ratio), 0, -1) if sizes.ratio % count == 0)
    return sizes._replace(key_heads=sizes.value_heads // part)


class Run(NamedTuple):
    """Sequences [begin, end) of a chunk, and their slots for tiles; a few slots may be empty."""

    begin: int
    end: int
    slots: int

    def heads(self, sizes: Sizes) -> int:
        """Value heads to take at a time, those of whole key heads: nearly as many every time."""
        groups = -(-sizes.key_heads // max(1, tile_heads(sizes) // (self.slots * sizes.ratio)))
        return -(-sizes.key_heads // groups) * sizes.ratio


def runs(seq_lens: Sequence[int], sizes: Sizes) -> list[Run]:
    """Cut the sequences, in order, into runs that kernels take at a time."""
    most, starts, row = _most_slots(sum(seq_lens), sizes), [0], 0
    for number, length in enumerate(seq_lens, start=1):
        row += length
        starts.append(row // TILE + number)
    found, begin = [], 0
    for end in range(1, len(starts)):
        if end == len(seq_lens) or starts[end + 1] - starts[begin] > most:
            found.append(Run(begin, end, starts[end] - starts[begin]))
            begin = end
    return found


def _most_slots(tokens: int, sizes: Sizes) -> int:
    """Slots of a run of more than one sequence."""
    return min(tile_heads(sizes) // sizes.ratio, 2 * _tiles(tokens) + SIDE_BY_SIDE)


def most_slots(tokens: int, sizes: Sizes) -> int:
    """Slots of a run, at the most."""
    return max(_most_slots(tokens, sizes), tokens // TILE + 2)


def most_tile_heads(tokens: int, sizes: Sizes) -> int:
    """Slots times heads that kernels take at a time, at the most."""
    heads = max(tile_heads(sizes), sizes.ratio * (tokens // TILE + 2))
    return min(sizes.value_heads * most_slots(tokens, sizes), heads)


def spans_of(cu: Tensor, slots: int) -> Tensor:
    """[2, slots] int32: first row of every tile and its sequence's end; a slot without a tile begins at the end."""
    numbers = torch.arange(max(slots, len(cu)), dtype=torch.int32, device=cu.device)
    starts = cu[:-1] // TILE - cu[0] // TILE + numbers[: len(cu) - 1]
    numbers = numbers[:slots]
    sequence = torch.searchsorted(starts, numbers, right=True) - 1
    begin = cu[:-1][sequence] + (numbers - starts[sequence]) * TILE
    return torch.stack((begin, cu[1:][sequence]))
