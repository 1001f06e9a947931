"""Gated linear units of gate_up + low @ B.T: what adapters add is multiplied and added while gate_up is read.

In backward the gradient of the output may lack what adapters behind the unit add to it, likewise. T tokens, F FFN
width, R rank. Formulas and rounding are those of kernels/glu.py, with gate and up the sums in fp32.
Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685; Shazeer 2020, https://arxiv.org/abs/2002.05202.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.counts import cdiv, next_power_of_2
from flexengine.kernels.glu import ACTIVATIONS, _gate, _unit_gradients
from flexengine.kernels.rounding import round_to

_ROWS, _COLUMNS = 64, 64  # of a program's tile: as many rows as a tensor core product takes, 128 bytes of each in bf16
_BACKWARD_ROWS = 32  # holds more tiles at once, and fewer rows were 7% faster on an H100
_MOST_RANKS = 64  # ranks multiplied at a time
_LEAST_RANKS = 16  # of a tensor core product


def glu_forward(
    gate_up: Tensor, low: Tensor, up: Tensor, halves: Sequence[tuple[int, int, int]], out: Tensor, activation: str
) -> None:
    """out = act(gate) * up of gate_up + low @ B.T.

    halves: (first column of gate_up, first column of low, first row of B) of gate, of up, or of both.
    Shapes: gate_up [T, 2F], gate in columns 0..F-1; low [T, L], up = B [N, R], out [T, F], all of one dtype, bf16 or
    fp32. Rows may be strided.
    Rounding: fp32 arithmetic, one rounding at the store.
    Cost: reads 2*T*F and writes T*F elements; 2*T*2F*R FLOPs.
    Order: launches on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes, strides or activations.
    """
    tokens, width = out.shape
    check_tensor("out", out, (tokens, width), FLOATS, strided_rows=True)
    launch = _launch(gate_up, low, up, halves, width, activation)
    if out.numel() == 0:
        return
    grid = (cdiv(tokens, _ROWS) * cdiv(width, _COLUMNS),)
    strides = (gate_up.stride(0), low.stride(0), up.stride(0), out.stride(0))
    _forward_kernel[grid](gate_up, low, up, out, tokens, width, *strides, **launch)


def glu_backward(
    grad_out: Tensor, gate_up: Tensor, low: Tensor, up: Tensor, halves: Sequence[tuple[int, int, int]],
    grad_gate_up: Tensor, activation: str, behind: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """Gradients of both halves of the sum, as kernels/glu.py gives them; they are those of gate_up too.

    behind: (grad_low, A) of adapters that read the unit's output; its gradient is then grad_out + grad_low @ A.
    Shapes: as in forward; grad_out [T, F], grad_low [T, R'], A [R', F], grad_gate_up [T, 2F], which may be gate_up
    itself.
    Cost: reads 3*T*F and writes 2*T*F elements; 2*T*2F*R + 2*T*F*R' FLOPs.
    Order: launches on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes, strides or activations.
    """
    tokens, width = grad_out.shape
    check_tensor("grad_out", grad_out, (tokens, width), FLOATS, strided_rows=True)
    check_tensor("grad_gate_up", grad_gate_up, (tokens, 2 * width), FLOATS, strided_rows=True)
    launch = {**_launch(gate_up, low, up, halves, width, activation), "ROWS": _BACKWARD_ROWS}
    if grad_out.numel() == 0:
        return
    grid = (cdiv(tokens, _BACKWARD_ROWS) * cdiv(width, _COLUMNS),)
    grad_low, down = behind or (grad_out, grad_out)
    if behind is not None:
        rank = down.shape[0]
        check_tensor("grad_low", grad_low, (tokens, rank), (grad_out.dtype,), strided_rows=True)
        check_tensor("down", down, (rank, width), (grad_out.dtype,), strided_rows=True)
        launch["RANKS"] = max(launch["RANKS"], _ranks(rank))
    tensors = (grad_out, gate_up, low, up, grad_low, down, grad_gate_up)
    strides = (t.stride(0) for t in tensors)
    ranks = down.shape[0]
    _backward_kernel[grid](*tensors, tokens, width, *strides, ranks, BEHIND=behind is not None, **launch)


def _launch(
    gate_up: Tensor, low: Tensor, up: Tensor, halves: Sequence[tuple[int, int, int]], width: int, activation: str
) -> dict[str, int | bool]:
    """Check the operands; returns the keywords of a launch."""
    check_tensor("gate_up", gate_up, (len(gate_up), 2 * width), FLOATS, strided_rows=True)
    check_tensor("low", low, (len(gate_up), low.shape[-1]), (gate_up.dtype,), strided_rows=True)
    check_tensor("up", up, (len(up), up.shape[-1]), (gate_up.dtype,), strided_rows=True)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, expected one of {ACTIVATIONS}")
    rank, found = up.shape[1], {start: (low_start, up_start) for start, low_start, up_start in halves}
    wrong = [f for f in found.items() if f[0] not in (0, width) or f[1][0] + rank > low.shape[1]
             or f[1][1] + width > len(up)]  # fmt: skip
    if wrong:
        raise ValueError(f"halves {wrong} lie outside gate_up, low or B")
    (gate_low, gate_up_row), (up_low, up_up_row) = found.get(0, (0, 0)), found.get(width, (0, 0))
    return {
        "rank": rank, "gate_low": gate_low, "gate_row": gate_up_row, "up_low": up_low, "up_row": up_up_row,
        "GATE": 0 in found, "UP": width in found, "GELU": activation == "gelu_tanh", "WIDE": not gate_up.is_cuda,
        "RANKS": _ranks(rank), "ROWS": _ROWS, "COLUMNS": _COLUMNS, "num_warps": 4,
    }  # fmt: skip


def _ranks(rank: int) -> int:
    """Ranks that are multiplied at a time."""
    return min(_MOST_RANKS, max(_LEAST_RANKS, next_power_of_2(rank)))


@triton.jit
def _tile(width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Tokens and columns of a program: neighbours take neighbouring columns, so that memory is swept row by row."""
    tiles = tl.cdiv(width, COLUMNS)
    rows = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return rows, (tl.program_id(0) % tiles) * COLUMNS + tl.arange(0, COLUMNS)


