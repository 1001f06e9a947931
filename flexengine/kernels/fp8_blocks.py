"""Rounds matrices to FP8 (e4m3) with scales for blocks, as they are and transposed, in one pass.

A program reads a tile of 128 x 128 once and finds there the scales of its 128 rows, of its 128 columns, or the one of
the whole tile. A scale depends on its own block alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.counts import cdiv
from flexengine.kernels.fp8 import fp8_bits, within
from flexengine.kernels.rounding import INTERPRETED
from flexengine.kernels.row_range import row_range

CODES = (torch.float8_e4m3fn,)
BLOCK = tl.constexpr(128)


def round_vectors(
    x: Tensor, largest: float, least: float, rows: tuple[Tensor, Tensor] | None, columns: tuple[Tensor, Tensor] | None,
    bounds: Tensor | None = None,
) -> None:  # fmt: skip
    """rows = (codes, scales) of x with a scale for every row and 128 columns; columns = the same of x transposed.
    bounds [E + 1] int32: tiles without rows of these experts are left out.

    Shapes: x [R, C] in bf16 or fp32; codes of rows [R, C], scales [ceil(C / 128), R]; codes of columns [C, S], S >= R a
    multiple of 128 and zero beyond R, scales [S / 128, C]. largest: of the codes; least: what a block's largest
    magnitude counts as at least. Rounding: as kernels/fp8.py.
    Cost: reads R*C elements once, writes R*C codes for each result.
    Order: launches on the current stream, never synchronises. Raises: ValueError on other shapes, dtypes or strides.
    """
    num_rows, num_columns = x.shape
    tiles, padded = cdiv(num_columns, 128), num_rows
    check_tensor("x", x, x.shape, FLOATS)
    if rows is not None:
        check_tensor("codes of rows", rows[0], x.shape, CODES)
        check_tensor("scales of rows", rows[1], (tiles, num_rows), (torch.float32,))
    if columns is not None:
        padded = cdiv(num_rows, 128) * 128
        check_tensor("codes of columns", columns[0], (num_columns, padded), CODES)
        check_tensor("scales of columns", columns[1], (padded // 128, num_columns), (torch.float32,))
    some = rows or columns
    if some is None or x.numel() == 0:
        return
    row_codes, row_scales = rows or some
    column_codes, column_scales = columns or some
    _vectors_kernel[(cdiv(num_rows, 128) * tiles,)](
        x, row_codes.view(torch.uint8), row_scales, column_codes.view(torch.uint8), column_scales, num_rows,
        num_columns, padded, tiles, *row_range(bounds, x), largest, least, ROWS=rows is not None,
        COLUMNS=columns is not None, SOME=bounds is not None, num_warps=8,
    )  # fmt: skip


def round_squares(x: Tensor, largest: float, least: float, codes: Tensor, scales: Tensor, transposed: bool) -> None:
    """codes = x (transposed: x.mT) over scales, one for every 128 x 128 elements of codes.

    Shapes: x [E, R, C] in bf16 or fp32 (one matrix without E); codes [E, R, C] (transposed: [E, C, S], S >= R and less
    than 128 more, zero beyond R); scales [E, ceil(rows of codes / 128), L] with L at least as many as there are blocks
    in a row; what is beyond these stays.
    Rounding: as kernels/fp8.py.
    Cost: reads and writes E*R*C elements once.
    Order: launches on the current stream, never synchronises. Raises: ValueError on other shapes, dtypes or strides.
    """
    *stack, num_rows, num_columns = x.shape
    check_tensor("x", x, x.shape, FLOATS)
    padded = min(max(codes.shape[-1], num_rows), cdiv(num_rows, 128) * 128) if transposed else num_rows
    shape = (num_columns, padded) if transposed else (num_rows, num_columns)
    check_tensor("codes", codes, (*stack, *shape), CODES)
    squares, stride = cdiv(shape[0], 128), max(cdiv(shape[1], 128), scales.shape[-1])
    check_tensor("scales", scales, (*stack, squares, stride), (torch.float32,))
    if x.numel() == 0:
        return
    tiles = cdiv(num_columns, 128)
    _squares_kernel[(cdiv(num_rows, 128) * tiles, x.numel() // (num_rows * num_columns))](
        x, codes.view(torch.uint8), scales, num_rows, num_columns, padded, tiles, stride, squares * stride, largest,
        least, TRANSPOSED=transposed, num_warps=8,
    )  # fmt: skip


def transpose_squares(codes: Tensor, scales: Tensor, codes_t: Tensor, scales_t: Tensor) -> None:
    """codes_t = codes transposed, scales_t = scales transposed.

    Shapes: codes [R, C] and codes_t [C, R] e4m3; scales [ceil(R / 128), ceil(C / 128)] and scales_t [ceil(C / 128), at
    least ceil(R / 128)] fp32; what is beyond these stays.
    Cost: reads and writes R*C codes.
    Order: launches on the current stream, never synchronises. Raises: ValueError on other shapes, dtypes or strides.
    """
    num_rows, num_columns = codes.shape
    down, across = cdiv(num_rows, 128), cdiv(num_columns, 128)
    check_tensor("codes", codes, (num_rows, num_columns), CODES)
    check_tensor("scales", scales, (down, across), (torch.float32,))
    check_tensor("codes_t", codes_t, (num_columns, num_rows), CODES)
    check_tensor("scales_t", scales_t, (across, max(down, scales_t.shape[-1])), (torch.float32,))
    if codes.numel() == 0:
        return
    _transposing_kernel[(down * across,)](
        codes.view(torch.uint8), scales, codes_t.view(torch.uint8), scales_t, num_rows, num_columns, across,
        scales_t.stride(0), num_warps=8,
    )  # fmt: skip


@triton.jit
def tile_of(tiles, num_rows, num_columns, ROWS: tl.constexpr):
    """(rows, columns, what of them is inside) of a program's tile."""
    row = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    return row, column, (row < num_rows)[:, None] & (column < num_columns)[None, :]


