"""Causal convolution of every channel along a sequence's tokens, then silu, forward and the two halves of backward.

T tokens, C channels, W taps. Channels are [T, groups, width] views of a fused row, one part of all channels per launch.
Source: Yang et al. 2024, "Gated Delta Networks". z_t = sum over p < W of weight[:, W - 1 - p] * x_(t - p), where
x_(t - p) counts only if positions[t] >= p; rows before the first are those of `tail`, which the chunk before left.
fp32 arithmetic, one rounding at the store.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.rounding import round_to

_ROWS, _COLUMNS = 32, 64  # tile of a program; neighbouring columns, so that a row's reads are whole sectors
_WEIGHT_ROWS = 16


class Part(NamedTuple):
    """Channels [first, first + groups * width) of all: their inputs x [T, groups, width], rows and groups may be
    strided, all channels' weight [C, 1, W], positions [T] int32, and what the chunk before left, tail [W - 1, C]."""

    x: Tensor
    first: int
    weight: Tensor
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
        return triton.cdiv(rows, _ROWS), triton.cdiv(self.columns, _COLUMNS)

    def inputs(self) -> tuple:
        """What every kernel reads z from."""
        tail = self.weight if self.tail is None else self.tail
        sizes = (self.rows, self.columns, self.x.shape[2], self.weight.shape[0], self.first)
        return self.x, self.weight, self.positions, tail, *sizes, *self.x.stride()[:2]

    def check(self, **others: Tensor) -> None:
        """Raise ValueError unless shapes, dtypes and strides fit; others [T, C], rows strided."""
        channels, _, taps = self.weight.shape
        check_tensor("x", self.x, self.x.shape, FLOATS, strided_rows=True)
        check_tensor("weight", self.weight, (channels, 1, taps), FLOATS)
        check_tensor("positions", self.positions, (self.rows,), (torch.int32,))
        if self.first + self.columns > channels:
            raise ValueError(f"channels {self.first} to {self.first + self.columns} are not among {channels}")
        if self.tail is not None:
            check_tensor("tail", self.tail, (taps - 1, channels), FLOATS)
        for name, tensor in others.items():
            check_tensor(name, tensor, (self.rows, channels), FLOATS, strided_rows=True)


def causal_conv_forward(part: Part, y: Tensor) -> None:
    """y[:, channels of the part] = silu(z); y [T, C] in bf16 or fp32, rows may be strided.

    Order: launches on the current stream, never synchronises. Raises: ValueError on other shapes, dtypes or strides.
    """
    part.check(y=y)
    if part.rows:
        _forward_kernel[part.grid(part.rows)](
            *part.inputs(), y, y.stride(0), HAS_TAIL=part.tail is not None, TAPS=part.weight.shape[2], ROWS=_ROWS,
            COLUMNS=_COLUMNS, num_warps=4,
        )  # fmt: skip


def causal_conv_backward_input(
    part: Part, grad_y: Tensor, grad_x: Tensor, grad_left: Tensor | None, grad_before: Tensor | None
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
            HAS_TAIL=part.tail is not None, HAS_LEFT=grad_left is not None, HAS_BEFORE=grad_before is not None,
            TAPS=taps, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4,
        )  # fmt: skip


def causal_conv_backward_weight(part: Part, grad_y: Tensor, partials: Tensor) -> None:
    """partials[:, p, channels of the part] = sums of grad_z_t * x_(t - p) over P groups of consecutive tokens.

    partials [P, W, C] fp32; the sum over P is the caller's. Order: launches on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes or strides.
    """
    part.check(grad_y=grad_y)
    groups, (channels, _, taps) = len(partials), part.weight.shape
    check_tensor("partials", partials, (groups, taps, channels), (torch.float32,))
    _weight_kernel[(groups, triton.cdiv(part.columns, _COLUMNS), taps)](
        *part.inputs(), grad_y, partials, grad_y.stride(0), triton.cdiv(part.rows, groups),
        HAS_TAIL=part.tail is not None, TAPS=taps, ROWS=_WEIGHT_ROWS, COLUMNS=_COLUMNS, num_warps=4,
    )  # fmt: skip


