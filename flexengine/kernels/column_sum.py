"""Sums over tokens: the gradient of a bias from that of the rows that it was added to.

T tokens, F width, P groups of consecutive rows. A group's rows are summed into one row of `partials`, then the P rows;
so the order of the sum depends on T, F and P alone. Sums in fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.counts import cdiv, next_power_of_2

_COLUMNS = 128  # of a tile: 256 bytes of a bf16 row, fewer where rows are narrower
_ELEMENTS = 32 * _COLUMNS  # of a tile, which one program has under way at once
TOTAL_ROWS, TOTAL_COLUMNS = 256, 16  # of a tile of the second sum: narrow, so that a short row keeps many programs busy


def column_sum(x: Tensor, total: Tensor, partials: Tensor, accumulate: bool) -> None:
    """total = (or +=) the sum of x over T.

    Shapes: x [T, F] in bf16 or fp32, rows may be strided; total [F] fp32; partials [P, F] fp32 is workspace.
    Cost: reads T*F elements of x, writes and reads 4*P*F bytes.
    Order: two launches on the current stream, never synchronises. T = 0 adds nothing.
    Raises: ValueError on other shapes, dtypes or strides, or without partials.
    """
    (count, width), groups = x.shape, partials.shape[0]
    check_tensor("x", x, (count, width), FLOATS, strided_rows=True)
    check_tensor("total", total, (width,), (torch.float32,))
    check_tensor("partials", partials, (groups, width), (torch.float32,))
    if groups == 0:
        raise ValueError("partials must have at least one row, got shape [0, F]")
    if width == 0:
        return
    columns = min(_COLUMNS, next_power_of_2(width))
    rows, tiles = _ELEMENTS // columns, cdiv(width, columns)
    _partial_sum_kernel[(groups * tiles,)](
        x, partials, count, width, rows_of_a_group(count, groups, rows), tiles, x.stride(0),
        ROWS=rows, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    _total_kernel[(cdiv(width, TOTAL_COLUMNS),)](
        partials, total, groups, width, ACCUMULATE=accumulate, ROWS=TOTAL_ROWS, COLUMNS=TOTAL_COLUMNS, num_warps=4
    )


def rows_of_a_group(count: int, groups: int, tile_rows: int) -> int:
    """Rows that a group sums: whole tiles, of which the last groups may find none left."""
    return cdiv(cdiv(count, groups), tile_rows) * tile_rows


@triton.jit
def sum_of_rows(ptr, rows, stride, columns, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[COLUMNS]: the sum over so many rows of fp32, which begin `stride` elements apart."""
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, rows, ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < rows)[:, None] & (columns < width)[None, :]
        total += tl.load(ptr + row[:, None] * stride + columns[None, :], mask=mask, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit(do_not_specialize=["count", "group_rows"])
def _partial_sum_kernel(
    x_ptr, partials_ptr, count, width, group_rows, tiles, x_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """partials[group] = the sum over the group's consecutive rows; lanes of a tile are summed once, at the end.

    Neighbouring programs take neighbouring columns, so that those at work together read whole rows.
    """
    group = (tl.program_id(0) // tiles).to(tl.int64)
    columns = (tl.program_id(0) % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    begin = group * group_rows
    end = tl.minimum(begin + group_rows, count)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for row in range(begin, end, ROWS):
        rows = row + tl.arange(0, ROWS)
        mask = (rows < end)[:, None] & (columns < width)[None, :]
        total += tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(partials_ptr + group * width + columns, tl.sum(total, axis=0), mask=columns < width)


@triton.jit(do_not_specialize=["groups"])
def _total_kernel(
    partials_ptr, total_ptr, groups, width, ACCUMULATE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    columns = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    total = sum_of_rows(partials_ptr, groups, width, columns, width, ROWS, COLUMNS)
    if ACCUMULATE:
        total += tl.load(total_ptr + columns, mask=columns < width, other=0.0)
    tl.store(total_ptr + columns, total, mask=columns < width)
