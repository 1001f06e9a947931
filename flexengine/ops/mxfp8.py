"""MXFP8 products: operands are e4m3, and 32 terms of a sum share a scale, a power of two.

The largest magnitude of a block lies below e4m3's largest number, 448, so that nothing is cut off: the scale is the
least power of two that is at least the one over the other. NaN stays NaN, and an infinity makes its block NaN.
Sources: Open Compute Project 2023, "OCP Microscaling Formats (MX) Specification", version 1.0, sections 5.1 and 6.3;
that scales are rounded up, and that all three products take these operands: Mishra et al. 2025, "Recipes for
Pre-training LLMs with MXFP8", https://arxiv.org/abs/2506.08027.

Shapes: a product is a [M, K] @ b [N, K].T, K and N multiples of 32; scales as `ops/scale_tiles.py` lays them out. A
matrix that is multiplied by both of its sides is rounded twice, as blocks lie along the dimension that is summed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexengine.ops.base import TensorSpec, Work, use_kernel
from flexengine.ops.fp8_scaling import (
    CUBLASLT_BYTES,
    FORWARD_DTYPE,
    LARGEST,
    Buffers,
    Operand,
    Role,
    Scaling,
    of_tokens,
)
from flexengine.ops.linear_shape import LinearShape
from flexengine.ops.scale_tiles import (
    TILE_BLOCKS,
    TILE_ROWS,
    in_rows,
    in_tiles,
    multiply,
    refusal,
    scale_shape,
    tokens_in_tiles,
    weight_in_tiles,
)

SPAN = 32
"""Terms that share a scale."""
_BIAS, _LEAST, _NAN = 127, 1, 255
"""Of a scale's byte; the least one, of blocks of zeros; the one that is NaN."""
_LARGEST_EXPONENT, _LARGEST_MANTISSA = 8, 0x60_0000
"""Of 448 = 1.75 * 2^8, the mantissa as bits of float32."""


def round_blocks(x: Tensor, rows: Operand | None, columns: Operand | None) -> None:
    """rows = x with a scale for 32 columns of a row; columns = the same of x transposed, whose rows have zeros up to
    their ends."""
    if use_kernel(x):
        from flexengine.kernels import mxfp8  # noqa: PLC0415 (Triton is imported when first used)

        of_rows, of_columns = (None if side is None else side[:2] for side in (rows, columns))
        return mxfp8.round_blocks(x, of_rows, of_columns)
    for matrix, side in ((x, rows), (x.t(), columns)):
        if side is not None:
            _round(matrix, side)


