"""Gated linear units: out = act(gate) * up, with gate and up side by side in one row.

T tokens, F FFN width. Source: Shazeer 2020, https://arxiv.org/abs/2002.05202. act(z) = z * sigmoid(u(z)) with u = z
for silu and u = sqrt(8 / pi) * (z + 0.044715 z^3) for the tanh form of GELU.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.rounding import round_to

ACTIVATIONS = ("silu", "gelu_tanh")
_GELU_LINEAR = tl.constexpr(math.sqrt(8 / math.pi))
_GELU_CUBIC = tl.constexpr(math.sqrt(8 / math.pi) * 0.044715)
_BLOCK = 2048  # columns per program; 4 warps then hold 16 elements per thread and tensor


def glu_forward(gate_up: Tensor, out: Tensor, activation: str, row_weight: Tensor | None = None) -> None:
    """out = (row_weight *) act(gate) * up; activation: one of ACTIVATIONS; row_weight [T] fp32.

    Shapes: gate_up [T, 2F] in bf16 or fp32, gate in columns 0..F-1, up in F..2F-1; out [T, F]. Rows may be strided.
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
    gelu = _is_gelu(activation)
    if out.numel() == 0:
        return
    block = min(_BLOCK, triton.next_power_of_2(width))
    tiles = triton.cdiv(width, block)
    _forward_kernel[(tokens * tiles,)](
        gate_up, out, out if row_weight is None else row_weight, width, tiles, gate_up.stride(0), out.stride(0),
        WEIGHTED=row_weight is not None, GELU=gelu, BLOCK=block, num_warps=4,
    )  # fmt: skip


def glu_backward(
    grad_out: Tensor, gate_up: Tensor, grad_gate_up: Tensor, activation: str, row_weight: Tensor | None = None,
    grad_row_weight: Tensor | None = None,
) -> None:  # fmt: skip
    """Gradients of both halves, with s = sigmoid(u(gate)): grad_gate = grad_out * up * s * (1 + gate * (1 - s) * u'),
    grad_up = grad_out * gate * s. With row_weight [T] fp32 both are that many times as much, and grad_row_weight [T]
    fp32 is the sum over columns of grad_out * act(gate) * up.

    Shapes: grad_out [T, F], gate_up and grad_gate_up [T, 2F] in bf16 or fp32; rows may be strided.
    grad_gate_up may be gate_up itself: each program reads its elements before it writes the same ones.
    Cost: reads 3*T*F and writes 2*T*F elements.
    Order: launches on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes, strides or activations.
    """
    tokens, width = grad_out.shape
    check_tensor("grad_out", grad_out, (tokens, width), FLOATS, strided_rows=True)
    check_tensor("gate_up", gate_up, (tokens, 2 * width), FLOATS, strided_rows=True)
    check_tensor("grad_gate_up", grad_gate_up, (tokens, 2 * width), FLOATS, strided_rows=True)
    gelu = _is_gelu(activation)
    if grad_out.numel() == 0:
        return
    block = min(_BLOCK, triton.next_power_of_2(width))
    tiles = triton.cdiv(width, block)
    if row_weight is not None:
        assert grad_row_weight is not None
        check_tensor("row_weight", row_weight, (tokens,), (torch.float32,))
        check_tensor("grad_row_weight", grad_row_weight, (tokens,), (torch.float32,))
        _weighted_backward_kernel[(tokens,)](
            grad_out, gate_up, row_weight, grad_gate_up, grad_row_weight, width, grad_out.stride(0), gate_up.stride(0),
            grad_gate_up.stride(0), GELU=gelu, BLOCK=block, num_warps=4,
        )  # fmt: skip
        return
    _backward_kernel[(tokens * tiles,)](
        grad_out, gate_up, grad_gate_up, width, tiles, grad_out.stride(0), gate_up.stride(0), grad_gate_up.stride(0),
        GELU=gelu, BLOCK=block, num_warps=4,
    )  # fmt: skip


