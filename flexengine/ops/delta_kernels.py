"""Gated delta rule on CUDA: kernels over tiles, all tiles and many heads per launch.

A run goes through parts of a chunk: consecutive sequences and whole key heads, so many that buffers stay below
TILE_HEADS tiles of a head. Tiles lie in slots: tile i of sequence b in slot cu[b] // TILE + b + i, less that of the
part's first, which is unique whatever the lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.kernels.delta_outputs import delta_outputs
from flexengine.kernels.delta_prepare import Tiles, delta_prepare
from flexengine.kernels.delta_states import delta_states
from flexengine.ops.delta_tiles import TILE

TILE_HEADS = 4608
"""Slots of value heads whose buffers are held at a time: 8192 tokens of 32 heads, and some room for slots that are not
full."""
Gates = tuple[Tensor, Tensor]
Sizes = tuple[int, int, int, int]
"""G, N, K, V."""


class Ends(NamedTuple):
    """States [N, K, V] before a chunk's only sequence and after it, or their gradients; None where nobody cares."""

    before: Tensor | None = None
    left: Tensor | None = None


class Prepared(NamedTuple):
    """Buffers of `delta_prepare`."""

    total: Tensor
    scale: Tensor
    u: Tensor
    w: Tensor


def forward(
    qkv: Tensor, gates: Gates, chunk: tuple[Tensor, Sequence[int]], sizes: Sizes, ends: Ends, o: Tensor
) -> None:
    """o [T, N * V]; chunk: cu_seqlens and lengths."""
    for tiles in _parts(qkv, gates, chunk, sizes):
        made, states = _prepared(tiles), _buffer(tiles, *sizes[2:])
        delta_states(tiles, *made, states, *ends)
        delta_outputs(tiles, made.total, made.scale, states, made.u, o)


def fill_window(qkv: Tensor, gates: Gates, chunk: tuple[Tensor, Sequence[int]], sizes: Sizes, ends: Ends) -> None:
    """The state after the chunk's sequence."""
    for tiles in _parts(qkv, gates, chunk, sizes):
        delta_states(tiles, *_prepared(tiles), None, *ends)


def _prepared(tiles: Tiles, inverse: Tensor | None = None) -> Prepared:
    *_, k, v = tiles.sizes
    made = Prepared(*(_buffer(tiles, *shape) for shape in ((TILE,), (TILE,), (TILE, v), (TILE, k))))
    delta_prepare(tiles, *made, inverse)
    return made


def _buffer(tiles: Tiles, *shape: int) -> Tensor:
    return torch.empty(tiles.slots, tiles.heads, *shape, dtype=torch.float32, device=tiles.qkv.device)


# -- parts of a chunk --------------------------------------------------------------------------------------------------


def most_slots(tokens: int, ratio: int) -> int:
    """Slots of a part that has more than one sequence; one sequence alone has tokens / TILE + 2 at the most."""
    return min(TILE_HEADS // ratio, 2 * -(-tokens // TILE) + 8)


def most_tile_heads(tokens: int, sizes: Sizes) -> int:
    """Slots times heads of any part of a chunk."""
    g, n, *_ = sizes
    ratio, alone = n // g, tokens // TILE + 2
    return min(n * max(most_slots(tokens, ratio), alone), max(TILE_HEADS, ratio * alone))


def _parts(qkv: Tensor, gates: Gates, chunk: tuple[Tensor, Sequence[int]], sizes: Sizes) -> Iterator[Tiles]:
    cu, seq_lens = chunk
    g, n, *_ = sizes
    ratio = n // g
    for begin, end, slots in _runs(seq_lens, most_slots(len(qkv), ratio)):
        own = cu[begin : end + 1]
        groups = -(-g // max(1, TILE_HEADS // slots // ratio))
        spans, heads = _spans(own, slots), -(-g // groups) * ratio
        for first in range(0, n, heads):
            yield Tiles(qkv, *gates, own, spans, sizes, first, min(heads, n - first))


def _runs(seq_lens: Sequence[int], most: int) -> list[tuple[int, int, int]]:
    """Consecutive sequences [begin, end) with their number of slots, which is above `most` for one sequence alone."""
    runs, begin, row, start = [], 0, 0, 0
    for number, length in enumerate(seq_lens):
        slots = (row + length) // TILE - start // TILE + number + 1 - begin
        if slots > most and number > begin:
            runs.append((begin, number, row // TILE - start // TILE + number - begin))
            begin, start = number, row
        row += length
    runs.append((begin, len(seq_lens), row // TILE - start // TILE + len(seq_lens) - begin))
    return runs


def _spans(cu: Tensor, slots: int) -> Tensor:
    """[2, slots] int32: first row of every tile and its sequence's end; a slot without a tile begins at the end."""
    numbers = torch.arange(max(slots, len(cu)), dtype=torch.int32, device=cu.device)
    starts = cu[:-1] // TILE - cu[0] // TILE + numbers[: len(cu) - 1]
    numbers = numbers[:slots]
    sequence = torch.searchsorted(starts, numbers, right=True) - 1
    begin = cu[:-1][sequence] + (numbers - starts[sequence]) * TILE
    return torch.stack((begin, cu[1:][sequence]))