def _round(matrix: Tensor, side: Operand) -> None:
    rows, terms = side.codes.shape
    blocks = torch.nn.functional.pad(matrix.float(), (0, terms - matrix.shape[1])).view(rows, terms // SPAN, SPAN)
    bits = blocks.abs().nan_to_num(0.0, torch.inf).amax(2).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7F_FFFF
    scales = (exponent - _LARGEST_EXPONENT + (mantissa > _LARGEST_MANTISSA).int()).clamp_(min=_LEAST)
    scales.masked_fill_(exponent == _NAN, _NAN)
    factors = ((2 * _BIAS - scales).clamp_(min=0) << 23).view(torch.float32).masked_fill_(scales == _NAN, torch.nan)
    side.codes.view(blocks.shape).copy_(blocks.mul_(factors[:, :, None]).clamp_(-LARGEST, LARGEST))
    side.scales.copy_(in_tiles(scales.to(torch.uint8), _LEAST))


def decoded(side: Operand) -> Tensor:
    """What codes and scales stand for, float32, exact."""
    rows, terms = side.codes.shape
    scales = in_rows(side.scales, rows, terms // SPAN).contiguous().view(torch.float8_e8m0fnu).float()
    return side.codes.float().view(rows, -1, SPAN).mul_(scales[:, :, None]).view(rows, terms)


class MicroScaling(Scaling):
    """A power of two for 32 terms of a row, of all operands of all three products."""

    name = "mxfp8"
    of_experts = False
    feature_multiple, row_multiple = SPAN, TILE_ROWS

    def refusal(self, device: torch.device) -> str | None:
        return refusal(device)

    def forward_scratch(self, shape: LinearShape) -> tuple[TensorSpec, ...]:
        d, f = shape.in_features, shape.out_features
        return *tokens_in_tiles(shape, "x8", d, SPAN), *weight_in_tiles(shape, "weight8", (f, d), SPAN)

    def input_scratch(self, shape: LinearShape) -> tuple[TensorSpec, ...]:
        d, f = shape.in_features, shape.out_features
        return *tokens_in_tiles(shape, "grad8", f, SPAN), *weight_in_tiles(shape, "weight8_t", (d, f), SPAN)

    def shared_scratch(self, shape: LinearShape, both: bool) -> tuple[TensorSpec, ...]:
        return _transposed(shape, "grad8_t", shape.out_features) if both else ()

    def weight_scratch(self, shape: LinearShape) -> tuple[TensorSpec, ...]:
        return _transposed(shape, "x8_t", shape.in_features)

    def forward_operands(self, t: Buffers, x: Tensor | None, weight: Tensor) -> tuple[Operand, Operand]:
        assert x is not None, "only codes with scales for blocks are written elsewhere"
        x8, weight8 = _side(t, "x8"), _side(t, "weight8")
        round_blocks(x, x8, None)
        round_blocks(weight, weight8, None)
        return x8, weight8

    def input_operands(self, t: Buffers, grad_y: Tensor | None, weight: Tensor, both: bool) -> tuple[Operand, Operand]:
        assert grad_y is not None, "only codes with scales for blocks are written elsewhere"
        grad8, weight8_t = _side(t, "grad8"), _side(t, "weight8_t")
        round_blocks(grad_y, grad8, _transposed_side(t, "grad8_t") if both else None)
        round_blocks(weight, None, weight8_t)
        return grad8, weight8_t

    def weight_operands(self, t: Buffers, x: Tensor) -> tuple[Operand, Operand]:
        x8_t = _transposed_side(t, "x8_t")
        round_blocks(x, None, x8_t)
        return _transposed_side(t, "grad8_t"), x8_t

    def multiply(self, a: Operand, b: Operand, out: Tensor, bias: Tensor | None = None, fast: bool = False) -> None:
        if a.codes.is_cuda:
            return multiply(a, b, FORWARD_DTYPE, "BlockWise1x32", out, bias)
        product = decoded(a) @ decoded(b).t()
        out.copy_(product if bias is None else product.add_(bias))

    def with_ones(self, codes: Tensor, role: Role) -> Operand:
        shape = scale_shape(codes.shape, SPAN)
        return Operand(codes, torch.full(shape, _BIAS, dtype=torch.uint8, device=codes.device), "tiles")

    def workspace_bytes(self, tokens: int, widest: int) -> int:
        return CUBLASLT_BYTES

    def plain_workspace_bytes(self, tokens: int, in_features: int, out_features: int) -> int:
        """All three matrices in float32, twice: of one that is rounded, and of two that are decoded."""
        elements = tokens * (in_features + out_features) + in_features * out_features
        return 8 * elements + 8 * TILE_ROWS * (in_features + out_features)

    def rounding_work(self, elements: int, compute_bytes: int, results: int = 1, transposed: bool = False) -> Work:
        """A read, and a write of codes and scales for each result."""
        return Work(memory_bytes=elements * (compute_bytes + results * (1.0 + 1.0 / SPAN)), kernels=1)


def _transposed(shape: LinearShape, suffix: str, features: int) -> tuple[TensorSpec, TensorSpec]:
    """Codes and scales of a matrix of tokens transposed, declared by tokens, of which 128 make a tile."""
    codes = of_tokens(shape, suffix, features, SPAN)
    bytes_per_token = -(-features // TILE_ROWS) * TILE_BLOCKS
    return codes, TensorSpec(f"{codes.name}_scales", (bytes_per_token,), "uint8", multiple=TILE_ROWS)


def _side(t: Buffers, suffix: str) -> Operand:
    return _in_tiles(t.codes(suffix, FORWARD_DTYPE), t[f"{suffix}_scales"])


def _transposed_side(t: Buffers, suffix: str) -> Operand:
    return _in_tiles(t.transposed(suffix, FORWARD_DTYPE), t[f"{suffix}_scales"])


def _in_tiles(codes: Tensor, scales: Tensor) -> Operand:
    return Operand(codes, scales.view(scale_shape(codes.shape, SPAN)), "tiles")