def _is_gelu(activation: str) -> bool:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, expected one of {ACTIVATIONS}")
    return activation == "gelu_tanh"


@triton.jit
def _gate(z, GELU: tl.constexpr):
    """(sigmoid(u(z)), u'(z))."""
    if GELU:
        square = z * z
        return tl.sigmoid(z * (_GELU_LINEAR + _GELU_CUBIC * square)), _GELU_LINEAR + 3.0 * _GELU_CUBIC * square
    else:
        return tl.sigmoid(z), tl.full(z.shape, 1.0, tl.float32)


@triton.jit
def _tile(tiles, BLOCK: tl.constexpr):
    """(token, columns) of a program: neighbours take neighbouring columns, so that memory is swept row by row."""
    token = (tl.program_id(0) // tiles).to(tl.int64)
    return token, (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _forward_kernel(
    gate_up_ptr, out_ptr, row_weight_ptr, width, tiles, gate_up_stride, out_stride,
    WEIGHTED: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, columns = _tile(tiles, BLOCK)
    mask = columns < width
    gate_ptrs = gate_up_ptr + token * gate_up_stride + columns
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + width, mask=mask, other=0.0).to(tl.float32)
    s, _ = _gate(gate, GELU)
    out = gate * s * up
    if WEIGHTED:
        out *= tl.load(row_weight_ptr + token)
    tl.store(out_ptr + token * out_stride + columns, round_to(out, out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    grad_out_ptr, gate_up_ptr, grad_gate_up_ptr, width, tiles, grad_out_stride, gate_up_stride, grad_gate_up_stride,
    GELU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, columns = _tile(tiles, BLOCK)
    mask = columns < width
    gate_ptrs = gate_up_ptr + token * gate_up_stride + columns
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + width, mask=mask, other=0.0).to(tl.float32)
    grad_out = tl.load(grad_out_ptr + token * grad_out_stride + columns, mask=mask, other=0.0).to(tl.float32)
    s, slope = _gate(gate, GELU)
    grad_gate = grad_out * up * s * (1.0 + gate * (1.0 - s) * slope)
    grad_up = grad_out * gate * s
    target = grad_gate_up_ptr + token * grad_gate_up_stride + columns
    dtype: tl.constexpr = grad_gate_up_ptr.dtype.element_ty
    tl.store(target, round_to(grad_gate, dtype), mask=mask)
    tl.store(target + width, round_to(grad_up, dtype), mask=mask)


@triton.jit
def _weighted_backward_kernel(
    grad_out_ptr, gate_up_ptr, row_weight_ptr, grad_gate_up_ptr, grad_row_weight_ptr, width, grad_out_stride,
    gate_up_stride, grad_gate_up_stride, GELU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row per program, whose columns add up to the gradient of its weight."""
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(row_weight_ptr + row)
    lanes = tl.zeros((BLOCK,), tl.float32)
    dtype: tl.constexpr = grad_gate_up_ptr.dtype.element_ty
    for first in range(0, width, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        mask = columns < width
        gate_ptrs = gate_up_ptr + row * gate_up_stride + columns
        gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_ptrs + width, mask=mask, other=0.0).to(tl.float32)
        grad_out = tl.load(grad_out_ptr + row * grad_out_stride + columns, mask=mask, other=0.0).to(tl.float32)
        s, slope = _gate(gate, GELU)
        lanes += grad_out * gate * s * up
        grad_out *= weight
        grad_gate = grad_out * up * s * (1.0 + gate * (1.0 - s) * slope)
        target = grad_gate_up_ptr + row * grad_gate_up_stride + columns
        tl.store(target, round_to(grad_gate, dtype), mask=mask)
        tl.store(target + width, round_to(grad_out * gate * s, dtype), mask=mask)
    tl.store(grad_row_weight_ptr + row, tl.sum(lanes, axis=0))
