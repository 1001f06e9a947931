"""Rounds matrices to FP8 (e4m3) with a scale for every row, or transposed with one for every column."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.counts import cdiv, next_power_of_2
from flexengine.kernels.fp8 import fp8_bits, within
from flexengine.kernels.row_range import is_within, row_range

CODES = (torch.float8_e4m3fn,)


def round_rows(
    x: Tensor, codes: Tensor, scales: Tensor, largest: float, least: float, bounds: Tensor | None = None
) -> None:
    """codes[r] = x[r] / scales[r], scales[r] = max(|x[r]|, least) / largest; with bounds [E + 1] int32 only the rows of
    these experts.

    Shapes: x [R, K] in bf16 or fp32, codes [R, K] e4m3, scales [R] fp32. Rounding: as kernels/fp8.py.
    Cost: reads R*K and writes R*K elements; the second reading of a row comes from the card's cache.
    Order: launches on the current stream, never synchronises. Raises: ValueError on other shapes, dtypes or strides.
    """
    count, inner = x.shape
    check_tensor("x", x, (count, inner), FLOATS)
    check_tensor("codes", codes, (count, inner), CODES)
    check_tensor("scales", scales, (count,), (torch.float32,))
    if x.numel() == 0:
        return
    _rows_kernel[(count,)](
        x, codes.view(torch.uint8), scales, *row_range(bounds, x), inner, largest, least, SOME=bounds is not None,
        BLOCK=min(4096, next_power_of_2(inner)), num_warps=4,
    )  # fmt: skip


def round_columns(weight: Tensor, codes: Tensor, scales: Tensor, largest: float, least: float) -> None:
    """codes[e] = weight[e].T / scales[e][:, None], where scales[e] are the largest magnitudes of columns, at least
    `least`, over largest.

    Shapes: weight [E, K, N] in bf16 or fp32, codes [E, N, K] e4m3, scales [E, N] fp32. Rounding: as kernels/fp8.py.
    Cost: reads E*K*N elements twice and writes them once.
    Order: launches on the current stream, never synchronises. Raises: ValueError on other shapes, dtypes or strides.
    """
    experts, inner, columns = weight.shape
    check_tensor("weight", weight, (experts, inner, columns), FLOATS)
    check_tensor("codes", codes, (experts, columns, inner), CODES)
    check_tensor("scales", scales, (experts, columns), (torch.float32,))
    if weight.numel() == 0:
        return
    tiles = cdiv(columns, 64)
    _columns_kernel[(experts * tiles,)](
        weight, codes.view(torch.uint8), scales, inner, columns, tiles, largest, least, TERMS=128, COLUMNS=64,
        num_warps=8,
    )  # fmt: skip


@triton.jit
def _scaled(x, factor, largest):
    """x times its factor within the range of the codes; NaN stays."""
    return within(x.to(tl.float32) * factor, largest)


@triton.jit
def _rows_kernel(
    x_ptr, codes_ptr, scales_ptr, bounds_ptr, experts, inner, largest, least, SOME: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    wanted = True
    if SOME:
        wanted = is_within(row, bounds_ptr, experts)
    if wanted:
        found = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, inner, BLOCK):
            at = first + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * inner + at, mask=at < inner, other=0.0).to(tl.float32)
            found = tl.maximum(found, tl.abs(x))
        absmax = tl.maximum(tl.max(found, axis=0), least)
        tl.store(scales_ptr + row, tl.div_rn(absmax, largest))
        factor = tl.div_rn(largest, absmax)
        for first in range(0, inner, BLOCK):
            at = first + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * inner + at, mask=at < inner, other=0.0)
            tl.store(codes_ptr + row * inner + at, fp8_bits(_scaled(x, factor, largest), True), mask=at < inner)


@triton.jit
def _columns_kernel(
    weight_ptr, codes_ptr, scales_ptr, inner, columns, tiles, largest, least, TERMS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    expert = (tl.program_id(0) // tiles).to(tl.int64)
    column = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    matrix = weight_ptr + expert * inner * columns
    found = tl.zeros((TERMS, COLUMNS), tl.float32)
    for first in range(0, inner, TERMS):
        term = first + tl.arange(0, TERMS)
        at = term.to(tl.int64)[:, None] * columns + column[None, :]
        x = tl.load(matrix + at, mask=(term < inner)[:, None] & inside[None, :], other=0.0).to(tl.float32)
        found = tl.maximum(found, tl.abs(x))
    absmax = tl.maximum(tl.max(found, axis=0), least)
    tl.store(scales_ptr + expert * columns + column, tl.div_rn(absmax, largest), mask=inside)
    factor = tl.div_rn(largest, absmax)
    for first in range(0, inner, TERMS):
        term = first + tl.arange(0, TERMS)
        at = term.to(tl.int64)[:, None] * columns + column[None, :]
        mask = (term < inner)[:, None] & inside[None, :]
        bits = fp8_bits(_scaled(tl.load(matrix + at, mask=mask, other=0.0), factor[None, :], largest), True)
        target = codes_ptr + (expert * columns + column)[:, None] * inner + term[None, :]
        tl.store(target, tl.trans(bits), mask=tl.trans(mask))