@triton.jit
def _added(
    low_ptr, up_ptr, rows, columns, tokens, width, rank, low_stride, column_stride, rank_stride, low_start, up_start,
    WIDE: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of low @ B.T in fp32; strides of B's rows, which are columns of the tile, and of its ranks."""
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, rank, RANKS):
        ranks = first + tl.arange(0, RANKS)
        held = ranks < rank
        low_at = rows[:, None] * low_stride + low_start + ranks[None, :]
        low = tl.load(low_ptr + low_at, mask=(rows < tokens)[:, None] & held[None, :], other=0.0)
        up_at = (up_start + columns)[None, :].to(tl.int64) * column_stride + ranks[:, None].to(tl.int64) * rank_stride
        up = tl.load(up_ptr + up_at, mask=(columns < width)[None, :] & held[:, None], other=0.0)
        if WIDE:
            low, up = low.to(tl.float32), up.to(tl.float32)
        total = tl.dot(low, up, total, input_precision="ieee")
    return total


@triton.jit
def _with_adapters(
    gate, up, low_ptr, up_ptr, rows, columns, tokens, width, low_stride, up_stride,
    rank, gate_low, gate_row, up_low, up_row,
    GATE: tl.constexpr, UP: tl.constexpr, WIDE: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Tiles of gate and of up in fp32, each with what its adapter adds."""
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    if GATE:
        gate += _added(
            low_ptr, up_ptr, rows, columns, tokens, width, rank, low_stride, up_stride, 1, gate_low, gate_row,
            WIDE, RANKS, ROWS, COLUMNS,
        )  # fmt: skip
    if UP:
        up += _added(
            low_ptr, up_ptr, rows, columns, tokens, width, rank, low_stride, up_stride, 1, up_low, up_row,
            WIDE, RANKS, ROWS, COLUMNS,
        )  # fmt: skip
    return gate, up


@triton.jit
def _sums(
    gate_up_ptr, low_ptr, up_ptr, tokens, width, gate_up_stride, low_stride, up_stride,
    rank, gate_low, gate_row, up_low, up_row,
    GATE: tl.constexpr, UP: tl.constexpr, WIDE: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """(tokens, columns, which of these there are, gate, up) of a program: both in fp32, with what adapters add."""
    rows, columns = _tile(width, ROWS, COLUMNS)
    inside = (rows < tokens)[:, None] & (columns < width)[None, :]
    at = gate_up_ptr + rows[:, None] * gate_up_stride + columns[None, :]
    gate = tl.load(at, mask=inside, other=0.0)
    up = tl.load(at + width, mask=inside, other=0.0)
    gate, up = _with_adapters(
        gate, up, low_ptr, up_ptr, rows, columns, tokens, width, low_stride, up_stride,
        rank, gate_low, gate_row, up_low, up_row, GATE, UP, WIDE, RANKS, ROWS, COLUMNS,
    )  # fmt: skip
    return rows, columns, inside, gate, up


@triton.jit(do_not_specialize=["tokens"])
def _forward_kernel(
    gate_up_ptr, low_ptr, up_ptr, out_ptr, tokens, width, gate_up_stride, low_stride, up_stride, out_stride,
    rank, gate_low, gate_row, up_low, up_row,
    GATE: tl.constexpr, UP: tl.constexpr, GELU: tl.constexpr, WIDE: tl.constexpr, RANKS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows, columns, inside, gate, up = _sums(
        gate_up_ptr, low_ptr, up_ptr, tokens, width, gate_up_stride, low_stride, up_stride,
        rank, gate_low, gate_row, up_low, up_row, GATE, UP, WIDE, RANKS, ROWS, COLUMNS,
    )  # fmt: skip
    s, _ = _gate(gate, 0.0, GELU, False)
    target = out_ptr + rows[:, None] * out_stride + columns[None, :]
    tl.store(target, round_to(gate * s * up, out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _backward_kernel(
    grad_out_ptr, gate_up_ptr, low_ptr, up_ptr, grad_low_ptr, down_ptr, grad_gate_up_ptr, tokens, width,
    grad_out_stride, gate_up_stride, low_stride, up_stride, grad_low_stride, down_stride, grad_stride, behind_rank,
    rank, gate_low, gate_row, up_low, up_row,
    BEHIND: tl.constexpr, GATE: tl.constexpr, UP: tl.constexpr, GELU: tl.constexpr, WIDE: tl.constexpr,
    RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows, columns = _tile(width, ROWS, COLUMNS)
    inside = (rows < tokens)[:, None] & (columns < width)[None, :]
    grads = grad_out_ptr + rows[:, None] * grad_out_stride + columns[None, :]
    at = gate_up_ptr + rows[:, None] * gate_up_stride + columns[None, :]
    # All are loaded before any is used: neither products nor uses of tiles, which wait, let a later load past them.
    grad = tl.load(grads, mask=inside, other=0.0)
    gate = tl.load(at, mask=inside, other=0.0)
    up = tl.load(at + width, mask=inside, other=0.0)
    grad = grad.to(tl.float32)
    gate, up = _with_adapters(
        gate, up, low_ptr, up_ptr, rows, columns, tokens, width, low_stride, up_stride,
        rank, gate_low, gate_row, up_low, up_row, GATE, UP, WIDE, RANKS, ROWS, COLUMNS,
    )  # fmt: skip
    if BEHIND:
        grad += _added(
            grad_low_ptr, down_ptr, rows, columns, tokens, width, behind_rank, grad_low_stride, 1, down_stride, 0, 0,
            WIDE, RANKS, ROWS, COLUMNS,
        )  # fmt: skip
    _, grad_gate, grad_up = _unit_gradients(grad, gate, up, 0.0, 0.0, GELU, False)
    target = grad_gate_up_ptr + rows[:, None] * grad_stride + columns[None, :]
    tl.store(target, round_to(grad_gate, grad_gate_up_ptr.dtype.element_ty), mask=inside)
    tl.store(target + width, round_to(grad_up, grad_gate_up_ptr.dtype.element_ty), mask=inside)
