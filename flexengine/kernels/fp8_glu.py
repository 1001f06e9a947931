"""Gated linear units between products of FP8 (e4m3) with scales for blocks: codes are written where values are made.

T tokens, F FFN width, a multiple of 128, S = T filled up to one. Values are those of kernels/glu.py, rounded to the
compute dtype; their codes and scales are what kernels/fp8_blocks.py makes of them. A program has a tile of 128 columns
of either half.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.counts import cdiv
from flexengine.kernels.fp8_blocks import BLOCK, CODES, store_columns, store_rows, store_square, tile_of
from flexengine.kernels.glu import ACTIVATIONS, _gate, _unit_gradients
from flexengine.kernels.rounding import round_to

FORWARD_ROWS, FORWARD_WARPS, BACKWARD_WARPS = 32, 4, 16
"""Tokens of a program in forward, which has scales of rows alone, and warps. Backward has 128, which share scales."""
Side = tuple[Tensor, Tensor]
"""Codes and scales."""


class Gradients(NamedTuple):
    """What backward writes: codes of the gradient of gate_up as it is and transposed, the gradient itself, and codes of
    the unit's output transposed; square: with a scale for 128 x 128 of these."""

    rows: Side | None = None
    columns: Side | None = None
    values: Tensor | None = None
    unit: Side | None = None
    square: bool = False


def glu_forward(
    gate_up: Tensor, codes: Tensor, scales: Tensor, largest: float, least: float, activation: str, out: Tensor | None
) -> None:
    """codes, scales = act(gate) * up with a scale for every row and 128 columns, and `out` that itself.

    Shapes: gate_up [T, 2F] in bf16 or fp32, codes [T, F] e4m3, scales [F / 128, T] fp32, out [T, F] as gate_up.
    Rounding: as kernels/glu.py, then as kernels/fp8_blocks.py.
    Cost: reads 2*T*F elements, writes T*F bytes, T*F / 32 of scales, and T*F elements of out.
    Order: launches on the current stream, never synchronises. Raises: ValueError on other shapes, dtypes, strides or
    activations.
    """
    tokens, width = codes.shape
    tiles = _check("gate_up", gate_up, tokens, 2 * width, activation) // 2
    check_tensor("codes", codes, (tokens, width), CODES)
    check_tensor("scales", scales, (tiles, tokens), (torch.float32,))
    if out is not None:
        check_tensor("out", out, (tokens, width), (gate_up.dtype,))
    if tokens == 0:
        return
    _forward_kernel[(cdiv(tokens, FORWARD_ROWS) * tiles,)](
        gate_up, gate_up if out is None else out, codes.view(torch.uint8), scales, tokens, width, tiles, largest, least,
        UNIT=out is not None, GELU=activation == "gelu_tanh", ROWS=FORWARD_ROWS, num_warps=FORWARD_WARPS,
    )  # fmt: skip


