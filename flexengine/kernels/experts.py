"""Dispatches rows of tokens to experts and combines the results.

T tokens, K experts of each, R = T * K rows sorted by expert, E experts. `place` [T, K]: the row of a token's k-th
expert; `bounds` [E + 1]: rows bounds[e] to bounds[e + 1] are those of expert e. Both stay on the device: grids depend
on R and E alone, so nothing is read back and any routing, even all tokens to one expert, takes the same memory. E may
be some consecutive experts of more: then other rows are neither read nor written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.counts import next_power_of_2
from flexengine.kernels.rounding import round_to
from flexengine.kernels.row_range import is_within, row_range


def dispatch(x: Tensor, place: Tensor, rows: Tensor, bounds: Tensor | None = None) -> None:
    """rows[place[t, k]] = x[t] for every k; with bounds [E + 1] int32 only the rows of these experts.

    Shapes: x [T, D] in bf16 or fp32, place [T, K] int32, rows [T * K, D]; rows of x and of rows may be strided.
    Cost: reads T*D and writes K*T*D elements. Order: launches on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes or strides.
    """
    tokens, width = x.shape
    count = place.shape[1]
    check_tensor("x", x, (tokens, width), FLOATS, strided_rows=True)
    check_tensor("place", place, (tokens, count), (torch.int32,))
    check_tensor("rows", rows, (tokens * count, width), (x.dtype,), strided_rows=True)
    if x.numel() == 0:
        return
    block = min(2048, next_power_of_2(width))
    _dispatch_kernel[(tokens,)](
        x, place, rows, *row_range(bounds, place), width, x.stride(0), rows.stride(0),
        SOME=bounds is not None, COUNT=count, BLOCK=block, num_warps=4,
    )  # fmt: skip


def combine(
    rows: Tensor, place: Tensor, out: Tensor, added: Tensor | None, last_first: bool = False,
    bounds: Tensor | None = None, sums: Tensor | None = None,
) -> None:  # fmt: skip
    """out[t] = (sums[t] +) sum over k of rows[place[t, k]] (+ added[t]), in fp32 with one rounding, in the order of
    rows or, with last_first, against it; with bounds [E + 1] int32 over the rows of these experts alone.

    Shapes: rows [T * K, D] in bf16 or fp32, place [T, K] int32, added [T, D] as rows, sums [T, D] fp32, out [T, D] as
    rows or fp32; rows may be strided, added or sums may be out. Cost: reads K*T*D and writes T*D elements.
    Order: launches on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes or strides.
    """
    tokens, width = out.shape
    count = place.shape[1]
    check_tensor("rows", rows, (tokens * count, width), FLOATS, strided_rows=True)
    check_tensor("place", place, (tokens, count), (torch.int32,))
    check_tensor("out", out, (tokens, width), (rows.dtype, torch.float32), strided_rows=True)
    if added is not None:
        check_tensor("added", added, (tokens, width), (rows.dtype,), strided_rows=True)
    if sums is not None:
        check_tensor("sums", sums, (tokens, width), (torch.float32,))
    if out.numel() == 0:
        return
    base, total = out if added is None else added, out if sums is None else sums
    block = min(2048, next_power_of_2(width))
    _combine_kernel[(tokens,)](
        rows, place, out, base, total, *row_range(bounds, place), width, rows.stride(0), out.stride(0),
        base.stride(0), SOME=bounds is not None, SUMS=sums is not None, ADDED=added is not None,
        LAST_FIRST=last_first, COUNT=count, COUNTS=next_power_of_2(count), BLOCK=block, num_warps=4,
    )  # fmt: skip


@triton.jit
def _dispatch_kernel(
    x_ptr, place_ptr, rows_ptr, bounds_ptr, experts, width, x_stride, rows_stride,
    SOME: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    for first in range(0, width, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        mask = columns < width
        x = tl.load(x_ptr + token * x_stride + columns, mask=mask, other=0.0)
        for k in range(COUNT):
            row = tl.load(place_ptr + token * COUNT + k).to(tl.int64)
            wanted = mask
            if SOME:
                wanted = mask & is_within(row, bounds_ptr, experts)
            tl.store(rows_ptr + row * rows_stride + columns, x, mask=wanted)


@triton.jit
def _combine_kernel(
    rows_ptr, place_ptr, out_ptr, added_ptr, sums_ptr, bounds_ptr, experts, width, rows_stride, out_stride,
    added_stride,
    SOME: tl.constexpr, SUMS: tl.constexpr, ADDED: tl.constexpr, LAST_FIRST: tl.constexpr, COUNT: tl.constexpr,
    COUNTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, COUNTS)
    places = tl.load(place_ptr + token * COUNT + index, mask=index < COUNT, other=2147483647)
    rank = tl.sum((places[:, None] > places[None, :]).to(tl.int32), 1)
    for first in range(0, width, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        mask = columns < width
        total = tl.zeros((BLOCK,), tl.float32)
        if SUMS:
            total = tl.load(sums_ptr + token * width + columns, mask=mask, other=0.0)
        for k in range(COUNT):
            wanted_rank = COUNT - 1 - k if LAST_FIRST else k
            row = tl.sum(tl.where(rank == wanted_rank, places, 0), 0).to(tl.int64)
            wanted = mask
            if SOME:
                wanted = mask & is_within(row, bounds_ptr, experts)
            total += tl.load(rows_ptr + row * rows_stride + columns, mask=wanted, other=0.0).to(tl.float32)
        if ADDED:
            total += tl.load(added_ptr + token * added_stride + columns, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + token * out_stride + columns, round_to(total, out_ptr.dtype.element_ty), mask=mask)
