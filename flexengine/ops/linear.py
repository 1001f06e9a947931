"""Linear layers: y = x @ weight.T (+ bias), and the same with the residual added.

Shapes: x [T, D], weight [F, D] (transposed: [D, F]), bias [F], y [T, F]. Fused projections (QKV, gate-up) are one
weight whose rows are the Hugging Face weights stacked.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from flexengine.ops.base import FLOAT64_BYTES, OpEnv, TensorSpec, Work, use_kernel
from flexengine.ops.linear_shape import LinearShape
from flexengine.ops.priced import PricedByHalf
from flexengine.ops.products import write_product

BIAS_GRAD_PARTIALS = 256
"""The most groups of rows that a bias's gradient is summed in side by side: with a tile of columns each they keep a
card busy from 768 columns on."""
BIAS_GRAD_ROWS = 32
"""The fewest rows of a group: as many as a tile of the kernel has."""
BIAS_GRAD_ELEMENTS = 1 << 19
"""Of all partial sums, 2 MiB, from which wide rows get fewer groups; they have more tiles of columns."""
WIDENED_ELEMENTS = 1 << 22
"""Elements of a block of rows that the CPU widens at once: 16 MiB, and its product about as much."""


def accumulate_weight_grad(acc: Tensor, grad_y: Tensor, x: Tensor, first: bool) -> None:
    """acc (+)= grad_y.T @ x with the sum kept in the accumulator's precision.

    Shapes: grad_y [T, F] and x [T, D] in the compute dtype, acc [F, D] in float32 (float64). On CUDA the product of
    bf16 operands goes straight into the fp32 accumulator (cuBLAS beta = 1), which costs the same as a bf16 result.
    """
    if grad_y.dtype == acc.dtype or grad_y.is_cuda:
        write_product(acc, grad_y.t(), x, added=not first)
    else:
        step, wide_x = _widened_rows(len(x), *acc.shape), x.to(acc.dtype)
        for start in range(0, len(acc), step):
            rows = slice(start, start + step)
            product = grad_y[:, rows].t().to(acc.dtype) @ wide_x
            if first:
                acc[rows].copy_(product)
            else:
                acc[rows].add_(product)


def _widened_rows(tokens: int, out_features: int, in_features: int) -> int:
    """Rows of a weight's gradient that the CPU works on at once in 16 bits."""
    return max(1, min(out_features, WIDENED_ELEMENTS // max(tokens, in_features)))


def widened_bytes(tokens: int, out_features: int, in_features: int, compute_bytes: int) -> int:
    """Bytes that `accumulate_weight_grad` takes on the CPU in 16 bits: x and some rows, widened, and their product."""
    if compute_bytes != 2:
        return 0
    rows = _widened_rows(tokens, out_features, in_features)
    return 4 * (tokens * in_features + rows * (tokens + in_features))


def sum_to_start_from(residual: Tensor | None, bias: Tensor | None, out: Tensor) -> Tensor | None:
    """What a product is added to: a residual [T, F], a bias [F], their sum, which is written to out, or nothing."""
    if residual is None or bias is None:
        return bias if residual is None else residual
    return torch.add(residual, bias, out=out)


def bias_grad_partials(tokens: int, features: int) -> int:
    """Groups of rows that the gradient [F] of a bias is summed in: by its shape alone, so that plans change no bit."""
    return max(1, min(BIAS_GRAD_PARTIALS, -(-tokens // BIAS_GRAD_ROWS), BIAS_GRAD_ELEMENTS // features))


def bias_grad_bytes(tokens: int, features: int, element_bytes: int) -> int:
    """Bytes that `accumulate_bias_grad` takes on CUDA, at the most, for up to so many features of so many bytes."""
    if element_bytes == FLOAT64_BYTES:
        return tokens * FLOAT64_BYTES
    groups = min(BIAS_GRAD_PARTIALS, -(-tokens // BIAS_GRAD_ROWS))
    return 4 * max(features, min(groups * features, BIAS_GRAD_ELEMENTS))


def accumulate_bias_grad(acc: Tensor, grad_y: Tensor, first: bool) -> None:
    """acc [F] (+)= the sum of grad_y [T, F] over tokens, in the accumulator's precision.

    On CUDA by a kernel, or in float64 as a product with ones [T]: torch's own sum along tokens takes more memory there
    than its operand.
    """
    if use_kernel(grad_y) and grad_y.dtype != torch.float64:
        from flexengine.kernels import column_sum  # noqa: PLC0415 (Triton is imported when first used)

        groups = bias_grad_partials(*grad_y.shape)
        partials = acc.new_empty((groups, grad_y.shape[1]))
        return column_sum.column_sum(grad_y, acc, partials, not first)
    if grad_y.is_cuda:
        return accumulate_weight_grad(acc[None, :], grad_y.new_ones((len(grad_y), 1)), grad_y, first)
    total = grad_y.sum(0, dtype=acc.dtype)
    acc.copy_(total) if first else acc.add_(total)


class Linear(PricedByHalf):
    """y = x @ weight.T + bias; with `residual`, y = residual + x @ weight.T + bias.

    With a residual the sum is taken in the accumulator of the product and rounded once, and the gradient of the
    residual is the gradient of y itself.
    """

    start: str | None = None
    """What the product is added to in place, where another op has written it."""

    def __init__(
        self,
        name: str,
        x: str,
        y: str,
        in_features: int,
        out_features: int,
        weight: str,
        bias: str | None = None,
        residual: str | None = None,
        transposed: bool = False,
    ) -> None:
        self.name, self.x, self.y = name, x, y
        self.in_features, self.out_features = in_features, out_features
        self.weight, self.bias, self.residual, self.transposed = weight, bias, residual, transposed
        self.inputs = (x,) if residual is None else (x, residual)
        self.outputs = (TensorSpec(y, (out_features,)),)
        self.params = (weight,) if bias is None else (weight, bias)
        self.x_again, self.needs_weight = x, (x,)
        self.grad_inputs = self.inputs
        self.grad_alias = () if residual is None else ((residual, y),)

    @property
    def shape(self) -> LinearShape:
        """What the layer's speed depends on."""
        adds = self.residual is not None
        return LinearShape(self.name, self.in_features, self.out_features, adds, self.transposed)

    def reading_again(self, x_again: str) -> Self:
        """The same layer, whose weight half reads x under another name: rounded or computed again."""
        return self.changed(x_again=x_again, needs_weight=(x_again,))

    def onto(self, start: str) -> Self:
        """The same layer that adds its product, in place, to `start`, where bias and residual are already."""
        inputs, alias = (self.x, start), ((start, self.y),)
        op = self.changed(inputs=inputs, grad_inputs=inputs, grad_alias=alias, in_place=alias[0])
        return op.changed(start=start, few_operands=True)

    def leaving_residual(self) -> Self:
        """The same layer without the residual, which another op adds to its product."""
        inputs = (self.x,)
        return self.changed(residual=None, inputs=inputs, grad_inputs=inputs, grad_alias=())

    def writing(self, y: str) -> Self:
        """The same layer that writes y under another name."""
        alias = tuple((name, y) for name, _ in self.grad_alias)
        return self.changed(y=y, outputs=(replace(self.outputs[0], name=y),), grad_alias=alias)

    def _matrix(self, env: OpEnv) -> Tensor:
        """The weight as [F, D]."""
        weight = env.p[self.weight]
        return weight.t() if self.transposed else weight

    def forward(self, env: OpEnv) -> None:
        x, y, weight, start = env.t[self.x], env.t[self.y], self._matrix(env), self._start(env)
        if start is None:
            torch.mm(x, weight.t(), out=y)
        else:
            torch.addmm(start, x, weight.t(), out=y)

    def _start(self, env: OpEnv) -> Tensor | None:
        """What the product is added to: y with all else, or a bias [F], or nothing."""
        y = env.t[self.y]
        if self.start is not None:
            return y
        residual = None if self.residual is None else env.t[self.residual]
        start = sum_to_start_from(residual, None if self.bias is None else env.p[self.bias], y)
        if residual is None or start is None or start.data_ptr() == y.data_ptr():
            return start
        return y.copy_(residual)

    def backward_input(self, env: OpEnv) -> None:
        write_product(env.g[self.x], env.g[self.y], self._matrix(env), self.x in env.accumulate)

    def backward_weight(self, env: OpEnv) -> None:
        rows, columns = env.g[self.y], env.t[self.x_again]
        if self.transposed:
            rows, columns = columns, rows
        accumulate_weight_grad(env.gp[self.weight], rows, columns, env.first)
        self.add_bias_grad(env)

    def add_bias_grad(self, env: OpEnv) -> None:
        """The bias's part of the weight half, where there is a bias."""
        if self.bias is not None:
            accumulate_bias_grad(env.gp[self.bias], env.g[self.y], env.first)

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        if self.bias not in self.params or not self.trained:
            return 0
        return bias_grad_bytes(tokens, self.out_features, compute_bytes)

    def plain_workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        features = (self.out_features, self.in_features)
        rows, columns = reversed(features) if self.transposed else features
        widened = widened_bytes(tokens, rows, columns, compute_bytes) if self.trained else 0
        return max(super().plain_workspace_bytes(tokens, compute_bytes), widened)

    def _product(self, tokens: int) -> Work:
        d, f = self.in_features, self.out_features
        return Work(matmul_flops=2.0 * tokens * d * f, kernels=1)

    def half_work(self, half: str, tokens: int, compute_bytes: int) -> Work:
        work, y_bytes = self._product(tokens), float(tokens * self.out_features * compute_bytes)
        if half == "forward" and self.residual is not None and self.start is None:
            work = work.plus(Work(memory_bytes=2 * y_bytes, kernels=1))
        if half == "weight" and self.bias is not None:
            work = work.plus(Work(memory_bytes=y_bytes, kernels=2))
        return work
