"""Attention of one new token of each of many sequences over its own cache, all in one launch.

A program takes the query heads of one sequence that read the same keys through that sequence's cache, so that what it
finds depends on no other sequence. Softmax in one pass with a running maximum, as in `attention.py`.

Shapes, for N query and G key heads of width H and values of width V: qkv [T, (N + G) * H + G * V], out [T, N * V]; of
B tokens rows [B] int32 are their rows in both, and starts [B] int32 how many tokens their caches hold; caches [2, B]
int64 are the addresses of keys [*, G, H] and of values [*, G, V].
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.attention_tiles import HIDDEN, product, values_of
from flexengine.kernels.attention_tilings import LOG2_E, Scoring
from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.counts import next_power_of_2
from flexengine.kernels.rounding import round_to

BLOCK = 64
"""Keys that a program takes at once."""
LEAST_ROWS = 16
"""Of a product on tensor cores."""


class Heads(NamedTuple):
    """Query heads, key heads, and the widths of a key and a value."""

    queries: int
    keys: int
    width: int
    value_width: int


class NewTokens(NamedTuple):
    """Which rows are new tokens, how many tokens their caches hold, and where these lie."""

    rows: Tensor
    starts: Tensor
    caches: Tensor


def attention_decode(
    qkv: Tensor, new: NewTokens, heads: Heads, scoring: Scoring, out: Tensor, sinks: Tensor | None = None
) -> None:
    """Put the keys and values of new tokens into their caches behind what these hold, and write what they attend to.

    Other rows of out stay as they are. Order: one launch on the current stream, never synchronises. Deterministic: the
    order of a row's sums depends on its own length alone. Raises: ValueError on other shapes, dtypes or strides.
    """
    scoring.check()
    n, g, h, v = heads
    tokens, count = len(qkv), len(new.rows)
    check_tensor("qkv", qkv, (tokens, (n + g) * h + g * v), FLOATS, strided_rows=True)
    check_tensor("out", out, (tokens, n * v), (qkv.dtype,), strided_rows=True)
    check_tensor("rows", new.rows, (count,), (torch.int32,))
    check_tensor("starts", new.starts, (count,), (torch.int32,))
    check_tensor("caches", new.caches, (2, count), (torch.int64,))
    if sinks is not None:
        check_tensor("sinks", sinks, (n,), FLOATS)
    if count == 0:
        return
    members = n // g
    _decode_kernel[count, g](
        qkv, out, *new, qkv if sinks is None else sinks,
        qkv.stride(0), out.stride(0), count, scoring.window, *scoring.factors(), LOG2_E,
        N=n, G=g, H=h, V=v, KEYS=next_power_of_2(h), VALUES=next_power_of_2(v), MEMBERS=members,
        ROWS=max(LEAST_ROWS, next_power_of_2(members)), BLOCK=BLOCK, CAPPED=scoring.soft_cap > 0,
        WINDOW=scoring.window > 0, SINKS=sinks is not None, WIDE=not qkv.is_cuda, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["sequences", "window"])
def _decode_kernel(
    qkv_ptr, out_ptr, rows_ptr, starts_ptr, caches_ptr, sinks_ptr, row_stride, out_stride, sequences, window, factor,
    unit, log2_e, N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, V: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, MEMBERS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CAPPED: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    row, start = tl.load(rows_ptr + sequence).to(tl.int64), tl.load(starts_ptr + sequence)
    keys_ptr = tl.load(caches_ptr + sequence).to(tl.pointer_type(qkv_ptr.dtype.element_ty)) + head * H
    values_ptr = tl.load(caches_ptr + sequences + sequence).to(tl.pointer_type(qkv_ptr.dtype.element_ty)) + head * V
    members, columns, value_columns = tl.arange(0, ROWS), tl.arange(0, KEYS), tl.arange(0, VALUES)
    in_key, in_value = columns < H, value_columns < V

    fused = qkv_ptr + row * row_stride
    own_key = tl.load(fused + (N + head) * H + columns, mask=in_key, other=0.0)
    own_value = tl.load(fused + (N + G) * H + head * V + value_columns, mask=in_value, other=0.0)
    place = start.to(tl.int64) * G
    tl.store(keys_ptr + place * H + columns, own_key, mask=in_key)
    tl.store(values_ptr + place * V + value_columns, own_value, mask=in_value)

    mine = (members < MEMBERS)[:, None]
    queries = (head * MEMBERS + members)[:, None] * H + columns[None, :]
    q = tl.load(fused + queries, mask=mine & in_key[None, :], other=0.0)
    own = tl.sum(q.to(tl.float32) * own_key.to(tl.float32)[None, :], axis=1)
    top = values_of(own, factor, CAPPED) * unit
    total = tl.full((ROWS,), 1.0, tl.float32)
    sums = tl.zeros((ROWS, VALUES), tl.float32) + own_value.to(tl.float32)[None, :]

    first = start * 0
    if WINDOW:
        first = tl.maximum(start - window + 1, 0)
    for block in range(first, start, BLOCK):
        index = block + tl.arange(0, BLOCK)
        here, offsets = index < start, index.to(tl.int64)[:, None] * G
        keys = tl.load(keys_ptr + offsets * H + columns[None, :], mask=here[:, None] & in_key[None, :], other=0.0)
        products = product(q, tl.trans(keys), tl.zeros((ROWS, BLOCK), tl.float32), WIDE)
        scores = tl.where(here[None, :], values_of(products, factor, CAPPED) * unit, HIDDEN)
        higher = tl.maximum(top, tl.max(scores, axis=1))
        shrunk, weights = tl.exp2(top - higher), tl.exp2(scores - higher[:, None])
        values = tl.load(
            values_ptr + offsets * V + value_columns[None, :], mask=here[:, None] & in_value[None, :], other=0.0
        )
        total = total * shrunk + tl.sum(weights, axis=1)
        sums = product(round_to(weights, values.dtype), values, sums * shrunk[:, None], WIDE)
        top = higher
    if SINKS:
        sinks = tl.load(sinks_ptr + head * MEMBERS + members, mask=members < MEMBERS, other=0.0).to(tl.float32) * log2_e
        higher = tl.maximum(top, sinks)
        shrunk = tl.exp2(top - higher)
        total = total * shrunk + tl.exp2(sinks - higher)
        sums = sums * shrunk[:, None]
    written = out_ptr + row * out_stride + (head * MEMBERS + members)[:, None] * V + value_columns[None, :]
    tl.store(written, round_to(sums / total[:, None], out_ptr.dtype.element_ty), mask=mine & in_value[None, :])
