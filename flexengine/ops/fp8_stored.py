"""FP8 products of weights that are stored as codes with a scale for 128 x 128 elements: they are what is multiplied.

Forward reads them where they lie. The gradient of x sums along the other dimension, for which codes are transposed;
squares stay squares, so that scales are transposed likewise, and nothing is rounded a second time.
Source: DeepSeek-AI 2024, "DeepSeek-V3", https://arxiv.org/abs/2412.19437, section 3.3.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from flexengine.ops.base import TensorSpec, Work, use_kernel
from flexengine.ops.formats.scaled_codes import FP8_BLOCKS
from flexengine.ops.formats.weight_format import StoredMatrix
from flexengine.ops.fp8 import Fp8Linear
from flexengine.ops.fp8_blocks import TERMS, BlockScaling, num_blocks, square_scales
from flexengine.ops.fp8_scaling import Buffers, Operand
from flexengine.ops.linear_shape import LinearShape


class StoredBlockScaling(BlockScaling):
    """Scales for blocks, of which a weight [rows, columns] has those that it is stored with."""

    def __init__(self, scaling: BlockScaling, rows: int, columns: int) -> None:
        super().__init__(scaling.name, scaling.gradient_in_fp8, scaling.squares)
        self.rows, self.columns = rows, columns

    @property
    def _fills_lines(self) -> bool:
        """Whether lines of stored scales are as long as cuBLAS reads them."""
        return square_scales(self.rows, self.columns)[1] == num_blocks(self.columns)

    def weight_scratch_of(self, shape: LinearShape, transposed: bool) -> tuple[TensorSpec, ...]:
        codes, scales = super().weight_scratch_of(shape, transposed)
        return (codes, scales) if transposed else () if self._fills_lines else (scales,)

    def weight_side(self, t: Buffers, weight: Tensor, transposed: bool) -> Operand:
        """weight: the stored bytes."""
        fields = _layout(self.rows, self.columns).views(weight)
        codes, scales = fields["codes"], fields["scales"]
        if transposed:
            side = self.empty_weight_side(t, transposed)
            transpose_squares(codes, scales, side)
            return side
        if not self._fills_lines:
            longer = t["weight8_scales"]
            longer[:, : scales.shape[1]].copy_(scales)
            scales = longer
        return Operand(codes, scales, "squares")

    def weight_work(self, elements: int, compute_bytes: int, transposed: bool) -> Work:
        """Codes are read and written to transpose them; else longer lines of scales are written at the most."""
        if transposed:
            return Work(memory_bytes=2.0 * elements * (1.0 + 4.0 / TERMS**2), kernels=1)
        return Work() if self._fills_lines else Work(memory_bytes=8.0 * elements / TERMS**2, kernels=1)


def transpose_squares(codes: Tensor, scales: Tensor, side: Operand) -> None:
    """side = codes [R, C] transposed, with their scales [ceil(R / 128), ceil(C / 128)] transposed."""
    if use_kernel(codes):
        from flexengine.kernels import fp8_blocks  # noqa: PLC0415 (Triton is imported when first used)

        return fp8_blocks.transpose_squares(codes, scales, side.codes, side.scales)
    side.codes.view(torch.uint8).copy_(codes.view(torch.uint8).t())
    side.scales[:, : len(scales)].copy_(scales.t())


@cache
def _layout(rows: int, columns: int) -> StoredMatrix:
    return FP8_BLOCKS.layout(rows, columns)


def as_stored(layer: Fp8Linear, storage: str) -> Fp8Linear | None:
    """The layer that multiplies its weight as it is stored; None where a product takes other scales."""
    if storage != FP8_BLOCKS.name or not isinstance(layer.scaling, BlockScaling):
        return None
    return layer.changed(scaling=StoredBlockScaling(layer.scaling, layer.out_features, layer.in_features))
