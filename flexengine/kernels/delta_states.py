"""Gated delta rule: states from tile to tile, and their gradients back.

Source: Yang et al. 2024, "Gated Delta Networks", and the formulas of `flexengine.ops.delta.tiles`. A program takes some
columns of the values of one head of one sequence and goes through all its tiles, the state's columns in registers; what
needs no order is left to the other kernels. Shapes: those of `delta_prepare`; R over u.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.counts import cdiv
from flexengine.kernels.delta_prepare import TILE, Tiles, load_block, product, store_block

_FORWARD_COLUMNS = 32
_NARROW_COLUMNS = 64
_BACKWARD_LAUNCH = {"num_warps": 4, "num_stages": 1}


def delta_states(
    tiles: Tiles, total: Tensor, scale: Tensor, query_scale: Tensor, u: Tensor, w: Tensor, states: Tensor | None,
    before: Tensor | None, left: Tensor | None, o: Tensor | None = None,
) -> None:  # fmt: skip
    """states [M, H, K, V] before every tile, and R over u; where states is None, neither is stored.

    o, if wanted: what `delta_outputs` writes, without reading states and R again.
    before, left [N, K, V] fp32: the state before the first token (None: zeros) and, if wanted, after the last.
    Order: one launch on the current stream, never synchronises. Raises: ValueError on other shapes, dtypes or strides.
    """
    _, n, k, v = tiles.sizes
    tiles.check(total=(total, (TILE,)), scale=(scale, (TILE,)), query_scale=(query_scale, (TILE,)))
    tiles.check(u=(u, (TILE, v)), w=(w, (TILE, k)), states=(states, (k, v)))
    _check_ends(tiles, before, left)
    if o is not None:
        check_tensor("o", o, (len(tiles.qkv), n * v), FLOATS, strided_rows=True)
    columns = tiles.block_of(v, _NARROW_COLUMNS if tiles.narrow else _FORWARD_COLUMNS)
    launch = _narrow_launch(k, o is not None) if tiles.narrow else forward_launch(tiles.qkv.dtype, k)
    _states_kernel[(cdiv(v, columns), tiles.heads, len(tiles.cu) - 1)](
        *tiles.inputs(), tiles.cu, total, scale, query_scale, u, w, u if states is None else states,
        u if before is None else before, u if left is None else left, u if o is None else o,
        0 if o is None else o.stride(0), **tiles.constants(), STORE=states is not None, HAS_BEFORE=before is not None,
        HAS_LEFT=left is not None, OUTPUTS=o is not None, BLOCK_K=tiles.block_of(k), BLOCK_V=columns,
        **launch,
    )  # fmt: skip


def delta_states_backward(
    tiles: Tiles, total: Tensor, scale: Tensor, query_scale: Tensor, w: Tensor, grad_o: Tensor, grad_written: Tensor,
    grad_states: Tensor, before: Tensor | None, left: Tensor | None,
) -> None:  # fmt: skip
    """grad_states [M, H, K, V], gradients of the states after every tile, and the rest of grad_written, added to it.

    before, left [N, K, V] fp32: the gradient of the state before the first token, to write if wanted, and that of the
    state after the last (None: zeros). Order: one launch on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes or strides.
    """
    _, n, k, v = tiles.sizes
    tiles.check(total=(total, (TILE,)), scale=(scale, (TILE,)), query_scale=(query_scale, (TILE,)), w=(w, (TILE, k)))
    tiles.check(grad_written=(grad_written, (TILE, v)), grad_states=(grad_states, (k, v)))
    check_tensor("grad_o", grad_o, (len(tiles.qkv), n * v), FLOATS, strided_rows=True)
    _check_ends(tiles, before, left)
    columns = tiles.block_of(v, _NARROW_COLUMNS if tiles.narrow else _backward_columns(k))
    _states_backward_kernel[(cdiv(v, columns), tiles.heads, len(tiles.cu) - 1)](
        *tiles.inputs(), tiles.cu, total, scale, query_scale, w, grad_o, grad_written, grad_states,
        w if before is None else before, w if left is None else left, grad_o.stride(0), **tiles.constants(),
        HAS_BEFORE=before is not None, HAS_LEFT=left is not None, BLOCK_K=tiles.block_of(k), BLOCK_V=columns,
        **(_narrow_launch(k, True) if tiles.narrow else _BACKWARD_LAUNCH),
    )  # fmt: skip


def forward_launch(dtype: torch.dtype, key_dim: int) -> dict[str, int]:
    """Read the next tile ahead only where shared memory holds two.

    99 KiB on consumer cards take two tiles of 128 columns in bf16 but not in fp32, and no card takes two of 256.
    """
    return {"num_warps": 4, "num_stages": 2 if key_dim <= (64 if dtype == torch.float32 else 128) else 1}


def _narrow_launch(key_dim: int, more: bool) -> dict[str, int]:
    """Of bf16. more: of kernels with more than two products, whose next tile would leave an SM one program. Whatever is
    wanted, as many warps make states: they have the same bits."""
    return {"num_warps": 4 if key_dim <= 128 else 8, "num_stages": 1 if more or key_dim > 128 else 2}


def _backward_columns(key_dim: int) -> int:
    """Of wide keys fewer: a program holds all rows of its columns in registers."""
    return 64 if key_dim <= 128 else 32


def _check_ends(tiles: Tiles, before: Tensor | None, left: Tensor | None) -> None:
    """Raise ValueError unless states of the whole model at a sequence's ends fit."""
    _, *shape = tiles.sizes
    for name, tensor in (("before", before), ("left", left)):
        if tensor is not None:
            check_tensor(name, tensor, shape, (torch.float32,))
            if len(tiles.cu) != 2:
                raise ValueError(f"{name} is the state of one sequence, got {len(tiles.cu) - 1}")


