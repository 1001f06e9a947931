"""Gated linear units: out = act(gate) * up, with gate and up side by side in one row.

T tokens, F FFN width. Source: Shazeer 2020, https://arxiv.org/abs/2002.05202. act(z) = z * sigmoid(u(z)) with u = z
for silu and u = sqrt(8 / pi) * (z + 0.044715 z^3) for the tanh form of GELU.

A clamped unit, (limit, alpha) in the place of an activation's name, has gate in even and up in odd columns, and is
z * sigmoid(alpha * z) * (up + 1) with z = gate up to the limit and up within +-limit; where one is clamped its gradient
is zero. Source: OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card".
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.counts import cdiv, next_power_of_2
from flexengine.kernels.rounding import round_to
from flexengine.kernels.row_range import is_within, row_range

ACTIVATIONS = ("silu", "gelu_tanh")
Activation = str | tuple[float, float]
_GELU_LINEAR = tl.constexpr(math.sqrt(8 / math.pi))
_GELU_CUBIC = tl.constexpr(math.sqrt(8 / math.pi) * 0.044715)
_BLOCK = 2048  # columns per program; 4 warps then hold 16 elements per thread and tensor
_CLAMPED_FORWARD, _CLAMPED_BACKWARD = 1024, 512  # the same of clamped units: taking gate and up apart needs registers


class WeightedRows(NamedTuple):
    """What backward has of rows with weights: these and their gradient [T] fp32, whether that is added to, bounds
    [E + 1] int32 of experts whose rows alone count, and where forward's output is written again."""

    weight: Tensor
    grad: Tensor
    accumulate: bool = False
    bounds: Tensor | None = None
    again: Tensor | None = None


def glu_forward(
    gate_up: Tensor, out: Tensor, activation: Activation, row_weight: Tensor | None = None,
    bounds: Tensor | None = None,
) -> None:  # fmt: skip
    """out = (row_weight *) act(gate) * up; activation: one of ACTIVATIONS, or a clamped unit; row_weight [T] fp32. With
    bounds [E + 1] int32 of experts to which rows belong, only those from the first bound to the last.

    Shapes: gate_up [T, 2F] in bf16 or fp32, gate in columns 0..F-1, up in F..2F-1 (clamped: in turns); out [T, F]. Rows
    may be strided.
    Rounding: fp32 arithmetic, one rounding at the store (Hugging Face also rounds act(gate)).
    Cost: reads 2*T*F and writes T*F elements.
    Order: launches on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes, strides or activations.
    """
    tokens, width = out.shape
    check_tensor("out", out, (tokens, width), FLOATS, strided_rows=True)
    check_tensor("gate_up", gate_up, (tokens, 2 * width), FLOATS, strided_rows=True)
    if row_weight is not None:
        check_tensor("row_weight", row_weight, (tokens,), (torch.float32,))
    unit = _unit_of(activation)
    if out.numel() == 0:
        return
    block = min(_CLAMPED_FORWARD if unit["CLAMPED"] else _BLOCK, next_power_of_2(width))
    tiles = cdiv(width, block)
    _forward_kernel[(tokens * tiles,)](
        gate_up, out, out if row_weight is None else row_weight, *row_range(bounds, out), width, tiles,
        gate_up.stride(0), out.stride(0), SOME=bounds is not None, WEIGHTED=row_weight is not None, **unit,
        BLOCK=block, num_warps=4,
    )  # fmt: skip


def glu_backward(grad_out: Tensor, gate_up: Tensor, grad_gate_up: Tensor, activation: Activation) -> None:
    """Gradients of both halves, with s = sigmoid(u(gate)): grad_gate = grad_out * up * s * (1 + gate * (1 - s) * u'),
    grad_up = grad_out * gate * s.

    Shapes: grad_out [T, F], gate_up and grad_gate_up [T, 2F] in bf16 or fp32; rows may be strided.
    grad_gate_up may be gate_up itself: each program reads its elements before it writes the same ones.
    Cost: reads 3*T*F and writes 2*T*F elements.
    Order: launches on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes, strides or activations.
    """
    tokens, width = grad_out.shape
    unit, block = _checked(grad_out, gate_up, grad_gate_up, activation)
    if grad_out.numel() == 0:
        return
    tiles = cdiv(width, block)
    _backward_kernel[(tokens * tiles,)](
        grad_out, gate_up, grad_gate_up, width, tiles, grad_out.stride(0), gate_up.stride(0), grad_gate_up.stride(0),
        **unit, BLOCK=block, num_warps=4,
    )  # fmt: skip


