"""LayerNorm: y = weight * (x - mean) / sqrt(var + eps) + bias, forward and the two halves of backward.

T tokens, D width, rows at any distance from each other. A program of forward and of the input half holds whole rows in
registers: D up to about 65536. fp32 arithmetic, with the variance as the mean square of x - mean; one rounding, at the
store. Source: Ba et al. 2016, "Layer Normalization", https://arxiv.org/abs/1607.06450.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.column_sum import TOTAL_COLUMNS, TOTAL_ROWS, rows_of_a_group, sum_of_rows
from flexengine.kernels.counts import cdiv, next_power_of_2
from flexengine.kernels.rounding import round_to

_TILE_ELEMENTS = 2048  # elements per program when rows are short: several rows share a program
_WEIGHT_COLUMNS = 128  # of a tile of the weight half: 256 bytes of a bf16 row, fewer where rows are narrower
_WEIGHT_ELEMENTS = 16 * _WEIGHT_COLUMNS


def layernorm_forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Tensor) -> None:
    """out = weight * n + bias, n = (x - mean) * rstd, rstd = 1 / sqrt(mean((x - mean)^2, over D) + eps).

    Shapes: x and out [T, D] in bf16 or fp32, rows may be strided; weight and bias [D]. out may be x.
    Cost: reads and writes T*D elements.
    Order: launches on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes or strides.
    """
    count, width = shape = _check({"x": x, "out": out})
    for name, vector in (("weight", weight), ("bias", bias)):
        check_tensor(name, vector, (width,), FLOATS)
    if 0 in shape:
        return
    rows, block, num_warps = _row_tile(width)
    _forward_kernel[(cdiv(count, rows),)](
        x, weight, bias, out, count, width, x.stride(0), out.stride(0), eps,
        ROWS=rows, BLOCK=block, num_warps=num_warps,
    )  # fmt: skip


def layernorm_backward_input(
    grad_y: Tensor, x: Tensor, weight: Tensor, eps: float, grad_x: Tensor, accumulate: bool,
    statistics: Tensor | None = None,
) -> None:  # fmt: skip
    """Input half of the gradients: grad_x = (or +=) rstd * (gw - mean(gw) - n * mean(gw * n)), gw = grad_y * weight.

    Shapes: grad_y, x and grad_x [T, D] in bf16 or fp32, rows may be strided; weight [D]; statistics [T, 2] fp32 takes
    mean and rstd of every row, for the weight half. accumulate adds the old grad_x in fp32 before the one rounding.
    grad_x may be grad_y or x.
    Cost: reads 2*T*D elements (3*T*D to accumulate), writes T*D.
    Order: launches on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes or strides.
    """
    count, width = shape = _check({"x": x, "grad_y": grad_y, "grad_x": grad_x})
    check_tensor("weight", weight, (width,), FLOATS)
    if statistics is not None:
        check_tensor("statistics", statistics, (count, 2), (torch.float32,))
    if 0 in shape:
        return
    rows, block, num_warps = _row_tile(width)
    _backward_input_kernel[(cdiv(count, rows),)](
        grad_y, x, weight, grad_x, statistics, count, width, grad_y.stride(0), x.stride(0), grad_x.stride(0), eps,
        ACCUMULATE=accumulate, STORE=statistics is not None, ROWS=rows, BLOCK=block, num_warps=num_warps,
    )  # fmt: skip


def layernorm_backward_weight(
    grad_y: Tensor, x: Tensor, statistics: Tensor, grad_weight: Tensor, grad_bias: Tensor, partials: Tensor,
    accumulate: bool,
) -> None:  # fmt: skip
    """Weight half of the gradients: grad_weight = (or +=) sum over T of grad_y * n, grad_bias = (or +=) that of grad_y.

    Shapes: grad_y and x [T, D] in bf16 or fp32, rows may be strided; statistics [T, 2] from the input half; grad_weight
    and grad_bias [D] fp32; partials [P, 2, D] fp32 is workspace. P groups of consecutive rows are summed side by side,
    then the P sums: the order of the sum, so its bits, depends on T, D and P only.
    Cost: reads 2*T*D elements, writes and reads 8*P*D bytes.
    Order: two launches on the current stream, never synchronises. T = 0 adds nothing.
    Raises: ValueError on other shapes, dtypes or strides, or without partials.
    """
    count, width = _check({"x": x, "grad_y": grad_y})
    groups = partials.shape[0]
    check_tensor("statistics", statistics, (count, 2), (torch.float32,))
    for name, total in (("grad_weight", grad_weight), ("grad_bias", grad_bias)):
        check_tensor(name, total, (width,), (torch.float32,))
    check_tensor("partials", partials, (groups, 2, width), (torch.float32,))
    if groups == 0:
        raise ValueError("partials must have at least one row, got shape [0, 2, D]")
    if width == 0:
        return
    columns = min(_WEIGHT_COLUMNS, next_power_of_2(width))
    rows, tiles = _WEIGHT_ELEMENTS // columns, cdiv(width, columns)
    _partial_weight_kernel[(groups * tiles,)](
        grad_y, x, statistics, partials, count, width, rows_of_a_group(count, groups, rows), tiles,
        grad_y.stride(0), x.stride(0), ROWS=rows, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    _totals_kernel[(cdiv(width, TOTAL_COLUMNS), 2)](
        partials, grad_weight, grad_bias, groups, width,
        ACCUMULATE=accumulate, ROWS=TOTAL_ROWS, COLUMNS=TOTAL_COLUMNS, num_warps=4,
    )  # fmt: skip


def _check(rows: dict[str, Tensor]) -> tuple[int, int]:
    """The shape [T, D] of all, the first of which has it."""
    count, width = next(iter(rows.values())).shape
    for name, tensor in rows.items():
        check_tensor(name, tensor, (count, width), FLOATS, strided_rows=True)
    return count, width


def _row_tile(width: int) -> tuple[int, int, int]:
    """(rows per program, padded width, warps): by width alone, so that no other number moves a bit."""
    block = next_power_of_2(width)
    num_warps = min(32, max(4, block // 1024))  # 32 elements a thread, so that the input half keeps them in registers
    return max(1, _TILE_ELEMENTS // block), block, num_warps


@triton.jit
def _centred(x, mask, width, eps):
    """(mean [ROWS], rstd [ROWS], x - mean, zero outside of the mask) of rows that are zero outside of it."""
    mean = tl.sum(x, axis=1) / width
    centred = tl.where(mask, x - mean[:, None], 0.0)
    variance = tl.sum(centred * centred, axis=1) / width
    return mean, tl.div_rn(1.0, tl.sqrt_rn(variance + eps)), centred


@triton.jit(do_not_specialize=["count"])
def _forward_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, count, width, x_stride, out_stride, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    within = columns < width
    mask = (rows < count)[:, None] & within[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    # before the sums over the row are waited for, so that all loads are under way together
    weight = tl.load(weight_ptr + columns, mask=within, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + columns, mask=within, other=0.0).to(tl.float32)
    _, rstd, centred = _centred(x, mask, width, eps)
    y = centred * rstd[:, None] * weight[None, :] + bias[None, :]
    tl.store(out_ptr + rows[:, None] * out_stride + columns[None, :], round_to(y, out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count"])
def _backward_input_kernel(
    grad_y_ptr, x_ptr, weight_ptr, grad_x_ptr, statistics_ptr, count, width, grad_y_stride, x_stride, grad_x_stride,
    eps, ACCUMULATE: tl.constexpr, STORE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < count)[:, None] & (columns < width)[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    grad_y = tl.load(grad_y_ptr + rows[:, None] * grad_y_stride + columns[None, :], mask=mask, other=0.0)
    weight = tl.load(weight_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
    target = grad_x_ptr + rows[:, None] * grad_x_stride + columns[None, :]
    if ACCUMULATE:  # all loads before the sums over the row are waited for
        previous = tl.load(target, mask=mask, other=0.0)
    mean, rstd, centred = _centred(x, mask, width, eps)
    if STORE:
        tl.store(statistics_ptr + 2 * rows, mean, mask=rows < count)
        tl.store(statistics_ptr + 2 * rows + 1, rstd, mask=rows < count)
    normalised = centred * rstd[:, None]
    grad_normalised = grad_y.to(tl.float32) * weight[None, :]
    shift = tl.sum(grad_normalised, axis=1) / width
    projection = tl.sum(grad_normalised * normalised, axis=1) / width
    grad_x = rstd[:, None] * (grad_normalised - shift[:, None] - normalised * projection[:, None])
    if ACCUMULATE:
        grad_x += previous.to(tl.float32)
    tl.store(target, round_to(grad_x, grad_x_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count", "group_rows"])
def _partial_weight_kernel(
    grad_y_ptr, x_ptr, statistics_ptr, partials_ptr, count, width, group_rows, tiles, grad_y_stride, x_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """partials[group] = the sums over the group's consecutive rows, the weight's and then the bias's.

    Neighbouring programs take neighbouring columns, so that those at work together read whole rows.
    """
    group = (tl.program_id(0) // tiles).to(tl.int64)
    columns = (tl.program_id(0) % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    begin = group * group_rows
    end = tl.minimum(begin + group_rows, count)
    weight_total = tl.zeros((ROWS, COLUMNS), tl.float32)
    bias_total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for row in range(begin, end, ROWS):
        rows = row + tl.arange(0, ROWS)
        mask = (rows < end)[:, None] & (columns < width)[None, :]
        x = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        grad_y = tl.load(grad_y_ptr + rows[:, None] * grad_y_stride + columns[None, :], mask=mask, other=0.0)
        mean = tl.load(statistics_ptr + 2 * rows, mask=rows < end, other=0.0)
        rstd = tl.load(statistics_ptr + 2 * rows + 1, mask=rows < end, other=0.0)
        weight_total += grad_y.to(tl.float32) * ((x - mean[:, None]) * rstd[:, None])
        bias_total += grad_y.to(tl.float32)
    target = partials_ptr + group * 2 * width + columns
    tl.store(target, tl.sum(weight_total, axis=0), mask=columns < width)
    tl.store(target + width, tl.sum(bias_total, axis=0), mask=columns < width)


@triton.jit(do_not_specialize=["groups"])
def _totals_kernel(
    partials_ptr, grad_weight_ptr, grad_bias_ptr, groups, width,
    ACCUMULATE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Half of the programs write the weight's gradient, and half of them the bias's."""
    columns = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    of_bias = tl.program_id(1)
    total = sum_of_rows(partials_ptr + of_bias * width, groups, 2 * width, columns, width, ROWS, COLUMNS)
    target = grad_weight_ptr + columns
    if of_bias == 1:
        target = grad_bias_ptr + columns
    if ACCUMULATE:
        total += tl.load(target, mask=columns < width, other=0.0)
    tl.store(target, total, mask=columns < width)
