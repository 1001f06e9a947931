"""Gated linear units of gate_up + low @ B.T whose backward reads the sums rounded to FP8.

What adapters add is multiplied and added while gate_up is read (kernels/lora_glu.py); codes and scales are those of
kernels/rounded_glu.py, here of the sums in fp32. T tokens, F FFN width, R rank, B = ceil(F / 128) blocks of columns of
either half. One kernel makes the sums for unit and codes alike, in one tile, so that who asked for them changes no bit.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels import lora_glu, rounded_glu
from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.counts import cdiv
from flexengine.kernels.fp8 import from_e4m3
from flexengine.kernels.glu import _gate, _unit_gradients
from flexengine.kernels.lora_glu import _added, _ranks, _sums, _tile
from flexengine.kernels.rounded_glu import COLUMNS, _store_codes
from flexengine.kernels.rounding import round_to

_ROWS = 32  # of a program's tile, whose columns share a scale: as many elements as a tile of kernels/lora_glu.py has
Halves = Sequence[tuple[int, int, int]]
"""(first column of gate_up, first column of low, first row of B) of gate, of up, or of both."""


def round_sums(
    gate_up: Tensor, low: Tensor, up: Tensor, halves: Halves, codes: Tensor, scales: Tensor, largest: float,
    least: float, out: Tensor | None = None, activation: str = "silu",
) -> None:  # fmt: skip
    """codes = (gate_up + low @ B.T) / scales, where a scale is max(largest magnitude of its block, least) / largest;
    with `out` also out = act(gate) * up of the sums themselves, as `glu_forward` gives it.

    Shapes: gate_up [T, 2F], low [T, L], up = B [N, R], out [T, F] of one dtype, bf16 or fp32; codes [T, 2F] uint8,
    scales [T, 2B] fp32. Rows of gate_up, low and B may be strided.
    Rounding: sums in fp32; codes as kernels/rounded_glu.py.
    Cost: reads 2*T*F elements, writes as many bytes, 8*T*B bytes of scales, and T*F elements of `out`; 2*T*2F*R FLOPs.
    Order: launches on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes, strides or activations.
    """
    _launch_sums(gate_up, low, up, halves, (codes, scales), (largest, least), out, activation)


def glu_forward(gate_up: Tensor, low: Tensor, up: Tensor, halves: Halves, out: Tensor, activation: str) -> None:
    """out = act(gate) * up of gate_up + low @ B.T, with the bits of `round_sums`.

    Shapes, rounding, order, errors: as `round_sums`.
    Cost: reads 2*T*F and writes T*F elements; 2*T*2F*R FLOPs.
    """
    _launch_sums(gate_up, low, up, halves, None, (1.0, 1.0), out, activation)


def glu_backward_from_codes(
    grad_out: Tensor, codes: Tensor, scales: Tensor, grad_gate_up: Tensor, activation: str,
    behind: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    """Gradients of both halves at the rounded sums, where that of the unit's output is grad_out + grad_low @ A.

    behind: (grad_low [T, R'], A [R', F]) of adapters that read the unit's output.
    Shapes: grad_out [T, F], grad_gate_up [T, 2F] in bf16 or fp32, all but codes and scales in one dtype.
    Cost: reads 2*T*F + 8*T*B bytes and T*F elements, writes 2*T*F elements; 2*T*F*R' FLOPs.
    Order: launches on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes, strides or activations.
    """
    tokens, width = grad_out.shape
    check_tensor("grad_out", grad_out, (tokens, width), FLOATS)
    check_tensor("grad_gate_up", grad_gate_up, (tokens, 2 * width), FLOATS)
    unit = rounded_glu._launch(codes, scales, tokens, width, activation)
    (grad_low, down), rank = behind, len(behind[1])
    check_tensor("grad_low", grad_low, (tokens, rank), (grad_out.dtype,), strided_rows=True)
    check_tensor("down", down, (rank, width), (grad_out.dtype,), strided_rows=True)
    if grad_out.numel() == 0:
        return
    grid = (cdiv(tokens, _ROWS) * cdiv(width, COLUMNS),)
    _backward_kernel[grid](
        grad_out, codes, scales, grad_low, down, grad_gate_up, tokens, width, grad_low.stride(0), down.stride(0), rank,
        GELU=unit["GELU"], NATIVE=unit["NATIVE"], WIDE=not grad_out.is_cuda, RANKS=_ranks(rank), ROWS=_ROWS,
        COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip


def _launch_sums(
    gate_up: Tensor, low: Tensor, up: Tensor, halves: Halves, kept: tuple[Tensor, Tensor] | None,
    limits: tuple[float, float], out: Tensor | None, activation: str,
) -> None:  # fmt: skip
    tokens, width = len(gate_up), gate_up.shape[1] // 2
    launch = lora_glu._launch(gate_up, low, up, halves, width, activation) | {"ROWS": _ROWS, "COLUMNS": COLUMNS}
    native = False if kept is None else rounded_glu._launch(*kept, tokens, width, activation)["NATIVE"]
    if out is not None:
        check_tensor("out", out, (tokens, width), FLOATS)
    if gate_up.numel() == 0:
        return
    grid = (cdiv(tokens, _ROWS) * cdiv(width, COLUMNS),)
    codes, scales = kept or (gate_up, gate_up)
    strides = (gate_up.stride(0), low.stride(0), up.stride(0))
    _sums_kernel[grid](
        gate_up, low, up, codes, scales, gate_up if out is None else out, tokens, width, *strides, *limits,
        CODES=kept is not None, UNIT=out is not None, NATIVE=native, **launch,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _sums_kernel(
    gate_up_ptr, low_ptr, up_ptr, codes_ptr, scales_ptr, out_ptr, tokens, width, gate_up_stride, low_stride, up_stride,
    largest, least, rank, gate_low, gate_row, up_low, up_row,
    CODES: tl.constexpr, UNIT: tl.constexpr, NATIVE: tl.constexpr, GATE: tl.constexpr, UP: tl.constexpr,
    GELU: tl.constexpr, WIDE: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows, columns, inside, gate, up = _sums(
        gate_up_ptr, low_ptr, up_ptr, tokens, width, gate_up_stride, low_stride, up_stride,
        rank, gate_low, gate_row, up_low, up_row, GATE, UP, WIDE, RANKS, ROWS, COLUMNS,
    )  # fmt: skip
    if CODES:
        blocks = tl.cdiv(width, COLUMNS)
        codes = codes_ptr + rows[:, None] * 2 * width + columns[None, :]
        scales = scales_ptr + rows * 2 * blocks + tl.program_id(0) % blocks
        _store_codes(gate, codes, scales, inside, rows < tokens, largest, least, NATIVE)
        _store_codes(up, codes + width, scales + blocks, inside, rows < tokens, largest, least, NATIVE)
    if UNIT:
        s, _ = _gate(gate, 0.0, GELU, False)
        target = out_ptr + rows[:, None] * width + columns[None, :]
        tl.store(target, round_to(gate * s * up, out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _backward_kernel(
    grad_out_ptr, codes_ptr, scales_ptr, grad_low_ptr, down_ptr, grad_gate_up_ptr, tokens, width, grad_low_stride,
    down_stride, rank,
    GELU: tl.constexpr, NATIVE: tl.constexpr, WIDE: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    rows, columns = _tile(width, ROWS, COLUMNS)
    held, blocks = rows < tokens, tl.cdiv(width, COLUMNS)
    inside = held[:, None] & (columns < width)[None, :]
    at = rows[:, None] * width + columns[None, :]  # of a tensor [T, F]
    wide_at = rows[:, None] * 2 * width + columns[None, :]  # of one [T, 2F]
    scales = scales_ptr + rows * 2 * blocks + tl.program_id(0) % blocks
    # All are loaded before any is used: neither products nor uses of tiles, which wait, let a later load past them.
    gate_code = tl.load(codes_ptr + wide_at, mask=inside, other=0)
    up_code = tl.load(codes_ptr + wide_at + width, mask=inside, other=0)
    gate_scale = tl.load(scales, mask=held, other=0.0)
    up_scale = tl.load(scales + blocks, mask=held, other=0.0)
    grad = tl.load(grad_out_ptr + at, mask=inside, other=0.0).to(tl.float32)
    grad += _added(
        grad_low_ptr, down_ptr, rows, columns, tokens, width, rank, grad_low_stride, 1, down_stride, 0, 0,
        WIDE, RANKS, ROWS, COLUMNS,
    )  # fmt: skip
    gate = from_e4m3(gate_code.to(tl.int32), NATIVE) * gate_scale[:, None]
    up = from_e4m3(up_code.to(tl.int32), NATIVE) * up_scale[:, None]
    _, grad_gate, grad_up = _unit_gradients(grad, gate, up, 0.0, 0.0, GELU, False)
    target = grad_gate_up_ptr + wide_at
    tl.store(target, round_to(grad_gate, grad_gate_up_ptr.dtype.element_ty), mask=inside)
    tl.store(target + width, round_to(grad_up, grad_gate_up_ptr.dtype.element_ty), mask=inside)
