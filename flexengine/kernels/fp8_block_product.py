"""Products of FP8 (e4m3) matrices with scales for blocks of 128 terms.

Tensor cores sum 128 products of codes; the sum is multiplied by the scales of its blocks and added in float32.
Source: DeepSeek-AI 2024, "DeepSeek-V3", https://arxiv.org/abs/2412.19437, section 3.3.2.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import check_tensor
from flexengine.kernels.counts import cdiv, next_power_of_2
from flexengine.kernels.fp8 import from_e4m3
from flexengine.kernels.grouped_tiles import grouped_tile
from flexengine.kernels.rounding import round_to

CODES = (torch.float8_e4m3fn,)
TERMS = 128
RESULTS = (torch.bfloat16, torch.float16, torch.float32)


def block_product(
    a: Tensor, b: Tensor, scales_a: Tensor, scales_b: Tensor, square: bool, out: Tensor, bias: Tensor | None,
    accumulate: bool,
) -> None:  # fmt: skip
    """out = (or, with accumulate, +=) a @ b.T of the matrices that codes and scales stand for (+ bias).

    Shapes: a [M, K] and b [N, K] e4m3; scales_a [ceil(K / 128), M] fp32, its last stride 1; scales_b likewise [.., N],
    or, square, [ceil(N / 128), at least ceil(K / 128)]; bias [N] of out's dtype; out [M, N] bf16 or fp32. Sums in fp32,
    blocks of terms in order, one rounding.
    Order: launches on the current stream, never synchronises. Raises: ValueError on other shapes, dtypes or strides.
    """
    (rows, inner), columns = a.shape, b.shape[0]
    check_tensor("a", a, (rows, inner), CODES)
    check_tensor("b", b, (columns, inner), CODES)
    check_tensor("out", out, (rows, columns), RESULTS)
    blocks = cdiv(inner, TERMS)
    _check_scales("scales of a", scales_a, (blocks, rows))
    if square:
        _check_scales("scales of b", scales_b, (cdiv(columns, TERMS), max(blocks, scales_b.shape[-1])))
    else:
        _check_scales("scales of b", scales_b, (blocks, columns))
    if bias is not None:
        check_tensor("bias", bias, (columns,), (out.dtype,))
    if out.numel() == 0:
        return
    block_rows = min(128, max(16, next_power_of_2(rows)))
    row_tiles, column_tiles = cdiv(rows, block_rows), cdiv(columns, 128)
    _product_kernel[(row_tiles * column_tiles,)](
        a, b, scales_a, scales_b, out, out if bias is None else bias, rows, columns, inner, scales_a.stride(0),
        scales_b.stride(0), row_tiles, column_tiles, WIDE=not a.is_cuda, SQUARE=square, BIAS=bias is not None,
        ACCUMULATE=accumulate, ROWS=block_rows, COLUMNS=128, INNER=TERMS, GROUP=8,
        num_warps=8 if block_rows == 128 else 4, num_stages=_stages(a),
    )  # fmt: skip


def _check_scales(name: str, scales: Tensor, shape: tuple[int, int]) -> None:
    if tuple(scales.shape) != shape or scales.dtype != torch.float32 or scales.stride(1) != 1:
        raise ValueError(
            f"{name} must be float32 of shape {list(shape)} with rows in one piece, got {scales.dtype} of"
            f" {list(scales.shape)} with strides {list(scales.stride())}"
        )


def _stages(x: Tensor) -> int:
    """Stages of both operands that shared memory holds: the last one takes none, the others 32 KiB each."""
    return 4 if x.is_cuda and _shared_memory_bytes(x.get_device()) >= 160 * 1024 else 3


@lru_cache
def _shared_memory_bytes(device: int) -> int:
    """Read how much shared memory one program may use."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@triton.jit(do_not_specialize=["rows", "row_tiles", "scales_a_stride"])
def _product_kernel(
    a_ptr, b_ptr, scales_a_ptr, scales_b_ptr, out_ptr, bias_ptr, rows, columns, inner, scales_a_stride,
    scales_b_stride, row_tiles, column_tiles, WIDE: tl.constexpr, SQUARE: tl.constexpr, BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A tile of the result. WIDE: products in fp32, for Triton's interpreter."""
    row_tile, column_tile = grouped_tile(tl.program_id(0), row_tiles, column_tiles, GROUP)
    row = row_tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = column_tile.to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    row_mask, column_mask = row < rows, column < columns
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, inner, INNER):
        term = first + tl.arange(0, INNER)
        block = first // INNER
        a_at, b_at = row[:, None] * inner + term[None, :], column[None, :] * inner + term[:, None]
        a_mask, b_mask = row_mask[:, None] & (term < inner)[None, :], column_mask[None, :] & (term < inner)[:, None]
        scale_a = tl.load(scales_a_ptr + block * scales_a_stride + row, mask=row_mask, other=0.0)
        a = tl.load(a_ptr + a_at, mask=a_mask, other=0.0)
        b = tl.load(b_ptr + b_at, mask=b_mask, other=0.0)
        if WIDE:  # the interpreter reads NaN of FP8 as a number
            a = from_e4m3(a.to(tl.uint8, bitcast=True).to(tl.int32))
            b = from_e4m3(b.to(tl.uint8, bitcast=True).to(tl.int32))
            part = tl.dot(a, b, input_precision="ieee")
        else:
            part = tl.dot(a, b)
        if SQUARE:  # a tile has as many columns as a square
            total += part * (scale_a * tl.load(scales_b_ptr + column_tile * scales_b_stride + block))[:, None]
        else:
            scale_b = tl.load(scales_b_ptr + block * scales_b_stride + column, mask=column_mask, other=0.0)
            total += part * scale_a[:, None] * scale_b[None, :]
    mask = row_mask[:, None] & column_mask[None, :]
    target = out_ptr + row[:, None] * columns + column[None, :]
    if BIAS:
        total += tl.load(bias_ptr + column, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    if ACCUMULATE:
        total += tl.load(target, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, round_to(total, out_ptr.dtype.element_ty), mask=mask)
