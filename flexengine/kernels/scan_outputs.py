"""Mamba-2's scan: what queries read from states and from their own tile, and the gradients of values and of dt.

Source: Dao & Gu 2024, "Transformers are SSMs", and the formulas of `flexengine.ops.delta.tiles` without correction.
Every program works on one tile of one head. Shapes: those of `scan_states`; o and grad_o [T, N * V] in bf16 or fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.counts import cdiv
from flexengine.kernels.delta_prepare import BLOCK_K, block_of, load_block, load_gate, product, store_block
from flexengine.kernels.scan_states import ScanTiles

_COLUMNS = 64
_LAUNCH = {"num_warps": 4, "num_stages": 1}


def scan_outputs(tiles: ScanTiles, states: Tensor, o: Tensor) -> None:
    """Columns of the heads of o = (q exp(c)) S + P (dt v) + skip v, for the rows of the tiles; rows may be strided.

    Order: one launch on the current stream, never synchronises. Raises: ValueError on other shapes, dtypes or strides.
    """
    *_, k, v = tiles.sizes
    tiles.check(states=(states, (k, v)))
    tiles.check_outputs("o", o)
    columns = block_of(v, _COLUMNS)
    _outputs_kernel[(tiles.slots, tiles.heads, cdiv(v, columns))](
        *tiles.inputs(), tiles.skip, states, o, o.stride(0), **tiles.constants(), BLOCK_K=block_of(k, BLOCK_K),
        BLOCK_V=columns, **_LAUNCH,
    )  # fmt: skip


def scan_values_backward(
    tiles: ScanTiles, grad_o: Tensor, grad_states: Tensor, grad_xbc: Tensor, grad_strength: Tensor, grad_skip: Tensor
) -> None:
    """The heads' columns of grad_xbc, shaped like xbc, and of grad_strength [T, N] and what tokens add to the gradient
    of skip, grad_skip [T, N].

    Order: one launch on the current stream, never synchronises. Raises: ValueError on other shapes, dtypes or strides.
    """
    *_, k, v = tiles.sizes
    tiles.check({"grad_strength": grad_strength, "grad_skip": grad_skip}, grad_states=(grad_states, (k, v)))
    tiles.check_outputs("grad_o", grad_o)
    check_tensor("grad_xbc", grad_xbc, tiles.xbc.shape, FLOATS, strided_rows=True)
    _values_kernel[(tiles.slots, tiles.heads)](
        *tiles.inputs(), tiles.skip, grad_o, grad_states, grad_xbc, grad_strength, grad_skip, grad_o.stride(0),
        grad_xbc.stride(0), **tiles.constants(), BLOCK_K=block_of(k, BLOCK_K), BLOCK_V=block_of(v, _COLUMNS), **_LAUNCH,
    )  # fmt: skip


@triton.jit(do_not_specialize=["slots"])
def _outputs_kernel(
    xbc_ptr, decay_ptr, strength_ptr, spans_ptr, slots, heads, first, stride, groups, num_heads, skip_ptr, states_ptr,
    o_ptr, o_stride, K: tl.constexpr, V: tl.constexpr, RATIO: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    slot, local = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(spans_ptr + slot), tl.load(spans_ptr + slots + slot)
    if begin >= end:
        return
    own, index, head = slot.to(tl.int64) * heads + local, tl.arange(0, TILE), first + local
    rows, inside = (begin + index).to(tl.int64), begin + index < end
    columns = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    keys_ptr = xbc_ptr + num_heads * V + (head // RATIO) * K
    pairs, o = tl.zeros((TILE, TILE), tl.float32), tl.zeros((TILE, BLOCK_V), tl.float32)
    for start in range(0, K, BLOCK_K):
        lines = start + tl.arange(0, BLOCK_K)
        q = load_block(keys_ptr + groups * K, rows, lines, stride, inside, K)
        k = load_block(keys_ptr, rows, lines, stride, inside, K)
        state = load_block(states_ptr + own * (K * V), lines, columns, V, lines < K, V)
        pairs += product(q, tl.trans(k), PRECISION)
        o += product(q.to(tl.float32), state, PRECISION)
    strength = load_gate(strength_ptr, rows, inside, head, num_heads)
    total = tl.cumsum(load_gate(decay_ptr, rows, inside, head, num_heads), axis=0)
    pairs *= strength[None, :] * tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0))
    pairs = tl.where(index[:, None] >= index[None, :], pairs, 0.0)
    v = load_block(xbc_ptr + head * V, rows, columns, stride, inside, V).to(tl.float32)
    o = o * tl.exp(total)[:, None] + product(pairs, v, PRECISION) + tl.load(skip_ptr + head) * v
    store_block(o_ptr + head * V, rows, columns, o_stride, inside, V, o)


@triton.jit(do_not_specialize=["slots"])
def _values_kernel(
    xbc_ptr, decay_ptr, strength_ptr, spans_ptr, slots, heads, first, stride, groups, num_heads, skip_ptr, grad_o_ptr,
    grad_states_ptr, grad_xbc_ptr, grad_strength_ptr, grad_skip_ptr, grad_o_stride, grad_stride, K: tl.constexpr,
    V: tl.constexpr, RATIO: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """P is made transposed, without dt."""
    slot, local = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(spans_ptr + slot), tl.load(spans_ptr + slots + slot)
    if begin >= end:
        return
    own, index, head = slot.to(tl.int64) * heads + local, tl.arange(0, TILE), first + local
    rows, inside = (begin + index).to(tl.int64), begin + index < end
    keys_ptr = xbc_ptr + num_heads * V + (head // RATIO) * K
    strength, skip = load_gate(strength_ptr, rows, inside, head, num_heads), tl.load(skip_ptr + head)
    decay = load_gate(decay_ptr, rows, inside, head, num_heads)
    total = tl.cumsum(decay, axis=0)
    rest = tl.exp(tl.sum(decay, axis=0) - total)
    pairs = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, K, BLOCK_K):
        lines = start + tl.arange(0, BLOCK_K)
        q = load_block(keys_ptr + groups * K, rows, lines, stride, inside, K)
        k = load_block(keys_ptr, rows, lines, stride, inside, K)
        pairs += product(k, tl.trans(q), PRECISION)
    pairs *= tl.exp(tl.minimum(total[None, :] - total[:, None], 0.0))
    pairs = tl.where(index[:, None] <= index[None, :], pairs, 0.0)
    grad_strength, grad_skip = tl.zeros((TILE,), tl.float32), tl.zeros((TILE,), tl.float32)
    for begin_v in range(0, V, BLOCK_V):
        columns = begin_v + tl.arange(0, BLOCK_V)
        grad_o = load_block(grad_o_ptr + head * V, rows, columns, grad_o_stride, inside, V).to(tl.float32)
        later = tl.zeros((TILE, BLOCK_V), tl.float32)
        for start in range(0, K, BLOCK_K):
            lines = start + tl.arange(0, BLOCK_K)
            k = load_block(keys_ptr, rows, lines, stride, inside, K).to(tl.float32)
            grad_state = load_block(grad_states_ptr + own * (K * V), lines, columns, V, lines < K, V)
            later += product(k, grad_state, PRECISION)
        grad = product(pairs, grad_o, PRECISION) + later * rest[:, None]
        v = load_block(xbc_ptr + head * V, rows, columns, stride, inside, V).to(tl.float32)
        grad_strength += tl.sum(grad * v, axis=1)
        grad_skip += tl.sum(grad_o * v, axis=1)
        grad_v = grad * strength[:, None] + skip * grad_o
        store_block(grad_xbc_ptr + head * V, rows, columns, grad_stride, inside, V, grad_v)
    tl.store(grad_strength_ptr + rows * num_heads + head, grad_strength, mask=inside)
    tl.store(grad_skip_ptr + rows * num_heads + head, grad_skip, mask=inside)
