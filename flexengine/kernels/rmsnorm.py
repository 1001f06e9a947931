"""RMSNorm: y = weight * x / sqrt(mean(x^2) + eps), forward and the two halves of backward.

T tokens (rows), D width. A program holds whole rows in registers: D up to about 65536. Source: Zhang and Sennrich 2019,
https://arxiv.org/abs/1910.07467, in the order of roundings of Hugging Face's LlamaRMSNorm.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.rounding import round_to

_TILE_ELEMENTS = 2048  # elements per program when rows are short: several rows share a program
_WEIGHT_ROWS, _WEIGHT_COLUMNS = 16, 256  # tile of the weight half: 512 bytes of a bf16 row, 16 rows in flight
_SUM_ROWS, _SUM_COLUMNS = 64, 64


def rmsnorm_forward(x: Tensor, weight: Tensor, eps: float, out: Tensor, rstd: Tensor) -> None:
    """out = weight * (x * rstd) with rstd = 1 / sqrt(mean(x^2, over D) + eps), kept for backward.

    Shapes: x and out [T, D] in bf16 or fp32, rows may be strided; weight [D]; rstd [T] fp32. out may be x.
    Rounding: x * rstd is rounded to x's dtype, then multiplied by the weight in that dtype.
    Cost: reads T*D and writes T*D elements.
    Order: launches on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes or strides.
    """
    tokens, width = x.shape
    check_tensor("x", x, (tokens, width), FLOATS, strided_rows=True)
    check_tensor("out", out, (tokens, width), (x.dtype,), strided_rows=True)
    check_tensor("weight", weight, (width,), FLOATS)
    check_tensor("rstd", rstd, (tokens,), (torch.float32,))
    if tokens == 0:
        return
    rows, block, num_warps = _row_tile(width)
    grid = (triton.cdiv(tokens, rows),)
    _forward_kernel[grid](
        x, weight, out, rstd, tokens, width, x.stride(0), out.stride(0), eps,
        ROWS=rows, BLOCK=block, num_warps=num_warps,
    )  # fmt: skip


def rmsnorm_backward_input(
    grad_y: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, grad_x: Tensor, accumulate: bool
) -> None:
    """Input half of the gradients: grad_x = (or +=) rstd * (gw - n * mean(gw * n)), gw = grad_y * weight, n = x * rstd.

    Shapes: grad_y, x, grad_x [T, D] in bf16 or fp32, rows may be strided; weight [D]; rstd [T] fp32 from the forward.
    accumulate adds the old grad_x in fp32 before the one rounding. grad_x may be grad_y or x.
    Order: launches on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes or strides.
    """
    tokens, width = x.shape
    for name, tensor in (("x", x), ("grad_y", grad_y), ("grad_x", grad_x)):
        check_tensor(name, tensor, (tokens, width), FLOATS, strided_rows=True)
    check_tensor("weight", weight, (width,), FLOATS)
    check_tensor("rstd", rstd, (tokens,), (torch.float32,))
    if tokens == 0:
        return
    rows, block, num_warps = _row_tile(width)
    grid = (triton.cdiv(tokens, rows),)
    _backward_input_kernel[grid](
        grad_y, x, weight, rstd, grad_x, tokens, width, grad_y.stride(0), x.stride(0), grad_x.stride(0),
        ACCUMULATE=accumulate, ROWS=rows, BLOCK=block, num_warps=num_warps,
    )  # fmt: skip


def rmsnorm_backward_weight(
    grad_y: Tensor, x: Tensor, rstd: Tensor, grad_weight: Tensor, partials: Tensor, accumulate: bool
) -> None:
    """Weight half of the gradients: grad_weight = (or +=) sum over T of grad_y * round(x * rstd).

    Shapes: grad_y and x [T, D] in bf16 or fp32, rows may be strided; rstd [T] fp32; grad_weight [D] fp32;
    partials [P, D] fp32 is workspace. P groups of consecutive rows are summed side by side, then the P sums: the
    order of the sum, so its bits, depends on T, D and P only (P = 128 keeps any card busy).
    round is to x's dtype, as in the forward, whose exact derivative this is.
    Order: two launches on the current stream, never synchronises. T = 0 adds nothing.
    Raises: ValueError on other shapes, dtypes or strides.
    """
    tokens, width = x.shape
    check_tensor("x", x, (tokens, width), FLOATS, strided_rows=True)
    check_tensor("grad_y", grad_y, (tokens, width), FLOATS, strided_rows=True)
    check_tensor("rstd", rstd, (tokens,), (torch.float32,))
    check_tensor("grad_weight", grad_weight, (width,), (torch.float32,))
    check_tensor("partials", partials, (partials.shape[0], width), (torch.float32,))
    groups = partials.shape[0]
    if groups == 0:
        raise ValueError("partials must have at least one row, got shape [0, D]")
    column_tiles = triton.cdiv(width, _WEIGHT_COLUMNS)
    _partial_weight_kernel[(groups * column_tiles,)](
        grad_y, x, rstd, partials, tokens, width, triton.cdiv(tokens, groups), column_tiles,
        grad_y.stride(0), x.stride(0), ROWS=_WEIGHT_ROWS, COLUMNS=_WEIGHT_COLUMNS, num_warps=4,
    )  # fmt: skip
    _sum_partials_kernel[(triton.cdiv(width, _SUM_COLUMNS),)](
        partials, grad_weight, groups, width,
        ACCUMULATE=accumulate, ROWS=_SUM_ROWS, COLUMNS=_SUM_COLUMNS, num_warps=4,
    )  # fmt: skip


def _row_tile(width: int) -> tuple[int, int, int]:
    """(rows per program, padded width, warps): by width alone, so that no other number moves a bit."""
    block = triton.next_power_of_2(width)
    num_warps = 4 if block <= 4096 else 8 if block <= 16384 else 16
    return max(1, _TILE_ELEMENTS // block), block, num_warps


@triton.jit
def _forward_kernel(
    x_ptr, weight_ptr, out_ptr, rstd_ptr, tokens, width, x_stride, out_stride, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < tokens)[:, None] & (columns < width)[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    # before the sum over the row is waited for, so that both loads are under way together
    weight = tl.load(weight_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
    mean_square = tl.sum(x * x, axis=1) / width
    rstd = tl.div_rn(1.0, tl.sqrt_rn(mean_square + eps))
    tl.store(rstd_ptr + rows, rstd, mask=rows < tokens)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    normalised = round_to(x * rstd[:, None], dtype).to(tl.float32)
    y = normalised * round_to(weight, dtype).to(tl.float32)[None, :]
    tl.store(out_ptr + rows[:, None] * out_stride + columns[None, :], round_to(y, dtype), mask=mask)


@triton.jit
def _backward_input_kernel(
    grad_y_ptr, x_ptr, weight_ptr, rstd_ptr, grad_x_ptr, tokens, width, grad_y_stride, x_stride, grad_x_stride,
    ACCUMULATE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < tokens)[:, None] & (columns < width)[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    grad_y = tl.load(grad_y_ptr + rows[:, None] * grad_y_stride + columns[None, :], mask=mask, other=0.0)
    weight = tl.load(weight_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
    rstd = tl.load(rstd_ptr + rows, mask=rows < tokens, other=0.0)[:, None]
    target = grad_x_ptr + rows[:, None] * grad_x_stride + columns[None, :]
    if ACCUMULATE:  # all loads before the sum over the row is waited for
        previous = tl.load(target, mask=mask, other=0.0)
    normalised = x * rstd
    grad_normalised = grad_y.to(tl.float32) * weight[None, :]
    projection = tl.sum(grad_normalised * normalised, axis=1) / width
    grad_x = rstd * (grad_normalised - normalised * projection[:, None])
    if ACCUMULATE:
        grad_x += previous.to(tl.float32)
    tl.store(target, round_to(grad_x, grad_x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _partial_weight_kernel(
    grad_y_ptr, x_ptr, rstd_ptr, partials_ptr, tokens, width, group_rows, column_tiles,
    grad_y_stride, x_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """partials[group] = the sum over the group's consecutive rows; lanes of a tile are summed once, at the end.

    Neighbouring programs take neighbouring columns, so that those at work together read whole rows.
    """
    group = (tl.program_id(0) // column_tiles).to(tl.int64)
    columns = (tl.program_id(0) % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    begin = group * group_rows
    end = tl.minimum(begin + group_rows, tokens)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for row in range(begin, end, ROWS):
        rows = row + tl.arange(0, ROWS)
        mask = (rows < end)[:, None] & (columns < width)[None, :]
        x = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0)
        grad_y = tl.load(grad_y_ptr + rows[:, None] * grad_y_stride + columns[None, :], mask=mask, other=0.0)
        rstd = tl.load(rstd_ptr + rows, mask=rows < end, other=0.0)
        normalised = round_to(x.to(tl.float32) * rstd[:, None], x.dtype).to(tl.float32)
        total += grad_y.to(tl.float32) * normalised
    tl.store(partials_ptr + group * width + columns, tl.sum(total, axis=0), mask=columns < width)


@triton.jit
def _sum_partials_kernel(
    partials_ptr, grad_weight_ptr, groups, width,
    ACCUMULATE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, groups, ROWS):
        rows = (first + tl.arange(0, ROWS)).to(tl.int64)
        mask = (rows < groups)[:, None] & (columns < width)[None, :]
        total += tl.load(partials_ptr + rows[:, None] * width + columns[None, :], mask=mask, other=0.0)
    grad_weight = tl.sum(total, axis=0)
    if ACCUMULATE:
        grad_weight += tl.load(grad_weight_ptr + columns, mask=columns < width, other=0.0)
    tl.store(grad_weight_ptr + columns, grad_weight, mask=columns < width)
