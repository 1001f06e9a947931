"""LayerNorm: y = weight * (x - mean) / sqrt(var + eps) + bias, forward, the input half of backward, and backward in one
pass.

T tokens, D width, rows at any distance from each other. A program holds whole rows in registers: D up to about 65536.
fp32 arithmetic, with the variance as the mean square of x - mean; one rounding, at the store. Source: Ba et al. 2016,
"Layer Normalization", https://arxiv.org/abs/1607.06450.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.column_sum import TOTAL_COLUMNS, TOTAL_ROWS, sum_of_rows
from flexengine.kernels.counts import cdiv, next_power_of_2, stages_of_rows
from flexengine.kernels.rounding import round_to

_TILE_ELEMENTS = 2048  # elements per program when rows are short: several rows share a program


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
    grad_y: Tensor, x: Tensor, weight: Tensor, eps: float, grad_x: Tensor, accumulate: bool
) -> None:
    """Input half of the gradients: grad_x = (or +=) rstd * (gw - mean(gw) - n * mean(gw * n)), gw = grad_y * weight.

    Shapes: grad_y, x and grad_x [T, D] in bf16 or fp32, rows may be strided; weight [D]. accumulate adds the old grad_x
    in fp32 before the one rounding. grad_x may be grad_y or x.
    Cost: reads 2*T*D elements (3*T*D to accumulate), writes T*D.
    Order: launches on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes or strides.
    """
    count, width = shape = _check({"x": x, "grad_y": grad_y, "grad_x": grad_x})
    check_tensor("weight", weight, (width,), FLOATS)
    if 0 in shape:
        return
    rows, block, num_warps = _row_tile(width)
    _backward_kernel[(cdiv(count, rows),)](
        grad_y, x, weight, grad_x, grad_x, count, width, rows, grad_y.stride(0), x.stride(0), grad_x.stride(0), eps,
        ACCUMULATE=accumulate, SUMS=False, ROWS=rows, BLOCK=block, STAGES=1, num_warps=num_warps,
    )  # fmt: skip


def layernorm_backward(
    grad_y: Tensor, x: Tensor, weight: Tensor, eps: float, grad_x: Tensor, partials: Tensor, accumulate: bool
) -> None:
    """Input half as `layernorm_backward_input`, and in `partials` what the gradients of weight and bias are sums of:
    grad_y * n and grad_y over T, in one pass over the rows.

    Shapes: those of the input half; partials [P, 2, D] fp32. P groups of consecutive rows are summed side by side;
    `sum_partials` adds them up: the order of the sum, so its bits, depends on T, D and P only.
    Cost: reads 2*T*D elements (3*T*D to accumulate), writes T*D, and 8*P*D bytes.
    Order: one launch on the current stream, never synchronises. Without rows the partial sums are zeros.
    Raises: ValueError on other shapes, dtypes or strides, or without partials.
    """
    count, width = _check({"x": x, "grad_y": grad_y, "grad_x": grad_x})
    groups = partials.shape[0]
    check_tensor("weight", weight, (width,), FLOATS)
    check_tensor("partials", partials, (groups, 2, width), (torch.float32,))
    if groups == 0:
        raise ValueError("partials must have at least one row, got shape [0, 2, D]")
    if width == 0:
        return
    rows, block, _ = _row_tile(width)
    _backward_kernel[(groups,)](
        grad_y, x, weight, grad_x, partials, count, width, cdiv(count, groups), grad_y.stride(0), x.stride(0),
        grad_x.stride(0), eps, ACCUMULATE=accumulate, SUMS=True, ROWS=rows, BLOCK=block,
        STAGES=stages_of_rows(block * x.element_size()), num_warps=min(32, max(4, block // 512)),
    )  # fmt: skip


def sum_partials(partials: Tensor, grad_weight: Tensor, grad_bias: Tensor, accumulate: bool) -> None:
    """grad_weight and grad_bias [D] fp32 = (or +=) the sums of partials [P, 2, D] over P, in an order that P fixes.

    Order: one launch on the current stream, never synchronises. Raises: ValueError on other shapes or dtypes.
    """
    groups, _, width = partials.shape
    check_tensor("partials", partials, (groups, 2, width), (torch.float32,))
    for name, total in (("grad_weight", grad_weight), ("grad_bias", grad_bias)):
        check_tensor(name, total, (width,), (torch.float32,))
    if width:
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


@triton.jit(do_not_specialize=["count", "group_rows"])
def _backward_kernel(
    grad_y_ptr, x_ptr, weight_ptr, grad_x_ptr, partials_ptr, count, width, group_rows, grad_y_stride, x_stride,
    grad_x_stride, eps, ACCUMULATE: tl.constexpr, SUMS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A group of consecutive rows, whose parts of the gradients of weight and bias it adds up if these are wanted;
    lanes of a tile are summed once, at the end."""
    group = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    within = columns < width
    weight = tl.load(weight_ptr + columns, mask=within, other=0.0).to(tl.float32)
    begin = group * group_rows
    end = tl.minimum(begin + group_rows, count)
    of_weight, of_bias = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS, BLOCK), tl.float32)
    for first in tl.range(begin, end, ROWS, num_stages=STAGES):  # in two stages it loads the next rows beside these
        rows = first + tl.arange(0, ROWS)
        mask = (rows < end)[:, None] & within[None, :]
        x = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        grad_y = tl.load(grad_y_ptr + rows[:, None] * grad_y_stride + columns[None, :], mask=mask, other=0.0)
        target = grad_x_ptr + rows[:, None] * grad_x_stride + columns[None, :]
        if ACCUMULATE:  # all loads before the sums over the row are waited for
            previous = tl.load(target, mask=mask, other=0.0).to(tl.float32)
        _, rstd, centred = _centred(x, mask, width, eps)
        normalised, grad_y = centred * rstd[:, None], grad_y.to(tl.float32)
        grad_normalised = grad_y * weight[None, :]
        shift = tl.sum(grad_normalised, axis=1) / width
        projection = tl.sum(grad_normalised * normalised, axis=1) / width
        grad_x = rstd[:, None] * (grad_normalised - shift[:, None] - normalised * projection[:, None])
        if ACCUMULATE:
            grad_x += previous
        tl.store(target, round_to(grad_x, grad_x_ptr.dtype.element_ty), mask=mask)
        if SUMS:
            of_weight += grad_y * normalised
            of_bias += grad_y
    if SUMS:
        target = partials_ptr + group * 2 * width + columns
        tl.store(target, tl.sum(of_weight, axis=0), mask=within)
        tl.store(target + width, tl.sum(of_bias, axis=0), mask=within)


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