def glu_backward(
    grad_out: Tensor, gate_up: Tensor, results: Gradients, largest: float, least: float, activation: str
) -> None:
    """Write `results` of the unit's backward in one pass.

    Shapes: grad_out [T, F] and gate_up [T, 2F] in bf16 or fp32; rows: codes [T, 2F] e4m3, scales [2F / 128, T] fp32;
    columns: codes [2F, S], scales [S / 128, 2F]; values [T, 2F], which may be gate_up itself; unit: codes [F, S],
    scales [S / 128, F], or, square, [F / 128, at least S / 128]. Codes beyond T are zero.
    Rounding: as `glu_forward`.
    Cost: reads 3*T*F elements, writes what is asked for.
    Order: launches on the current stream, never synchronises. Raises: ValueError on other shapes, dtypes, strides or
    activations.
    """
    tokens, width = grad_out.shape
    _check("grad_out", grad_out, tokens, width, activation)
    tiles = _check("gate_up", gate_up, tokens, 2 * width, activation) // 2
    padded = cdiv(tokens, 128) * 128
    _check_side("rows", results.rows, (tokens, 2 * width), (2 * tiles, tokens))
    _check_side("columns", results.columns, (2 * width, padded), (padded // 128, 2 * width))
    stride = 0 if results.unit is None else results.unit[1].shape[-1]
    of_unit = (tiles, max(stride, padded // 128)) if results.square else (padded // 128, width)
    _check_side("unit", results.unit, (width, padded), of_unit)
    if results.values is not None:
        check_tensor("values", results.values, (tokens, 2 * width), (gate_up.dtype,))
    if tokens == 0:
        return
    parts = 1 if results.values is not None else 2 + (results.unit is not None)
    _backward_kernel[(padded // 128 * tiles * parts,)](
        grad_out, gate_up, *_pointers(results.rows), *_pointers(results.columns), *_pointers(results.unit),
        results.values, tokens, width, padded, tiles, stride, largest, least,
        CODED=results.rows is not None, TURNED=results.columns is not None, VALUES=results.values is not None,
        UNIT=results.unit is not None, SQUARE=results.square, GELU=activation == "gelu_tanh",
        num_warps=BACKWARD_WARPS,
    )  # fmt: skip


def _pointers(side: Side | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if side is None else (side[0].view(torch.uint8), side[1])


def _check(name: str, tensor: Tensor, tokens: int, columns: int, activation: str) -> int:
    """Returns the blocks of 128 columns."""
    check_tensor(name, tensor, (tokens, columns), FLOATS)
    if columns % 128:
        raise ValueError(f"{name} needs a multiple of 128 columns, got {columns}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, expected one of {ACTIVATIONS}")
    return columns // 128


def _check_side(name: str, side: Side | None, codes: tuple[int, int], scales: tuple[int, int]) -> None:
    if side is not None:
        check_tensor(f"codes of {name}", side[0], codes, CODES)
        check_tensor(f"scales of {name}", side[1], scales, (torch.float32,))


@triton.jit(do_not_specialize=["tokens"])
def _forward_kernel(
    gate_up_ptr, out_ptr, codes_ptr, scales_ptr, tokens, width, tiles, largest, least,
    UNIT: tl.constexpr, GELU: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, column, inside = tile_of(tiles, tokens, width, ROWS)
    source = gate_up_ptr + row[:, None] * 2 * width + column[None, :]
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
    s, _ = _gate(gate, 0.0, GELU, False)
    value = round_to(gate * s * up, gate_up_ptr.dtype.element_ty)
    if UNIT:
        tl.store(out_ptr + row[:, None] * width + column[None, :], value, mask=inside)
    tile = tl.program_id(0) % tiles
    store_rows(value.to(tl.float32), row, column, inside, codes_ptr, scales_ptr, tokens, width, tile, largest, least)


@triton.jit
def _values(grad_out_ptr, gate_up_ptr, row, column, inside, width, GELU: tl.constexpr):
    """(a, gradients of gate and of up) of a tile, rounded."""
    source = gate_up_ptr + row[:, None] * 2 * width + column[None, :]
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_out_ptr + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
    unit, grad_gate, grad_up = _unit_gradients(grad, gate, up, 0.0, 0.0, GELU, False)
    dtype: tl.constexpr = gate_up_ptr.dtype.element_ty
    return round_to(unit, dtype), round_to(grad_gate, dtype), round_to(grad_up, dtype)


@triton.jit
def _store_half(
    x, half, row, column, inside, row_codes_ptr, row_scales_ptr, column_codes_ptr, column_scales_ptr, tokens, width,
    padded, row_tile, tile, tiles, largest, least, CODED: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Codes of the gradient of gate (half 0) or of up (1)."""
    wide, columns = x.to(tl.float32), column + half * width
    if CODED:
        at = tile + half * tiles
        store_rows(wide, row, columns, inside, row_codes_ptr, row_scales_ptr, tokens, 2 * width, at, largest, least)
    if TURNED:
        store_columns(
            wide, row, columns, column_codes_ptr, column_scales_ptr, 2 * width, padded, row_tile, largest, least
        )


@triton.jit
def _store_unit(
    x, row, column, codes_ptr, scales_ptr, tokens, width, padded, row_tile, tile, stride, largest, least,
    SQUARE: tl.constexpr,
):  # fmt: skip
    """Codes of a transposed."""
    wide = x.to(tl.float32)
    if SQUARE:
        scale = scales_ptr + tile * stride + row_tile
        store_square(wide, row, column, codes_ptr, scale, tokens, width, padded, largest, least, True)
    else:
        store_columns(wide, row, column, codes_ptr, scales_ptr, width, padded, row_tile, largest, least)


@triton.jit(do_not_specialize=["tokens", "stride"])
def _backward_kernel(
    grad_out_ptr, gate_up_ptr, row_codes_ptr, row_scales_ptr, column_codes_ptr, column_scales_ptr, unit_codes_ptr,
    unit_scales_ptr, values_ptr, tokens, width, padded, tiles, stride, largest, least,
    CODED: tl.constexpr, TURNED: tl.constexpr, VALUES: tl.constexpr, UNIT: tl.constexpr, SQUARE: tl.constexpr,
    GELU: tl.constexpr,
):  # fmt: skip
    """Codes of a tile: of the gradient of gate, of up's, or of a, as registers hold those of one; what its neighbours
    read, too, the card's cache has. With values, which may be written over gate and up, a program makes all."""
    program, part = tl.program_id(0), 0
    if not VALUES:
        part = program % (2 + UNIT)
        program = program // (2 + UNIT)
    row_tile, tile = program // tiles, program % tiles
    row = row_tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tile * BLOCK + tl.arange(0, BLOCK)
    inside = (row < tokens)[:, None] & (column < width)[None, :]
    if VALUES:
        unit, grad_gate, grad_up = _values(grad_out_ptr, gate_up_ptr, row, column, inside, width, GELU)
        target = values_ptr + row[:, None] * 2 * width + column[None, :]
        tl.store(target, grad_gate, mask=inside)
        tl.store(target + width, grad_up, mask=inside)
        for half in tl.static_range(2):
            _store_half(
                grad_up if half else grad_gate, half, row, column, inside, row_codes_ptr, row_scales_ptr,
                column_codes_ptr, column_scales_ptr, tokens, width, padded, row_tile, tile, tiles, largest, least,
                CODED, TURNED,
            )  # fmt: skip
        if UNIT:
            _store_unit(
                unit, row, column, unit_codes_ptr, unit_scales_ptr, tokens, width, padded, row_tile, tile, stride,
                largest, least, SQUARE,
            )  # fmt: skip
    elif part < 2:
        _, grad_gate, grad_up = _values(grad_out_ptr, gate_up_ptr, row, column, inside, width, GELU)
        _store_half(
            tl.where(part == 0, grad_gate, grad_up), part, row, column, inside, row_codes_ptr, row_scales_ptr,
            column_codes_ptr, column_scales_ptr, tokens, width, padded, row_tile, tile, tiles, largest, least, CODED,
            TURNED,
        )  # fmt: skip
    elif UNIT:
        unit, _, _ = _values(grad_out_ptr, gate_up_ptr, row, column, inside, width, GELU)
        _store_unit(
            unit, row, column, unit_codes_ptr, unit_scales_ptr, tokens, width, padded, row_tile, tile, stride, largest,
            least, SQUARE,
        )  # fmt: skip
