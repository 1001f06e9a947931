"""The products of kernels/grouped.py where the card's engine for tiles (TMA) loads the operands: Hopper cards.

A descriptor knows a matrix and the shape of its tiles, so that a program gives two numbers where it else computes an
address and a mask for every row. What lies beyond a matrix is loaded as zero; what belongs to the next expert is loaded
as it is: it comes only into rows and columns that are not stored.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.counts import cdiv, next_power_of_2
from flexengine.kernels.grouped_tiles import (
    LowRank,
    Scales,
    Tiling,
    add_product,
    add_scaled,
    block_strides,
    described,
    find_expert,
    grouped_tile,
    load_matrix,
    scaled,
    scaling,
    store_tile,
)


def launch(
    x: Tensor, weight: Tensor, bounds: Tensor, out: Tensor, transposed: bool, bias: Tensor | None,
    row_weight: Tensor | None, adapter: LowRank | None, gains: Tensor | None, t: Tiling, scales: Scales | None = None,
) -> None:  # fmt: skip
    """`grouped.grouped_product` of operands that it has checked, with tiles of t; a sum is whole tiles of t.inner."""
    (count, inner), columns, experts = x.shape, out.shape[1], weight.shape[0]
    rows, weights, low, up, width, block = described(x, weight, transposed, adapter, t)
    row_scales, column_scales = (out, out) if scales is None else scales[:2]
    row_tiles = cdiv(count, t.rows) + experts
    _descriptor_kernel[(row_tiles * cdiv(columns, t.columns),)](
        rows, weights, low, up, bounds, out, out if bias is None else bias, out if row_weight is None else row_weight,
        out if gains is None else gains, row_scales, column_scales, inner, columns, width, experts, row_tiles,
        *block_strides(scales), WIDE=not x.is_cuda, EXPERTS=next_power_of_2(experts), ROWS=t.rows, COLUMNS=t.columns,
        INNER=t.inner, LOW=block, GROUP=t.group, TRANSPOSED=transposed,
        UP_TRANSPOSED=adapter is not None and adapter.transposed, BIAS=bias is not None,
        WEIGHTED=row_weight is not None, GAINS=gains is not None, **scaling(scales), **t.launch(),
    )  # fmt: skip


@triton.jit(do_not_specialize=["row_tiles", "block_rows"])
def _descriptor_kernel(
    x_tiles, weight_tiles, low_tiles, up_tiles, bounds_ptr, out_ptr, bias_ptr, row_weight_ptr, gains_ptr,
    row_scales_ptr, column_scales_ptr, inner, columns, width, experts, row_tiles, block_rows, square_stride,
    WIDE: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
    LOW: tl.constexpr, GROUP: tl.constexpr, TRANSPOSED: tl.constexpr, UP_TRANSPOSED: tl.constexpr, BIAS: tl.constexpr,
    WEIGHTED: tl.constexpr, GAINS: tl.constexpr, SCALED: tl.constexpr, BLOCKS: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """A tile of rows of one expert. The last tile of each may be part filled, so there are as many more as experts."""
    tile, column_tile = grouped_tile(tl.program_id(0), row_tiles, tl.cdiv(columns, COLUMNS), GROUP)
    expert, first_row, end = find_expert(bounds_ptr, tile, experts, EXPERTS, ROWS)
    if expert < experts:  # else there are fewer tiles than programs
        column = column_tile * COLUMNS
        rows = (first_row + tl.arange(0, ROWS)).to(tl.int64)
        outs = column + tl.arange(0, COLUMNS)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(0, inner, INNER):
            x = x_tiles.load([first_row, first])
            w = load_matrix(weight_tiles, expert, first, columns, column, inner, TRANSPOSED)
            if BLOCKS:
                part = add_product(tl.zeros((ROWS, COLUMNS), tl.float32), x, w, WIDE)
                total = add_scaled(
                    total, part, first // INNER, row_scales_ptr, column_scales_ptr, expert, rows, outs, end, columns,
                    block_rows, square_stride,
                )  # fmt: skip
            else:
                total = add_product(total, x, w, WIDE, SHORT)
        if SCALED:
            total = scaled(total, row_scales_ptr, column_scales_ptr, expert, rows, outs, end, columns)
        if LOW > 0:
            for first in range(0, width, LOW):
                low = low_tiles.load([first_row, first])
                up = load_matrix(up_tiles, expert, first, columns, column, width, UP_TRANSPOSED)
                total = add_product(total, low, up, WIDE)
        store_tile(
            total, out_ptr, bias_ptr, row_weight_ptr, gains_ptr, expert, rows, outs, end, columns, BIAS, WEIGHTED, GAINS
        )
