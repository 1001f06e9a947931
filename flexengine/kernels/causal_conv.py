"""Causal convolution of every channel along a sequence's tokens, then silu, forward and the two halves of backward.

T tokens, C channels, W taps. Channels are [T, groups, width] views of a fused row, one part of all channels per launch.
Source: Yang et al. 2024, "Gated Delta Networks". z_t = bias + sum over p < W of weight[:, W - 1 - p] * x_(t - p), where
x_(t - p) counts only if positions[t] >= p; rows before the first are those of `tail`, which the chunk before left.
fp32 arithmetic, one rounding at the store.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.counts import cdiv
from flexengine.kernels.rounding import round_to

_ROWS, _COLUMNS, _WARPS = 8, 128, 1  # tile of a program: every row is read once, and found again in registers


class ConvChannels(NamedTuple):
    """Channels [first, first + groups * width) of all: their inputs x [T, groups, width], rows and groups may be
    strided, all channels' weight [C, 1, W] and bias [C], positions [T] int32, and what the chunk before left, tail
    [W - 1, C]."""

    x: Tensor
    first: int
    weight: Tensor
    bias: Tensor | None
    positions: Tensor
    tail: Tensor | None

    @property
    def columns(self) -> int:
        """Channels of the part."""
        return self.x.shape[1] * self.x.shape[2]

    @property
    def rows(self) -> int:
        """Tokens."""
        return self.x.shape[0]

    def grid(self, rows: int) -> tuple[int, int]:
        """Programs for tiles over so many rows."""
        return cdiv(rows, _ROWS), cdiv(self.columns, _COLUMNS)

    def inputs(self) -> tuple:
        """What every kernel reads z from."""
        bias, tail = (self.weight if given is None else given for given in (self.bias, self.tail))
        sizes = (self.rows, self.columns, self.x.shape[2], self.weight.shape[0], self.first)
        return self.x, self.weight, bias, self.positions, tail, *sizes, *self.x.stride()[:2]

    def constants(self) -> dict:
        """What every kernel is compiled for."""
        given = {"BIASES": int(self.bias is not None), "HAS_TAIL": self.tail is not None}
        return given | {"TAPS": self.weight.shape[2], "ROWS": _ROWS, "COLUMNS": _COLUMNS, "num_warps": _WARPS}

    def check(self, **others: Tensor) -> None:
        """Raise ValueError unless shapes, dtypes and strides fit; others [T, C], rows strided."""
        channels, _, taps = self.weight.shape
        check_tensor("x", self.x, self.x.shape, FLOATS, strided_rows=True)
        check_tensor("weight", self.weight, (channels, 1, taps), FLOATS)
        check_tensor("positions", self.positions, (self.rows,), (torch.int32,))
        if self.bias is not None:
            check_tensor("bias", self.bias, (channels,), FLOATS)
        if self.first + self.columns > channels:
            raise ValueError(f"channels {self.first} to {self.first + self.columns} are not among {channels}")
        if self.tail is not None:
            check_tensor("tail", self.tail, (taps - 1, channels), FLOATS)
        for name, tensor in others.items():
            check_tensor(name, tensor, (self.rows, channels), FLOATS, strided_rows=True)


def causal_conv_forward(part: ConvChannels, y: Tensor) -> None:
    """y[:, channels of the part] = silu(z); y [T, C] in bf16 or fp32, rows may be strided.

    Order: launches on the current stream, never synchronises. Raises: ValueError on other shapes, dtypes or strides.
    """
    part.check(y=y)
    if part.rows:
        _forward_kernel[part.grid(part.rows)](*part.inputs(), y, y.stride(0), **part.constants())


def causal_conv_backward_input(
    part: ConvChannels, grad_y: Tensor, grad_x: Tensor, grad_left: Tensor | None, grad_before: Tensor | None
) -> None:
    """grad_x [T, groups, width] of the part's inputs, from grad_y [T, C] and from what the chunk after hands back.

    grad_left [W - 1, C] fp32: the gradient of the last W - 1 inputs, from the chunk after; grad_before, the same of the
    chunk before, is written here. z is found again at every token that an input reaches.
    Order: launches on the current stream, never synchronises. Raises: ValueError on other shapes, dtypes or strides.
    """
    part.check(grad_y=grad_y)
    check_tensor("grad_x", grad_x, part.x.shape, FLOATS, strided_rows=True)
    channels, _, taps = part.weight.shape
    for name, tensor in (("grad_left", grad_left), ("grad_before", grad_before)):
        if tensor is not None:
            check_tensor(name, tensor, (taps - 1, channels), (torch.float32,))
    if part.rows:
        _backward_kernel[part.grid(part.rows + taps - 1)](
            *part.inputs(), grad_y, grad_x, grad_y if grad_left is None else grad_left,
            grad_y if grad_before is None else grad_before, grad_y.stride(0), *grad_x.stride()[:2],
            HAS_LEFT=grad_left is not None, HAS_BEFORE=grad_before is not None, **part.constants(),
        )  # fmt: skip


def causal_conv_backward_weight(part: ConvChannels, grad_y: Tensor, partials: Tensor) -> None:
    """partials[:, p, channels of the part] = sums of grad_z_t * x_(t - p) over P groups of consecutive tokens, and
    behind those of all taps the sums of grad_z_t, if there is a bias.

    partials [P, W (+ 1), C] fp32; the sum over P is the caller's. Order: launches on the current stream, never
    synchronises.
    Raises: ValueError on other shapes, dtypes or strides.
    """
    part.check(grad_y=grad_y)
    groups, (channels, _, taps) = len(partials), part.weight.shape
    check_tensor("partials", partials, (groups, taps + (part.bias is not None), channels), (torch.float32,))
    _weight_kernel[(groups, cdiv(part.columns, _COLUMNS))](
        *part.inputs(), grad_y, partials, grad_y.stride(0), cdiv(part.rows, groups), **part.constants()
    )


@triton.jit
def _there(row, end, columns, column_count):
    """Mask [COLUMNS]: a row from 0 to `end`, of columns that there are."""
    row += tl.zeros_like(columns)  # in the interpreter a mask takes no number beside a vector
    return (columns < column_count) & (row >= 0) & (row < end)


@triton.jit
def _rows(
    x_ptr, tail_ptr, begin, columns, count, column_count, width, channels, first, x_stride, x_step,
    HAS_TAIL: tl.constexpr, TAPS: tl.constexpr, NUMBER: tl.constexpr,
):  # fmt: skip
    """NUMBER rows of x from `begin` on, each [COLUMNS] in fp32; zeros beyond what there is."""
    inside = (columns // width) * x_step + columns % width
    found = ()
    for i in tl.static_range(NUMBER):
        row = begin + i
        mask = _there(row, count, columns, column_count)
        x = tl.load(x_ptr + row.to(tl.int64) * x_stride + inside, mask=mask, other=0.0).to(tl.float32)
        if HAS_TAIL and i < 2 * (TAPS - 1):  # no tile begins further before row 0
            left = row + TAPS - 1
            mask = _there(left, TAPS - 1, columns, column_count)
            x += tl.load(tail_ptr + left * channels + first + columns, mask=mask, other=0.0).to(tl.float32)
        found += (x,)
    return found


@triton.jit
def _weights(weight_ptr, bias_ptr, columns, column_count, first, BIASES: tl.constexpr, TAPS: tl.constexpr):
    """The weight [COLUMNS] in fp32 of every number of tokens back, and then what z begins with."""
    found = ()
    for back in tl.static_range(TAPS):
        taps = weight_ptr + (first + columns) * TAPS + (TAPS - 1 - back)
        found += (tl.load(taps, mask=columns < column_count, other=0.0).to(tl.float32),)
    if BIASES:
        bias = tl.load(bias_ptr + first + columns, mask=columns < column_count, other=0.0).to(tl.float32)
    else:
        bias = tl.zeros_like(found[0])
    found += (bias,)
    return found


@triton.jit
def _sum(x, weights, position, row: tl.constexpr, TAPS: tl.constexpr):
    """z [COLUMNS] of the row after TAPS - 1 + `row` others of x."""
    z = weights[TAPS]
    for back in tl.static_range(TAPS):
        z += tl.where(position >= back, weights[back] * x[row + TAPS - 1 - back], 0.0)
    return z


@triton.jit
def _grad_sums(
    x, weights, positions_ptr, grad_y_ptr, begin, end, columns, column_count, first, grad_y_stride,
    TAPS: tl.constexpr, NUMBER: tl.constexpr,
):  # fmt: skip
    """(grad_z [COLUMNS], position) of NUMBER rows from `begin` on, where they are from 0 to `end`; zeros and -1
    elsewhere. x: the rows from TAPS - 1 before `begin`."""
    grads, positions = (), ()
    for i in tl.static_range(NUMBER):
        row = begin + i
        at = grad_y_ptr + row.to(tl.int64) * grad_y_stride + first + columns
        grads += (tl.load(at, mask=_there(row, end, columns, column_count), other=0.0).to(tl.float32),)
        positions += (tl.load(positions_ptr + row, mask=(row >= 0) & (row < end), other=-1),)
    found = ()
    for i in tl.static_range(NUMBER):
        z = _sum(x, weights, positions[i], i, TAPS)
        s = tl.sigmoid(z)
        found += (grads[i] * s * (1.0 + z * (1.0 - s)),)
    return found, positions


@triton.jit(do_not_specialize=["count"])
def _forward_kernel(
    x_ptr, weight_ptr, bias_ptr, positions_ptr, tail_ptr, count, column_count, width, channels, first, x_stride, x_step,
    y_ptr, y_stride, BIASES: tl.constexpr, HAS_TAIL: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0) * ROWS
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    weights = _weights(weight_ptr, bias_ptr, columns, column_count, first, BIASES, TAPS)
    x = _rows(
        x_ptr, tail_ptr, begin - (TAPS - 1), columns, count, column_count, width, channels, first, x_stride, x_step,
        HAS_TAIL, TAPS, ROWS + TAPS - 1,
    )  # fmt: skip
    for i in tl.static_range(ROWS):
        row = begin + i
        z = _sum(x, weights, tl.load(positions_ptr + row, mask=row < count, other=-1), i, TAPS)
        target = y_ptr + row.to(tl.int64) * y_stride + first + columns
        mask = _there(row, count, columns, column_count)
        tl.store(target, round_to(z * tl.sigmoid(z), y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count"])
def _backward_kernel(
    x_ptr, weight_ptr, bias_ptr, positions_ptr, tail_ptr, count, column_count, width, channels, first, x_stride, x_step,
    grad_y_ptr, grad_x_ptr, grad_left_ptr, grad_before_ptr, grad_y_stride, grad_x_stride, grad_x_step,
    BIASES: tl.constexpr, HAS_TAIL: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_BEFORE: tl.constexpr, TAPS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Inputs from the tail's first row on: what is before row 0 belongs to the chunk before."""
    begin = tl.program_id(0) * ROWS - (TAPS - 1)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    weights = _weights(weight_ptr, bias_ptr, columns, column_count, first, BIASES, TAPS)
    x = _rows(
        x_ptr, tail_ptr, begin - (TAPS - 1), columns, count, column_count, width, channels, first, x_stride, x_step,
        HAS_TAIL, TAPS, ROWS + 2 * (TAPS - 1),
    )  # fmt: skip
    grad_z, positions = _grad_sums(
        x, weights, positions_ptr, grad_y_ptr, begin, count, columns, column_count, first, grad_y_stride, TAPS,
        ROWS + TAPS - 1,
    )  # fmt: skip
    inside = (columns // width) * grad_x_step + columns % width
    for i in tl.static_range(ROWS):
        row = begin + i
        grad = tl.zeros((COLUMNS,), tl.float32)
        for ahead in tl.static_range(TAPS):
            grad += tl.where(positions[i + ahead] >= ahead, weights[ahead] * grad_z[i + ahead], 0.0)
        if HAS_LEFT:
            last = row - (count - (TAPS - 1))
            at = grad_left_ptr + last * channels + first + columns
            grad += tl.load(at, mask=_there(last, TAPS - 1, columns, column_count), other=0.0)
        target = grad_x_ptr + row.to(tl.int64) * grad_x_stride + inside
        mask = _there(row, count, columns, column_count)
        tl.store(target, round_to(grad, grad_x_ptr.dtype.element_ty), mask=mask)
        if HAS_BEFORE and i < TAPS - 1:
            before = row + TAPS - 1
            at = grad_before_ptr + before * channels + first + columns
            tl.store(at, grad, mask=_there(before, TAPS - 1, columns, column_count))


@triton.jit(do_not_specialize=["count", "group_rows"])
def _weight_kernel(
    x_ptr, weight_ptr, bias_ptr, positions_ptr, tail_ptr, count, column_count, width, channels, first, x_stride, x_step,
    grad_y_ptr, partials_ptr, grad_y_stride, group_rows,
    BIASES: tl.constexpr, HAS_TAIL: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    weights = _weights(weight_ptr, bias_ptr, columns, column_count, first, BIASES, TAPS)
    end = tl.minimum((group + 1) * group_rows, count)
    totals = ()
    for _ in tl.static_range(TAPS):
        totals += (tl.zeros((COLUMNS,), tl.float32),)
    of_bias = tl.zeros((COLUMNS,), tl.float32)
    for tile in range(tl.cdiv(group_rows, ROWS)):
        begin = group * group_rows + tile * ROWS
        x = _rows(
            x_ptr, tail_ptr, begin - (TAPS - 1), columns, count, column_count, width, channels, first, x_stride, x_step,
            HAS_TAIL, TAPS, ROWS + TAPS - 1,
        )  # fmt: skip
        grad_z, positions = _grad_sums(
            x, weights, positions_ptr, grad_y_ptr, begin, end, columns, column_count, first, grad_y_stride, TAPS, ROWS,
        )  # fmt: skip
        for i in tl.static_range(ROWS):
            added = ()
            for back in tl.static_range(TAPS):
                product = tl.where(positions[i] >= back, grad_z[i] * x[i + TAPS - 1 - back], 0.0)
                added += (totals[back] + product,)
            totals = added
            of_bias += grad_z[i]
    if BIASES:
        target = partials_ptr + (group * (TAPS + 1) + TAPS).to(tl.int64) * channels + first + columns
        tl.store(target, of_bias, mask=columns < column_count)
    for back in tl.static_range(TAPS):
        target = partials_ptr + (group * (TAPS + BIASES) + back).to(tl.int64) * channels + first + columns
        tl.store(target, totals[back], mask=columns < column_count)