def weighted_glu_backward(
    grad_out: Tensor, gate_up: Tensor, grad_gate_up: Tensor, activation: Activation, rows: WeightedRows
) -> None:
    """`glu_backward` of rows with weights: gradients of both halves are that many times as much, and rows.grad is the
    sum over columns of grad_out * act(gate) * up, on top of what is there with rows.accumulate. rows.again [T, F]: what
    forward wrote, which may lie over grad_out; it costs T*F elements more. Only rows within rows.bounds are touched.

    Raises: ValueError on other shapes, dtypes, strides or activations.
    """
    tokens, width = grad_out.shape
    unit, block = _checked(grad_out, gate_up, grad_gate_up, activation)
    check_tensor("row_weight", rows.weight, (tokens,), (torch.float32,))
    check_tensor("grad_row_weight", rows.grad, (tokens,), (torch.float32,))
    again = grad_out if rows.again is None else rows.again
    check_tensor("again", again, (tokens, width), (grad_out.dtype,), strided_rows=True)
    if grad_out.numel() == 0:
        return
    _weighted_backward_kernel[(tokens,)](
        grad_out, gate_up, rows.weight, grad_gate_up, rows.grad, again, *row_range(rows.bounds, gate_up), width,
        grad_out.stride(0), gate_up.stride(0), grad_gate_up.stride(0), again.stride(0), SOME=rows.bounds is not None,
        ACCUMULATE=rows.accumulate, AGAIN=rows.again is not None, **unit, BLOCK=block, num_warps=4,
    )  # fmt: skip


def _checked(
    grad_out: Tensor, gate_up: Tensor, grad_gate_up: Tensor, activation: Activation
) -> tuple[dict[str, bool | float], int]:
    """Keywords of a launch, and columns of a program, of operands that are checked."""
    tokens, width = grad_out.shape
    check_tensor("grad_out", grad_out, (tokens, width), FLOATS, strided_rows=True)
    check_tensor("gate_up", gate_up, (tokens, 2 * width), FLOATS, strided_rows=True)
    check_tensor("grad_gate_up", grad_gate_up, (tokens, 2 * width), FLOATS, strided_rows=True)
    unit = _unit_of(activation)
    return unit, min(_CLAMPED_BACKWARD if unit["CLAMPED"] else _BLOCK, next_power_of_2(width))


def _unit_of(activation: Activation) -> dict[str, bool | float]:
    """Keywords of a launch."""
    if isinstance(activation, tuple):
        limit, alpha = activation
        return {"limit": limit, "alpha": alpha, "GELU": False, "CLAMPED": True}
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, expected one of {ACTIVATIONS}")
    return {"limit": 0.0, "alpha": 0.0, "GELU": activation == "gelu_tanh", "CLAMPED": False}


@triton.jit
def _gate(z, alpha, GELU: tl.constexpr, CLAMPED: tl.constexpr):
    """(sigmoid(u(z)), u'(z))."""
    if CLAMPED:
        return tl.sigmoid(alpha * z), tl.zeros(z.shape, tl.float32) + alpha
    elif GELU:
        square = z * z
        return tl.sigmoid(z * (_GELU_LINEAR + _GELU_CUBIC * square)), _GELU_LINEAR + 3.0 * _GELU_CUBIC * square
    else:
        return tl.sigmoid(z), tl.full(z.shape, 1.0, tl.float32)


