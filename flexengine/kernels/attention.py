"""Causal attention over packed sequences, forward: a program takes a tile of queries through the keys that they see.

Source: Dao 2023, "FlashAttention-2" (arXiv 2307.08691): softmax in one pass with a running maximum, float32 sums. What
is new here is what the project's models need of it: soft caps, sinks, windows whose far keys are not read, values
narrower than keys, heads of any width to 512, and queries that follow keys of earlier chunks.

Shapes: q [T, N, H], out [T, N, V], k [K, G, H], v [K, G, V], where K = T, or K > T for one sequence whose last T keys
are the queries' own; lse [N, T] float32; cu_seqlens [sequences + 1] int32, of the queries. Rows may be strided.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.attention_short import short_forward_kernel
from flexengine.kernels.attention_tiles import (
    HIDDEN,
    LN_2,
    find_tile,
    key_steps,
    load_columns,
    product,
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
    Widths,
    forward_tiling,
    packed_heads,
    short_tiling,
    slots,
)
from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.rounding import round_to

MOST_WIDTH = 512
"""Of a head's keys and values: the sums of a tile of wider ones would not stay in registers."""


class Operands(NamedTuple):
    """What both directions read; the shapes are the module's."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens: Tensor

    @property
    def before(self) -> int:
        """Keys of earlier chunks."""
        return len(self.k) - len(self.q)

    @property
    def widths(self) -> Widths:
        """Of a head's keys and values."""
        return Widths.of(self.q.shape[2], self.v.shape[2])

    def check(self) -> None:
        """Raises: ValueError on shapes, dtypes or strides that no kernel reads."""
        (tokens, heads, width), (keys, groups, _), value_width = self.q.shape, self.k.shape, self.v.shape[-1]
        check_tensor("q", self.q, (tokens, heads, width), FLOATS, strided_rows=True)
        check_tensor("k", self.k, (keys, groups, width), (self.q.dtype,), strided_rows=True)
        check_tensor("v", self.v, (keys, groups, value_width), (self.q.dtype,), strided_rows=True)
        check_tensor("cu_seqlens", self.cu_seqlens, (len(self.cu_seqlens),), (torch.int32,))
        if max(width, value_width) > MOST_WIDTH or heads % groups:
            raise ValueError(
                f"attention: {heads} query heads over {groups} key heads of widths {width} and {value_width}; expected "
                f"widths up to {MOST_WIDTH}, and a number of key heads that divides that of query heads"
            )
        if keys < tokens or (keys > tokens and len(self.cu_seqlens) != 2):
            raise ValueError(
                f"attention: {keys} keys for {tokens} queries of {len(self.cu_seqlens) - 1} sequences; earlier keys go "
                "with one sequence"
            )

    def strides(self) -> tuple[int, ...]:
        """From row to row and from head to head, of q, k and v."""
        return tuple(x.stride(dim) for x in (self.q, self.k, self.v) for dim in (0, 1))


