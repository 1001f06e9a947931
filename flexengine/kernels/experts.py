"""Dispatches rows of tokens to experts, combines the results, and multiplies each expert with its rows.

T tokens, K experts of each, R = T * K rows sorted by expert, E experts. `place` [T, K]: the row of a token's k-th
expert; `bounds` [E + 1]: rows bounds[e] to bounds[e + 1] are those of expert e. Both stay on the device: grids depend
on R and E alone, so nothing is read back and any routing, even all tokens to one expert, takes the same memory. E may
be some consecutive experts of more: then other rows are neither read nor written.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.rounding import round_to
from flexengine.kernels.row_range import is_within, row_range


class Tiling(NamedTuple):
    """A program's tile of rows by columns; it takes `inner` terms of its sums at a time.

    Neighbouring programs share `group` tiles of rows, so that what they read stays in the card's cache.
    """

    rows: int
    columns: int
    inner: int
    group: int
    warps: int
    stages: int

    def launch(self) -> dict[str, int]:
        """Keywords of a launch."""
        return {"num_warps": self.warps, "num_stages": self.stages}


def _tiling(x: Tensor) -> Tiling:
    """Choose the tiles of a product.

    The stages of both operands fit the 99 KiB of shared memory of smaller cards. Tiles are twice as wide if 144 KiB
    fit.
    """
    if x.element_size() == 4:
        return Tiling(128, 128, 32, 8, 8, 3)
    wide = x.is_cuda and _shared_memory_bytes(x.get_device()) >= 160 * 1024
    return Tiling(128, 256 if wide else 128, 64, 8, 8, 3)


def _gradient_tiling(x: Tensor) -> Tiling:
    """Choose the tiles of a weight's gradient.

    Two programs share a multiprocessor: one reads and writes its accumulator while the other computes its sums.
    """
    return Tiling(128, 128, 32, 8, 8, 3) if x.element_size() == 4 else Tiling(128, 128, 64, 8, 4, 3)


@lru_cache
def _shared_memory_bytes(device: int) -> int:
    """Read how much shared memory one program may use."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


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
    block = min(2048, triton.next_power_of_2(width))
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
    block = min(2048, triton.next_power_of_2(width))
    _combine_kernel[(tokens,)](
        rows, place, out, base, total, *row_range(bounds, place), width, rows.stride(0), out.stride(0),
        base.stride(0), SOME=bounds is not None, SUMS=sums is not None, ADDED=added is not None,
        LAST_FIRST=last_first, COUNT=count, COUNTS=triton.next_power_of_2(count), BLOCK=block, num_warps=4,
    )  # fmt: skip


def grouped_product(
    x: Tensor, weight: Tensor, bounds: Tensor, out: Tensor, transposed: bool, bias: Tensor | None = None,
    row_weight: Tensor | None = None, added: bool = False, gains: Tensor | None = None,
) -> None:  # fmt: skip
    """out[r] = x[r] @ weight[e].T (+ (row_weight[r] *) bias[e]) for the rows r of every expert e; transposed:
    x[r] @ weight[e]; added: on top of what out holds; gains [E, F] fp32: what the sum is multiplied by, without bias.

    Shapes: x [R, D] and out [R, F] in bf16 or fp32, weight [E, F, D] (transposed: [E, D, F]), bounds [E + 1] int32,
    bias [E, F] of x's dtype, row_weight [R] fp32. Sums in fp32, one rounding. Deterministic: the order of a sum depends
    on shapes alone.
    Order: launches on the current stream, never synchronises. Raises: ValueError on other shapes, dtypes or strides.
    """
    (count, inner), columns, experts = x.shape, out.shape[1], weight.shape[0]
    check_tensor("x", x, (count, inner), FLOATS)
    check_tensor("out", out, (count, columns), (x.dtype,))
    shape = (experts, inner, columns) if transposed else (experts, columns, inner)
    check_tensor("weight", weight, shape, (x.dtype,))
    check_tensor("bounds", bounds, (experts + 1,), (torch.int32,))
    if bias is not None:
        check_tensor("bias", bias, (experts, columns), (x.dtype,))
    if row_weight is not None:
        check_tensor("row_weight", row_weight, (count,), (torch.float32,))
    if gains is not None:
        check_tensor("gains", gains, (experts, columns), (torch.float32,))
        if bias is not None:
            raise ValueError("a product has gains or a bias, not both")
    if out.numel() == 0:
        return
    t = _tiling(x)
    block_rows = min(t.rows, max(16, triton.next_power_of_2(count)))
    row_tiles = triton.cdiv(count, block_rows) + experts
    block_columns = min(t.columns, max(16, triton.next_power_of_2(columns)))
    _product_kernel[(row_tiles * triton.cdiv(columns, block_columns),)](
        x, weight, bounds, out, out if bias is None else bias, out if row_weight is None else row_weight,
        out if gains is None else gains, inner, columns, experts, row_tiles,
        weight.stride(0), weight.stride(2 if transposed else 1), weight.stride(1 if transposed else 2),
        WIDE=not x.is_cuda, EXPERTS=triton.next_power_of_2(experts), ROWS=block_rows, COLUMNS=block_columns,
        INNER=t.inner, GROUP=t.group, BIAS=bias is not None, WEIGHTED=row_weight is not None, ADDED=added,
        GAINS=gains is not None,
        **t.launch(),
    )  # fmt: skip


