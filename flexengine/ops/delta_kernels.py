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

from flexengine.kernels.delta_backward import delta_gates_backward, delta_keys_backward, delta_norm_backward
from flexengine.kernels.delta_backward import delta_pairs_backward, gate_parts
from flexengine.kernels.delta_outputs import delta_outputs, delta_outputs_backward
from flexengine.kernels.delta_prepare import Tiles, delta_prepare
from flexengine.kernels.delta_states import delta_states, delta_states_backward
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


def backward(
    qkv: Tensor, gates: Gates, chunk: tuple[Tensor, Sequence[int]], sizes: Sizes, ends: Ends, grad_o: Tensor,
    grad_ends: Ends, grad_qkv: Tensor, grads: Gates,
) -> None:  # fmt: skip
    """Gradients of qkv, of log decay and strength, and of the state before the sequence; `left` of grad_ends is read."""
    for tiles in _parts(qkv, gates, chunk, sizes):
        _part_backward(tiles, ends.before, grad_o, grad_ends, grad_qkv, grads)


def _part_backward(
    tiles: Tiles, before: Tensor | None, grad_o: Tensor, grad_ends: Ends, grad_qkv: Tensor, grads: Gates
) -> None:
    """Names as in `delta_backward`: X is `solved`, M `pairs`, Q `read`."""
    *_, k, v = tiles.sizes
    inverse, states, grad_states = (_buffer(tiles, *shape) for shape in ((TILE, TILE), (k, v), (k, v)))
    total, scale, written, w = _prepared(tiles, inverse)
    delta_states(tiles, total, scale, written, w, states, before, None)
    query_scale, grad_written = _buffer(tiles, TILE), _buffer(tiles, TILE, v)
    delta_outputs_backward(tiles, total, scale, grad_o, query_scale, grad_written)
    delta_states_backward(tiles, total, scale, query_scale, w, grad_o, grad_written, grad_states, *grad_ends)
    del w
    scales, read, parts = (
        (total, scale, query_scale),
        _buffer(tiles, TILE, TILE),
        _buffer(tiles, gate_parts(k), 2, TILE),
    )
    delta_pairs_backward(tiles, *scales, written, grad_o, grad_written, inverse, read, parts, grad_qkv)
    pairs, solved = inverse, grad_written
    grad_q, grad_k = (_key_buffer(tiles) for _ in range(2))
    delta_keys_backward(
        tiles, *scales, states, written, grad_o, grad_states, solved, pairs, read, grad_q, grad_k, parts
    )
    delta_gates_backward(tiles, parts, *grads)
    delta_norm_backward(tiles, grad_q, grad_k, grad_qkv)


def _prepared(tiles: Tiles, inverse: Tensor | None = None) -> Prepared:
    *_, k, v = tiles.sizes
    made = Prepared(*(_buffer(tiles, *shape) for shape in ((TILE,), (TILE,), (TILE, v), (TILE, k))))
    delta_prepare(tiles, *made, inverse)
    return made


def _buffer(tiles: Tiles, *shape: int) -> Tensor:
    return torch.empty(tiles.slots, tiles.heads, *shape, dtype=torch.float32, device=tiles.qkv.device)


def _key_buffer(tiles: Tiles) -> Tensor:
    shape = (tiles.slots, tiles.heads // tiles.ratio, TILE, tiles.sizes[2])
    return torch.empty(shape, dtype=torch.float32, device=tiles.qkv.device)


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
