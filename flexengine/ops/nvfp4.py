"""NVFP4 products: operands are e2m1, two in a byte; 16 terms share a scale in e4m3, and a matrix a factor in float32.

What is here of the published recipe: activations and gradients have scales for 16 terms of a row, weights for 16 x 16
elements, so that both products read the same rounded weight, and gradients are rounded at random, so that they are
right on average. What is not: gradients of weights in NVFP4, with random Hadamard transforms of their operands (they
take the compute dtype here), and blocks that stay in 16 bits.
Source: NVIDIA 2025, "Pretraining Large Language Models with NVFP4", https://arxiv.org/abs/2509.25149, sections 2 and 4.

A matrix's factor is its largest magnitude over 6 * 448, the largest numbers of codes and scales; a block's scale is its
own over 6 and that factor, to nearest even. A NaN makes its block NaN, and an infinity the whole matrix.

Shapes: a product is a [M, K] @ b [N, K].T, K and N multiples of 32; codes [M, K / 2], the first of two in the low half;
scales as `ops/scale_tiles.py` lays them out.
"""

from __future__ import annotations

from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from flexengine.ops.base import DropoutDraws, TensorSpec, Work, use_kernel
from flexengine.ops.formats.mxfp4 import MAGNITUDES, nearest, numbers
from flexengine.ops.fp8_scaling import (
    CUBLASLT_BYTES,
    FORWARD_DTYPE,
    LARGEST,
    LEAST_ABSMAX,
    PARTIALS,
    Buffers,
    Operand,
    Role,
    Scaling,
    scale_buffer,
    scale_of,
)
from flexengine.ops.linear_shape import LinearShape
from flexengine.ops.scale_tiles import (
    TILE_ROWS,
    in_rows,
    in_tiles,
    multiply,
    refusal,
    scale_shape,
    tokens_in_tiles,
    weight_in_tiles,
)
from flexengine.random_bits import random_bits16, stream_keys

SPAN = 16
"""Terms that share a scale, and rows of a weight."""
LARGEST_CODE = MAGNITUDES[-1]
LIMITS = (LARGEST_CODE, LARGEST, LEAST_ABSMAX)
"""The largest code and scale, and what a matrix's largest magnitude counts as at least."""
FACTOR_BYTES = 512
"""The least that torch allocates."""
_NAN = 0x7F
_ONE = 0x38
"""A scale's bytes."""
_STREAM = 1 << 40
"""First of the streams of random bits, above those of dropout; a layer of the model has 2**32 of them."""


class Draws(NamedTuple):
    """Which random bits round a matrix: those of the counters from its first element on, in its rows' order."""

    seed: int
    step: int
    stream: int
    first_row: int

    @staticmethod
    def of(t: Buffers, draws: DropoutDraws | None) -> Draws | None:
        """Those of a layer's gradient; None outside of training, where it is rounded to nearest."""
        stream = _STREAM + (t.number << 32) + crc32(t.name.encode())
        return None if draws is None else Draws(draws.seed, draws.step, stream, draws.first_row)