def grouped_weight_gradient(grad_y: Tensor, x: Tensor, bounds: Tensor, acc: Tensor, accumulate: bool) -> None:
    """acc[e] = (or +=) grad_y[rows of e].T @ x[rows of e]; an expert without rows has zero.

    Shapes: grad_y [R, F] and x [R, D] in bf16 or fp32, bounds [E + 1] int32, acc [E, F, D] fp32. Sums in fp32, rows in
    order.
    Order: launches on the current stream, never synchronises. Raises: ValueError on other shapes, dtypes or strides.
    """
    (count, columns), inner, experts = grad_y.shape, x.shape[1], acc.shape[0]
    check_tensor("grad_y", grad_y, (count, columns), FLOATS)
    check_tensor("x", x, (count, inner), (grad_y.dtype,))
    check_tensor("bounds", bounds, (experts + 1,), (torch.int32,))
    check_tensor("acc", acc, (experts, columns, inner), (torch.float32,))
    t = _gradient_tiling(x)
    grid = (experts * triton.cdiv(columns, t.rows) * triton.cdiv(inner, t.columns),)
    _weight_gradient_kernel[grid](
        grad_y, x, bounds, acc, columns, inner, ACCUMULATE=accumulate, WIDE=not x.is_cuda, OUTS=t.rows, INS=t.columns,
        ROWS=t.inner, GROUP=t.group, **t.launch(),
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


@triton.jit
def _add_product(total, a, b, WIDE: tl.constexpr):
    """WIDE: in fp32, for Triton's interpreter, which takes the bits of bf16 operands for whole numbers."""
    if WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    else:
        return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _grouped_tile(program, row_tiles, column_tiles, GROUP: tl.constexpr):
    """(row tile, column tile) of a program: GROUP tiles of rows go through all columns together."""
    first = program // (GROUP * column_tiles) * GROUP
    size = tl.minimum(row_tiles - first, GROUP)
    within = program % (GROUP * column_tiles)
    return first + within % size, within // size


@triton.jit(do_not_specialize=["row_tiles"])
def _product_kernel(
    x_ptr, weight_ptr, bounds_ptr, out_ptr, bias_ptr, row_weight_ptr, gains_ptr, inner, columns, experts, row_tiles,
    expert_stride, column_stride, inner_stride,
    WIDE: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
    GROUP: tl.constexpr, BIAS: tl.constexpr, WEIGHTED: tl.constexpr, ADDED: tl.constexpr, GAINS: tl.constexpr,
):  # fmt: skip
    """A tile of rows of one expert. The last tile of each may be part filled, so there are as many more as experts."""
    tile, column_tile = _grouped_tile(tl.program_id(0), row_tiles, tl.cdiv(columns, COLUMNS), GROUP)
    index = tl.arange(0, EXPERTS)
    starts = tl.load(bounds_ptr + index, mask=index < experts, other=0)
    ends = tl.load(bounds_ptr + index + 1, mask=index < experts, other=0)
    tiles = tl.where(index < experts, (ends - starts + ROWS - 1) // ROWS, 0)
    tile_ends = tl.cumsum(tiles, 0)
    expert = tl.sum((tile_ends <= tile).to(tl.int32), 0)
    if expert < experts:  # else there are fewer tiles than programs
        mine = index == expert
        start = tl.sum(tl.where(mine, starts, 0), 0)
        end = tl.sum(tl.where(mine, ends, 0), 0)
        before = tl.sum(tl.where(mine, tile_ends - tiles, 0), 0)
        rows = (start + (tile - before) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        outs = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        row_mask, out_mask = rows < end, outs < columns
        weights = weight_ptr + expert.to(tl.int64) * expert_stride + outs.to(tl.int64)[None, :] * column_stride
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(0, inner, INNER):
            inners = first + tl.arange(0, INNER)
            inner_mask = inners < inner
            x = tl.load(x_ptr + rows[:, None] * inner + inners[None, :], mask=row_mask[:, None] & inner_mask, other=0.0)
            w = tl.load(weights + inners[:, None] * inner_stride, mask=inner_mask[:, None] & out_mask, other=0.0)
            total = _add_product(total, x, w, WIDE)
        if BIAS:
            added = tl.load(bias_ptr + expert.to(tl.int64) * columns + outs, mask=out_mask, other=0.0).to(tl.float32)
            if WEIGHTED:
                total += added[None, :] * tl.load(row_weight_ptr + rows, mask=row_mask, other=0.0)[:, None]
            else:
                total += added[None, :]
        target = out_ptr + rows[:, None] * columns + outs[None, :]
        if ADDED:
            total += tl.load(target, mask=row_mask[:, None] & out_mask, other=0.0).to(tl.float32)
        if GAINS:
            total *= tl.load(gains_ptr + expert.to(tl.int64) * columns + outs, mask=out_mask, other=0.0)[None, :]
        tl.store(target, round_to(total, out_ptr.dtype.element_ty), mask=row_mask[:, None] & out_mask)


@triton.jit
def _weight_gradient_kernel(
    grad_y_ptr, x_ptr, bounds_ptr, acc_ptr, columns, inner,
    ACCUMULATE: tl.constexpr, WIDE: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, ROWS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    out_tiles, in_tiles = tl.cdiv(columns, OUTS), tl.cdiv(inner, INS)
    expert = tl.program_id(0) // (out_tiles * in_tiles)
    out_tile, in_tile = _grouped_tile(tl.program_id(0) % (out_tiles * in_tiles), out_tiles, in_tiles, GROUP)
    start, end = tl.load(bounds_ptr + expert), tl.load(bounds_ptr + expert + 1)
    outs, ins = out_tile * OUTS + tl.arange(0, OUTS), in_tile * INS + tl.arange(0, INS)
    total = tl.zeros((OUTS, INS), tl.float32)
    for first in range(start, end, ROWS):
        rows = (first + tl.arange(0, ROWS)).to(tl.int64)
        mask = rows < end
        grads = grad_y_ptr + rows[None, :] * columns + outs[:, None]
        grad = tl.load(grads, mask=mask[None, :] & (outs < columns)[:, None], other=0.0)
        x = tl.load(x_ptr + rows[:, None] * inner + ins[None, :], mask=mask[:, None] & (ins < inner), other=0.0)
        total = _add_product(total, grad, x, WIDE)
    target = acc_ptr + expert.to(tl.int64) * columns * inner + outs.to(tl.int64)[:, None] * inner + ins[None, :]
    mask = (outs < columns)[:, None] & (ins < inner)[None, :]
    if ACCUMULATE:
        total += tl.load(target, mask=mask, other=0.0)
    tl.store(target, total, mask=mask)