@triton.jit
def magnitude(x):
    """What maxima are taken from: a NaN counts as nothing, as cards' maxima have it by themselves."""
    if INTERPRETED:
        return tl.where(x == x, tl.abs(x), 0.0)  # noqa: PLR0124 - false for a NaN
    else:
        return tl.abs(x)


@triton.jit
def _codes(x, factor, largest):
    """Bytes of x times its factor, within the range of the codes; NaN stays."""
    return fp8_bits(within(x * factor, largest), True)


@triton.jit
def store_rows(x, row, column, inside, codes_ptr, scales_ptr, num_rows, num_columns, tile, largest, least):
    """Codes [R, C] of a tile x in float32, and scales [ceil(C / 128), R] of its rows; tile: its number in a row."""
    absmax = tl.maximum(tl.max(magnitude(x), axis=1), least)
    tl.store(scales_ptr + tile.to(tl.int64) * num_rows + row, tl.div_rn(absmax, largest), mask=row < num_rows)
    bits = _codes(x, tl.div_rn(largest, absmax)[:, None], largest)
    tl.store(codes_ptr + row[:, None] * num_columns + column[None, :], bits, mask=inside)


@triton.jit
def store_columns(x, row, column, codes_ptr, scales_ptr, num_columns, padded, tile, largest, least):
    """Codes [C, S] of a tile of 128 rows transposed, and scales [S / 128, C]; tile: its number in a column."""
    absmax = tl.maximum(tl.max(magnitude(x), axis=0), least)
    scales = scales_ptr + tile.to(tl.int64) * num_columns + column
    tl.store(scales, tl.div_rn(absmax, largest), mask=column < num_columns)
    bits = _codes(x, tl.div_rn(largest, absmax)[None, :], largest)
    store_transposed(bits, row, column, codes_ptr, num_columns, padded)


@triton.jit
def store_square(
    x, row, column, codes_ptr, scale_ptr, num_rows, num_columns, padded, largest, least, TRANSPOSED: tl.constexpr
):  # fmt: skip
    """Codes of a tile of 128 x 128, as it is or transposed [C, S], and its one scale."""
    absmax = tl.maximum(tl.max(tl.max(magnitude(x), axis=1), axis=0), least)
    tl.store(scale_ptr, tl.div_rn(absmax, largest))
    bits = _codes(x, tl.div_rn(largest, absmax), largest)
    if TRANSPOSED:
        store_transposed(bits, row, column, codes_ptr, num_columns, padded)
    else:
        inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
        tl.store(codes_ptr + row[:, None] * num_columns + column[None, :], bits, mask=inside)


@triton.jit
def store_transposed(bits, row, column, codes_ptr, num_columns, padded):
    """Bytes of a tile, whose rows become columns of codes [C, padded]."""
    target = codes_ptr + column.to(tl.int64)[:, None] * padded + row[None, :]
    tl.store(target, tl.trans(bits), mask=(column < num_columns)[:, None] & (row < padded)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _vectors_kernel(
    x_ptr, row_codes_ptr, row_scales_ptr, column_codes_ptr, column_scales_ptr, num_rows, num_columns, padded, tiles,
    bounds_ptr, experts, largest, least, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    if SOME:
        first = tl.program_id(0) // tiles * BLOCK
        if (first >= tl.load(bounds_ptr + experts)) | (first + BLOCK <= tl.load(bounds_ptr)):
            return
    row, column, inside = tile_of(tiles, num_rows, num_columns, BLOCK)
    x = tl.load(x_ptr + row[:, None] * num_columns + column[None, :], mask=inside, other=0.0).to(tl.float32)
    row_tile, column_tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    if ROWS:
        store_rows(
            x, row, column, inside, row_codes_ptr, row_scales_ptr, num_rows, num_columns, column_tile, largest, least
        )
    if COLUMNS:
        store_columns(
            x, row, column, column_codes_ptr, column_scales_ptr, num_columns, padded, row_tile, largest, least
        )


@triton.jit(do_not_specialize=["num_rows"])
def _squares_kernel(
    x_ptr, codes_ptr, scales_ptr, num_rows, num_columns, padded, tiles, stride, of_matrix, largest, least,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(1).to(tl.int64)
    x_ptr += matrix * num_rows * num_columns
    row, column, inside = tile_of(tiles, num_rows, num_columns, BLOCK)
    x = tl.load(x_ptr + row[:, None] * num_columns + column[None, :], mask=inside, other=0.0).to(tl.float32)
    row_tile, column_tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    if TRANSPOSED:
        row_tile, column_tile = column_tile, row_tile
    store_square(
        x, row, column, codes_ptr + matrix * padded * num_columns,
        scales_ptr + matrix * of_matrix + row_tile * stride + column_tile, num_rows, num_columns, padded, largest,
        least, TRANSPOSED,
    )  # fmt: skip


@triton.jit
def _transposing_kernel(
    codes_ptr, scales_ptr, codes_t_ptr, scales_t_ptr, height, width, across, stride
):  # fmt: skip
    row, column, inside = tile_of(across, height, width, BLOCK)
    bits = tl.load(codes_ptr + row[:, None] * width + column[None, :], mask=inside, other=0)
    store_transposed(bits, row, column, codes_t_ptr, width, height)
    row_tile, column_tile = tl.program_id(0) // across, tl.program_id(0) % across
    tl.store(scales_t_ptr + column_tile * stride + row_tile, tl.load(scales_ptr + tl.program_id(0)))