@triton.jit
def _load(row_ptr, first, width, CLAMPED: tl.constexpr, BLOCK: tl.constexpr):
    """Gate and up of BLOCK columns from `first` on; of a clamped unit they lie in turns."""
    if CLAMPED:
        both = 2 * first + tl.arange(0, 2 * BLOCK)
        pairs = tl.load(row_ptr + both, mask=both < 2 * width, other=0.0)
        gate, up = tl.split(tl.reshape(pairs, (BLOCK, 2)))
        return gate.to(tl.float32), up.to(tl.float32)
    else:
        columns = first + tl.arange(0, BLOCK)
        mask = columns < width
        gate = tl.load(row_ptr + columns, mask=mask, other=0.0).to(tl.float32)
        return gate, tl.load(row_ptr + width + columns, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(row_ptr, first, width, gate, up, CLAMPED: tl.constexpr, BLOCK: tl.constexpr):
    """Rounded to where `_load` reads them."""
    dtype: tl.constexpr = row_ptr.dtype.element_ty
    if CLAMPED:
        both = 2 * first + tl.arange(0, 2 * BLOCK)
        tl.store(row_ptr + both, round_to(tl.interleave(gate, up), dtype), mask=both < 2 * width)
    else:
        columns = first + tl.arange(0, BLOCK)
        mask = columns < width
        tl.store(row_ptr + columns, round_to(gate, dtype), mask=mask)
        tl.store(row_ptr + width + columns, round_to(up, dtype), mask=mask)


@triton.jit
def _clamped(gate, up, limit, CLAMPED: tl.constexpr):
    """(z, factor of act(z)); a NaN stays one."""
    if CLAMPED:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + 1.0
    return gate, up


@triton.jit
def _unit_gradients(grad, gate, up, limit, alpha, GELU: tl.constexpr, CLAMPED: tl.constexpr):
    """(act(z) * up, and its gradients by both halves times grad)."""
    z, factor = _clamped(gate, up, limit, CLAMPED)
    s, slope = _gate(z, alpha, GELU, CLAMPED)
    grad_gate = grad * factor * s * (1.0 + z * (1.0 - s) * slope)
    grad_up = grad * z * s
    if CLAMPED:
        grad_gate = tl.where(gate > limit, 0.0, grad_gate)
        grad_up = tl.where((up > limit) | (up < -limit), 0.0, grad_up)
    return z * s * factor, grad_gate, grad_up


@triton.jit
def _tile(tiles, BLOCK: tl.constexpr):
    """(token, first column) of a program: neighbours take neighbouring columns, so that memory is swept row by row."""
    return (tl.program_id(0) // tiles).to(tl.int64), (tl.program_id(0) % tiles) * BLOCK


@triton.jit
def _forward_kernel(
    gate_up_ptr, out_ptr, row_weight_ptr, bounds_ptr, experts, width, tiles, gate_up_stride, out_stride, limit, alpha,
    SOME: tl.constexpr, WEIGHTED: tl.constexpr, GELU: tl.constexpr, CLAMPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, first = _tile(tiles, BLOCK)
    if not SOME or is_within(token, bounds_ptr, experts):
        gate, up = _load(gate_up_ptr + token * gate_up_stride, first, width, CLAMPED, BLOCK)
        z, factor = _clamped(gate, up, limit, CLAMPED)
        s, _ = _gate(z, alpha, GELU, CLAMPED)
        out = z * s * factor
        if WEIGHTED:
            out *= tl.load(row_weight_ptr + token)
        columns = first + tl.arange(0, BLOCK)
        target = out_ptr + token * out_stride + columns
        tl.store(target, round_to(out, out_ptr.dtype.element_ty), mask=columns < width)


@triton.jit
def _backward_kernel(
    grad_out_ptr, gate_up_ptr, grad_gate_up_ptr, width, tiles, grad_out_stride, gate_up_stride, grad_gate_up_stride,
    limit, alpha, GELU: tl.constexpr, CLAMPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, first = _tile(tiles, BLOCK)
    columns = first + tl.arange(0, BLOCK)
    gate, up = _load(gate_up_ptr + token * gate_up_stride, first, width, CLAMPED, BLOCK)
    grad = tl.load(grad_out_ptr + token * grad_out_stride + columns, mask=columns < width, other=0.0).to(tl.float32)
    _, grad_gate, grad_up = _unit_gradients(grad, gate, up, limit, alpha, GELU, CLAMPED)
    _store(grad_gate_up_ptr + token * grad_gate_up_stride, first, width, grad_gate, grad_up, CLAMPED, BLOCK)


@triton.jit
def _weighted_backward_kernel(
    grad_out_ptr, gate_up_ptr, row_weight_ptr, grad_gate_up_ptr, grad_row_weight_ptr, again_ptr, bounds_ptr, experts,
    width, grad_out_stride, gate_up_stride, grad_gate_up_stride, again_stride, limit, alpha,
    SOME: tl.constexpr, ACCUMULATE: tl.constexpr, AGAIN: tl.constexpr, GELU: tl.constexpr, CLAMPED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A row per program, whose columns add up to the gradient of its weight."""
    row = tl.program_id(0).to(tl.int64)
    if not SOME or is_within(row, bounds_ptr, experts):
        weight = tl.load(row_weight_ptr + row)
        lanes = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, width, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            gate, up = _load(gate_up_ptr + row * gate_up_stride, first, width, CLAMPED, BLOCK)
            grad = tl.load(grad_out_ptr + row * grad_out_stride + columns, mask=columns < width, other=0.0)
            grad = grad.to(tl.float32)
            unit, grad_gate, grad_up = _unit_gradients(grad * weight, gate, up, limit, alpha, GELU, CLAMPED)
            lanes += grad * unit
            _store(grad_gate_up_ptr + row * grad_gate_up_stride, first, width, grad_gate, grad_up, CLAMPED, BLOCK)
            if AGAIN:
                again = round_to(unit * weight, again_ptr.dtype.element_ty)
                tl.store(again_ptr + row * again_stride + columns, again, mask=columns < width)
        total = tl.sum(lanes, axis=0)
        if ACCUMULATE:
            total += tl.load(grad_row_weight_ptr + row)
        tl.store(grad_row_weight_ptr + row, total)
