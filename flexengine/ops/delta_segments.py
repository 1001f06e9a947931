"""Packed sequences as segments of whole tiles: sequences of like length side by side, a few tiles of each at a time.

Lengths are known on the host, so rows are copied sequence by sequence; no index is made on the device. What a segment
takes there is bounded whatever the lengths: SEGMENT_TILES tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.ops.delta_tiles import TILE

SEGMENT_TILES = 128
"""Tiles of all sequences of a segment: 8192 tokens, so that launches are few beside what they do. Buffers take 4 GiB at
32 heads of 128 columns."""
SIDE_BY_SIDE = 8
"""Sequences of one segment at the most; their states go from tile to tile together."""


class Segment(NamedTuple):
    """The same tiles of several sequences: (first row, rows) of each within the chunk, and the number of tiles, beyond
    the end of some. Sequences come longest first, so that those which end early are last."""

    spans: tuple[tuple[int, int], ...]
    tiles: int

    @property
    def count(self) -> int:
        """Sequences."""
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
