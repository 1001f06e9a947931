"""Products of experts whose operands are rounded to FP8 (e4m3), each row of both with a scale of its own.

A row's scale is its largest magnitude over 448, so that what an expert's rows become depends neither on other rows nor
on the part of the experts that a call works on, and garbage in the weights of experts without rows harms nobody. Tensor
cores sum along the last dimension of both operands, so one of the two halves rounds the weights transposed. The
gradient of the weights takes the compute dtype: its sums run over rows, along which the scales differ.
Source: rowwise scaling with the weights' gradient in higher precision, PyTorch 2025, torchao.float8,
https://github.com/pytorch/ao/tree/main/torchao/float8.

Shapes: R rows sorted by expert, E experts, rows [R, K] and weight [E, N, K] (transposed: [E, K, N]) give [R, N].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.ops.base import OpEnv, TensorSpec, Work, use_kernel
from flexengine.ops.experts.grouped_products import NOTHING, Added, Scales, grouped_product

CODES = torch.float8_e4m3fn
LARGEST = torch.finfo(CODES).max
LEAST_ABSMAX = 1e-30
"""A row is scaled as if it held a magnitude of at least this, so that one of zeros has a scale."""
MULTIPLE = 16
"""Sizes along which FP8 products sum, and widths of their results, are multiples of this."""


def round_rows(x: Tensor, codes: Tensor, scales: Tensor, bounds: Tensor | None = None) -> None:
    """codes [R, K] = x [R, K] / scales [R], in FP8; with bounds [E + 1] the rows of these experts alone."""
    if use_kernel(x):
        from flexengine.kernels import fp8_rows  # noqa: PLC0415 (Triton is imported when first used)

        return fp8_rows.round_rows(x, codes, scales, LARGEST, LEAST_ABSMAX, bounds)
    wide = x.float()
    absmax = wide.abs().nan_to_num(0.0, torch.inf).amax(-1).clamp_(min=LEAST_ABSMAX)
    torch.div(absmax, LARGEST, out=scales)
    factors = torch.full_like(absmax, LARGEST).div_(absmax)  # a number over a tensor is not rounded correctly
    codes.copy_((wide * factors[:, None]).clamp_(-LARGEST, LARGEST))


def round_columns(weight: Tensor, codes: Tensor, scales: Tensor) -> None:
    """codes [E, N, K] = weight [E, K, N].mT / scales [E, N], in FP8."""
    if use_kernel(weight):
        from flexengine.kernels import fp8_rows  # noqa: PLC0415 (Triton is imported when first used)

        return fp8_rows.round_columns(weight, codes, scales, LARGEST, LEAST_ABSMAX)
    for matrix, own, factors in zip(weight, codes, scales, strict=True):
        round_rows(matrix.t(), own, factors)


class Fp8Product(NamedTuple):
    """A product of an op: its half, K, N, the experts of a call, rows of each token, and how the weight lies."""

    name: str
    half: str
    inner: int
    columns: int
    experts: int
    per_token: int
    transposed: bool

    def scratch(self) -> tuple[TensorSpec, ...]:
        """Codes and scales of both operands."""
        rows = self.experts * self.columns
        return (
            TensorSpec(self._named("rows8"), (self.per_token * self.inner,), "uint8"),
            TensorSpec(self._named("row_scales"), (self.per_token,), "float32"),
            TensorSpec(self._named("weight8"), (self.inner,), "uint8", rows=rows),
            TensorSpec(self._named("weight_scales"), (), "float32", rows=rows),
        )

    def _named(self, tensor: str) -> str:
        return f"{self.name}_{self.half}_{tensor}"

    def multiply(
        self, env: OpEnv, rows: Tensor, weight: Tensor, bounds: Tensor, out: Tensor, added: Added = NOTHING
    ) -> None:
        """out [R, N] = the product with what is added to it; forward sums fast."""
        codes, factors, weight8, weight_factors = (env.t[spec.name] for spec in self.scratch())
        codes, factors = codes.view(CODES).view(-1, self.inner), factors.view(-1)
        weight8 = weight8.view(CODES).view(self.experts, self.columns, self.inner)
        weight_factors = weight_factors.view(self.experts, self.columns)
        round_rows(rows, codes, factors, bounds)
        if self.transposed:
            round_columns(weight, weight8, weight_factors)
        else:
            flat = (weight.view(-1, self.inner), weight8.view(-1, self.inner), weight_factors.view(-1))
            round_rows(*flat)
        scales = Scales(factors, weight_factors, fast=self.half == "forward")
        grouped_product(codes, weight8, bounds, out, False, added, scales)

    def work(self, tokens: int, compute_bytes: int) -> Work:
        """The product, and reading and writing what is rounded; columns are read once more for their maxima."""
        rows, reads = tokens * self.per_token, 2 if self.transposed else 1
        matrix = float(self.experts * self.columns * self.inner)
        num_bytes = rows * self.inner * (compute_bytes + 1.0) + matrix * (reads * compute_bytes + 1.0)
        return Work(fp8_flops=2.0 * rows * self.inner * self.columns, memory_bytes=num_bytes, kernels=3)
