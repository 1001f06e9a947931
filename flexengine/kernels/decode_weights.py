"""Decode matrices that are stored in fewer bytes: codes and scales in, elements of the compute dtype out.

Bit for bit what the torch paths of ops/formats/nf4.py, ops/formats/scaled_codes.py and ops/formats/mxfp4.py give:
products in float32, rounded once. Elements are counted in 32 bits within a matrix, in 64 over a stack of matrices.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.counts import cdiv
from flexengine.kernels.fp8 import from_e4m3
from flexengine.kernels.rounding import round_to

_NF4_BLOCKS = 64  # blocks of 64 elements that a program decodes: 2 KiB in, 8 KiB out in bf16
_ROWS, _COLUMNS = 8, 512  # elements that a program decodes of 8-bit codes
_MX_ROWS, _MX_COLUMNS = 128, 64  # elements that a program decodes of MXFP4: 64 bytes of a column, 128 of a row of bf16
_ALIGNMENT = 16


def decode_nf4(
    stored: Tensor,
    starts: tuple[int, int, int],
    codebook: Tensor,
    dynamic_map: Tensor | None,
    out: Tensor,
    unit_rows: Tensor | None = None,
) -> None:
    """out[u] = the elements of NF4 matrix u, where unit_rows[u] is not 0.

    Shapes: stored [U, B] uint8, codes first; starts: bytes to the magnitudes (uint8), their magnitudes (float32) and
    the mean (float32); codebook [16] and dynamic_map [256] float32, None for magnitudes that are float32 themselves;
    out [U, N] in bf16 or fp32, N even; unit_rows [U] int32, None for all.
    Cost: reads stored, writes out.
    Order: launches on the current stream, never synchronises. Raises: ValueError on other shapes or dtypes.
    """
    units, numel = out.shape
    _check(stored, units, out, unit_rows)
    check_tensor("codebook", codebook, (16,), (torch.float32,))
    if dynamic_map is not None:
        check_tensor("dynamic_map", dynamic_map, (256,), (torch.float32,))
    if numel % 2:
        raise ValueError(f"out must have pairs of elements, got {numel}")
    absmax, nested, offset = starts
    grid = (cdiv(numel, 64 * _NF4_BLOCKS), units)
    _nf4_kernel[grid](
        stored, codebook, codebook if dynamic_map is None else dynamic_map, out, unit_rows, stored.stride(0), numel,
        absmax, nested, offset, CHOSEN=unit_rows is not None, NESTED=dynamic_map is not None, BLOCKS=_NF4_BLOCKS,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def decode_scaled(
    stored: Tensor,
    codes: torch.dtype,
    scales_start: int,
    block: tuple[int, int],
    shape: tuple[int, int],
    out: Tensor,
    unit_rows: Tensor | None = None,
) -> None:
    """out[u] = codes of matrix u times the scales of their blocks, where unit_rows[u] is not 0.

    Shapes: stored [U, B] uint8, codes [R, C] of E4M3 or int8 first, and `scales_start` bytes from the beginning float32
    scales, one for each block of (rows, columns), row by row; shape: (R, C); out [U, R * C] in bf16 or fp32; unit_rows
    [U] int32, None for all.
    Cost: reads stored, writes out.
    Order: launches on the current stream, never synchronises. Raises: ValueError on other shapes or dtypes.
    """
    (rows, columns), units = shape, len(out)
    _check(stored, units, out, unit_rows)
    if out.shape[1] != rows * columns or codes not in (torch.float8_e4m3fn, torch.int8):
        raise ValueError(f"codes of E4M3 or int8 give {rows} x {columns} elements, got {codes} and {out.shape[1]}")
    grid = (cdiv(rows, _ROWS) * cdiv(columns, _COLUMNS), units)
    _scaled_kernel[grid](
        stored, out, unit_rows, stored.stride(0), rows, columns, scales_start, cdiv(columns, block[1]), *block,
        CHOSEN=unit_rows is not None, E4M3=codes == torch.float8_e4m3fn, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4,
    )  # fmt: skip


def decode_mxfp4(
    stored: Tensor, scales_start: int, shape: tuple[int, int], out: Tensor, unit_rows: Tensor | None = None
) -> None:
    """out[u] = codes of matrix u times the scales of their blocks, where unit_rows[u] is not 0.

    Shapes: shape: (R, C), R a multiple of 32; stored [U, B] uint8, codes [C, R / 2] first, and `scales_start` bytes
    from the beginning scales [C, R / 32] of E8M0; out [U, R * C] in bf16 or fp32; unit_rows [U] int32, None for all.
    Cost: reads stored, writes out.
    Order: launches on the current stream, never synchronises. Raises: ValueError on other shapes or dtypes.
    """
    (rows, columns), units = shape, len(out)
    _check(stored, units, out, unit_rows)
    if out.shape[1] != rows * columns or rows % 32:
        raise ValueError(f"codes of MXFP4 give {rows} x {columns} elements, 32 rows with a scale, got {out.shape[1]}")
    grid = (cdiv(rows, _MX_ROWS) * cdiv(columns, _MX_COLUMNS), units)
    _mxfp4_kernel[grid](
        stored, out, unit_rows, stored.stride(0), rows, columns, scales_start,
        CHOSEN=unit_rows is not None, ROWS=_MX_ROWS, COLUMNS=_MX_COLUMNS, num_warps=4,
    )  # fmt: skip


def _check(stored: Tensor, units: int, out: Tensor, unit_rows: Tensor | None) -> None:
    check_tensor("stored", stored, (units, stored.shape[-1]), (torch.uint8,), strided_rows=True)
    check_tensor("out", out, out.shape, FLOATS)
    if unit_rows is not None:
        check_tensor("unit_rows", unit_rows, (units,), (torch.int32,))
    if stored.data_ptr() % _ALIGNMENT or stored.stride(0) % _ALIGNMENT:
        raise ValueError(f"stored matrices must begin at multiples of {_ALIGNMENT} bytes")


@triton.jit
def _nf4_kernel(
    stored_ptr, codebook_ptr, map_ptr, out_ptr, rows_ptr, unit_bytes, numel, absmax_start, nested_start, offset_start,
    CHOSEN: tl.constexpr, NESTED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(1).to(tl.int64)
    if CHOSEN:  # noqa: SIM102 - without it there is no pointer to load from
        if tl.load(rows_ptr + unit) == 0:
            return
    matrix_ptr = stored_ptr + unit * unit_bytes
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block * 64 < numel
    if NESTED:
        number = tl.load(map_ptr + tl.load(matrix_ptr + absmax_start + block, mask=inside, other=0).to(tl.int32))
        nested_ptr = (matrix_ptr + nested_start).to(tl.pointer_type(tl.float32))
        nested = tl.load(nested_ptr + block // 256, mask=inside, other=0.0)
        mean = tl.load((matrix_ptr + offset_start).to(tl.pointer_type(tl.float32)))
        scale = number * nested + mean  # two roundings, as the torch path: the launch forbids a fused one
    else:
        scale = tl.load((matrix_ptr + absmax_start).to(tl.pointer_type(tl.float32)) + block, mask=inside, other=0.0)
    pair = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    codes = tl.load(matrix_ptr + pair, mask=pair * 2 < numel, other=0).to(tl.int32)
    first = tl.load(codebook_ptr + (codes >> 4)) * scale[:, None]
    second = tl.load(codebook_ptr + (codes & 15)) * scale[:, None]
    element = block[:, None] * 64 + tl.arange(0, 64)[None, :]
    values = round_to(tl.interleave(first, second), out_ptr.dtype.element_ty)
    tl.store(out_ptr + unit * numel + element, values, mask=element < numel)


@triton.jit
def _scaled_kernel(
    stored_ptr, out_ptr, rows_ptr, unit_bytes, rows, columns, scales_start, scale_columns, block_rows, block_columns,
    CHOSEN: tl.constexpr, E4M3: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(1).to(tl.int64)
    if CHOSEN:  # noqa: SIM102 - without it there is no pointer to load from
        if tl.load(rows_ptr + unit) == 0:
            return
    matrix_ptr = stored_ptr + unit * unit_bytes
    across = tl.cdiv(columns, COLUMNS)
    row = (tl.program_id(0) // across) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row[:, None] * columns + column[None, :]
    code = tl.load(matrix_ptr + at, mask=inside, other=0).to(tl.int32)
    scales_ptr = (matrix_ptr + scales_start).to(tl.pointer_type(tl.float32))
    scale_at = (row // block_rows)[:, None] * scale_columns + (column // block_columns)[None, :]
    value = from_e4m3(code) if E4M3 else ((code ^ 128) - 128).to(tl.float32)
    value = value * tl.load(scales_ptr + scale_at, mask=inside, other=0.0)
    tl.store(out_ptr + unit * rows * columns + at, round_to(value, out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _mxfp4_kernel(
    stored_ptr, out_ptr, rows_ptr, unit_bytes, rows, columns, scales_start,
    CHOSEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(1).to(tl.int64)
    if CHOSEN:  # noqa: SIM102 - without it there is no pointer to load from
        if tl.load(rows_ptr + unit) == 0:
            return
    matrix_ptr = stored_ptr + unit * unit_bytes
    across = tl.cdiv(columns, COLUMNS)
    first_row = (tl.program_id(0) // across) * ROWS
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    pair = first_row // 2 + tl.arange(0, ROWS // 2)
    row = first_row + tl.arange(0, ROWS)
    held = (column < columns)[:, None]
    codes_at = column[:, None] * (rows // 2) + pair[None, :]
    codes = tl.load(matrix_ptr + codes_at, mask=held & (pair * 2 < rows)[None, :], other=0).to(tl.int32)
    scale_at = column[:, None] * (rows // 32) + row[None, :] // 32
    inside = held & (row < rows)[None, :]
    scale = _from_e8m0(tl.load(matrix_ptr + scales_start + scale_at, mask=inside, other=0).to(tl.int32))
    values = tl.interleave(_from_e2m1(codes & 15), _from_e2m1(codes >> 4)) * scale
    turned = tl.trans(round_to(values, out_ptr.dtype.element_ty))
    at = row[:, None] * columns + column[None, :]
    tl.store(out_ptr + unit * rows * columns + at, turned, mask=tl.trans(inside))


@triton.jit
def _from_e2m1(code):
    """float32 of E2M1 patterns in int32, exact."""
    exponent = (code >> 1) & 3
    mantissa = code & 1
    normal = (((exponent + 126) << 23) | (mantissa << 22)).to(tl.float32, bitcast=True)
    magnitude = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.5, normal)
    return tl.where(code >= 8, -magnitude, magnitude)


@triton.jit
def _from_e8m0(code):
    """float32 of E8M0 patterns in int32, exact: 2**(code - 127), of which 2**-127 is subnormal; 255 is NaN."""
    value = tl.where(code == 0, 1 << 22, code << 23).to(tl.float32, bitcast=True)
    return tl.where(code == 255, float("nan"), value)
