"""The products of kernels/grouped_tma.py by one program per multiprocessor, which goes through its tiles of all experts
in a single loop over terms of sums: loads of the next tile run while the sums of the last one are stored.

The engine for tiles stores these, without a mask: rows of the next expert are behind the end of what it knows.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.counts import cdiv, next_power_of_2
from flexengine.kernels.grouped_tiles import (
    LIMIT,
    LowRank,
    Scales,
    Tiling,
    add_product,
    add_scaled,
    block_strides,
    described,
    finished,
    grouped_tile,
    load_matrix,
    multiprocessors,
    rows_before,
    scaled,
    scaling,
)
from flexengine.kernels.rounding import round_to


class Walk(NamedTuple):
    """How programs share the work: tiles, the pieces that one is stored in, and programs on a multiprocessor."""

    tiles: Tiling
    parts: int = 2
    programs: int = 1


PRODUCT = Walk(Tiling(128, 256, 64, 8, 8, 3))
"""144 KiB of operands and 32 of sums. On an H200 1.04 to 1.14 times as fast as a program for each tile, with 4 stages
and 4 parts 0.97 to 1.07 (`python -m bench.experts_products`)."""
SHARED_BYTES = 226 * 1024
"""Of the 227 KiB of a Hopper card, less what programs wait for each other by."""


def walk_beside(adapter: LowRank | None) -> Walk | None:
    """How programs share a product of 16 bits to which an adapter adds: in smaller parts where its operands take the
    room of larger ones; None where they leave none."""
    t, width = PRODUCT.tiles, 0 if adapter is None else adapter.low.shape[1]
    operands = 2 * (t.stages * t.inner + width) * (t.rows + t.columns)
    fitting = (parts for parts in (2, 4, 8) if operands + 2 * t.rows * t.columns // parts <= SHARED_BYTES)
    parts = next(fitting, None)
    return None if parts is None else PRODUCT._replace(parts=parts)


def launch(
    x: Tensor, weight: Tensor, bounds: Tensor, out: Tensor, transposed: bool, bias: Tensor | None,
    row_weight: Tensor | None, adapter: LowRank | None, gains: Tensor | None, walk: Walk, scales: Scales | None = None,
) -> None:  # fmt: skip
    """`grouped.grouped_product` of operands that it has checked; a sum is whole tiles of walk.tiles.inner."""
    (count, inner), columns, experts, t = x.shape, out.shape[1], weight.shape[0], walk.tiles
    rows, weights, low, up, width, block = described(x, weight, transposed, adapter, t)
    row_scales, column_scales = (out, out) if scales is None else scales[:2]
    tiles = (cdiv(count, t.rows) + experts) * cdiv(columns, t.columns)
    _walk_kernel[(min(tiles, walk.programs * multiprocessors(x)),)](
        rows, weights, low, up, rows_before(out, [t.rows, t.columns // walk.parts]), bounds,
        out if bias is None else bias, out if row_weight is None else row_weight, out if gains is None else gains,
        row_scales, column_scales, inner, columns, width, experts, *block_strides(scales),
        WIDE=not x.is_cuda, EXPERTS=next_power_of_2(experts), ROWS=t.rows, COLUMNS=t.columns, INNER=t.inner, LOW=block,
        LOWS=width // max(block, 1), GROUP=t.group, PARTS=walk.parts, TRANSPOSED=transposed,
        UP_TRANSPOSED=adapter is not None and adapter.transposed, BIAS=bias is not None,
        WEIGHTED=row_weight is not None, GAINS=gains is not None, **scaling(scales), **t.launch(),
    )  # fmt: skip


@triton.jit
def _put(out_tiles, total, end, first_row, column, PARTS: tl.constexpr):
    """Round sums and store the rows before `end`, a part of their columns at a time."""
    ROWS: tl.constexpr = total.shape[0]
    COLUMNS: tl.constexpr = total.shape[1]
    if PARTS > 1:
        low, high = tl.split(total.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1))
        _put(out_tiles, low, end, first_row, column, PARTS // 2)
        _put(out_tiles, high, end, first_row, column + COLUMNS // 2, PARTS // 2)
    else:
        part = round_to(total, out_tiles.dtype).reshape(1, 1, ROWS, COLUMNS)
        out_tiles.store([LIMIT, end, first_row - end + LIMIT, column], part)


@triton.jit(do_not_specialize=["block_rows"])
def _walk_kernel(
    x_tiles, weight_tiles, low_tiles, up_tiles, out_tiles, bounds_ptr, bias_ptr, row_weight_ptr, gains_ptr,
    row_scales_ptr, column_scales_ptr, inner, columns, width, experts, block_rows, square_stride,
    WIDE: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
    LOW: tl.constexpr, LOWS: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, TRANSPOSED: tl.constexpr,
    UP_TRANSPOSED: tl.constexpr, BIAS: tl.constexpr, WEIGHTED: tl.constexpr, GAINS: tl.constexpr, SCALED: tl.constexpr,
    BLOCKS: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """A share of the tiles of all experts. One loop instead of two: only then loads run ahead from tile to tile."""
    index = tl.arange(0, EXPERTS)
    starts = tl.load(bounds_ptr + index, mask=index < experts, other=0)
    ends = tl.load(bounds_ptr + index + 1, mask=index < experts, other=0)
    tile_ends = tl.cumsum(tl.where(index < experts, tl.cdiv(ends - starts, ROWS), 0), 0)
    row_tiles, column_tiles = tl.max(tile_ends, 0), tl.cdiv(columns, COLUMNS)
    programs = tl.num_programs(0)
    tile = tl.program_id(0) - programs
    first = inner - INNER
    expert, first_row, end, column = 0, 0, 0, 0
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for _ in range(tl.cdiv(row_tiles * column_tiles - tl.program_id(0), programs) * (inner // INNER)):
        first += INNER
        if first >= inner:  # no terms are left of this tile: the next one's
            first = 0
            tile += programs
            row_tile, column_tile = grouped_tile(tile, row_tiles, column_tiles, GROUP)
            expert = tl.sum((tile_ends <= row_tile).to(tl.int32), 0)
            before = tl.max(tl.where(tile_ends <= row_tile, tile_ends, 0), 0)
            end = tl.load(bounds_ptr + expert + 1)
            first_row = tl.load(bounds_ptr + expert) + (row_tile - before) * ROWS
            column = column_tile * COLUMNS
        x = x_tiles.load([first_row, first])
        w = load_matrix(weight_tiles, expert, first, columns, column, inner, TRANSPOSED)
        rows = (first_row + tl.arange(0, ROWS)).to(tl.int64)
        outs = column + tl.arange(0, COLUMNS)
        if BLOCKS:
            part = add_product(tl.zeros((ROWS, COLUMNS), tl.float32), x, w, WIDE)
            total = add_scaled(
                total, part, first // INNER, row_scales_ptr, column_scales_ptr, expert, rows, outs, end, columns,
                block_rows, square_stride,
            )  # fmt: skip
        else:
            total = add_product(total, x, w, WIDE, SHORT)
        if first + INNER >= inner:
            if SCALED:
                total = scaled(total, row_scales_ptr, column_scales_ptr, expert, rows, outs, end, columns)
            if LOW > 0:
                for step in tl.static_range(LOWS):  # a loop inside would keep this one's loads from running ahead
                    low = low_tiles.load([first_row, step * LOW])
                    up = load_matrix(up_tiles, expert, step * LOW, columns, column, width, UP_TRANSPOSED)
                    total = add_product(total, low, up, WIDE)
            total = finished(
                total, bias_ptr, row_weight_ptr, gains_ptr, expert, rows, outs, end, columns, BIAS, WEIGHTED, GAINS
            )
            _put(out_tiles, total, end, first_row, column, PARTS)
            total = tl.zeros((ROWS, COLUMNS), tl.float32)
