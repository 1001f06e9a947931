"""Gated delta rule, backward of all that needs no order once states and their gradients are known.

Source: Yang et al. 2024, "Gated Delta Networks", and the formulas of `flexengine.ops.delta.tiles`. With grad_R and
X = (I + A)^-T grad_R: grad_v = b X, grad_A = -X R^T below the diagonal, and W's part of grad_k is -b exp(c) X S^T, so
that neither U nor W is needed. With D_ij = d_ij for j <= i, M = grad_A D b + its transpose and Q = (grad_o R^T) D:

    grad_q = exp(c) grad_o S^T + Q k            grad_k = exp(c_C - c) R grad_S'^T - b exp(c) X S^T + M k + Q^T q

Shapes: those of `delta_prepare`; X over grad_R, M over the inverse, grad_q and grad_k summed over the value heads of a
key head, [M, H * G / N, 64, K]; gradients of log decay and strength as `parts` [M, H, 1 + K blocks, 2, 64] in fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.counts import cdiv
from flexengine.kernels.delta_prepare import (
    BLOCK_K,
    BLOCK_V,
    LEAST_OF_EIGHT_WARPS,
    TILE,
    Tiles,
    load_block,
    load_gate,
    product,
    scale_of,
    squares_of,
    store_block,
)

_KEY_COLUMNS = 64
_VALUE_COLUMNS = 64
_NORM_ROWS = 16
_KEYS_LAUNCH = {"num_warps": 8, "num_stages": 2}


def gate_parts(tiles: Tiles) -> int:
    """Parts that the gradients of gates are the sums of."""
    return 1 + cdiv(tiles.sizes[2], tiles.block_of(tiles.sizes[2], _KEY_COLUMNS, LEAST_OF_EIGHT_WARPS))


def delta_pairs_backward(
    tiles: Tiles, total: Tensor, scale: Tensor, query_scale: Tensor, written: Tensor, grad_o: Tensor,
    grad_written: Tensor, inverse: Tensor, read: Tensor, parts: Tensor, grad_qkv: Tensor,
) -> None:  # fmt: skip
    """X over grad_written, M over inverse, Q in `read` [M, H, 64, 64], the first of `parts`, and grad_v in grad_qkv,
    shaped like qkv.

    Order: one launch on the current stream, never synchronises. Raises: ValueError on other shapes, dtypes or strides.
    """
    _, n, k, v = tiles.sizes
    tiles.check(total=(total, (TILE,)), scale=(scale, (TILE,)), query_scale=(query_scale, (TILE,)))
    tiles.check(written=(written, (TILE, v)), grad_written=(grad_written, (TILE, v)), inverse=(inverse, (TILE, TILE)))
    tiles.check(read=(read, (TILE, TILE)), parts=(parts, (gate_parts(tiles), 2, TILE)))
    check_tensor("grad_o", grad_o, (len(tiles.qkv), n * v), FLOATS, strided_rows=True)
    check_tensor("grad_qkv", grad_qkv, tiles.qkv.shape, FLOATS, strided_rows=True)
    _pairs_kernel[(tiles.slots, tiles.heads)](
        *tiles.inputs(), tiles.strength, total, scale, query_scale, written, grad_o, grad_written, inverse, read, parts,
        grad_qkv, grad_o.stride(0), grad_qkv.stride(0), gate_parts(tiles), **tiles.constants(),
        BLOCK_K=tiles.block_of(k, BLOCK_K), BLOCK_V=tiles.block_of(v, BLOCK_V), num_warps=4,
        num_stages=2 if tiles.narrow else 1,
    )  # fmt: skip


def delta_keys_backward(
    tiles: Tiles, total: Tensor, scale: Tensor, query_scale: Tensor, states: Tensor, written: Tensor, grad_o: Tensor,
    grad_states: Tensor, solved: Tensor, pairs: Tensor, read: Tensor, grad_q: Tensor, grad_k: Tensor, parts: Tensor,
) -> None:  # fmt: skip
    """grad_q and grad_k of the normalised rows, and all but the first of `parts`; solved: X, pairs: M, read: Q.

    Order: one launch on the current stream, never synchronises. Raises: ValueError on other shapes, dtypes or strides.
    """
    _, n, k, v = tiles.sizes
    tiles.check(total=(total, (TILE,)), scale=(scale, (TILE,)), query_scale=(query_scale, (TILE,)))
    tiles.check(states=(states, (k, v)), grad_states=(grad_states, (k, v)), written=(written, (TILE, v)))
    tiles.check(solved=(solved, (TILE, v)), pairs=(pairs, (TILE, TILE)), read=(read, (TILE, TILE)))
    tiles.check(parts=(parts, (gate_parts(tiles), 2, TILE)))
    tiles.check_keys(grad_q=grad_q, grad_k=grad_k)
    check_tensor("grad_o", grad_o, (len(tiles.qkv), n * v), FLOATS, strided_rows=True)
    columns = tiles.block_of(k, _KEY_COLUMNS, LEAST_OF_EIGHT_WARPS)
    _keys_kernel[(tiles.slots, tiles.heads // tiles.ratio, cdiv(k, columns))](
        *tiles.inputs(), tiles.strength, total, scale, query_scale, states, written, grad_o, grad_states, solved, pairs,
        read, grad_q, grad_k, parts, grad_o.stride(0), gate_parts(tiles), **tiles.constants(), BLOCK_K=columns,
        BLOCK_V=tiles.block_of(v, _VALUE_COLUMNS), **_KEYS_LAUNCH,
    )  # fmt: skip


def delta_gates_backward(tiles: Tiles, parts: Tensor, grad_decay: Tensor, grad_strength: Tensor) -> None:
    """Columns of the heads of grad_decay and grad_strength [T, N] fp32, from their parts.

    Order: one launch on the current stream, never synchronises. Raises: ValueError on other shapes, dtypes or strides.
    """
    count = gate_parts(tiles)
    tiles.check({"grad_decay": grad_decay, "grad_strength": grad_strength}, parts=(parts, (count, 2, TILE)))
    _gates_kernel[(tiles.slots, tiles.heads)](
        *tiles.inputs(), parts, grad_decay, grad_strength, count, TILE=TILE, num_warps=1
    )


def delta_norm_backward(tiles: Tiles, grad_q: Tensor, grad_k: Tensor, grad_qkv: Tensor) -> None:
    """Columns of the queries and keys of grad_qkv, from the gradients of the normalised rows.

    Order: one launch on the current stream, never synchronises. Raises: ValueError on other shapes, dtypes or strides.
    """
    *_, k, _ = tiles.sizes
    tiles.check()
    tiles.check_keys(grad_q=grad_q, grad_k=grad_k)
    check_tensor("grad_qkv", grad_qkv, tiles.qkv.shape, FLOATS, strided_rows=True)
    _norm_kernel[(tiles.slots, tiles.heads // tiles.ratio, TILE // _NORM_ROWS)](
        *tiles.inputs(), grad_q, grad_k, grad_qkv, grad_qkv.stride(0), k**-0.5, K=k, RATIO=tiles.ratio, TILE=TILE,
        ROWS=_NORM_ROWS, BLOCK_K=tiles.block_of(k), num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["slots", "count"])
def _pairs_kernel(
    qkv_ptr, spans_ptr, slots, heads, first, stride, key_heads, num_heads, strength_ptr, total_ptr, scale_ptr,
    query_scale_ptr, written_ptr, grad_o_ptr, grad_written_ptr, inverse_ptr, read_ptr, parts_ptr, grad_qkv_ptr,
    grad_o_stride, grad_stride, count, K: tl.constexpr, V: tl.constexpr, RATIO: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    slot, local = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(spans_ptr + slot), tl.load(spans_ptr + slots + slot)
    if begin >= end:
        return
    own, index, head = slot.to(tl.int64) * heads + local, tl.arange(0, TILE), first + local
    rows, inside, whole = (begin + index).to(tl.int64), begin + index < end, index < TILE
    strength = load_gate(strength_ptr, rows, inside, head, num_heads)
    inverse = tl.trans(load_block(inverse_ptr + own * (TILE * TILE), index, index, TILE, whole, TILE))
    of_values, own_values = 2 * key_heads * K + head * V, own * (TILE * V)
    grad_strength = tl.zeros((TILE,), tl.float32)
    grad_a, read = tl.zeros((TILE, TILE), tl.float32), tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, V, BLOCK_V):
        columns = start + tl.arange(0, BLOCK_V)
        solved = load_block(grad_written_ptr + own_values, index, columns, V, whole, V)
        solved = product(inverse, solved, PRECISION)
        store_block(grad_written_ptr + own_values, index, columns, V, whole, V, solved)
        v = load_block(qkv_ptr + of_values, rows, columns, stride, inside, V).to(tl.float32)
        grad_strength += tl.sum(solved * v, axis=1)
        store_block(grad_qkv_ptr + of_values, rows, columns, grad_stride, inside, V, solved * strength[:, None])
        written = tl.trans(load_block(written_ptr + own_values, index, columns, V, whole, V))
        grad_a -= product(solved, written, PRECISION)
        grad_o = load_block(grad_o_ptr + head * V, rows, columns, grad_o_stride, inside, V)
        read += product(grad_o, written, PRECISION)
    total = tl.load(total_ptr + own * TILE + index)
    apart = tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0))
    grad_a = tl.where(index[:, None] > index[None, :], grad_a * apart, 0.0)
    read = tl.where(index[:, None] >= index[None, :], read * apart, 0.0)
    by_keys, by_queries = tl.zeros((TILE, TILE), tl.float32), tl.zeros((TILE, TILE), tl.float32)
    queries_ptr = qkv_ptr + (head // RATIO) * K
    for start in range(0, K, BLOCK_K):
        lines = start + tl.arange(0, BLOCK_K)
        k = load_block(queries_ptr + key_heads * K, rows, lines, stride, inside, K)
        q = load_block(queries_ptr, rows, lines, stride, inside, K)
        by_keys += product(k, tl.trans(k), PRECISION)
        by_queries += product(q, tl.trans(k), PRECISION)
    scale, query_scale = tl.load(scale_ptr + own * TILE + index), tl.load(query_scale_ptr + own * TILE + index)
    by_keys *= grad_a * scale[:, None] * scale[None, :]
    by_queries *= read * query_scale[:, None] * scale[None, :]
    grad_strength += tl.sum(by_keys, axis=1)
    by_queries += by_keys * strength[:, None]
    own_parts = parts_ptr + own * count * (2 * TILE) + index
    tl.store(own_parts, tl.sum(by_queries, axis=1) - tl.sum(by_queries, axis=0))
    tl.store(own_parts + TILE, grad_strength)
    store_block(read_ptr + own * (TILE * TILE), index, index, TILE, whole, TILE, read)
    grad_a *= strength[:, None]
    store_block(inverse_ptr + own * (TILE * TILE), index, index, TILE, whole, TILE, grad_a + tl.trans(grad_a))


@triton.jit(do_not_specialize=["slots", "count"])
def _keys_kernel(
    qkv_ptr, spans_ptr, slots, heads, first, stride, key_heads, num_heads, strength_ptr, total_ptr, scale_ptr,
    query_scale_ptr, states_ptr, written_ptr, grad_o_ptr, grad_states_ptr, solved_ptr, pairs_ptr, read_ptr, grad_q_ptr,
    grad_k_ptr, parts_ptr, grad_o_stride, count, K: tl.constexpr, V: tl.constexpr, RATIO: tl.constexpr,
    TILE: tl.constexpr, PRECISION: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Some columns of the keys: value head after value head, and each some columns of the values after the others."""
    slot, key_head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(spans_ptr + slot), tl.load(spans_ptr + slots + slot)
    if begin >= end:
        return
    index, lines = tl.arange(0, TILE), tl.program_id(2) * BLOCK_K + tl.arange(0, BLOCK_K)
    rows, inside, whole, there = (begin + index).to(tl.int64), begin + index < end, index < TILE, lines < K
    queries_ptr = qkv_ptr + (first // RATIO + key_head) * K
    grad_q, grad_k = tl.zeros((TILE, BLOCK_K), tl.float32), tl.zeros((TILE, BLOCK_K), tl.float32)
    for member in range(RATIO):
        local = key_head * RATIO + member
        own, head = slot.to(tl.int64) * heads + local, first + local
        seen, tail = tl.zeros((TILE, BLOCK_K), tl.float32), tl.zeros((TILE, BLOCK_K), tl.float32)
        found, kept = tl.zeros((TILE, BLOCK_K), tl.float32), tl.zeros((BLOCK_K,), tl.float32)
        for start in range(0, V, BLOCK_V):
            columns = start + tl.arange(0, BLOCK_V)
            state = load_block(states_ptr + own * (K * V), lines, columns, V, there, V)
            grad_state = load_block(grad_states_ptr + own * (K * V), lines, columns, V, there, V)
            kept += tl.sum(state.to(tl.float32) * grad_state, axis=1)
            grad_o = load_block(grad_o_ptr + head * V, rows, columns, grad_o_stride, inside, V)
            seen += product(grad_o, tl.trans(state), PRECISION)
            written = load_block(written_ptr + own * (TILE * V), index, columns, V, whole, V)
            tail += product(written, tl.trans(grad_state), PRECISION)
            solved = load_block(solved_ptr + own * (TILE * V), index, columns, V, whole, V)
            found -= product(solved, tl.trans(state), PRECISION)
        strength = load_gate(strength_ptr, rows, inside, head, num_heads)
        total = tl.load(total_ptr + own * TILE + index)
        last = tl.load(total_ptr + own * TILE + (TILE - 1))
        grown, rest = tl.exp(total), tl.exp(last - total)
        by_key, by_query = tl.load(scale_ptr + own * TILE + index), tl.load(query_scale_ptr + own * TILE + index)
        q = load_block(queries_ptr, rows, lines, stride, inside, K)
        k = load_block(queries_ptr + key_heads * K, rows, lines, stride, inside, K)
        of_scale = tl.sum(found * k, axis=1) * by_key * grown
        left = tl.sum(tail * k, axis=1) * by_key * rest
        grad_total = tl.sum(seen * q, axis=1) * by_query * grown + of_scale * strength - left
        grad_last = tl.sum(left, axis=0) + tl.sum(kept, axis=0) * tl.exp(last)
        own_parts = parts_ptr + (own * count + 1 + tl.program_id(2)) * (2 * TILE) + index
        tl.store(own_parts, grad_total + tl.where(index == TILE - 1, grad_last, 0.0))
        tl.store(own_parts + TILE, of_scale)
        read = load_block(read_ptr + own * (TILE * TILE), index, index, TILE, whole, TILE)
        grad_q += seen * grown[:, None] + product(read * by_key[None, :], k, PRECISION)
        grad_k += tail * rest[:, None] + found * (strength * grown)[:, None]
        grad_k += product(tl.trans(read * by_query[:, None]), q, PRECISION)
        pairs = load_block(pairs_ptr + own * (TILE * TILE), index, index, TILE, whole, TILE)
        grad_k += product(pairs * by_key[None, :], k, PRECISION)
    target = (slot.to(tl.int64) * (heads // RATIO) + key_head) * (TILE * K)
    store_block(grad_q_ptr + target, index, lines, K, whole, K, grad_q)
    store_block(grad_k_ptr + target, index, lines, K, whole, K, grad_k)


@triton.jit(do_not_specialize=["slots", "count"])
def _gates_kernel(
    qkv_ptr, spans_ptr, slots, heads, first, stride, key_heads, num_heads, parts_ptr, grad_decay_ptr, grad_strength_ptr,
    count, TILE: tl.constexpr,
):  # fmt: skip
    slot, local = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(spans_ptr + slot), tl.load(spans_ptr + slots + slot)
    if begin >= end:
        return
    index = tl.arange(0, TILE)
    grad_total, grad_strength = tl.zeros((TILE,), tl.float32), tl.zeros((TILE,), tl.float32)
    part_ptr = parts_ptr + (slot.to(tl.int64) * heads + local) * count * (2 * TILE) + index
    for part in range(0, count):
        grad_total += tl.load(part_ptr + part * (2 * TILE))
        grad_strength += tl.load(part_ptr + part * (2 * TILE) + TILE)
    at = (begin + index).to(tl.int64) * num_heads + first + local
    tl.store(grad_decay_ptr + at, tl.cumsum(grad_total, axis=0, reverse=True), mask=begin + index < end)
    tl.store(grad_strength_ptr + at, grad_strength, mask=begin + index < end)


@triton.jit
def _unscaled(x, grad, factor):
    """Gradient of x, given that of factor * x / sqrt(|x|^2 + eps)."""
    scale = scale_of(squares_of(x), 1.0)[:, None]
    unit = x * scale
    return factor * scale * (grad - unit * tl.sum(unit * grad, axis=1)[:, None])


@triton.jit(do_not_specialize=["slots"])
def _norm_kernel(
    qkv_ptr, spans_ptr, slots, heads, first, stride, key_heads, num_heads, grad_q_ptr, grad_k_ptr, grad_qkv_ptr,
    grad_stride, factor, K: tl.constexpr, RATIO: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    slot, key_head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(spans_ptr + slot), tl.load(spans_ptr + slots + slot)
    index, lines = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    rows, inside = (begin + index).to(tl.int64), begin + index < end
    source = (slot.to(tl.int64) * (heads // RATIO) + key_head) * (TILE * K)
    of_queries = (first // RATIO + key_head) * K
    of_keys = of_queries + key_heads * K
    q = load_block(qkv_ptr + of_queries, rows, lines, stride, inside, K).to(tl.float32)
    grad = _unscaled(q, load_block(grad_q_ptr + source, index, lines, K, inside, K), factor)
    store_block(grad_qkv_ptr + of_queries, rows, lines, grad_stride, inside, K, grad)
    k = load_block(qkv_ptr + of_keys, rows, lines, stride, inside, K).to(tl.float32)
    grad = _unscaled(k, load_block(grad_k_ptr + source, index, lines, K, inside, K), 1.0)
    store_block(grad_qkv_ptr + of_keys, rows, lines, grad_stride, inside, K, grad)
