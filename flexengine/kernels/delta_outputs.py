"""Gated delta rule: what queries read from states and from their own tile, and the part of backward like it.

Source: Yang et al. 2024, "Gated Delta Networks", and the formulas of `flexengine.ops.delta.tiles`. Every program works
on one tile of one value head. Shapes: those of `delta_prepare`; o and grad_o [T, N * V] in bf16 or fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.counts import cdiv
from flexengine.kernels.delta_prepare import (
    BLOCK_K,
    TILE,
    Tiles,
    load_block,
    product,
    store_block,
)

_COLUMNS = 64
_BACKWARD_COLUMNS, _NARROW_BACKWARD_COLUMNS = 64, 128
_LAUNCH = {"num_warps": 4, "num_stages": 1}
_BACKWARD_LAUNCH = {"num_warps": 4, "num_stages": 1}
"""In two stages Triton 3.6 and 3.9 load the next queries for Hopper over those that a product still reads."""


def delta_outputs(
    tiles: Tiles, total: Tensor, scale: Tensor, query_scale: Tensor, states: Tensor, written: Tensor, o: Tensor
) -> None:
    """Columns of the heads of o = (q exp(c)) S + P R, for the rows of the tiles; rows of o may be strided.

    Order: one launch on the current stream, never synchronises. Raises: ValueError on other shapes, dtypes or strides.
    """
    _, n, k, v = tiles.sizes
    tiles.check(total=(total, (TILE,)), scale=(scale, (TILE,)), query_scale=(query_scale, (TILE,)))
    tiles.check(states=(states, (k, v)), written=(written, (TILE, v)))
    check_tensor("o", o, (len(tiles.qkv), n * v), FLOATS, strided_rows=True)
    columns = tiles.block_of(v, _COLUMNS)
    _outputs_kernel[(tiles.slots, tiles.heads, cdiv(v, columns))](
        *tiles.inputs(), total, scale, query_scale, states, written, o, o.stride(0), **tiles.constants(),
        BLOCK_K=tiles.block_of(k, BLOCK_K), BLOCK_V=columns, **_LAUNCH,
    )  # fmt: skip


def delta_outputs_backward(
    tiles: Tiles, total: Tensor, scale: Tensor, query_scale: Tensor, grad_o: Tensor, grad_written: Tensor
) -> None:
    """grad_written [M, H, 64, V] = P^T grad_o, what comes from the tile's own outputs; rows of grad_o may be strided.

    Order: one launch on the current stream, never synchronises. Raises: ValueError on other shapes, dtypes or strides.
    """
    _, n, k, v = tiles.sizes
    tiles.check(total=(total, (TILE,)), scale=(scale, (TILE,)), query_scale=(query_scale, (TILE,)))
    tiles.check(grad_written=(grad_written, (TILE, v)))
    check_tensor("grad_o", grad_o, (len(tiles.qkv), n * v), FLOATS, strided_rows=True)
    columns = tiles.block_of(v, _NARROW_BACKWARD_COLUMNS if tiles.narrow else _BACKWARD_COLUMNS)
    _outputs_backward_kernel[(tiles.slots, tiles.heads)](
        *tiles.inputs(), total, scale, query_scale, grad_o, grad_written, grad_o.stride(0), **tiles.constants(),
        BLOCK_K=tiles.block_of(k, BLOCK_K), BLOCK_V=columns, **_BACKWARD_LAUNCH,
    )  # fmt: skip


@triton.jit(do_not_specialize=["slots"])
def _outputs_kernel(
    qkv_ptr, spans_ptr, slots, heads, first, stride, key_heads, num_heads, total_ptr, scale_ptr,
    query_scale_ptr, states_ptr, written_ptr, o_ptr, o_stride, K: tl.constexpr, V: tl.constexpr, RATIO: tl.constexpr,
    TILE: tl.constexpr, PRECISION: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    slot, local = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(spans_ptr + slot), tl.load(spans_ptr + slots + slot)
    if begin >= end:
        return
    own, index, head = slot.to(tl.int64) * heads + local, tl.arange(0, TILE), first + local
    rows, inside = (begin + index).to(tl.int64), begin + index < end
    columns = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    queries_ptr = qkv_ptr + (head // RATIO) * K
    pairs = tl.zeros((TILE, TILE), tl.float32)
    o = tl.zeros((TILE, BLOCK_V), tl.float32)
    for start in range(0, K, BLOCK_K):
        lines = start + tl.arange(0, BLOCK_K)
        q = load_block(queries_ptr, rows, lines, stride, inside, K)
        k = load_block(queries_ptr + key_heads * K, rows, lines, stride, inside, K)
        state = load_block(states_ptr + own * (K * V), lines, columns, V, lines < K, V)
        pairs += product(q, tl.trans(k), PRECISION)
        o += product(q, state, PRECISION)
    by_query, by_key = tl.load(query_scale_ptr + own * TILE + index), tl.load(scale_ptr + own * TILE + index)
    total = tl.load(total_ptr + own * TILE + index)
    pairs *= by_query[:, None] * by_key[None, :] * tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0))
    pairs = tl.where(index[:, None] >= index[None, :], pairs, 0.0)
    written = load_block(written_ptr + own * (TILE * V), index, columns, V, index < TILE, V)
    o = o * (by_query * tl.exp(total))[:, None] + product(pairs, written, PRECISION)
    store_block(o_ptr + head * V, rows, columns, o_stride, inside, V, o)


@triton.jit(do_not_specialize=["slots"])
def _outputs_backward_kernel(
    qkv_ptr, spans_ptr, slots, heads, first, stride, key_heads, num_heads, total_ptr, scale_ptr,
    query_scale_ptr, grad_o_ptr, grad_written_ptr, grad_o_stride, K: tl.constexpr, V: tl.constexpr, RATIO: tl.constexpr,
    TILE: tl.constexpr, PRECISION: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """P is made transposed."""
    slot, local = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(spans_ptr + slot), tl.load(spans_ptr + slots + slot)
    if begin >= end:
        return
    own, index, head = slot.to(tl.int64) * heads + local, tl.arange(0, TILE), first + local
    rows, inside = (begin + index).to(tl.int64), begin + index < end
    queries_ptr = qkv_ptr + (head // RATIO) * K
    pairs = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, K, BLOCK_K):
        lines = start + tl.arange(0, BLOCK_K)
        q = load_block(queries_ptr, rows, lines, stride, inside, K)
        k = load_block(queries_ptr + key_heads * K, rows, lines, stride, inside, K)
        pairs += product(k, tl.trans(q), PRECISION)
    by_query, by_key = tl.load(query_scale_ptr + own * TILE + index), tl.load(scale_ptr + own * TILE + index)
    total = tl.load(total_ptr + own * TILE + index)
    pairs *= by_key[:, None] * by_query[None, :] * tl.exp(tl.minimum(total[None, :] - total[:, None], 0.0))
    pairs = tl.where(index[:, None] <= index[None, :], pairs, 0.0)
    for start in range(0, V, BLOCK_V):
        columns = start + tl.arange(0, BLOCK_V)
        grad_o = load_block(grad_o_ptr + head * V, rows, columns, grad_o_stride, inside, V)
        grad = product(pairs, grad_o, PRECISION)
        store_block(grad_written_ptr + own * (TILE * V), index, columns, V, index < TILE, V, grad)
