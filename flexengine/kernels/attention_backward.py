"""Causal attention over packed sequences, backward, without atomic additions: gradients have the same bits every time.

Two passes over the visible pairs, each of which finds the probabilities again from the log-sum-exps: one takes a tile
of queries through its keys, for grad_q; the other takes a tile of keys through the queries of all heads that read it,
for grad_k and grad_v. That is seven products where five would do with additions in any order.

Source: Dao 2023, "FlashAttention-2" (arXiv 2307.08691): P = exp(S - lse), dV = P^T dO, dS = P * (dO V^T - delta) with
delta = rowsum(dO * O), dQ = scale * dS K, dK = scale * dS^T Q; and with a soft cap dS * (1 - tanh^2).

Shapes: those of `attention.py`; gradients as what they are of.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.attention import Operands
from flexengine.kernels.attention_short import short_query_kernel
from flexengine.kernels.attention_tiles import (
    find_tile,
    key_steps,
    load_columns,
    load_stats,
    product,
    query_steps,
    row_products,
    step_of,
    store_columns,
    values_of,
    visible,
)
from flexengine.kernels.attention_tilings import (
    LOG2_E,
    Scoring,
    ShortTiling,
    key_tiling,
    packed_heads,
    query_tiling,
    short_tiling,
    slots,
)
from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.rounding import round_to


class Forward(NamedTuple):
    """What forward left of all keys that the queries see, sinks included, and the gradient of its output."""

    grad_out: Tensor
    out: Tensor
    lse: Tensor


class Gradients(NamedTuple):
    """Where gradients go. add: those of keys and values to what float32 sums hold already, else everything is
    written."""

    q: Tensor
    k: Tensor
    v: Tensor
    add: bool = False


def attention_backward(operands: Operands, scoring: Scoring, forward: Forward, grads: Gradients) -> None:
    """Gradients of q, k and v from what forward left.

    Cost: 2 * (4 * H + 3 * V) FLOPs per head and visible pair; takes 2 * N * T float32 from the allocator.
    Order: two launches on the current stream, never synchronises. Deterministic. Raises: ValueError on other shapes,
    dtypes or strides.
    """
    operands.check()
    scoring.check()
    _check(operands, forward, grads)
    if len(operands.q):
        tokens, heads, _ = operands.q.shape
        stats = torch.empty(2, tokens, heads, dtype=torch.float32, device=operands.q.device)
        _query_gradients(operands, scoring, forward, grads.q, stats)
        _key_gradients(operands, scoring, forward, grads, stats)


def _check(operands: Operands, forward: Forward, grads: Gradients) -> None:
    (tokens, heads, _), dtype = operands.q.shape, operands.q.dtype
    shape = (tokens, heads, operands.v.shape[2])
    check_tensor("grad_out", forward.grad_out, shape, (dtype,), strided_rows=True)
    check_tensor("out", forward.out, shape, (dtype,), strided_rows=True)
    check_tensor("lse", forward.lse, (heads, tokens), (torch.float32,))
    check_tensor("grad_q", grads.q, operands.q.shape, FLOATS, strided_rows=True)
    for name, grad, x in (("grad_k", grads.k, operands.k), ("grad_v", grads.v, operands.v)):
        check_tensor(name, grad, x.shape, (torch.float32,) if grads.add else FLOATS, strided_rows=True)


def _query_gradients(operands: Operands, scoring: Scoring, forward: Forward, grad_q: Tensor, stats: Tensor) -> None:
    """grad_q; and stats [2, T, N] for the other kernel: log2(e) * lse, and delta."""
    q, k, v, cu_seqlens = operands
    (tokens, heads, _), groups, widths = q.shape, k.shape[1], operands.widths
    if short := short_tiling(widths, scoring, heads // groups, True, q.device):
        return _short_query_gradients(operands, scoring, forward, grad_q, stats, short)
    tiling = query_tiling(widths, scoring, q.device)
    pack = packed_heads(heads, groups, tiling.rows)
    grid = (slots(tokens, cu_seqlens, tiling.rows // pack), heads // pack)
    outputs = (forward.grad_out, forward.out, grad_q)
    _query_kernel[grid](
        q, k, v, *outputs, forward.lse, *stats, cu_seqlens,
        *operands.strides(), *(x.stride(dim) for x in outputs for dim in (0, 1)),
        tokens, operands.before, len(cu_seqlens) - 1, scoring.window, heads // groups, *scoring.factors(), LOG2_E,
        scoring.scale, NUM_HEADS=heads, **widths._asdict(), PACK=pack, APART=tiling.apart, ROWS=tiling.rows,
        BLOCK=tiling.keys, **scoring.constants(), WIDE=not q.is_cuda, **tiling.launch(),
    )  # fmt: skip


def _short_query_gradients(
    operands: Operands, scoring: Scoring, forward: Forward, grad_q: Tensor, stats: Tensor, tiling: ShortTiling
) -> None:
    q, k, v, cu_seqlens = operands
    (tokens, heads, _), widths = q.shape, operands.widths
    strided = (forward.grad_out, grad_q)
    short_query_kernel[slots(tokens, cu_seqlens, tiling.queries), heads // tiling.pack](
        q, k, v, *strided, forward.lse, *stats, cu_seqlens,
        *operands.strides(), *(x.stride(dim) for x in strided for dim in (0, 1)),
        tokens, operands.before, len(cu_seqlens) - 1, scoring.window, heads // k.shape[1], *scoring.factors(), LOG2_E,
        scoring.scale, NUM_HEADS=heads, H=widths.H, V=widths.V, KEYS=widths.FIRST, VALUES=widths.VALUES,
        CAPPED=scoring.soft_cap > 0, WIDE=not q.is_cuda, **tiling.constants(),
    )  # fmt: skip


def _key_gradients(operands: Operands, scoring: Scoring, forward: Forward, grads: Gradients, stats: Tensor) -> None:
    """grad_k and grad_v."""
    q, k, v, cu_seqlens = operands
    (_, heads, _), (keys, groups, _), widths = q.shape, k.shape, operands.widths
    tiling = key_tiling(widths, scoring, q.device)
    pack = packed_heads(heads, groups, tiling.rows)
    strided = (forward.grad_out, grads.k, grads.v)
    for wanted in ((True, True),) if tiling.passes == 1 else ((False, True), (True, False)):
        _key_kernel[slots(keys, cu_seqlens, tiling.keys), groups](
            q, k, v, *strided, *stats, cu_seqlens,
            *operands.strides(), *(x.stride(dim) for x in strided for dim in (0, 1)),
            operands.before, len(cu_seqlens) - 1, scoring.window, *scoring.factors(), scoring.scale, NUM_HEADS=heads,
            PARTS=heads // groups // pack, **widths._asdict(), PACK=pack, APART=tiling.apart, ROWS=tiling.rows,
            BLOCK=tiling.keys, **scoring.constants(), WIDE=not q.is_cuda, ADD=grads.add, GRAD_K=wanted[0],
            GRAD_V=wanted[1], **tiling.launch(),
        )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "before", "sequences", "window"])
def _query_kernel(
    q_ptr, k_ptr, v_ptr, grad_out_ptr, out_ptr, grad_q_ptr, lse_ptr, scaled_lse_ptr, delta_ptr, cu_ptr,
    q_stride: tl.constexpr, q_head: tl.constexpr, k_stride: tl.constexpr, k_head: tl.constexpr, v_stride: tl.constexpr,
    v_head: tl.constexpr, grad_stride: tl.constexpr, grad_head: tl.constexpr, out_stride: tl.constexpr,
    out_head: tl.constexpr, grad_q_stride: tl.constexpr, grad_q_head: tl.constexpr, tokens, before, sequences, window,
    members, factor, unit, log2_e, scale, NUM_HEADS: tl.constexpr, H: tl.constexpr, V: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, VALUES: tl.constexpr, PACK: tl.constexpr, APART: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    QUERIES: tl.constexpr = ROWS // PACK
    start, length, tile = find_tile(cu_ptr, sequences, tl.program_id(0), QUERIES)
    tile = tl.cdiv(length, QUERIES) - 1 - tile  # those with the most keys come first
    if tile < 0:
        return
    index, head = tl.arange(0, ROWS), tl.program_id(1) * PACK
    queries, heads, first = index // PACK, index % PACK, tile * QUERIES
    here, own = first + queries < length, (start + first).to(tl.int64)
    grad_out_ptr += own * grad_stride + head * grad_head
    grad = load_columns(grad_out_ptr, queries * grad_stride + heads * grad_head, here, 0, VALUES, V, True)
    out_ptr += own * out_stride + head * out_head
    out = load_columns(out_ptr, queries * out_stride + heads * out_head, here, 0, VALUES, V, True)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    lse_ptr += head.to(tl.int64) * tokens + own
    lse = tl.load(lse_ptr + (heads * tokens + queries), mask=here, other=float("inf")) * log2_e  # no share past the end
    stats = own * NUM_HEADS + head
    tl.store(scaled_lse_ptr + stats + (queries * NUM_HEADS + heads), lse, mask=here)
    tl.store(delta_ptr + stats + (queries * NUM_HEADS + heads), delta, mask=here)
    q_ptr += own * q_stride + head * q_head
    q = load_columns(q_ptr, queries * q_stride + heads * q_head, here, 0, FIRST, H, True)
    q_second, grad_second = q, tl.zeros((ROWS, 16), tl.float32)
    if SECOND > 0:
        q_second = load_columns(q_ptr, queries * q_stride + heads * q_head, here, FIRST, SECOND, H, True)
        grad_second = tl.zeros((ROWS, SECOND), tl.float32)
    group, row = head // members, start.to(tl.int64)
    k_ptr += row * k_stride + group * k_head
    v_ptr += row * v_stride + group * v_head
    grad_first = tl.zeros((ROWS, FIRST), tl.float32)
    first += before
    positions, keys = first + queries, before + length
    begin, low, high, steps = key_steps(first, first + QUERIES - 1, keys, window, CAUSAL, WINDOW, BLOCK)
    if APART:
        grad_first, grad_second = _query_steps(
            grad_first, grad_second, q, q_second, grad, lse, delta, k_ptr, v_ptr, k_stride, v_stride, positions,
            keys, window, factor, unit, begin, low, high, high - low,
            H, V, FIRST, SECOND, VALUES, BLOCK, CAUSAL, WINDOW, CAPPED, WIDE, False,
        )  # fmt: skip
    else:
        high = low
    grad_first, grad_second = _query_steps(
        grad_first, grad_second, q, q_second, grad, lse, delta, k_ptr, v_ptr, k_stride, v_stride, positions,
        keys, window, factor, unit, begin, low, high, steps - (high - low),
        H, V, FIRST, SECOND, VALUES, BLOCK, CAUSAL, WINDOW, CAPPED, WIDE, True,
    )  # fmt: skip
    grad_q_ptr += own * grad_q_stride + head * grad_q_head
    targets = queries * grad_q_stride + heads * grad_q_head
    store_columns(grad_q_ptr, targets, here, grad_first * scale, 0, FIRST, H, False)
    if SECOND > 0:
        store_columns(grad_q_ptr, targets, here, grad_second * scale, FIRST, SECOND, H, False)


@triton.jit
def _query_steps(
    grad_first, grad_second, q, q_second, grad, lse, delta, k_ptr, v_ptr, k_stride, v_stride, positions, num_keys,
    window, factor, unit, begin, low, high, steps, H: tl.constexpr, V: tl.constexpr, FIRST: tl.constexpr,
    SECOND: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, WIDE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """grad_q in both parts, with what so many more steps of keys give."""
    offsets = tl.arange(0, BLOCK)
    for i in range(0, steps):
        key = begin + step_of(i, low, high, MASKED) * BLOCK
        keys, row = key + offsets, key.to(tl.int64)
        k = load_columns(k_ptr + row * k_stride, offsets * k_stride, keys < num_keys, 0, FIRST, H, MASKED)
        k_second = k
        if SECOND > 0:
            k_second = load_columns(
                k_ptr + row * k_stride, offsets * k_stride, keys < num_keys, FIRST, SECOND, H, MASKED
            )
        v = load_columns(v_ptr + row * v_stride, offsets * v_stride, keys < num_keys, 0, VALUES, V, MASKED)
        values = values_of(row_products(q, q_second, k, k_second, SECOND, WIDE), factor, CAPPED)
        powers = tl.exp2(values * unit - lse[:, None])
        if MASKED:
            seen = visible(positions[:, None], keys[None, :], num_keys, window, CAUSAL, WINDOW)
            powers = tl.where(seen, powers, 0.0)
        grad_scores = powers * (product(grad, tl.trans(v), tl.zeros_like(powers), WIDE) - delta[:, None])
        if CAPPED:
            grad_scores *= 1.0 - values * values
        grad_scores = round_to(grad_scores, k.dtype)
        grad_first = product(grad_scores, k, grad_first, WIDE)
        if SECOND > 0:
            grad_second = product(grad_scores, k_second, grad_second, WIDE)
    return grad_first, grad_second


@triton.jit(do_not_specialize=["before", "sequences", "window"])
def _key_kernel(
    q_ptr, k_ptr, v_ptr, grad_out_ptr, grad_k_ptr, grad_v_ptr, lse_ptr, delta_ptr, cu_ptr, q_stride: tl.constexpr,
    q_head: tl.constexpr, k_stride: tl.constexpr, k_head: tl.constexpr, v_stride: tl.constexpr, v_head: tl.constexpr,
    grad_stride: tl.constexpr, grad_head: tl.constexpr, grad_k_stride: tl.constexpr, grad_k_head: tl.constexpr,
    grad_v_stride: tl.constexpr, grad_v_head: tl.constexpr, before, sequences, window, factor, unit, scale,
    NUM_HEADS: tl.constexpr, PARTS: tl.constexpr, H: tl.constexpr, V: tl.constexpr, FIRST: tl.constexpr,
    SECOND: tl.constexpr, VALUES: tl.constexpr, PACK: tl.constexpr, APART: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, WIDE: tl.constexpr,
    ADD: tl.constexpr, GRAD_K: tl.constexpr, GRAD_V: tl.constexpr,
):  # fmt: skip
    """Everything lies transposed, a row for a key: so probabilities go from one product into the next as they are."""
    start, length, tile = find_tile(cu_ptr, sequences, tl.program_id(0), BLOCK)
    num_keys, first, group = before + length, tile * BLOCK, tl.program_id(1)
    if first >= num_keys:
        return
    rows, own = tl.arange(0, BLOCK), (start + first).to(tl.int64)
    keys = first + rows
    here = keys < num_keys
    k_ptr += own * k_stride + group * k_head
    k = load_columns(k_ptr, rows * k_stride, here, 0, FIRST, H, True)
    k_second, grad_second = k, tl.zeros((BLOCK, 16), tl.float32)
    if SECOND > 0:
        k_second = load_columns(k_ptr, rows * k_stride, here, FIRST, SECOND, H, True)
        grad_second = tl.zeros((BLOCK, SECOND), tl.float32)
    v = load_columns(v_ptr + own * v_stride + group * v_head, rows * v_stride, here, 0, VALUES, V, True)
    grad_first = tl.zeros((BLOCK, FIRST if GRAD_K else 16), tl.float32)
    grad_values = tl.zeros((BLOCK, VALUES if GRAD_V else 16), tl.float32)
    begin, low, high, steps = query_steps(first, length, before, window, CAUSAL, WINDOW, BLOCK, ROWS // PACK)
    if not APART:
        high = low
    row = start.to(tl.int64)
    for part in range(0, PARTS):
        head = (group * PARTS + part) * PACK
        q_base, grad_base = q_ptr + row * q_stride + head * q_head, grad_out_ptr + row * grad_stride + head * grad_head
        stats = row * NUM_HEADS + head
        if APART:
            grad_first, grad_second, grad_values = _key_steps(
                grad_first, grad_second, grad_values, k, k_second, v, q_base, grad_base, lse_ptr + stats,
                delta_ptr + stats, q_stride, q_head, grad_stride, grad_head, keys, length, before, window, factor, unit,
                begin, low, high, high - low,
                NUM_HEADS, H, V, FIRST, SECOND, VALUES, PACK, ROWS, CAUSAL, WINDOW, CAPPED, WIDE, GRAD_K, GRAD_V, False,
            )  # fmt: skip
        grad_first, grad_second, grad_values = _key_steps(
            grad_first, grad_second, grad_values, k, k_second, v, q_base, grad_base, lse_ptr + stats, delta_ptr + stats,
            q_stride, q_head, grad_stride, grad_head, keys, length, before, window, factor, unit,
            begin, low, high, steps - (high - low),
            NUM_HEADS, H, V, FIRST, SECOND, VALUES, PACK, ROWS, CAUSAL, WINDOW, CAPPED, WIDE, GRAD_K, GRAD_V, True,
        )  # fmt: skip
    grad_k_ptr += own * grad_k_stride + group * grad_k_head
    if GRAD_K:
        store_columns(grad_k_ptr, rows * grad_k_stride, here, grad_first * scale, 0, FIRST, H, ADD)
        if SECOND > 0:
            store_columns(grad_k_ptr, rows * grad_k_stride, here, grad_second * scale, FIRST, SECOND, H, ADD)
    if GRAD_V:
        grad_v_ptr += own * grad_v_stride + group * grad_v_head
        store_columns(grad_v_ptr, rows * grad_v_stride, here, grad_values, 0, VALUES, V, ADD)


@triton.jit
def _key_steps(
    grad_first, grad_second, grad_values, k, k_second, v, q_ptr, grad_ptr, lse_ptr, delta_ptr, q_stride, q_head,
    grad_stride, grad_head, keys, num_queries, before, window, factor, unit, begin, low, high, steps,
    NUM_HEADS: tl.constexpr, H: tl.constexpr, V: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    VALUES: tl.constexpr, PACK: tl.constexpr, ROWS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, WIDE: tl.constexpr, GRAD_K: tl.constexpr, GRAD_V: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """grad_k in both parts and grad_v, with what so many more steps of queries give."""
    index = tl.arange(0, ROWS)
    offsets, heads = index // PACK, index % PACK
    q_offsets, grad_offsets = offsets * q_stride + heads * q_head, offsets * grad_stride + heads * grad_head
    stats = offsets * NUM_HEADS + heads
    for i in range(0, steps):
        query = begin + step_of(i, low, high, MASKED) * (ROWS // PACK)
        queries, row = query + offsets, query.to(tl.int64)
        here = queries < num_queries
        q = load_columns(q_ptr + row * q_stride, q_offsets, here, 0, FIRST, H, MASKED)
        q_second = q
        if SECOND > 0:
            q_second = load_columns(q_ptr + row * q_stride, q_offsets, here, FIRST, SECOND, H, MASKED)
        # past the end no key has a share
        lse = load_stats(lse_ptr + row * NUM_HEADS, stats, here, float("inf"), MASKED)
        values = values_of(row_products(k, k_second, q, q_second, SECOND, WIDE), factor, CAPPED)
        powers = tl.exp2(values * unit - lse[None, :])
        if MASKED:
            seen = visible((before + queries)[None, :], keys[:, None], before + num_queries, window, CAUSAL, WINDOW)
            powers = tl.where(seen, powers, 0.0)
        grad = load_columns(grad_ptr + row * grad_stride, grad_offsets, here, 0, VALUES, V, MASKED)
        if GRAD_V:
            grad_values = product(round_to(powers, grad.dtype), grad, grad_values, WIDE)
        if GRAD_K:
            delta = load_stats(delta_ptr + row * NUM_HEADS, stats, here, 0.0, MASKED)
            grad_scores = powers * (product(v, tl.trans(grad), tl.zeros_like(powers), WIDE) - delta[None, :])
            if CAPPED:
                grad_scores *= 1.0 - values * values
            grad_scores = round_to(grad_scores, q.dtype)
            grad_first = product(grad_scores, q, grad_first, WIDE)
            if SECOND > 0:
                grad_second = product(grad_scores, q_second, grad_second, WIDE)
    return grad_first, grad_second, grad_values
