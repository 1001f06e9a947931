"""Quantisation of matrices to FP8 with one scale per tensor, as they are and transposed.

A scale needs the largest magnitude of the whole matrix first: partial maxima by fixed pieces, then a second kernel that
reads the matrix again. A maximum does not depend on the order it is taken in, so results are the same in every run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.counts import cdiv

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_BLOCK = 128  # rows and columns of a tile: enough to make up for the maximum that every program takes
_PIECE = 4096  # elements a program reads at a time
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


def absmax_partials(x: Tensor, partials: Tensor) -> None:
    """partials[i] = largest magnitude of the i-th piece of x, 0 for empty pieces; NaN counts as nothing.

    Shapes: x contiguous in bf16 or fp32, partials [P] fp32.
    Cost: reads x once.
    Order: launches on the current stream, never synchronises.
    Raises: ValueError on other dtypes or strides.
    """
    check_tensor("x", x, x.shape, FLOATS)
    check_tensor("partials", partials, partials.shape, (torch.float32,))
    per_program = cdiv(cdiv(x.numel(), partials.numel()), _PIECE) * _PIECE
    _absmax_kernel[(partials.numel(),)](x, partials, x.numel(), per_program, PIECE=_PIECE, num_warps=4)


def quantize(
    x: Tensor,
    partials: Tensor,
    largest: float,
    least: float,
    scale: Tensor,
    rows: Tensor | None,
    columns: Tensor | None,
) -> None:
    """rows = clamp(x / scale) and columns = the same transposed, with scale = max(partials, least) / largest.

    Shapes: x [R, C] in bf16 or fp32; partials [P] fp32, P a power of two; scale [1] fp32, written; rows [R, C] and
    columns [C, S], S >= R, in one FP8 dtype, either may be None; columns beyond R are zero. largest: of that dtype.
    Rounding: the factor largest / max is rounded to fp32, the product to fp32, and that to nearest even FP8. NaN stays
    NaN, and so does everything where an infinity is in x.
    Cost: reads R*C and writes R*C elements per result.
    Order: launches on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes or strides.
    """
    num_rows, num_columns = x.shape
    check_tensor("x", x, x.shape, FLOATS)
    check_tensor("partials", partials, partials.shape, (torch.float32,))
    check_tensor("scale", scale, (1,), (torch.float32,))
    if rows is not None:
        check_tensor("rows", rows, x.shape, FP8)
    if columns is not None:
        check_tensor("columns", columns, (num_columns, max(num_rows, columns.shape[-1])), FP8)
    target = rows if rows is not None else columns
    if target is None or x.numel() == 0:
        return
    padded = num_rows if columns is None else columns.shape[1]
    tiles = cdiv(num_columns, _BLOCK)
    out = target.view(torch.uint8)
    _quantize_kernel[(cdiv(padded, _BLOCK) * tiles,)](
        x, partials, scale, out if rows is None else rows.view(torch.uint8),
        out if columns is None else columns.view(torch.uint8), num_rows, num_columns, padded, tiles, largest, least,
        PARTIALS=partials.numel(), E4M3=target.dtype == torch.float8_e4m3fn, ROWS=rows is not None,
        COLUMNS=columns is not None, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip


@triton.jit
def _absmax_kernel(x_ptr, partials_ptr, numel, per_program, PIECE: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * per_program
    found = tl.zeros((PIECE,), dtype=tl.float32)
    for offset in range(0, per_program, PIECE):
        at = first + offset + tl.arange(0, PIECE)
        found = tl.maximum(found, tl.abs(tl.load(x_ptr + at, mask=at < numel, other=0.0).to(tl.float32)))
    tl.store(partials_ptr + tl.program_id(0), tl.max(found, axis=0))


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_kernel(
    x_ptr, partials_ptr, scale_ptr, rows_ptr, columns_ptr, num_rows, num_columns, padded, tiles, largest, least,
    PARTIALS: tl.constexpr, E4M3: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    absmax = tl.maximum(tl.max(tl.load(partials_ptr + tl.arange(0, PARTIALS)), axis=0), least)
    if tl.program_id(0) == 0:
        tl.store(scale_ptr, tl.div_rn(absmax, largest))
    factor = tl.div_rn(largest, absmax)
    row = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    at = row[:, None] * num_columns + column[None, :]
    scaled = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) * factor
    bits = fp8_bits(within(scaled, largest), E4M3)
    if ROWS:
        tl.store(rows_ptr + at, bits, mask=inside)
    if COLUMNS:
        target = columns_ptr + column.to(tl.int64)[:, None] * padded + row[None, :]
        tl.store(target, tl.trans(bits), mask=(column < num_columns)[:, None] & (row < padded)[None, :])


@triton.jit
def within(x, largest):
    """x within the range of FP8, where cards that have an instruction for it keep x as they convert it; NaN stays."""
    if _INTERPRETED:
        return tl.where(x > largest, largest, tl.where(x < -largest, -largest, x))
    else:
        return x


@triton.jit
def fp8_bits(x, E4M3: tl.constexpr, NATIVE: tl.constexpr = True):
    """uint8 patterns of float32 x, within range, rounded to nearest even.

    NATIVE: the card has an instruction for it, as those since Ada do. Triton's interpreter truncates and loses NaN and
    subnormals. There, and on older cards, x is first rounded to what FP8 can hold.
    """
    if _INTERPRETED or not NATIVE:
        drop: tl.constexpr = 20 if E4M3 else 21  # bits of float32's 23 beyond FP8's 3 or 2
        smallest: tl.constexpr = 2.0**-6 if E4M3 else 2.0**-14  # normal number
        magic: tl.constexpr = 1.5 * 2.0 ** (23 - 9) if E4M3 else 1.5 * 2.0 ** (23 - 16)  # one unit: a subnormal's step
        bits = x.to(tl.int32, bitcast=True)
        normal = ((bits + ((1 << (drop - 1)) - 1) + ((bits >> drop) & 1)) & (-1 << drop)).to(tl.float32, bitcast=True)
        steps = (((x + magic) - magic) * (2.0**9 if E4M3 else 2.0**16)).to(tl.int32)
        sign = ((bits >> 31) & 1) << 7
        subnormal = tl.abs(steps) | sign
        exponent = ((normal.to(tl.int32, bitcast=True) >> 23) & 0xFF) - (127 - (7 if E4M3 else 15))
        mantissa = (normal.to(tl.int32, bitcast=True) >> drop) & (7 if E4M3 else 3)
        pattern = sign | (exponent << (3 if E4M3 else 2)) | mantissa
        pattern = tl.where(tl.abs(x) < smallest, subnormal, pattern)
        return tl.where(x == x, pattern, 0x7F).to(tl.uint8)  # noqa: PLR0124 - false for a NaN
    elif E4M3:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return x.to(tl.float8e5).to(tl.uint8, bitcast=True)


@triton.jit
def from_e4m3(code, NATIVE: tl.constexpr = False):
    """float32 of E4M3 patterns in int32, exact. By hand unless NATIVE: cards before Ada have no instruction for it."""
    if NATIVE and not _INTERPRETED:
        return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        exponent = (code >> 3) & 15
        mantissa = code & 7
        normal = (((exponent + 120) << 23) | (mantissa << 20)).to(tl.float32, bitcast=True)
        magnitude = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, normal)  # 2**-9: a subnormal's step
        magnitude = tl.where((code & 127) == 127, float("nan"), magnitude)
        return tl.where(code >= 128, -magnitude, magnitude)