def attention_forward(
    operands: Operands, scoring: Scoring, out: Tensor, lse: Tensor, sinks: Tensor | None = None
) -> None:
    """out = softmax(scores) v and lse = log of the sum of exponentials, of every row; with sinks [N] each row has one
    more score, of a key whose value is 0.

    Cost: 2 * (H + V) FLOPs per head and visible pair. Order: one launch on the current stream, never synchronises.
    Deterministic: the order of sums depends on lengths alone. Raises: ValueError on other shapes, dtypes or strides.
    """
    operands.check()
    scoring.check()
    q, k, v, cu_seqlens = operands
    (tokens, heads, _), groups = q.shape, k.shape[1]
    check_tensor("out", out, (tokens, heads, v.shape[2]), (q.dtype,), strided_rows=True)
    check_tensor("lse", lse, (heads, tokens), (torch.float32,))
    if sinks is not None:
        check_tensor("sinks", sinks, (heads,), FLOATS)
    if tokens == 0:
        return
    widths = operands.widths
    if short := short_tiling(widths, scoring, heads // groups, False, q.device):
        return _short_forward(operands, scoring, out, lse, sinks, short)
    tiling = forward_tiling(widths, scoring, q.device)
    pack = packed_heads(heads, groups, tiling.rows)
    grid = (slots(tokens, cu_seqlens, tiling.rows // pack), heads // pack)
    _forward_kernel[grid](
        q, k, v, out, lse, lse if sinks is None else sinks, cu_seqlens,
        *operands.strides(), out.stride(0), out.stride(1),
        tokens, operands.before, len(cu_seqlens) - 1, scoring.window, heads // groups, *scoring.factors(), LOG2_E,
        **widths._asdict(), PACK=pack, APART=tiling.apart, ROWS=tiling.rows, BLOCK=tiling.keys, **scoring.constants(),
        WIDE=not q.is_cuda, SINKS=sinks is not None, **tiling.launch(),
    )  # fmt: skip


def _short_forward(
    operands: Operands, scoring: Scoring, out: Tensor, lse: Tensor, sinks: Tensor | None, tiling: ShortTiling
) -> None:
    q, k, v, cu_seqlens = operands
    (tokens, heads, _), widths = q.shape, operands.widths
    short_forward_kernel[slots(tokens, cu_seqlens, tiling.queries), heads // tiling.pack](
        q, k, v, out, lse, lse if sinks is None else sinks, cu_seqlens,
        *operands.strides(), out.stride(0), out.stride(1),
        tokens, operands.before, len(cu_seqlens) - 1, scoring.window, heads // k.shape[1], *scoring.factors(), LOG2_E,
        H=widths.H, V=widths.V, KEYS=widths.FIRST, VALUES=widths.VALUES, CAPPED=scoring.soft_cap > 0,
        WIDE=not q.is_cuda, SINKS=sinks is not None, **tiling.constants(),
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "before", "sequences", "window"])
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, sinks_ptr, cu_ptr, q_stride: tl.constexpr, q_head: tl.constexpr,
    k_stride: tl.constexpr, k_head: tl.constexpr, v_stride: tl.constexpr, v_head: tl.constexpr,
    out_stride: tl.constexpr, out_head: tl.constexpr, tokens, before, sequences, window, members, factor, unit, log2_e,
    H: tl.constexpr, V: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, VALUES: tl.constexpr,
    PACK: tl.constexpr, APART: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, WIDE: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    QUERIES: tl.constexpr = ROWS // PACK
    start, length, tile = find_tile(cu_ptr, sequences, tl.program_id(0), QUERIES)
    tile = tl.cdiv(length, QUERIES) - 1 - tile  # those with the most keys come first
    if tile < 0:
        return
    index, head = tl.arange(0, ROWS), tl.program_id(1) * PACK
    queries, heads, first = index // PACK, index % PACK, tile * QUERIES
    here, own = first + queries < length, (start + first).to(tl.int64)
    q_ptr += own * q_stride + head * q_head
    q = load_columns(q_ptr, queries * q_stride + heads * q_head, here, 0, FIRST, H, True)
    q_second = q
    if SECOND > 0:
        q_second = load_columns(q_ptr, queries * q_stride + heads * q_head, here, FIRST, SECOND, H, True)
    group, row = head // members, start.to(tl.int64)
    k_ptr += row * k_stride + group * k_head
    v_ptr += row * v_stride + group * v_head
    if SINKS:
        top, total = tl.load(sinks_ptr + head + heads).to(tl.float32) * log2_e, tl.full((ROWS,), 1.0, tl.float32)
    else:
        top, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, VALUES), tl.float32)
    first += before
    positions, keys = first + queries, before + length
    begin, low, high, steps = key_steps(first, first + QUERIES - 1, keys, window, CAUSAL, WINDOW, BLOCK)
    if APART:
        acc, total, top = _take_keys(
            acc, total, top, q, q_second, k_ptr, v_ptr, k_stride, v_stride, positions, keys, window, factor, unit,
            begin, low, high, high - low,
            H, V, FIRST, SECOND, VALUES, BLOCK, CAUSAL, WINDOW, CAPPED, WIDE, False,
        )  # fmt: skip
    else:
        high = low
    acc, total, top = _take_keys(
        acc, total, top, q, q_second, k_ptr, v_ptr, k_stride, v_stride, positions, keys, window, factor, unit,
        begin, low, high, steps - (high - low),
        H, V, FIRST, SECOND, VALUES, BLOCK, CAUSAL, WINDOW, CAPPED, WIDE, True,
    )  # fmt: skip
    out_ptr += own * out_stride + head * out_head
    offsets = queries * out_stride + heads * out_head
    store_columns(out_ptr, offsets, here, acc / total[:, None], 0, VALUES, V, False)
    lse_ptr += head.to(tl.int64) * tokens + own
    tl.store(lse_ptr + (heads * tokens + queries), (top + tl.log2(total)) * LN_2, mask=here)


@triton.jit
def _take_keys(
    acc, total, top, q, q_second, k_ptr, v_ptr, k_stride, v_stride, positions, num_keys, window, factor, unit, begin,
    low, high, steps, H: tl.constexpr, V: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, VALUES: tl.constexpr,
    BLOCK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, WIDE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Sums of values, of exponentials, and the highest score, with so many more steps of keys."""
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
        values = values_of(row_products(q, q_second, k, k_second, SECOND, WIDE), factor, CAPPED)
        if MASKED:
            seen = visible(positions[:, None], keys[None, :], num_keys, window, CAUSAL, WINDOW)
            values = tl.where(seen, values, HIDDEN)
        higher = tl.maximum(top, tl.max(values, 1) * unit)
        powers = tl.exp2(values * unit - higher[:, None])
        before = tl.exp2(top - higher)
        total = total * before + tl.sum(powers, 1)
        acc *= before[:, None]
        v = load_columns(v_ptr + row * v_stride, offsets * v_stride, keys < num_keys, 0, VALUES, V, MASKED)
        acc = product(round_to(powers, v.dtype), v, acc, WIDE)
        top = higher
    return acc, total, top
