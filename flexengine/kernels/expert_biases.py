"""Gradients that the biases of experts bring: their own, and those of the weights that rows of them are multiplied by.

R rows sorted by expert, E experts, `bounds` [E + 1] int32: rows bounds[e] to bounds[e + 1] are those of expert e, as in
kernels/grouped.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.counts import cdiv, next_power_of_2
from flexengine.kernels.row_range import is_within

_ROWS, _COLUMNS = 32, 64  # a tile of a sum over rows: 128 bytes of each row of bf16
_BLOCK = 2048


def bias_gradient(grad_y: Tensor, bounds: Tensor, row_weight: Tensor | None, acc: Tensor, accumulate: bool) -> None:
    """acc[e] = (or +=) the sum over the rows of e of (row_weight[r] *) grad_y[r]; an expert without rows has zero.

    Shapes: grad_y [R, F] in bf16 or fp32, bounds [E + 1] int32, row_weight [R] fp32, acc [E, F] fp32, all contiguous.
    Sums in fp32; their order depends on where an expert's rows begin and end alone. Cost: reads R*F elements.
    Order: launches on the current stream, never synchronises. Raises: ValueError on other shapes, dtypes or strides.
    """
    (count, columns), experts = grad_y.shape, acc.shape[0]
    check_tensor("grad_y", grad_y, (count, columns), FLOATS)
    check_tensor("bounds", bounds, (experts + 1,), (torch.int32,))
    check_tensor("acc", acc, (experts, columns), (torch.float32,))
    if row_weight is not None:
        check_tensor("row_weight", row_weight, (count,), (torch.float32,))
    tiles = cdiv(columns, _COLUMNS)
    _bias_kernel[(experts * tiles,)](
        grad_y, bounds, acc if row_weight is None else row_weight, acc, columns, tiles,
        WEIGHTED=row_weight is not None, ACCUMULATE=accumulate, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4,
    )  # fmt: skip


def row_weight_gradient(grad_y: Tensor, bias: Tensor, bounds: Tensor, out: Tensor, accumulate: bool) -> None:
    """out[r] = (or +=) the sum over columns of grad_y[r] * bias[e] for the rows r of every expert e.

    Shapes: grad_y [R, F] and bias [E, F] in bf16 or fp32, bounds [E + 1] int32, out [R] fp32, all contiguous. Sums in
    fp32; other rows of out stay as they are. Cost: reads R*F elements.
    Order: launches on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes or strides.
    """
    (count, columns), experts = grad_y.shape, bias.shape[0]
    check_tensor("grad_y", grad_y, (count, columns), FLOATS)
    check_tensor("bias", bias, (experts, columns), FLOATS)
    check_tensor("bounds", bounds, (experts + 1,), (torch.int32,))
    check_tensor("out", out, (count,), (torch.float32,))
    if count == 0:
        return
    _row_weight_kernel[(count,)](
        grad_y, bias, bounds, out, columns, experts, ACCUMULATE=accumulate,
        EXPERTS=next_power_of_2(experts), BLOCK=min(_BLOCK, next_power_of_2(columns)), num_warps=4,
    )  # fmt: skip


@triton.jit
def _bias_kernel(
    grad_y_ptr, bounds_ptr, row_weight_ptr, acc_ptr, columns, tiles,
    WEIGHTED: tl.constexpr, ACCUMULATE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0) // tiles
    outs = (tl.program_id(0) % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    start, end = tl.load(bounds_ptr + expert), tl.load(bounds_ptr + expert + 1)
    lanes = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(start, end, ROWS):
        rows = (first + tl.arange(0, ROWS)).to(tl.int64)
        mask = (rows < end)[:, None] & (outs < columns)[None, :]
        grad = tl.load(grad_y_ptr + rows[:, None] * columns + outs[None, :], mask=mask, other=0.0).to(tl.float32)
        if WEIGHTED:
            grad *= tl.load(row_weight_ptr + rows, mask=rows < end, other=0.0)[:, None]
        lanes += grad
    total = tl.sum(lanes, axis=0)
    target = acc_ptr + expert.to(tl.int64) * columns + outs
    if ACCUMULATE:
        total += tl.load(target, mask=outs < columns, other=0.0)
    tl.store(target, total, mask=outs < columns)


@triton.jit
def _row_weight_kernel(
    grad_y_ptr, bias_ptr, bounds_ptr, out_ptr, columns, experts,
    ACCUMULATE: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if is_within(row, bounds_ptr, experts):
        index = tl.arange(0, EXPERTS)
        ends = tl.load(bounds_ptr + 1 + index, mask=index < experts, other=2147483647)
        expert = tl.sum((ends <= row).to(tl.int64), 0)
        lanes = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, columns, BLOCK):
            outs = first + tl.arange(0, BLOCK)
            mask = outs < columns
            grad = tl.load(grad_y_ptr + row * columns + outs, mask=mask, other=0.0).to(tl.float32)
            lanes += grad * tl.load(bias_ptr + expert * columns + outs, mask=mask, other=0.0).to(tl.float32)
        total = tl.sum(lanes, axis=0)
        if ACCUMULATE:
            total += tl.load(out_ptr + row)
        tl.store(out_ptr + row, total)
