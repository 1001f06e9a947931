"""Products of experts whose operands are rounded to FP8 (e4m3), with scales for every row or for blocks.

A scale is the largest magnitude of what shares it over 448: of each row of both operands, or (fp8-blockwise) of 128
columns of a row and of 128 x 128 elements of a weight. So what an expert's rows become depends neither on other rows
nor on the part of the experts that a call works on, and garbage in the weights of experts without rows harms nobody.
Tensor cores sum along the last dimension of both operands, so one of the two halves rounds the weights transposed. The
gradient of the weights takes the compute dtype: its sums run over rows, along which the scales differ.
Source: rowwise scaling with the weights' gradient in higher precision, PyTorch 2025, torchao.float8,
https://github.com/pytorch/ao/tree/main/torchao/float8; blocks: ops/fp8_blocks.py.

Shapes: R rows sorted by expert, E experts, rows [R, K] and weight [E, N, K] (transposed: [E, K, N]) give [R, N].
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from flexengine.ops.base import OpEnv, TensorSpec, Work
from flexengine.ops.experts.grouped_products import NOTHING, Added, Scales, grouped_product
from flexengine.ops.fp8_blocks import TERMS, num_blocks, round_squares, round_vectors, square_scales
from flexengine.ops.fp8_scaling import FORWARD_DTYPE, Operand, round_columns, round_rows


class Fp8Product(NamedTuple):
    """A product of an op: its half, K, N, the experts of a call, rows of each token, how the weight lies, and whether
    blocks have scales."""

    name: str
    half: str
    inner: int
    columns: int
    experts: int
    per_token: int
    transposed: bool
    blocks: bool = False

    def scratch(self) -> tuple[TensorSpec, ...]:
        """Codes and scales of both operands."""
        rows, of_rows, of_weight = self.experts * self.columns, (self.per_token,), ((), self.experts * self.columns)
        if self.blocks:
            of_rows = (self.per_token * num_blocks(self.inner),)
            squares, stride = square_scales(self.columns, self.inner)
            of_weight = ((stride,), self.experts * squares)
        return (
            TensorSpec(self._named("rows8"), (self.per_token * self.inner,), "uint8"),
            TensorSpec(self._named("row_scales"), of_rows, "float32"),
            TensorSpec(self._named("weight8"), (self.inner,), "uint8", rows=rows),
            TensorSpec(self._named("weight_scales"), of_weight[0], "float32", rows=of_weight[1]),
        )

    def _named(self, tensor: str) -> str:
        return f"{self.name}_{self.half}_{tensor}"

    def multiply(
        self, env: OpEnv, rows: Tensor, weight: Tensor, bounds: Tensor, out: Tensor, added: Added = NOTHING
    ) -> None:
        """out [R, N] = the product with what is added to it; forward sums fast."""
        codes, factors, weight8, weight_factors = (env.t[spec.name] for spec in self.scratch())
        codes, factors = codes.view(FORWARD_DTYPE).view(-1, self.inner), factors.view(-1)
        weight8 = weight8.view(FORWARD_DTYPE).view(self.experts, self.columns, self.inner)
        if self.blocks:
            factors = factors.view(num_blocks(self.inner), -1)
            weight_factors = weight_factors.view(self.experts, *square_scales(self.columns, self.inner))
            round_vectors(rows, Operand(codes, factors, "terms"), None, bounds)
            round_squares(weight, Operand(weight8, weight_factors, "squares"), self.transposed)
        else:
            weight_factors = weight_factors.view(self.experts, self.columns)
            round_rows(rows, codes, factors, bounds)
            if self.transposed:
                round_columns(weight, weight8, weight_factors)
            else:
                flat = (weight.view(-1, self.inner), weight8.view(-1, self.inner), weight_factors.view(-1))
                round_rows(*flat)
        scales = Scales(factors, weight_factors, fast=self.half == "forward", blocks=self.blocks)
        grouped_product(codes, weight8, bounds, out, False, added, scales)

    def work(self, tokens: int, compute_bytes: int) -> Work:
        """The product, which is one by weights, and reading and writing what is rounded; columns are read once more for
        their maxima."""
        rows, reads = tokens * self.per_token, 2 if self.transposed and not self.blocks else 1
        matrix, scales = float(self.experts * self.columns * self.inner), 4 / TERMS if self.blocks else 0.0
        num_bytes = rows * self.inner * (compute_bytes + 1.0 + scales) + matrix * (reads * compute_bytes + 1.0)
        return Work(fp8_weight_flops=2.0 * rows * self.inner * self.columns, memory_bytes=num_bytes, kernels=3)
