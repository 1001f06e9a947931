"""One byte of scale for a few terms of a row, in the order that tensor cores of Blackwell cards read them.

128 rows and 4 blocks of terms make a tile of 512 bytes: byte 16 * (row % 32) + 4 * (row // 32) + block. Tiles of the
same rows follow each other. A matrix is filled up to whole tiles, with finite scales that multiply nothing.
Source: NVIDIA, cuBLAS 13, "1D Block Scaling Factors Layout", https://docs.nvidia.com/cuda/cublas/.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexengine.ops.base import TensorSpec
from flexengine.ops.fp8_scaling import Operand, of_tokens, of_weight
from flexengine.ops.linear_shape import LinearShape
from flexengine.ops.scaled_mm import CUDA_VERSION, ScaledMatrix, has_scale_kinds, scaled_product

TILE_ROWS, TILE_BLOCKS = 128, 4
TILE_BYTES = TILE_ROWS * TILE_BLOCKS
BLACKWELL = (10, 0)
"""Compute capability from which cards multiply operands with such scales."""


def across(terms: int, span: int) -> int:
    """Tiles side by side for so many terms, of which `span` share a scale."""
    return -(-terms // (span * TILE_BLOCKS))


def scale_shape(matrix: Sequence[int], span: int) -> tuple[int, int]:
    """Shape of the scales of a matrix [rows, terms]: a row for every 128 rows of it."""
    rows, terms = matrix
    return -(-rows // TILE_ROWS), TILE_BYTES * across(terms, span)


def row_scales(name: str, terms: int, span: int, rows: int | None = None) -> TensorSpec:
    """The scales of a matrix with a row for every token, or with so many rows."""
    height = None if rows is None else -(-rows // TILE_ROWS) * TILE_ROWS
    return TensorSpec(name, (TILE_BLOCKS * across(terms, span),), "uint8", rows=height, multiple=TILE_ROWS)


def in_tiles(scales: Tensor, filling: int) -> Tensor:
    """Scales [R, B] in the order of tiles, which are filled up by a byte."""
    rows, blocks = scales.shape
    whole = torch.nn.functional.pad(scales, (0, -blocks % TILE_BLOCKS, 0, -rows % TILE_ROWS), value=filling)
    split = whole.view(len(whole) // TILE_ROWS, 4, 32, whole.shape[1] // TILE_BLOCKS, TILE_BLOCKS)
    return split.permute(0, 3, 2, 1, 4).reshape(len(whole) // TILE_ROWS, -1)


def in_rows(tiles: Tensor, rows: int, blocks: int) -> Tensor:
    """Scales [R, B] that lie in the order of tiles."""
    split = tiles.view(len(tiles), -1, 32, 4, TILE_BLOCKS).permute(0, 3, 2, 1, 4)
    return split.reshape(len(tiles) * TILE_ROWS, -1)[:rows, :blocks]


def refusal(device: torch.device) -> str | None:
    """Why products of such operands do not run on a device; None where they do. The CPU decodes what it multiplies."""
    if device.type == "cpu":
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability < BLACKWELL:
        asked, found = (".".join(map(str, each)) for each in (BLACKWELL, capability))
        return f"it takes a Blackwell card, of compute capability {asked} or more, and this one has {found}"
    if not has_scale_kinds():
        return (
            f"it takes a torch with torch.nn.functional.scaled_mm for CUDA {'.'.join(map(str, CUDA_VERSION))} or more,"
            f" and torch {torch.__version__} is here"
        )
    return None


def multiply(a: Operand, b: Operand, of_codes: torch.dtype, kind: str, out: Tensor, bias: Tensor | None) -> None:
    """out = a @ b.T (+ bias), by cuBLAS. of_codes: how bytes of codes are read; kind: torch's name of the scales."""
    scaled_product(_scaled(a, of_codes, kind), _scaled(b, of_codes, kind), out, bias)


def _scaled(side: Operand, of_codes: torch.dtype, kind: str) -> ScaledMatrix:
    of_scales = torch.float8_e8m0fnu if kind == "BlockWise1x32" else torch.float8_e4m3fn
    codes, scales, order = side.codes.view(of_codes), side.scales.view(of_scales), "SWIZZLE_32_4_4"
    if side.factor is None:
        return ScaledMatrix(codes, [scales], [kind], [order])
    return ScaledMatrix(codes, [scales, side.factor], [kind, "TensorWise"], [order, "NO_SWIZZLE"])


def tokens_in_tiles(
    shape: LinearShape, suffix: str, terms: int, span: int, per_byte: int = 1
) -> tuple[TensorSpec, ...]:
    """Codes, so many in a byte, and scales of a matrix with a row for every token."""
    codes = of_tokens(shape, suffix, terms // per_byte)
    return codes, row_scales(f"{codes.name}_scales", terms, span)


def weight_in_tiles(
    shape: LinearShape, suffix: str, size: tuple[int, int], span: int, per_byte: int = 1
) -> tuple[TensorSpec, ...]:
    """The same of a weight, or of it transposed; size: its rows and terms."""
    rows, terms = size
    codes = of_weight(shape, suffix, rows, terms // per_byte)
    return codes, row_scales(f"{codes.name}_scales", terms, span, rows)
