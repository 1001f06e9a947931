"""Gated linear units that give the adapter behind them what it would read their output for.

Forward gives out @ A.T while it has out, and backward the gradient of A while it makes out once more, so that out is
neither kept nor written again. One is a sum over columns and the other over tokens: programs write partial sums, which
are added up in a fixed order (kernels/lora_grads.py). T tokens, F FFN width, R rank. Units, what an adapter before them
adds, and rounding are those of kernels/lora_glu.py.
Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685; Shazeer 2020, https://arxiv.org/abs/2002.05202.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import check_tensor
from flexengine.kernels.counts import cdiv
from flexengine.kernels.glu import _gate, _unit_gradients
from flexengine.kernels.lora_glu import _launch, _ranks
from flexengine.kernels.lora_grads import sum_low
from flexengine.kernels.rounding import round_to


class Tiling(NamedTuple):
    """Tokens and columns that a program works on at a time, its warps, tiles that are loaded at once, and the most
    registers of a thread: 128 leave room for 16 warps on a multiprocessor."""

    rows: int
    columns: int
    warps: int
    stages: int
    registers: int


# The fastest on an H200 of what was tried; one tile at a time takes 1.2 and 1.5 times as long.
FORWARD = Tiling(64, 64, 4, 3, 128)
BACKWARD = Tiling(32, 64, 4, 3, 128)


class Behind(NamedTuple):
    """The adapter behind a unit: A [R, F]; low [T, R] = scale * out @ A.T, which forward writes, or its gradient, which
    backward reads. parts, in fp32: [T, ceil(F / columns) * R] of forward, or [spans of tokens, R * F] of backward."""

    low: Tensor
    down: Tensor
    parts: Tensor
    scale: float = 1.0


Before = tuple[Tensor, Tensor, Sequence[tuple[int, int, int]]]
"""The adapter before a unit: low, B and halves, as in kernels/lora_glu.py."""


def unit_forward(gate_up: Tensor, before: Before, behind: Behind, columns: int, out: Tensor, activation: str) -> None:
    """out = the unit of gate_up + low @ B.T, and from the rounded out low = scale * out @ A.T of the adapter behind.

    columns: of a partial sum for low, a multiple of those of a tile.
    Shapes: gate_up [T, 2F], out [T, F], all of one dtype, rows may be strided; R of A and of B at most 64.
    Cost: reads 2*T*F and writes T*F elements, writes and reads T*R*F/columns fp32 numbers; 2*T*3F*R FLOPs.
    Order: launches on the current stream, never synchronises. Sums do not depend on the card.
    Raises: ValueError on other shapes, dtypes, strides or activations.
    """
    (tokens, width), rank = out.shape, len(behind.down)
    launch, parts = _operands(gate_up, before, behind, out, activation), cdiv(width, columns)
    check_tensor("parts", behind.parts, (tokens, parts * rank), (torch.float32,), strided_rows=True)
    if columns % FORWARD.columns:
        raise ValueError(f"a partial sum has {columns} columns, expected a multiple of {FORWARD.columns}")
    if tokens == 0:
        return
    tensors = (gate_up, *before[:2], behind.down, out, behind.parts)
    _forward_kernel[(cdiv(tokens, FORWARD.rows) * parts,)](
        *tensors, tokens, width, *(t.stride(0) for t in tensors), rank, **launch | _tiled(FORWARD),
        TILES=columns // FORWARD.columns,
    )  # fmt: skip
    sum_low(behind.parts, behind.low, (parts,), behind.scale)


def unit_backward(
    grad_out: Tensor, gate_up: Tensor, before: Before, behind: Behind, grad_gate_up: Tensor, activation: str
) -> None:
    """Gradients of both halves of the sum (kernels/lora_glu.py), where that of out is grad_out + grad_low @ A, and
    partial sums of A's gradient grad_low.T @ out, with the rounded out.

    Shapes: grad_out [T, F], grad_gate_up [T, 2F], which may be gate_up itself; else as in forward.
    Cost: reads 3*T*F and writes 2*T*F elements and R*F fp32 numbers for each span; 2*T*4F*R FLOPs.
    Order: launches on the current stream, never synchronises. Sums do not depend on the card.
    Raises: ValueError on other shapes, dtypes, strides or activations.
    """
    (tokens, width), spans = grad_out.shape, len(behind.parts)
    launch = _operands(gate_up, before, behind, grad_out, activation)
    check_tensor("grad_gate_up", grad_gate_up, (tokens, 2 * width), (gate_up.dtype,), strided_rows=True)
    check_tensor("parts", behind.parts, (spans, behind.down.numel()), (torch.float32,), strided_rows=True)
    tensors = (grad_out, gate_up, *before[:2], behind.low, behind.down, grad_gate_up, behind.parts)
    span_rows = cdiv(cdiv(tokens, BACKWARD.rows), spans) * BACKWARD.rows
    _backward_kernel[(cdiv(width, BACKWARD.columns), spans)](
        *tensors, tokens, span_rows, width, *(t.stride(0) for t in tensors), len(behind.down),
        **launch | _tiled(BACKWARD),
    )  # fmt: skip


def _tiled(tiling: Tiling) -> dict[str, int]:
    """Keywords of a launch."""
    names = ("ROWS", "COLUMNS", "num_warps", "STAGES", "maxnreg")
    return dict(zip(names, tiling, strict=True))


def _operands(gate_up: Tensor, before: Before, behind: Behind, out: Tensor, activation: str) -> dict[str, int | bool]:
    """Check what both directions read; returns the keywords of a launch."""
    (tokens, width), rank = out.shape, max(before[1].shape[1], len(behind.down))
    check_tensor("out", out, (tokens, width), (gate_up.dtype,), strided_rows=True)
    check_tensor("low", behind.low, (tokens, len(behind.down)), (gate_up.dtype,), strided_rows=True)
    check_tensor("down", behind.down, (len(behind.down), width), (gate_up.dtype,), strided_rows=True)
    launch = _launch(gate_up, *before, width, activation) | {"RANKS": _ranks(rank)}
    if rank > launch["RANKS"]:
        raise ValueError(f"A or B have rank {rank}, of which a program holds {launch['RANKS']}")
    return launch


@triton.jit
def _rows_of(ptr, rows, there, stride, rank, WIDE: tl.constexpr, RANKS: tl.constexpr):
    """Rows of low, of its gradient or of B, as many columns as there are ranks."""
    ranks = tl.arange(0, RANKS)
    found = tl.load(ptr + (rows[:, None] * stride + ranks[None, :]), there[:, None] & (ranks < rank)[None, :], 0.0)
    if WIDE:
        found = found.to(tl.float32)
    return found


@triton.jit
def _columns_of(ptr, columns, within, stride, rank, WIDE: tl.constexpr, RANKS: tl.constexpr):
    """Columns of A."""
    ranks = tl.arange(0, RANKS)
    at = ptr + (ranks[:, None] * stride + columns[None, :])
    found = tl.load(at, (ranks < rank)[:, None] & within[None, :], 0.0)
    if WIDE:
        found = found.to(tl.float32)
    return found


@triton.jit(do_not_specialize=["tokens"])
def _forward_kernel(
    gate_up_ptr, low_ptr, up_ptr, down_ptr, out_ptr, parts_ptr, tokens, width,
    gate_up_stride, low_stride, up_stride, down_stride, out_stride, parts_stride, behind_rank,
    rank, gate_low, gate_row, up_low, up_row,
    GATE: tl.constexpr, UP: tl.constexpr, GELU: tl.constexpr, WIDE: tl.constexpr, RANKS: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program has some tokens and the columns of a partial sum, which it goes over tile by tile."""
    sums = tl.cdiv(width, TILES * COLUMNS)
    number, start = tl.program_id(0) % sums, (tl.program_id(0) // sums).to(tl.int64) * ROWS
    rows = tl.arange(0, ROWS)  # offsets are small numbers from where a program begins
    there = start + rows < tokens
    gate_up_ptr += start * gate_up_stride
    out_ptr += start * out_stride
    if GATE:
        low_of_gate = _rows_of(low_ptr + start * low_stride + gate_low, rows, there, low_stride, rank, WIDE, RANKS)
    if UP:
        low_of_up = _rows_of(low_ptr + start * low_stride + up_low, rows, there, low_stride, rank, WIDE, RANKS)
    total = tl.zeros((ROWS, RANKS), tl.float32)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        columns = (number * TILES + tile) * COLUMNS + tl.arange(0, COLUMNS)
        within = columns < width
        inside = there[:, None] & within[None, :]
        at = gate_up_ptr + (rows[:, None] * gate_up_stride + columns[None, :])
        gate = tl.load(at, mask=inside, other=0.0)
        up = tl.load(at + width, mask=inside, other=0.0)
        down = _columns_of(down_ptr, columns, within, down_stride, behind_rank, WIDE, RANKS)
        gate, up = gate.to(tl.float32), up.to(tl.float32)
        if GATE:
            matrix = _rows_of(up_ptr + gate_row * up_stride, columns, within, up_stride, rank, WIDE, RANKS)
            gate = tl.dot(low_of_gate, tl.trans(matrix), gate, input_precision="ieee")
        if UP:
            matrix = _rows_of(up_ptr + up_row * up_stride, columns, within, up_stride, rank, WIDE, RANKS)
            up = tl.dot(low_of_up, tl.trans(matrix), up, input_precision="ieee")
        s, _ = _gate(gate, 0.0, GELU, False)
        out = round_to(gate * s * up, out_ptr.dtype.element_ty)
        tl.store(out_ptr + (rows[:, None] * out_stride + columns[None, :]), out, mask=inside)
        if WIDE:
            out = out.to(tl.float32)
        total = tl.dot(out, tl.trans(down), total, input_precision="ieee")
    ranks = tl.arange(0, RANKS)
    parts = parts_ptr + start * parts_stride + number * behind_rank + (rows[:, None] * parts_stride + ranks[None, :])
    tl.store(parts, total, there[:, None] & (ranks < behind_rank)[None, :])


@triton.jit(do_not_specialize=["tokens", "span_rows"])
def _backward_kernel(
    grad_out_ptr, gate_up_ptr, low_ptr, up_ptr, grad_low_ptr, down_ptr, grad_ptr, parts_ptr, tokens, span_rows, width,
    grad_out_stride, gate_up_stride, low_stride, up_stride, grad_low_stride, down_stride, grad_stride, parts_stride,
    behind_rank, rank, gate_low, gate_row, up_low, up_row,
    GATE: tl.constexpr, UP: tl.constexpr, GELU: tl.constexpr, WIDE: tl.constexpr, RANKS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program has a tile of columns and goes over a span of tokens, whose sum for A it holds."""
    columns, rows = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, ROWS)
    within = columns < width
    if GATE:
        gate_matrix = _rows_of(up_ptr + gate_row * up_stride, columns, within, up_stride, rank, WIDE, RANKS)
    if UP:
        up_matrix = _rows_of(up_ptr + up_row * up_stride, columns, within, up_stride, rank, WIDE, RANKS)
    down = _columns_of(down_ptr, columns, within, down_stride, behind_rank, WIDE, RANKS)
    total = tl.zeros((RANKS, COLUMNS), tl.float32)
    begin = tl.program_id(1) * span_rows
    for step in tl.range(0, tl.cdiv(min(span_rows, tokens - begin), ROWS), num_stages=STAGES):
        start = begin + step * ROWS
        there, start = start + rows < tokens, start.to(tl.int64)
        inside = there[:, None] & within[None, :]
        gates = gate_up_ptr + start * gate_up_stride + (rows[:, None] * gate_up_stride + columns[None, :])
        grads = grad_out_ptr + start * grad_out_stride + (rows[:, None] * grad_out_stride + columns[None, :])
        grad = tl.load(grads, mask=inside, other=0.0)
        gate = tl.load(gates, mask=inside, other=0.0)
        up = tl.load(gates + width, mask=inside, other=0.0)
        grad, gate, up = grad.to(tl.float32), gate.to(tl.float32), up.to(tl.float32)
        if GATE:
            low_of_gate = _rows_of(low_ptr + start * low_stride + gate_low, rows, there, low_stride, rank, WIDE, RANKS)
            gate = tl.dot(low_of_gate, tl.trans(gate_matrix), gate, input_precision="ieee")
        if UP:
            low_of_up = _rows_of(low_ptr + start * low_stride + up_low, rows, there, low_stride, rank, WIDE, RANKS)
            up = tl.dot(low_of_up, tl.trans(up_matrix), up, input_precision="ieee")
        grad_low = _rows_of(
            grad_low_ptr + start * grad_low_stride, rows, there, grad_low_stride, behind_rank, WIDE, RANKS
        )
        grad = tl.dot(grad_low, down, grad, input_precision="ieee")
        out, grad_gate, grad_up = _unit_gradients(grad, gate, up, 0.0, 0.0, GELU, False)
        target = grad_ptr + start * grad_stride + (rows[:, None] * grad_stride + columns[None, :])
        tl.store(target, round_to(grad_gate, grad_ptr.dtype.element_ty), mask=inside)
        tl.store(target + width, round_to(grad_up, grad_ptr.dtype.element_ty), mask=inside)
        out = round_to(out, grad_ptr.dtype.element_ty)
        if WIDE:
            out = out.to(tl.float32)
        # So few rows are no wgmma, which would run on while the next tile is loaded over the one that it reads.
        total = tl.dot(tl.trans(grad_low), out, total, input_precision="ieee")
    ranks = tl.arange(0, RANKS)
    at = parts_ptr + tl.program_id(1).to(tl.int64) * parts_stride + (ranks[:, None] * width + columns[None, :])
    tl.store(at, total, (ranks < behind_rank)[:, None] & within[None, :])
