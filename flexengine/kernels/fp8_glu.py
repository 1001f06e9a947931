"""Gated linear units between products of FP8 (e4m3) with scales for blocks: codes are written where values are made.

T tokens, F FFN width, a multiple of 128, S = T filled up to one. Values are those of kernels/glu.py, rounded to the
compute dtype; their codes and scales are what kernels/fp8_blocks.py makes of them. A program has a tile of 128 columns
of either half.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.counts import cdiv
from flexengine.kernels.fp8_blocks import BLOCK, CODES, store_rows, tile_of
from flexengine.kernels.glu import ACTIVATIONS, _gate, _unit_gradients
from flexengine.kernels.rounding import round_to

ROWS, FORWARD_WARPS, BACKWARD_ROWS, BACKWARD_WARPS = 32, 4, 128, 16
"""Tokens and warps of a program: the fastest of some on an H200."""


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
    _forward_kernel[(cdiv(tokens, ROWS) * tiles,)](
        gate_up, gate_up if out is None else out, codes.view(torch.uint8), scales, tokens, width, tiles, largest, least,
        UNIT=out is not None, GELU=activation == "gelu_tanh", ROWS=ROWS, num_warps=FORWARD_WARPS,
    )  # fmt: skip


def glu_backward(
    grad_out: Tensor, gate_up: Tensor, codes: Tensor, scales: Tensor, largest: float, least: float, activation: str
) -> None:
    """codes, scales = the gradient of gate_up with a scale for every row and 128 columns; it itself is not written.

    Shapes: grad_out [T, F] and gate_up [T, 2F] in bf16 or fp32; codes [T, 2F] e4m3, scales [2F / 128, T] fp32.
    Rounding: as `glu_forward`.
    Cost: reads 3*T*F elements, writes 2*T*F bytes, T*F / 16 of scales.
    Order: launches on the current stream, never synchronises. Raises: ValueError on other shapes, dtypes, strides or
    activations.
    """
    tokens, width = grad_out.shape
    tiles = _check("grad_out", grad_out, tokens, width, activation)
    _check("gate_up", gate_up, tokens, 2 * width, activation)
    check_tensor("codes", codes, (tokens, 2 * width), CODES)
    check_tensor("scales", scales, (2 * tiles, tokens), (torch.float32,))
    if tokens == 0:
        return
    _backward_kernel[(cdiv(tokens, BACKWARD_ROWS) * tiles * 2,)](
        grad_out, gate_up, codes.view(torch.uint8), scales, tokens, width, tiles, largest, least,
        GELU=activation == "gelu_tanh", ROWS=BACKWARD_ROWS, num_warps=BACKWARD_WARPS,
    )  # fmt: skip


def _check(name: str, tensor: Tensor, tokens: int, columns: int, activation: str) -> int:
    """Returns the blocks of 128 columns."""
    check_tensor(name, tensor, (tokens, columns), FLOATS)
    if columns % 128:
        raise ValueError(f"{name} needs a multiple of 128 columns, got {columns}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, expected one of {ACTIVATIONS}")
    return columns // 128


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


@triton.jit(do_not_specialize=["tokens"])
def _backward_kernel(
    grad_out_ptr, gate_up_ptr, codes_ptr, scales_ptr, tokens, width, tiles, largest, least,
    GELU: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A tile of the gradient of gate or of up, as registers hold those of one; what both read the card's cache has."""
    half, program = tl.program_id(0) % 2, tl.program_id(0) // 2
    tile = program % tiles
    row = (program // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tile * BLOCK + tl.arange(0, BLOCK)
    inside = (row < tokens)[:, None] & (column < width)[None, :]
    source = gate_up_ptr + row[:, None] * 2 * width + column[None, :]
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_out_ptr + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
    _, grad_gate, grad_up = _unit_gradients(grad, gate, up, 0.0, 0.0, GELU, False)
    value = round_to(tl.where(half == 0, grad_gate, grad_up), gate_up_ptr.dtype.element_ty).to(tl.float32)
    columns, at = column + half * width, tile + half * tiles
    store_rows(value, row, columns, inside, codes_ptr, scales_ptr, tokens, 2 * width, at, largest, least)
