"""Mamba-2's scan: gradients of B, C and of the decays, once states and their gradients are known.

Source: Dao & Gu 2024, "Transformers are SSMs", and the formulas of `flexengine.ops.delta.tiles` without correction.
With Q = (grad_o (dt v)^T) d below and on the diagonal, each head adds to the gradients of its group

    grad_q = exp(c) grad_o S^T + Q k            grad_k = exp(c_C - c) (dt v) grad_S'^T + Q^T q

and grad_c = sum of q grad_q - sum of k grad_k, over columns; c_C gets what decays all that the tile leaves. Programs
add up parts of a group's heads, in order, and another kernel adds up the parts.

Shapes: those of `scan_states`; sums [2, M, N / part, 64, K] in fp32, of queries and of keys; decays as `parts`
[M, H, K blocks, 64].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.counts import cdiv
from flexengine.kernels.delta_prepare import (
    LEAST_OF_EIGHT_WARPS,
    TILE,
    block_of,
    load_block,
    load_gate,
    product,
    store_block,
)
from flexengine.kernels.scan_states import ScanTiles

_KEY_COLUMNS = 64
_VALUE_COLUMNS = 64
_SUM_ROWS = 16
_LAUNCH = {"num_warps": 8, "num_stages": 1}


def decay_parts(key_dim: int) -> int:
    """Parts that the gradients of decays are the sums of."""
    return cdiv(key_dim, block_of(key_dim, _KEY_COLUMNS, LEAST_OF_EIGHT_WARPS))


def scan_keys_backward(
    tiles: ScanTiles, states: Tensor, grad_o: Tensor, grad_states: Tensor, sums: Tensor, parts: Tensor
) -> None:
    """The parts' gradients of queries and keys in sums, and those of decays in parts.

    Order: one launch on the current stream, never synchronises. Raises: ValueError on other shapes, dtypes or strides.
    """
    *_, k, v = tiles.sizes
    tiles.check(states=(states, (k, v)), grad_states=(grad_states, (k, v)), parts=(parts, (decay_parts(k), TILE)))
    tiles.check_outputs("grad_o", grad_o)
    _check_sums(tiles, sums)
    _keys_kernel[(tiles.slots, tiles.heads // tiles.part, decay_parts(k))](
        *tiles.inputs(), states, grad_o, grad_states, *sums, parts, grad_o.stride(0), **tiles.constants(),
        PART=tiles.part, BLOCK_K=block_of(k, _KEY_COLUMNS, LEAST_OF_EIGHT_WARPS), BLOCK_V=block_of(v, _VALUE_COLUMNS),
        **_LAUNCH,
    )  # fmt: skip


def scan_decays_backward(tiles: ScanTiles, parts: Tensor, grad_decay: Tensor) -> None:
    """Columns of the heads of grad_decay [T, N] fp32, from their parts.

    Order: one launch on the current stream, never synchronises. Raises: ValueError on other shapes, dtypes or strides.
    """
    count = decay_parts(tiles.sizes[2])
    tiles.check({"grad_decay": grad_decay}, parts=(parts, (count, TILE)))
    _decays_kernel[(tiles.slots, tiles.heads)](*tiles.inputs(), parts, grad_decay, count, TILE=TILE, num_warps=1)


def scan_sums(tiles: ScanTiles, sums: Tensor, grad_xbc: Tensor) -> None:
    """Columns of B and C of all groups of grad_xbc, from the parts' sums; tiles of whatever heads.

    Order: one launch on the current stream, never synchronises. Raises: ValueError on other shapes, dtypes or strides.
    """
    groups, num_heads, k, v = tiles.sizes
    _check_sums(tiles, sums)
    check_tensor("grad_xbc", grad_xbc, tiles.xbc.shape, FLOATS, strided_rows=True)
    _sums_kernel[(tiles.slots, groups, TILE // _SUM_ROWS)](
        *tiles.inputs(), *sums, grad_xbc, grad_xbc.stride(0), K=k, V=v, PARTS=num_heads // groups // tiles.part,
        TILE=TILE, ROWS=_SUM_ROWS, BLOCK_K=block_of(k), num_warps=4,
    )  # fmt: skip


def _check_sums(tiles: ScanTiles, sums: Tensor) -> None:
    shape = (2, tiles.slots, tiles.sizes[1] // tiles.part, TILE, tiles.sizes[2])
    check_tensor("sums", sums, shape, (torch.float32,))


@triton.jit(do_not_specialize=["slots"])
def _keys_kernel(
    xbc_ptr, decay_ptr, strength_ptr, spans_ptr, slots, heads, first, stride, groups, num_heads, states_ptr, grad_o_ptr,
    grad_states_ptr, grad_q_ptr, grad_k_ptr, parts_ptr, grad_o_stride, K: tl.constexpr, V: tl.constexpr,
    RATIO: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr, PART: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Some columns of the keys: head after head of a part, and each some columns of the values after the others."""
    slot, part = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(spans_ptr + slot), tl.load(spans_ptr + slots + slot)
    if begin >= end:
        return
    index, lines = tl.arange(0, TILE), tl.program_id(2) * BLOCK_K + tl.arange(0, BLOCK_K)
    rows, inside, whole, there = (begin + index).to(tl.int64), begin + index < end, index < TILE, lines < K
    keys_ptr = xbc_ptr + num_heads * V + ((first + part * PART) // RATIO) * K
    q = load_block(keys_ptr + groups * K, rows, lines, stride, inside, K).to(tl.float32)
    k = load_block(keys_ptr, rows, lines, stride, inside, K).to(tl.float32)
    grad_q, grad_k = tl.zeros((TILE, BLOCK_K), tl.float32), tl.zeros((TILE, BLOCK_K), tl.float32)
    for member in range(PART):
        local = part * PART + member
        own, head = slot.to(tl.int64) * heads + local, first + local
        seen, tail = tl.zeros((TILE, BLOCK_K), tl.float32), tl.zeros((TILE, BLOCK_K), tl.float32)
        read, kept = tl.zeros((TILE, TILE), tl.float32), tl.zeros((BLOCK_K,), tl.float32)
        strength = load_gate(strength_ptr, rows, inside, head, num_heads)
        for start in range(0, V, BLOCK_V):
            columns = start + tl.arange(0, BLOCK_V)
            state = load_block(states_ptr + own * (K * V), lines, columns, V, there, V)
            grad_state = load_block(grad_states_ptr + own * (K * V), lines, columns, V, there, V)
            kept += tl.sum(state * grad_state, axis=1)
            grad_o = load_block(grad_o_ptr + head * V, rows, columns, grad_o_stride, inside, V).to(tl.float32)
            v = load_block(xbc_ptr + head * V, rows, columns, stride, inside, V).to(tl.float32) * strength[:, None]
            seen += product(grad_o, tl.trans(state), PRECISION)
            tail += product(v, tl.trans(grad_state), PRECISION)
            read += product(grad_o, tl.trans(v), PRECISION)
        decay = load_gate(decay_ptr, rows, inside, head, num_heads)
        total, last = tl.cumsum(decay, axis=0), tl.sum(decay, axis=0)
        read *= tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0))
        read = tl.where(index[:, None] >= index[None, :], read, 0.0)
        seen = seen * tl.exp(total)[:, None] + product(read, k, PRECISION)
        tail *= tl.exp(last - total)[:, None]
        grad_last = tl.sum(tl.sum(tail * k, axis=1), axis=0) + tl.sum(kept, axis=0) * tl.exp(last)
        tail += product(tl.trans(read), q, PRECISION)
        grad_total = tl.sum(seen * q - tail * k, axis=1) + tl.where(index == TILE - 1, grad_last, 0.0)
        tl.store(parts_ptr + (own * tl.num_programs(2) + tl.program_id(2)) * TILE + index, grad_total)
        grad_q += seen
        grad_k += tail
    target = (slot.to(tl.int64) * (num_heads // PART) + first // PART + part) * (TILE * K)
    store_block(grad_q_ptr + target, index, lines, K, whole, K, grad_q)
    store_block(grad_k_ptr + target, index, lines, K, whole, K, grad_k)


@triton.jit(do_not_specialize=["slots", "count"])
def _decays_kernel(
    xbc_ptr, decay_ptr, strength_ptr, spans_ptr, slots, heads, first, stride, groups, num_heads, parts_ptr,
    grad_decay_ptr, count, TILE: tl.constexpr,
):  # fmt: skip
    slot, local = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(spans_ptr + slot), tl.load(spans_ptr + slots + slot)
    if begin >= end:
        return
    index, grad = tl.arange(0, TILE), tl.zeros((TILE,), tl.float32)
    part_ptr = parts_ptr + (slot.to(tl.int64) * heads + local) * count * TILE + index
    for part in range(0, count):
        grad += tl.load(part_ptr + part * TILE)
    at = (begin + index).to(tl.int64) * num_heads + first + local
    tl.store(grad_decay_ptr + at, tl.cumsum(grad, axis=0, reverse=True), mask=begin + index < end)


@triton.jit(do_not_specialize=["slots"])
def _sums_kernel(
    xbc_ptr, decay_ptr, strength_ptr, spans_ptr, slots, heads, first, stride, groups, num_heads, grad_q_ptr, grad_k_ptr,
    grad_xbc_ptr, grad_stride, K: tl.constexpr, V: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    slot, group = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(spans_ptr + slot), tl.load(spans_ptr + slots + slot)
    index, lines = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    rows, inside = (begin + index).to(tl.int64), begin + index < end
    grad_q, grad_k = tl.zeros((ROWS, BLOCK_K), tl.float32), tl.zeros((ROWS, BLOCK_K), tl.float32)
    for part in range(PARTS):
        source = ((slot.to(tl.int64) * groups + group) * PARTS + part) * (TILE * K)
        grad_q += load_block(grad_q_ptr + source, index, lines, K, inside, K)
        grad_k += load_block(grad_k_ptr + source, index, lines, K, inside, K)
    target_ptr = grad_xbc_ptr + num_heads * V + group * K
    store_block(target_ptr, rows, lines, grad_stride, inside, K, grad_k)
    store_block(target_ptr + groups * K, rows, lines, grad_stride, inside, K, grad_q)
