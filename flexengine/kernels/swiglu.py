"""SwiGLU: out = silu(gate) * up, with gate and up side by side in one row.

T tokens, F FFN width. Source: Shazeer 2020, https://arxiv.org/abs/2002.05202.
"""

import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.rounding import round_to

_BLOCK = 2048  # columns per program; 4 warps then hold 16 elements per thread and tensor


def swiglu_forward(gate_up: Tensor, out: Tensor) -> None:
    """out = silu(gate) * up, silu(z) = z / (1 + exp(-z)).

    Shapes: gate_up [T, 2F] in bf16 or fp32, gate in columns 0..F-1, up in F..2F-1; out [T, F]. Rows may be strided.
    Rounding: fp32 arithmetic, one rounding at the store (Hugging Face also rounds silu(gate)).
    Cost: reads 2*T*F and writes T*F elements.
    Order: launches on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes or strides.
    """
    tokens, width = out.shape
    check_tensor("out", out, (tokens, width), FLOATS, strided_rows=True)
    check_tensor("gate_up", gate_up, (tokens, 2 * width), FLOATS, strided_rows=True)
    if out.numel() == 0:
        return
    block = min(_BLOCK, triton.next_power_of_2(width))
    tiles = triton.cdiv(width, block)
    _forward_kernel[(tokens * tiles,)](
        gate_up, out, width, tiles, gate_up.stride(0), out.stride(0), BLOCK=block, num_warps=4
    )


def swiglu_backward(grad_out: Tensor, gate_up: Tensor, grad_gate_up: Tensor) -> None:
    """Gradients of both halves: grad_gate = grad_out * up * s * (1 + gate * (1 - s)), grad_up = grad_out * gate * s,
    with s = sigmoid(gate).

    Shapes: grad_out [T, F], gate_up and grad_gate_up [T, 2F] in bf16 or fp32; rows may be strided.
    grad_gate_up may be gate_up itself: each program reads its elements before it writes the same ones.
    Cost: reads 3*T*F and writes 2*T*F elements.
    Order: launches on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes or strides.
    """
    tokens, width = grad_out.shape
    check_tensor("grad_out", grad_out, (tokens, width), FLOATS, strided_rows=True)
    check_tensor("gate_up", gate_up, (tokens, 2 * width), FLOATS, strided_rows=True)
    check_tensor("grad_gate_up", grad_gate_up, (tokens, 2 * width), FLOATS, strided_rows=True)
    if grad_out.numel() == 0:
        return
    block = min(_BLOCK, triton.next_power_of_2(width))
    tiles = triton.cdiv(width, block)
    _backward_kernel[(tokens * tiles,)](
        grad_out, gate_up, grad_gate_up, width, tiles, grad_out.stride(0), gate_up.stride(0), grad_gate_up.stride(0),
        BLOCK=block, num_warps=4,
    )  # fmt: skip


@triton.jit
def _tile(tiles, BLOCK: tl.constexpr):
    """(token, columns) of a program: neighbours take neighbouring columns, so that memory is swept row by row."""
    token = (tl.program_id(0) // tiles).to(tl.int64)
    return token, (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _forward_kernel(gate_up_ptr, out_ptr, width, tiles, gate_up_stride, out_stride, BLOCK: tl.constexpr):
    token, columns = _tile(tiles, BLOCK)
    mask = columns < width
    gate_ptrs = gate_up_ptr + token * gate_up_stride + columns
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + width, mask=mask, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + token * out_stride + columns, round_to(out, out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    grad_out_ptr, gate_up_ptr, grad_gate_up_ptr, width, tiles, grad_out_stride, gate_up_stride, grad_gate_up_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token, columns = _tile(tiles, BLOCK)
    mask = columns < width
    gate_ptrs = gate_up_ptr + token * gate_up_stride + columns
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + width, mask=mask, other=0.0).to(tl.float32)
    grad_out = tl.load(grad_out_ptr + token * grad_out_stride + columns, mask=mask, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    grad_gate = grad_out * up * s * (1.0 + gate * (1.0 - s))
    grad_up = grad_out * gate * s
    target = grad_gate_up_ptr + token * grad_gate_up_stride + columns
    dtype: tl.constexpr = grad_gate_up_ptr.dtype.element_ty
    tl.store(target, round_to(grad_gate, dtype), mask=mask)
    tl.store(target + width, round_to(grad_up, dtype), mask=mask)