@triton.jit(do_not_specialize=["slots"])
def _states_kernel(
    qkv_ptr, spans_ptr, slots, heads, first, stride, key_heads, num_heads, cu_ptr, total_ptr, scale_ptr,
    query_scale_ptr, u_ptr, w_ptr, states_ptr, before_ptr, left_ptr, o_ptr, o_stride, K: tl.constexpr, V: tl.constexpr,
    RATIO: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr, STORE: tl.constexpr, HAS_BEFORE: tl.constexpr,
    HAS_LEFT: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    local, sequence = tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(cu_ptr + sequence), tl.load(cu_ptr + sequence + 1)
    slot = begin // TILE - tl.load(cu_ptr) // TILE + sequence
    head, index, lines = first + local, tl.arange(0, TILE), tl.arange(0, BLOCK_K)
    columns = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    whole, there = index < TILE, lines < K
    queries_ptr = qkv_ptr + (head // RATIO) * K
    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    if HAS_BEFORE:
        state += load_block(before_ptr + head.to(tl.int64) * (K * V), lines, columns, V, there, V)
    for i in range(0, (end - begin + TILE - 1) // TILE):
        own = (slot + i).to(tl.int64) * heads + local
        if STORE:
            store_block(states_ptr + own * (K * V), lines, columns, V, there, V, state)
        w = load_block(w_ptr + own * (TILE * K), index, lines, K, whole, K)
        written = load_block(u_ptr + own * (TILE * V), index, columns, V, whole, V) - product(w, state, PRECISION)
        if STORE:
            store_block(u_ptr + own * (TILE * V), index, columns, V, whole, V, written)
        total = tl.load(total_ptr + own * TILE + index)
        last = tl.load(total_ptr + own * TILE + (TILE - 1))
        rest = tl.load(scale_ptr + own * TILE + index) * tl.exp(last - total)
        row = begin + i * TILE + index
        rows, inside = row.to(tl.int64), row < end
        k = load_block(queries_ptr + key_heads * K, rows, lines, stride, inside, K)
        if OUTPUTS:
            q = load_block(queries_ptr, rows, lines, stride, inside, K)
            by_query = tl.load(query_scale_ptr + own * TILE + index)
            by_key = tl.load(scale_ptr + own * TILE + index)
            pairs = product(q, tl.trans(k), PRECISION)
            pairs *= by_query[:, None] * by_key[None, :] * tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0))
            pairs = tl.where(index[:, None] >= index[None, :], pairs, 0.0)
            o = product(q, state, PRECISION) * (by_query * tl.exp(total))[:, None]
            o += product(pairs, written, PRECISION)
            store_block(o_ptr + head * V, rows, columns, o_stride, inside, V, o)
        state = state * tl.exp(last) + product(tl.trans(k), written * rest[:, None], PRECISION)
    if HAS_LEFT:
        store_block(left_ptr + head.to(tl.int64) * (K * V), lines, columns, V, there, V, state)


@triton.jit(do_not_specialize=["slots"])
def _states_backward_kernel(
    qkv_ptr, spans_ptr, slots, heads, first, stride, key_heads, num_heads, cu_ptr, total_ptr, scale_ptr,
    query_scale_ptr, w_ptr, grad_o_ptr, grad_written_ptr, grad_states_ptr, before_ptr, left_ptr, grad_o_stride,
    K: tl.constexpr, V: tl.constexpr, RATIO: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
    HAS_BEFORE: tl.constexpr, HAS_LEFT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    local, sequence = tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(cu_ptr + sequence), tl.load(cu_ptr + sequence + 1)
    slot, tiles = begin // TILE - tl.load(cu_ptr) // TILE + sequence, (end - begin + TILE - 1) // TILE
    head, index, lines = first + local, tl.arange(0, TILE), tl.arange(0, BLOCK_K)
    columns = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    whole, there = index < TILE, lines < K
    queries_ptr = qkv_ptr + (head // RATIO) * K
    grad = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    if HAS_LEFT:
        grad += load_block(left_ptr + head.to(tl.int64) * (K * V), lines, columns, V, there, V)
    for done in range(0, tiles):
        i = tiles - 1 - done
        own, row = (slot + i).to(tl.int64) * heads + local, begin + i * TILE + index
        rows, inside = row.to(tl.int64), row < end
        store_block(grad_states_ptr + own * (K * V), lines, columns, V, there, V, grad)
        total = tl.load(total_ptr + own * TILE + index)
        last = tl.load(total_ptr + own * TILE + (TILE - 1))
        rest = tl.load(scale_ptr + own * TILE + index) * tl.exp(last - total)
        k = load_block(queries_ptr + key_heads * K, rows, lines, stride, inside, K)
        written = load_block(grad_written_ptr + own * (TILE * V), index, columns, V, whole, V)
        written = written.to(tl.float32) + product(k, grad, PRECISION) * rest[:, None]
        store_block(grad_written_ptr + own * (TILE * V), index, columns, V, whole, V, written)
        grown = tl.load(query_scale_ptr + own * TILE + index) * tl.exp(total)
        grad_o = load_block(grad_o_ptr + head * V, rows, columns, grad_o_stride, inside, V).to(tl.float32)
        q = load_block(queries_ptr, rows, lines, stride, inside, K)
        grad = grad * tl.exp(last) + product(tl.trans(q), grad_o * grown[:, None], PRECISION)
        w = load_block(w_ptr + own * (TILE * K), index, lines, K, whole, K)
        grad -= product(tl.trans(w), written, PRECISION)
    if HAS_BEFORE:
        store_block(before_ptr + head.to(tl.int64) * (K * V), lines, columns, V, there, V, grad)