@triton.jit
def _input(
    x_ptr, tail_ptr, rows, back, position, columns, mask, width, channels, first, x_stride, x_step,
    HAS_TAIL: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """x_(t - back) [ROWS, COLUMNS] in fp32, 0 before a sequence's first token."""
    there = (position >= back)[:, None] & mask
    source = (rows - back).to(tl.int64)
    at = source[:, None] * x_stride + ((columns // width) * x_step + columns % width)[None, :]
    x = tl.load(x_ptr + at, mask=there & (source >= 0)[:, None], other=0.0).to(tl.float32)
    if HAS_TAIL:
        at = (source + TAPS - 1)[:, None] * channels + (first + columns)[None, :]
        x += tl.load(tail_ptr + at, mask=there & (source < 0)[:, None], other=0.0).to(tl.float32)
    return x


@triton.jit
def _sums(
    x_ptr, weight_ptr, tail_ptr, rows, position, columns, mask, column_count, width, channels, first, x_stride, x_step,
    HAS_TAIL: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """z [ROWS, COLUMNS]."""
    z = tl.zeros(mask.shape, tl.float32)
    for back in tl.static_range(TAPS):
        taps = weight_ptr + (first + columns) * TAPS + (TAPS - 1 - back)
        weight = tl.load(taps, mask=columns < column_count, other=0.0).to(tl.float32)
        x = _input(
            x_ptr, tail_ptr, rows, back, position, columns, mask, width, channels, first, x_stride, x_step, HAS_TAIL,
            TAPS,
        )  # fmt: skip
        z += weight[None, :] * x
    return z


@triton.jit
def _forward_kernel(
    x_ptr, weight_ptr, positions_ptr, tail_ptr, count, column_count, width, channels, first, x_stride, x_step, y_ptr,
    y_stride, HAS_TAIL: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (rows < count)[:, None] & (columns < column_count)[None, :]
    position = tl.load(positions_ptr + rows, mask=rows < count, other=-1)
    z = _sums(
        x_ptr, weight_ptr, tail_ptr, rows, position, columns, mask, column_count, width, channels, first, x_stride,
        x_step, HAS_TAIL, TAPS,
    )  # fmt: skip
    target = y_ptr + rows.to(tl.int64)[:, None] * y_stride + (first + columns)[None, :]
    tl.store(target, round_to(z * tl.sigmoid(z), y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _grad_sums(
    x_ptr, weight_ptr, positions_ptr, tail_ptr, grad_y_ptr, rows, end, columns, column_count, width, channels, first,
    x_stride, x_step, grad_y_stride, HAS_TAIL: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """(grad_z [ROWS, COLUMNS], positions [ROWS]) of rows from 0 to end; zeros and -1 elsewhere."""
    inside = (rows >= 0) & (rows < end)
    mask = inside[:, None] & (columns < column_count)[None, :]
    position = tl.load(positions_ptr + rows, mask=inside, other=-1)
    z = _sums(
        x_ptr, weight_ptr, tail_ptr, rows, position, columns, mask, column_count, width, channels, first, x_stride,
        x_step, HAS_TAIL, TAPS,
    )  # fmt: skip
    source = grad_y_ptr + rows.to(tl.int64)[:, None] * grad_y_stride + (first + columns)[None, :]
    grad_y = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    s = tl.sigmoid(z)
    return grad_y * s * (1.0 + z * (1.0 - s)), position


@triton.jit
def _backward_kernel(
    x_ptr, weight_ptr, positions_ptr, tail_ptr, count, column_count, width, channels, first, x_stride, x_step,
    grad_y_ptr, grad_x_ptr, grad_left_ptr, grad_before_ptr, grad_y_stride, grad_x_stride, grad_x_step,
    HAS_TAIL: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_BEFORE: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Inputs from the tail's first row on: what is before row 0 belongs to the chunk before."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS) - (TAPS - 1)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = columns < column_count
    grad = tl.zeros((ROWS, COLUMNS), tl.float32)
    for ahead in tl.static_range(TAPS):
        grad_z, position = _grad_sums(
            x_ptr, weight_ptr, positions_ptr, tail_ptr, grad_y_ptr, rows + ahead, count, columns, column_count, width,
            channels, first, x_stride, x_step, grad_y_stride, HAS_TAIL, TAPS,
        )  # fmt: skip
        taps = weight_ptr + (first + columns) * TAPS + (TAPS - 1 - ahead)
        weight = tl.load(taps, mask=there, other=0.0).to(tl.float32)
        grad += tl.where((position >= ahead)[:, None], weight[None, :] * grad_z, 0.0)
    if HAS_LEFT:
        last = rows - (count - (TAPS - 1))
        mask = ((last >= 0) & (rows < count))[:, None] & there[None, :]
        grad += tl.load(grad_left_ptr + last[:, None] * channels + (first + columns)[None, :], mask=mask, other=0.0)
    at = rows.to(tl.int64)[:, None] * grad_x_stride + ((columns // width) * grad_x_step + columns % width)[None, :]
    mask = ((rows >= 0) & (rows < count))[:, None] & there[None, :]
    tl.store(grad_x_ptr + at, round_to(grad, grad_x_ptr.dtype.element_ty), mask=mask)
    if HAS_BEFORE:
        at = (rows + TAPS - 1)[:, None] * channels + (first + columns)[None, :]
        tl.store(grad_before_ptr + at, grad, mask=(rows < 0)[:, None] & there[None, :])


@triton.jit
def _weight_kernel(
    x_ptr, weight_ptr, positions_ptr, tail_ptr, count, column_count, width, channels, first, x_stride, x_step,
    grad_y_ptr, partials_ptr, grad_y_stride, group_rows,
    HAS_TAIL: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    group, back = tl.program_id(0), tl.program_id(2)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    begin = group * group_rows
    end = tl.minimum(begin + group_rows, count)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for row in range(begin, end, ROWS):
        rows = row + tl.arange(0, ROWS)
        grad_z, position = _grad_sums(
            x_ptr, weight_ptr, positions_ptr, tail_ptr, grad_y_ptr, rows, end, columns, column_count, width, channels,
            first, x_stride, x_step, grad_y_stride, HAS_TAIL, TAPS,
        )  # fmt: skip
        mask = (rows < end)[:, None] & (columns < column_count)[None, :]
        total += grad_z * _input(
            x_ptr, tail_ptr, rows, back, position, columns, mask, width, channels, first, x_stride, x_step, HAS_TAIL,
            TAPS,
        )  # fmt: skip
    target = partials_ptr + (group * TAPS + back).to(tl.int64) * channels + first + columns
    tl.store(target, tl.sum(total, axis=0), mask=columns < column_count)
