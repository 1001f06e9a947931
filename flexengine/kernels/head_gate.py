"""Attention's output times the sigmoid of a gate, which lies head by head in another row.

T tokens, N groups of W columns. Source: Qiu et al. 2025, "Gated Attention for Large Language Models".
"""

import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.counts import cdiv
from flexengine.kernels.rounding import round_to

_BLOCK = 1024


def head_gate_forward(o: Tensor, gate: Tensor, out: Tensor) -> None:
    """out = o * sigmoid(gate).

    Shapes: o and out [T, N, W] contiguous in bf16 or fp32; gate the same, rows and groups may be strided.
    Rounding: fp32 arithmetic, one rounding at the store. Cost: reads 2*T*N*W and writes T*N*W elements.
    Order: launches on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes or strides.
    """
    grid, sizes = _check(o, {"o": o, "out": out}, {"gate": gate})
    if grid:
        _forward_kernel[grid](o, gate, out, *sizes, *gate.stride()[:2], BLOCK=_BLOCK, num_warps=4)


def head_gate_backward(grad_out: Tensor, o: Tensor, gate: Tensor, grad_o: Tensor, grad_gate: Tensor) -> None:
    """grad_o = grad_out * s and grad_gate = grad_out * o * s * (1 - s), s = sigmoid(gate).

    Shapes: as forward's; grad_gate strided as gate may be. grad_o may be grad_out.
    Order: launches on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes or strides.
    """
    given = {"grad_out": grad_out, "o": o, "grad_o": grad_o}
    grid, sizes = _check(o, given, {"gate": gate, "grad_gate": grad_gate})
    if grid:
        _backward_kernel[grid](
            grad_out, o, gate, grad_o, grad_gate, *sizes, *gate.stride()[:2], *grad_gate.stride()[:2], BLOCK=_BLOCK,
            num_warps=4,
        )  # fmt: skip


def _check(
    o: Tensor, whole: dict[str, Tensor], strided: dict[str, Tensor]
) -> tuple[tuple[int, ...], tuple[int, int, int]]:
    """(grid, (columns of a row, of a group, programs of a row)); no grid when there is nothing to do."""
    for name, tensor in whole.items():
        check_tensor(name, tensor, o.shape, FLOATS)
    for name, tensor in strided.items():
        check_tensor(name, tensor, o.shape, FLOATS, strided_rows=True)
    tokens, columns = o.shape[0], o.shape[1] * o.shape[2]
    tiles = cdiv(columns, _BLOCK)
    return ((tokens * tiles,) if tokens * tiles else ()), (columns, o.shape[2], tiles)


@triton.jit
def _places(columns, width, tiles, stride, step, BLOCK: tl.constexpr):
    """(token, columns of a program, which of them there are, where they lie in a strided row)."""
    token = (tl.program_id(0) // tiles).to(tl.int64)
    column = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    return token, column, column < columns, token * stride + (column // width) * step + column % width


@triton.jit
def _forward_kernel(o_ptr, gate_ptr, out_ptr, columns, width, tiles, stride, step, BLOCK: tl.constexpr):
    token, column, mask, at = _places(columns, width, tiles, stride, step, BLOCK)
    o = tl.load(o_ptr + token * columns + column, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + at, mask=mask, other=0.0).to(tl.float32)
    y = round_to(o * tl.sigmoid(gate), out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * columns + column, y, mask=mask)


@triton.jit
def _backward_kernel(
    grad_out_ptr, o_ptr, gate_ptr, grad_o_ptr, grad_gate_ptr, columns, width, tiles, stride, step, grad_stride,
    grad_step, BLOCK: tl.constexpr,
):  # fmt: skip
    token, column, mask, at = _places(columns, width, tiles, stride, step, BLOCK)
    row = token * columns + column
    grad = tl.load(grad_out_ptr + row, mask=mask, other=0.0).to(tl.float32)
    o = tl.load(o_ptr + row, mask=mask, other=0.0).to(tl.float32)
    s = tl.sigmoid(tl.load(gate_ptr + at, mask=mask, other=0.0).to(tl.float32))
    tl.store(grad_o_ptr + row, round_to(grad * s, grad_o_ptr.dtype.element_ty), mask=mask)
    target = grad_gate_ptr + token * grad_stride + (column // width) * grad_step + column % width
    tl.store(target, round_to(grad * o * s * (1.0 - s), grad_gate_ptr.dtype.element_ty), mask=mask)
