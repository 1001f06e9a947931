"""Causal attention with a short window, forward and the gradients of queries: all keys of a tile of queries at once.

A tile is OWN queries of PACK query heads that read the same keys. It sees its own keys and the FAR keys before them, no
more; so nothing is summed up from block to block, no maximum changes on the way, and what hides a key is one comparison
with a number of the row. A program takes TILES such tiles, one after the other, while the next one's rows are loaded.

Backward finds delta = rowsum(dO * O) as rowsum(P * dP), which is the same sum in another order, and so reads no output.

Shapes: those of `attention.py`; the gradients of keys and values are left to `attention_backward.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexengine.kernels.attention_tiles import LN_2, find_tile, load_columns, product, store_columns, values_of
from flexengine.kernels.rounding import round_to


@triton.jit(do_not_specialize=["tokens", "before", "sequences", "window"])
def short_forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, sinks_ptr, cu_ptr, q_stride: tl.constexpr, q_head: tl.constexpr,
    k_stride: tl.constexpr, k_head: tl.constexpr, v_stride: tl.constexpr, v_head: tl.constexpr,
    out_stride: tl.constexpr, out_head: tl.constexpr, tokens, before, sequences, window, members, factor, unit, log2_e,
    H: tl.constexpr, V: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, PACK: tl.constexpr, OWN: tl.constexpr,
    FAR: tl.constexpr, TILES: tl.constexpr, CAPPED: tl.constexpr, WIDE: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    start, length, part = find_tile(cu_ptr, sequences, tl.program_id(0), OWN * TILES)
    begin = part * OWN * TILES
    if begin >= length:
        return
    index, head = tl.arange(0, OWN * PACK), tl.program_id(1) * PACK
    queries, heads, row = index // PACK, index % PACK, start.to(tl.int64)
    q_ptr += row * q_stride + head * q_head
    out_ptr += row * out_stride + head * out_head
    lse_ptr += head.to(tl.int64) * tokens + row
    k_ptr += row * k_stride + head // members * k_head
    v_ptr += row * v_stride + head // members * v_head
    if SINKS:
        sinks = tl.load(sinks_ptr + head + heads).to(tl.float32) * log2_e
    for i in range(0, tl.minimum(TILES, tl.cdiv(length - begin, OWN))):
        first = begin + i * OWN
        here, own = first + queries < length, first.to(tl.int64)
        q = load_columns(q_ptr + own * q_stride, queries * q_stride + heads * q_head, here, 0, KEYS, H, True)
        k, k_far = _both(k_ptr, k_stride, first, before, length, KEYS, H, OWN, FAR)
        seen, seen_far = _seen(queries, before + first, window, OWN, FAR)
        near = tl.where(seen, _values(q, k, factor, CAPPED, WIDE), float("-inf"))
        far = tl.where(seen_far, _values(q, k_far, factor, CAPPED, WIDE), float("-inf"))
        top = tl.maximum(tl.max(near, 1), tl.max(far, 1)) * unit
        if SINKS:
            top = tl.maximum(top, sinks)
        near, far = tl.exp2(near * unit - top[:, None]), tl.exp2(far * unit - top[:, None])
        total = tl.sum(near, 1) + tl.sum(far, 1)
        if SINKS:
            total += tl.exp2(sinks - top)
        v, v_far = _both(v_ptr, v_stride, first, before, length, VALUES, V, OWN, FAR)
        acc = product(round_to(far, v.dtype), v_far, tl.zeros((OWN * PACK, VALUES), tl.float32), WIDE)
        acc = product(round_to(near, v.dtype), v, acc, WIDE)
        targets = queries * out_stride + heads * out_head
        store_columns(out_ptr + own * out_stride, targets, here, acc * (1.0 / total)[:, None], 0, VALUES, V, False)
        tl.store(lse_ptr + own + (heads * tokens + queries), (top + tl.log2(total)) * LN_2, mask=here)


@triton.jit(do_not_specialize=["tokens", "before", "sequences", "window"])
def short_query_kernel(
    q_ptr, k_ptr, v_ptr, grad_out_ptr, grad_q_ptr, lse_ptr, scaled_lse_ptr, delta_ptr, cu_ptr, q_stride: tl.constexpr,
    q_head: tl.constexpr, k_stride: tl.constexpr, k_head: tl.constexpr, v_stride: tl.constexpr, v_head: tl.constexpr,
    grad_stride: tl.constexpr, grad_head: tl.constexpr, grad_q_stride: tl.constexpr, grad_q_head: tl.constexpr,
    tokens, before, sequences, window, members, factor, unit, log2_e, scale, NUM_HEADS: tl.constexpr, H: tl.constexpr,
    V: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, PACK: tl.constexpr, OWN: tl.constexpr, FAR: tl.constexpr,
    TILES: tl.constexpr, CAPPED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    start, length, part = find_tile(cu_ptr, sequences, tl.program_id(0), OWN * TILES)
    begin = part * OWN * TILES
    if begin >= length:
        return
    index, head = tl.arange(0, OWN * PACK), tl.program_id(1) * PACK
    queries, heads, row = index // PACK, index % PACK, start.to(tl.int64)
    q_ptr += row * q_stride + head * q_head
    grad_out_ptr += row * grad_stride + head * grad_head
    grad_q_ptr += row * grad_q_stride + head * grad_q_head
    lse_ptr += head.to(tl.int64) * tokens + row
    scaled_lse_ptr += row * NUM_HEADS + head
    delta_ptr += row * NUM_HEADS + head
    k_ptr += row * k_stride + head // members * k_head
    v_ptr += row * v_stride + head // members * v_head
    for i in range(0, tl.minimum(TILES, tl.cdiv(length - begin, OWN))):
        first = begin + i * OWN
        here, own = first + queries < length, first.to(tl.int64)
        q = load_columns(q_ptr + own * q_stride, queries * q_stride + heads * q_head, here, 0, KEYS, H, True)
        grads = queries * grad_stride + heads * grad_head
        grad = load_columns(grad_out_ptr + own * grad_stride, grads, here, 0, VALUES, V, True)
        k, k_far = _both(k_ptr, k_stride, first, before, length, KEYS, H, OWN, FAR)
        v, v_far = _both(v_ptr, v_stride, first, before, length, VALUES, V, OWN, FAR)
        lse = tl.load(lse_ptr + own + (heads * tokens + queries), mask=here, other=float("inf")) * log2_e
        seen, seen_far = _seen(queries, before + first, window, OWN, FAR)
        near, far = _values(q, k, factor, CAPPED, WIDE), _values(q, k_far, factor, CAPPED, WIDE)
        powers = tl.where(seen, tl.exp2(near * unit - lse[:, None]), 0.0)
        powers_far = tl.where(seen_far, tl.exp2(far * unit - lse[:, None]), 0.0)
        grad_near, grad_far = _values(grad, v, factor, False, WIDE), _values(grad, v_far, factor, False, WIDE)
        delta = tl.sum(powers * grad_near, 1) + tl.sum(powers_far * grad_far, 1)
        stats = own * NUM_HEADS + (queries * NUM_HEADS + heads)
        tl.store(scaled_lse_ptr + stats, lse, mask=here)
        tl.store(delta_ptr + stats, delta, mask=here)
        grad_near = powers * (grad_near - delta[:, None])
        grad_far = powers_far * (grad_far - delta[:, None])
        if CAPPED:
            grad_near *= 1.0 - near * near
            grad_far *= 1.0 - far * far
        grad_q = product(round_to(grad_far, k.dtype), k_far, tl.zeros((OWN * PACK, KEYS), tl.float32), WIDE)
        grad_q = product(round_to(grad_near, k.dtype), k, grad_q, WIDE)
        targets = queries * grad_q_stride + heads * grad_q_head
        store_columns(grad_q_ptr + own * grad_q_stride, targets, here, grad_q * scale, 0, KEYS, H, False)


@triton.jit
def _both(
    ptr, stride, first, before, length, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, OWN: tl.constexpr, FAR: tl.constexpr
):
    """Rows of the tile's own keys, and of those before them; 0 past either end of the sequence."""
    own, far = tl.arange(0, OWN), tl.arange(0, FAR)
    key = before + first
    near = load_columns(ptr + key.to(tl.int64) * stride, own * stride, first + own < length, 0, COLUMNS, WIDTH, True)
    ptr += (key - FAR).to(tl.int64) * stride
    return near, load_columns(ptr, far * stride, key - FAR + far >= 0, 0, COLUMNS, WIDTH, True)


@triton.jit
def _seen(queries, position, window, OWN: tl.constexpr, FAR: tl.constexpr):
    """Which of the tile's own keys, and of those before them, the queries see; the tile begins at `position`."""
    own, far = tl.arange(0, OWN)[None, :], tl.arange(0, FAR)[None, :]
    queries = queries[:, None]
    hidden = tl.maximum(queries + (FAR - window), FAR - 1 - position)
    return (own <= queries) & (queries - own < window), far > hidden


@triton.jit
def _values(a, b, factor, CAPPED: tl.constexpr, WIDE: tl.constexpr):
    """Products of all rows of a with all rows of b, bounded where CAPPED."""
    products = product(a, tl.trans(b), tl.zeros((a.shape[0], b.shape[0]), tl.float32), WIDE)
    return values_of(products, factor, CAPPED)