def round_fours(
    x: Tensor, side: Operand, partials: Tensor, squares: bool = False, transposed: bool = False,
    draws: Draws | None = None,
) -> None:  # fmt: skip
    """side = x (transposed: x.T) with a scale for 16 terms of a row (squares: for 16 x 16 elements), and its factor.

    partials: what the factor's maximum is taken from. draws: rounds at random by these, else to nearest even.
    """
    assert side.factor is not None, "a matrix in NVFP4 has a factor"
    if use_kernel(x):
        from flexengine.kernels import fp8, nvfp4  # noqa: PLC0415 (Triton is imported when first used)

        fp8.absmax_partials(x, partials)
        operand, drawn = (side.codes, side.scales, side.factor), None
        if draws is not None:
            drawn = stream_keys(draws.seed, draws.step, draws.stream), draws.first_row * x.shape[1]
        return nvfp4.round_fours(x, operand, partials, LIMITS, squares, transposed, drawn)
    matrix = (x.t() if transposed else x).float()
    rows, terms = matrix.shape
    factor = matrix.abs().nan_to_num(0.0, torch.inf).max().clamp_(min=LEAST_ABSMAX)
    factor = side.factor.copy_(factor / torch.full_like(factor, LARGEST_CODE * LARGEST))
    blocks = matrix.reshape(rows, terms // SPAN, SPAN)
    absmax = blocks.abs().nan_to_num(torch.inf, torch.inf).amax(2)
    if squares:
        absmax = absmax.view(rows // SPAN, SPAN, -1).amax(1).repeat_interleave(SPAN, 0)
    codes = (absmax / (factor * LARGEST_CODE)).nan_to_num(torch.nan, LARGEST).clamp_(max=LARGEST).to(FORWARD_DTYPE)
    scales = codes.view(torch.uint8).masked_fill(absmax.isinf(), _NAN)
    steps = scales.view(FORWARD_DTYPE).float() * factor
    scaled = blocks * torch.where(steps > 0, torch.ones_like(steps) / steps, 0.0)[:, :, None]
    scaled = scaled.nan_to_num(0.0, 0.0, 0.0).view(rows, terms)
    pairs = (nearest(scaled) if draws is None else _at_random(scaled, draws)).view(rows, terms // 2, 2)
    side.codes.copy_(pairs[:, :, 0] | (pairs[:, :, 1] << 4))
    side.scales.copy_(in_tiles(scales, 0))


def _at_random(x: Tensor, draws: Draws) -> Tensor:
    """Codes of the numbers below or above x, so that x is their mean."""
    table = numbers(x.device)[: len(MAGNITUDES)]
    below = torch.bucketize(x.abs(), table, right=True).sub_(1)
    above = (below + 1).clamp_(max=len(table) - 1)
    low, high = table[below], table[above]
    share = ((x.abs() - low) / (high - low)).nan_to_num_(0.0, 0.0) * 65536
    drawn = random_bits16(x.numel(), x.device, *draws[:2], draws.first_row * x.shape[1], draws.stream).view(x.shape)
    return (torch.where(drawn < share, above, below) + 8 * torch.signbit(x)).to(torch.uint8)


def decoded(side: Operand) -> Tensor:
    """What codes and scales stand for but for the factor, float32, exact."""
    rows, terms = side.codes.shape[0], 2 * side.codes.shape[1]
    scales = in_rows(side.scales, rows, terms // SPAN).contiguous().view(FORWARD_DTYPE).float()
    pairs = torch.stack((side.codes & 15, side.codes >> 4), dim=2).int()
    return numbers(pairs.device)[pairs].view(rows, -1, SPAN).mul_(scales[:, :, None]).view(rows, terms)


class FourBitScaling(Scaling):
    """NVFP4 forward and for the gradient of x; the weight's gradient takes the compute dtype."""

    name = "nvfp4-gw-hp"
    gradient_in_fp8 = of_experts = False
    draws = True
    feature_multiple, row_multiple = 2 * SPAN, TILE_ROWS

    def refusal(self, device: torch.device) -> str | None:
        return refusal(device)

    def forward_scratch(self, shape: LinearShape) -> tuple[TensorSpec, ...]:
        d, f = shape.in_features, shape.out_features
        x, weight = tokens_in_tiles(shape, "x4", d, SPAN, 2), weight_in_tiles(shape, "weight4", (f, d), SPAN, 2)
        return *x, *weight, scale_buffer(shape.name)

    def input_scratch(self, shape: LinearShape) -> tuple[TensorSpec, ...]:
        d, f = shape.in_features, shape.out_features
        grad, weight = tokens_in_tiles(shape, "grad4", f, SPAN, 2), weight_in_tiles(shape, "weight4_t", (d, f), SPAN, 2)
        return *grad, *weight, scale_buffer(f"{shape.name}_grad")

    def shared_scratch(self, shape: LinearShape, both: bool) -> tuple[TensorSpec, ...]:
        return ()

    def weight_scratch(self, shape: LinearShape) -> tuple[TensorSpec, ...]:
        return ()

    def forward_operands(self, t: Buffers, x: Tensor | None, weight: Tensor) -> tuple[Operand, Operand]:
        assert x is not None, "only codes with scales for blocks are written elsewhere"
        factors = t["scales"]
        x4, weight4 = _side(t, "x4", scale_of(factors, 0)), _side(t, "weight4", scale_of(factors, 1))
        round_fours(x, x4, factors[-PARTIALS:])
        round_fours(weight, weight4, factors[-PARTIALS:], squares=True)
        return x4, weight4

    def input_operands(self, t: Buffers, grad_y: Tensor | None, weight: Tensor, both: bool) -> tuple[Operand, Operand]:
        assert grad_y is not None, "only codes with scales for blocks are written elsewhere"
        factors = t["grad_scales"]
        grad4, weight4_t = _side(t, "grad4", scale_of(factors, 0)), _side(t, "weight4_t", scale_of(factors, 1))
        round_fours(grad_y, grad4, factors[-PARTIALS:], draws=Draws.of(t, t.draws))
        round_fours(weight, weight4_t, factors[-PARTIALS:], squares=True, transposed=True)
        return grad4, weight4_t

    def weight_operands(self, t: Buffers, x: Tensor) -> tuple[Operand, Operand]:
        raise AssertionError("the weight's gradient takes the compute dtype")

    def multiply(self, a: Operand, b: Operand, out: Tensor, bias: Tensor | None = None, fast: bool = False) -> None:
        if a.codes.is_cuda:
            return multiply(a, b, torch.float4_e2m1fn_x2, "BlockWise1x16", out, bias)
        assert a.factor is not None
        assert b.factor is not None
        product = (decoded(a) @ decoded(b).t()).mul_(a.factor * b.factor)
        out.copy_(product if bias is None else product.add_(bias))

    def with_ones(self, codes: Tensor, role: Role) -> Operand:
        rows, terms = codes.shape
        pairs = codes.view(torch.uint8).view(-1)[: rows * terms // 2].view(rows, terms // 2)
        scales = torch.full(scale_shape(codes.shape, SPAN), _ONE, dtype=torch.uint8, device=codes.device)
        return Operand(pairs, scales, "tiles", torch.ones(1, device=codes.device))

    def workspace_bytes(self, tokens: int, widest: int) -> int:
        """cuBLAS, and the product of both factors."""
        return CUBLASLT_BYTES + FACTOR_BYTES

    def plain_workspace_bytes(self, tokens: int, in_features: int, out_features: int) -> int:
        """All three matrices in float32, twice, and what rounding at random takes of the largest: 8 whole numbers."""
        sizes = tokens * in_features, tokens * out_features, in_features * out_features
        return 8 * sum(sizes) + 64 * max(sizes) + 8 * TILE_ROWS * (in_features + out_features)

    def rounding_work(self, elements: int, compute_bytes: int, results: int = 1, transposed: bool = False) -> Work:
        """Two reads, one of them for the factor, and a write of codes and scales for each result."""
        return Work(memory_bytes=elements * (2 * compute_bytes + results * (0.5 + 1.0 / SPAN)), kernels=2)


def _side(t: Buffers, suffix: str, factor: Tensor) -> Operand:
    codes = t[suffix]
    shape = scale_shape((len(codes), 2 * codes.shape[1]), SPAN)
    return Operand(codes, t[f"{suffix}_scales"].view(shape), "tiles", factor)
