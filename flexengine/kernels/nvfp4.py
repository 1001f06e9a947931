"""Rounds matrices to NVFP4 (e2m1, a scale in e4m3 for 16 terms or 16 x 16 elements), to nearest or at random.

A program has a tile of 128 rows and 64 terms of the result, and so the 512 bytes of a tile of scales
(ops/scale_tiles.py). The factor of the whole matrix comes from partial maxima, as in kernels/fp8.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, float32, uint8

from flexengine.kernels.checks import FLOATS, check_tensor, signed_words
from flexengine.kernels.counts import cdiv
from flexengine.kernels.fp8 import fp8_bits, from_e4m3, within
from flexengine.kernels.mxfp8 import tile_offsets
from flexengine.kernels.rounding import random_bits16

ROWS, TERMS, BLOCKS, SIZE, SQUARES = (tl.constexpr(size) for size in (128, 64, 4, 16, 8))
NUM_WARPS = 8


def round_fours(
    x: Tensor, side: tuple[Tensor, Tensor, Tensor], partials: Tensor, limits: tuple[float, float, float],
    squares: bool, transposed: bool, draws: tuple[tuple[int, int], int] | None = None,
) -> None:  # fmt: skip
    """side = (codes, scales, factor) of x (transposed: of x.T); factor = max(partials, least) / (largest code * scale).

    Shapes: x [R, C] in bf16 or fp32; of the result's N rows and K terms (both multiples of 16, K of 32, where it has
    squares) codes [N, K / 2] uint8, the first of two in the low half; scales [ceil(N / 128), 512 * ceil(K / 64)] uint8;
    factor [1] and partials [P] fp32, P a power of two. limits: largest code, largest scale, least magnitude of x.
    draws: unsigned 32-bit numbers of the stream of random bits that round, and the counter of element 0, in the order
    of the result; None: to nearest even.
    Cost: reads R*C elements once more after kernels/fp8.py:absmax_partials, writes R*C/2 codes and R*C/16 scales.
    Order: launches on the current stream, never synchronises. Raises: ValueError on other shapes, dtypes or strides.
    Source: as ops/nvfp4.py.
    """
    (codes, scales, factor), (keys, first) = side, draws or ((0, 0), 0)
    rows, terms = (x.shape[1], x.shape[0]) if transposed else x.shape
    check_tensor("x", x, x.shape, FLOATS)
    check_tensor("codes", codes, (rows, terms // 32 * 16), (uint8,))
    check_tensor("scales", scales, (cdiv(rows, 128), 512 * cdiv(terms, 64)), (uint8,))
    check_tensor("factor", factor, (1,), (float32,))
    check_tensor("partials", partials, partials.shape, (float32,))
    if x.numel() == 0:
        return
    tiles = cdiv(terms, 64)
    _fours_kernel[(cdiv(rows, 128) * tiles,)](
        x, codes, scales, factor, partials, rows, terms, x.shape[1], tiles, *limits, *signed_words(keys), first,
        TRANSPOSED=transposed, SQUARE=squares, RANDOM=draws is not None, PARTIALS=partials.numel(),
        num_warps=NUM_WARPS,
    )  # fmt: skip


@triton.jit
def _nearest(size):
    """Codes of the numbers 0, 0.5, 1, 1.5, 2, 3, 4 and 6 that are nearest; of two as near the even code."""
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    return code + (size > 5.0).to(tl.int32)


@triton.jit
def _at_random(size, drawn):
    """Codes of the numbers below or above, by 16 random bits."""
    code = (size >= 0.5).to(tl.int32) + (size >= 1.0).to(tl.int32) + (size >= 1.5).to(tl.int32)
    code += (size >= 2.0).to(tl.int32) + (size >= 3.0).to(tl.int32) + (size >= 4.0).to(tl.int32)
    code += (size >= 6.0).to(tl.int32)
    low = tl.where(code < 4, code * 0.5, tl.where(code < 6, code - 2.0, 4.0))
    gaps = tl.where(code < 4, 2.0 * 65536, tl.where(code < 6, 65536.0, 0.5 * 65536))  # levels over the distance up
    above = (drawn < (size - low) * gaps) & (code < 7)
    return code + above.to(tl.int32)


# Keys and offset differ at every call: specialising on their values would compile the kernel again and again.
@triton.jit(do_not_specialize=["rows", "key_low", "key_high", "first"])
def _fours_kernel(
    x_ptr, codes_ptr, scales_ptr, factor_ptr, partials_ptr, rows, terms, width, tiles, largest_code, largest_scale,
    least, key_low, key_high, first, TRANSPOSED: tl.constexpr, SQUARE: tl.constexpr, RANDOM: tl.constexpr,
    PARTIALS: tl.constexpr,
):  # fmt: skip
    absmax = tl.maximum(tl.max(tl.load(partials_ptr + tl.arange(0, PARTIALS)), axis=0), least)
    factor = tl.div_rn(absmax, largest_code * largest_scale)
    if tl.program_id(0) == 0:
        tl.store(factor_ptr, factor)
    row_tile, term_tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    row, term = row_tile * ROWS + tl.arange(0, ROWS), term_tile * TERMS + tl.arange(0, TERMS)
    if TRANSPOSED:
        inside = (term < terms)[:, None] & (row < width)[None, :]  # of rows nothing is known ahead
        x = tl.trans(tl.load(x_ptr + term.to(tl.int64)[:, None] * width + row[None, :], mask=inside, other=0.0))
    else:
        inside = (row < rows)[:, None] & (term < terms)[None, :]
        x = tl.load(x_ptr + row[:, None] * width + term[None, :], mask=inside, other=0.0)
    x = x.to(tl.float32)
    sizes = tl.where(x == x, tl.abs(x), float("inf"))  # noqa: PLR0124 - false for a NaN
    if SQUARE:
        most = tl.max(tl.max(tl.reshape(sizes, (SQUARES, SIZE, BLOCKS, SIZE)), axis=3), axis=1)
        most = tl.reshape(tl.broadcast_to(most[:, None, :], (SQUARES, SIZE, BLOCKS)), (ROWS, BLOCKS))
    else:
        most = tl.max(tl.reshape(sizes, (ROWS, BLOCKS, SIZE)), axis=2)
    bits = fp8_bits(within(tl.div_rn(most, factor * largest_code), largest_scale), True)
    bits = tl.where(most == float("inf"), 0x7F, bits.to(tl.int32))
    place = scales_ptr + (row_tile * tiles + term_tile) * 512 + tile_offsets()
    tl.store(place, bits.to(tl.uint8))
    step = from_e4m3(bits) * factor
    by = tl.where(step > 0.0, tl.div_rn(1.0, tl.where(step > 0.0, step, 1.0)), 0.0)
    scaled = tl.reshape(tl.reshape(x, (ROWS, BLOCKS, SIZE)) * by[:, :, None], (ROWS, TERMS))
    scaled = tl.where(scaled == scaled, scaled, 0.0)  # noqa: PLR0124
    if RANDOM:
        counter = row[:, None] * terms + term[None, :] + first
        code = _at_random(tl.abs(scaled), random_bits16(counter, key_low, key_high))
    else:
        code = _nearest(tl.abs(scaled))
    code += ((scaled.to(tl.int32, bitcast=True) >> 31) & 1) << 3
    halves = tl.reshape(code, (ROWS, TERMS // 2, 2)) << (4 * tl.arange(0, 2))[None, None, :]
    pair = term_tile * (TERMS // 2) + tl.arange(0, TERMS // 2)
    target = codes_ptr + row[:, None] * (terms // 2) + pair[None, :]
    tl.store(target, tl.sum(halves, axis=2).to(tl.uint8), mask=(row < rows)[:, None] & (pair < terms // 2)[None, :])
