"""Rounds matrices to MXFP8 (e4m3 and a power of two for 32 terms), as they are and transposed, in one pass.

A program reads a tile of 128 x 128 once: four blocks of each of its rows, four of each of its columns, and so the 512
bytes of one tile of scales (ops/scale_tiles.py) for each result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.counts import cdiv
from flexengine.kernels.fp8 import fp8_bits, within
from flexengine.kernels.fp8_blocks import CODES, magnitude, store_transposed, tile_of

SPAN = 32
BLOCK, BLOCKS, SIZE = tl.constexpr(128), tl.constexpr(4), tl.constexpr(SPAN)
NUM_WARPS = 8


def round_blocks(x: Tensor, rows: tuple[Tensor, Tensor] | None, columns: tuple[Tensor, Tensor] | None) -> None:
    """rows = (codes, scales) of x with a scale for every row and 32 columns; columns = the same of x transposed.

    Shapes: x [R, C] in bf16 or fp32, C a multiple of 32; codes of rows [R, C]; codes of columns [C, S], S >= R the next
    multiple of 32 and zero beyond R. Scales are uint8 in whole tiles: [ceil(R / 128), 512 * ceil(C / 128)] of rows,
    [ceil(C / 128), 512 * ceil(S / 128)] of columns.
    Cost: reads R*C elements once, writes R*C codes and R*C/32 scales for each result.
    Order: launches on the current stream, never synchronises. Raises: ValueError on other shapes, dtypes or strides.
    Source: as ops/mxfp8.py.
    """
    num_rows, num_columns = x.shape
    down, tiles, padded = cdiv(num_rows, 128), cdiv(num_columns, 128), cdiv(num_rows, SPAN) * SPAN
    check_tensor("x", x, (num_rows, cdiv(num_columns, SPAN) * SPAN), FLOATS)
    if rows is not None:
        check_tensor("codes of rows", rows[0], x.shape, CODES)
        check_tensor("scales of rows", rows[1], (down, 512 * tiles), (torch.uint8,))
    if columns is not None:
        check_tensor("codes of columns", columns[0], (num_columns, padded), CODES)
        check_tensor("scales of columns", columns[1], (tiles, 512 * down), (torch.uint8,))
    some = rows or columns
    if some is None or x.numel() == 0:
        return
    row_codes, row_scales = rows or some
    column_codes, column_scales = columns or some
    _blocks_kernel[(down * tiles,)](
        x, row_codes.view(torch.uint8), row_scales, column_codes.view(torch.uint8), column_scales, num_rows,
        num_columns, padded, tiles, down, ROWS=rows is not None, COLUMNS=columns is not None, num_warps=NUM_WARPS,
    )  # fmt: skip


@triton.jit
def block_scales(absmax):
    """(int32 bytes of the scales of blocks with these largest magnitudes, float32 of what is multiplied by)."""
    bits = tl.maximum(absmax, 0.0).to(tl.int32, bitcast=True)  # of nothing but NaN there is no largest magnitude
    exponent = (bits >> 23) & 0xFF
    above = tl.where((bits & 0x7FFFFF) > 0x600000, 1, 0)  # of 1.75, as in 448 = 1.75 * 2**8
    scale = tl.where(exponent == 255, 255, tl.maximum(exponent - 8 + above, 1))
    factor = (tl.maximum(254 - scale, 0) << 23).to(tl.float32, bitcast=True)
    return scale, tl.where(scale == 255, float("nan"), factor)


@triton.jit
def tile_offsets():
    """Where a tile of scales has those of its 128 rows and 4 blocks: [128, 4]."""
    row, block = tl.arange(0, BLOCK), tl.arange(0, BLOCKS)
    return ((row % 32) * 16 + (row // 32) * 4)[:, None] + block[None, :]


@triton.jit(do_not_specialize=["num_rows", "down"])
def _blocks_kernel(
    x_ptr, row_codes_ptr, row_scales_ptr, column_codes_ptr, column_scales_ptr, num_rows, num_columns, padded, tiles,
    down, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column, inside = tile_of(tiles, num_rows, num_columns, BLOCK)
    x = tl.load(x_ptr + row[:, None] * num_columns + column[None, :], mask=inside, other=0.0).to(tl.float32)
    row_tile, column_tile = (tl.program_id(0) // tiles).to(tl.int64), (tl.program_id(0) % tiles).to(tl.int64)
    if ROWS:
        blocks = tl.reshape(x, (BLOCK, BLOCKS, SIZE))
        scale, factor = block_scales(tl.max(magnitude(blocks), axis=2))
        tl.store(row_scales_ptr + (row_tile * tiles + column_tile) * 512 + tile_offsets(), scale.to(tl.uint8))
        scaled = tl.reshape(blocks * factor[:, :, None], (BLOCK, BLOCK))
        bits = fp8_bits(within(scaled, 448.0), True)
        tl.store(row_codes_ptr + row[:, None] * num_columns + column[None, :], bits, mask=inside)
    if COLUMNS:
        blocks = tl.reshape(x, (BLOCKS, SIZE, BLOCK))
        scale, factor = block_scales(tl.max(magnitude(blocks), axis=1))
        target = column_scales_ptr + (column_tile * down + row_tile) * 512 + tl.trans(tile_offsets())
        tl.store(target, scale.to(tl.uint8))
        scaled = tl.reshape(blocks * factor[:, None, :], (BLOCK, BLOCK))
        bits = fp8_bits(within(scaled, 448.0), True)
        store_transposed(bits, row, column, column_codes_ptr, num_columns, padded)
