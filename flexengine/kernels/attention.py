"""Causal attention over packed sequences, forward: a program takes a tile of queries through the keys that they see.

Source: Dao 2023, "FlashAttention-2" (arXiv 2307.08691): softmax in one pass with a running maximum, float32 sums. What
is new here is what the project's models need of it: soft caps, sinks, windows whose far keys are not read, values
narrower than keys, heads of any width to 256, and queries that follow keys of earlier chunks.

Shapes: q, out's rows [T, N, H], [T, N, V]; k [K, G, H], v [K, G, V], where K = T, or K > T for one sequence whose last T
keys are the queries' own; lse [N, T] float32; cu_seqlens [sequences + 1] int32, of the queries. Rows may be strided.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.attention_tiles import (
    HIDDEN,
    LN_2,
    LOG2_E,
    Scoring,
    Tiling,
    Widths,
    find_tile,
    key_steps,
    load_columns,
    packed_heads,
    product,
    row_products,
    slots,
    step_of,
    store_columns,
    values_of,
    visible,
)
from flexengine.kernels.checks import FLOATS, check_tensor

MOST_WIDTH = 256
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
                f"attention: {heads} heads of width {width} over {groups} of width {width} and {value_width}; widths go "
                f"to {MOST_WIDTH}, and groups must divide heads"
            )
        if keys < tokens or (keys > tokens and len(self.cu_seqlens) != 2):
            raise ValueError(
                f"attention: {keys} keys for {tokens} queries of {len(self.cu_seqlens) - 1} sequences; earlier keys go "
                "with one sequence"
            )

    def strides(self) -> tuple[int, ...]:
        """From row to row and from head to head, of q, k and v."""
        return tuple(x.stride(dim) for x in (self.q, self.k, self.v) for dim in (0, 1))


def forward_tiling(widths: Widths) -> Tiling:
    """The tile of the forward kernel."""
    if max(widths.columns, widths.VALUES) > 128:
        return Tiling(128, 64, 8, 2)
    return Tiling(128, 64, 4, 3)


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
    tiling = forward_tiling(widths)
    pack = packed_heads(heads, groups, tiling.rows)
    grid = (slots(tokens, cu_seqlens, tiling.rows // pack), heads // pack)
    _forward_kernel[grid](
        q, k, v, out, lse, lse if sinks is None else sinks, cu_seqlens,
        *operands.strides(), out.stride(0), out.stride(1),
        tokens, operands.before, len(cu_seqlens) - 1, scoring.window, heads // groups, *scoring.factors(), LOG2_E,
        **widths._asdict(), PACK=pack, ROWS=tiling.rows, BLOCK=tiling.keys, CAUSAL=scoring.causal,
        WINDOW=scoring.window > 0, CAPPED=scoring.soft_cap > 0, WIDE=not q.is_cuda, SINKS=sinks is not None, **tiling.launch(),
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "before", "sequences", "window"])
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, sinks_ptr, cu_ptr,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, out_stride, out_head,
    tokens, before, sequences, window, members, factor, unit, log2_e,
    H: tl.constexpr, V: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, VALUES: tl.constexpr,
    PACK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, WIDE: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    QUERIES: tl.constexpr = ROWS // PACK
    start, length, tile = find_tile(cu_ptr, sequences, tl.program_id(0), QUERIES)
    tile = tl.cdiv(length, QUERIES) - 1 - tile  # those with the most keys come first
    if tile < 0:
        return
    index, head = tl.arange(0, ROWS), tl.program_id(1) * PACK
    queries, heads = tile * QUERIES + index // PACK, head + index % PACK
    here, first = queries < length, before + tile * QUERIES
    rows = (start + queries).to(tl.int64)
    q = load_columns(q_ptr, rows * q_stride + heads * q_head, here, 0, FIRST, H, True)
    q_second = q
    if SECOND > 0:
        q_second = load_columns(q_ptr, rows * q_stride + heads * q_head, here, FIRST, SECOND, H, True)
    group, row = head // members, start.to(tl.int64)
    k_ptr += row * k_stride + group * k_head
    v_ptr += row * v_stride + group * v_head
    if SINKS:
        top, total = tl.load(sinks_ptr + heads).to(tl.float32) * log2_e, tl.full((ROWS,), 1.0, tl.float32)
    else:
        top, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, VALUES), tl.float32)
    keys = before + length
    begin, low, high, steps = key_steps(first, first + QUERIES - 1, keys, window, CAUSAL, WINDOW, BLOCK)
    acc, total, top = _take_keys(
        acc, total, top, q, q_second, k_ptr, v_ptr, k_stride, v_stride, before + queries, keys, window, factor, unit,
        begin, low, high, high - low,
        H, V, FIRST, SECOND, VALUES, BLOCK, CAUSAL, WINDOW, CAPPED, WIDE, False,
    )  # fmt: skip
    acc, total, top = _take_keys(
        acc, total, top, q, q_second, k_ptr, v_ptr, k_stride, v_stride, before + queries, keys, window, factor, unit,
        begin, low, high, steps - (high - low),
        H, V, FIRST, SECOND, VALUES, BLOCK, CAUSAL, WINDOW, CAPPED, WIDE, True,
    )  # fmt: skip
    store_columns(out_ptr, rows * out_stride + heads * out_head, here, acc / total[:, None], 0, VALUES, V, False)
    lse = (top + tl.log2(total)) * LN_2
    tl.store(lse_ptr + heads.to(tl.int64) * tokens + rows, lse, mask=here)


@triton.jit
def _take_keys(
    acc, total, top, q, q_second, k_ptr, v_ptr, k_stride, v_stride, positions, num_keys, window, factor, unit,
    begin, low, high, steps,
    H: tl.constexpr, V: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, VALUES: tl.constexpr,
    BLOCK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, WIDE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Sums of values, of exponentials, and the highest score, with so many more steps of keys."""
    offsets = tl.arange(0, BLOCK)
    for i in range(0, steps):
        key = begin + step_of(i, low, high, MASKED) * BLOCK
        keys, row = key + offsets, key.to(tl.int64)
        k = load_columns(k_ptr + row * k_stride, offsets * k_stride, keys < num_keys, 0, FIRST, H, MASKED)
        k_second = k
        if SECOND > 0:
            k_second = load_columns(k_ptr + row * k_stride, offsets * k_stride, keys < num_keys, FIRST, SECOND, H, MASKED)
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
        acc = product(powers.to(v.dtype), v, acc, WIDE)
        top = higher
    return acc, total, top
