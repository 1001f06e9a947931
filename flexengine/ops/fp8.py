"""Linear layers whose products take FP8 operands: half the bytes, and up to twice the rate, of 16 bits.

Scales are those of what is multiplied (current scaling), by one of the schemes of `ops/fp8_scaling.py`; the operands of
two for Blackwell cards are in MXFP8 and NVFP4. Everything between products stays in the compute dtype.

Shapes: x [T, D], weight [F, D], y [T, F]: grad_x = grad_y [T, F] @ (weight.T [D, F]).T and
grad_weight = grad_y.T [F, T] @ (x.T [D, T]).T.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexengine.ops.base import Op, OpEnv, TensorSpec, Work
from flexengine.ops.fp8_blocks import BlockScaling
from flexengine.ops.fp8_scaling import Buffers, RowScaling, Scaling, TensorScaling
from flexengine.ops.joined import Joined
from flexengine.ops.linear import Linear
from flexengine.ops.mxfp8 import MicroScaling
from flexengine.ops.nvfp4 import FourBitScaling

PRODUCT_ELEMENTS = 1 << 24
"""Bytes of the part of a weight gradient that is computed at once where it is added to an accumulator."""
SCALINGS: dict[str, Scaling] = {
    scaling.name: scaling
    for scaling in (
        TensorScaling(),
        RowScaling(),
        BlockScaling("fp8-blockwise", gradient_in_fp8=True),
        BlockScaling("fp8-blockwise-gw-hp", gradient_in_fp8=False),
        BlockScaling("fp8-blockwise-gw-squares", gradient_in_fp8=True, squares=True),
        MicroScaling(),
        FourBitScaling(),
    )
}
"""Schemes of scales by the values of --matmul-dtype; gw-hp as in torchao: gradients of weights in high precision."""


class Fp8Linear(Linear):
    """y = x @ weight.T + bias with FP8 operands; with `residual`, y = residual + the product rounded to y's dtype.

    The input half quantises grad_y for both halves; the weight half finds it there. adds: another op reads x after this
    one, so that the input half adds to what is there: some rows at a time. scaling: of the operands.
    """

    coded: frozenset[str] = frozenset()
    """Of x8 and grad8: operands whose codes another op has written."""

    def __init__(self, linear: Linear, adds: bool = False, scaling: Scaling = SCALINGS["fp8"]) -> None:
        self.adds, self.scaling = adds, scaling
        self.replays = not scaling.draws  # what it draws is an operand, and changes with every step
        super().__init__(
            linear.name,
            linear.x,
            linear.y,
            linear.in_features,
            linear.out_features,
            linear.weight,
            linear.bias,
            linear.residual,
        )
        if linear.transposed:
            raise ValueError(
                f"{self.name} stores its weight input by output, which FP8 products do not take; leave "
                "--matmul-dtype out"
            )
        multiple = scaling.feature_multiple
        if self.in_features % multiple or self.out_features % multiple:
            kind = "FP8" if scaling.name.startswith("fp8") else scaling.name
            raise ValueError(
                f"{self.name} has {self.in_features} input and {self.out_features} output features; {kind} products"
                f" need multiples of {multiple}; leave --matmul-dtype out"
            )

    def with_next(self, following: Op) -> Op | None:
        return following.with_previous(self) if isinstance(following, Joined) else None

    @property
    def gradient_in_fp8(self) -> bool:
        """Whether there is a gradient of the weight, of FP8 operands."""
        return self.trained and self.scaling.gradient_in_fp8

    def forward(self, env: OpEnv) -> None:
        x, y = None if "x8" in self.coded else env.t[self.x], env.t[self.y]
        operands = self.scaling.forward_operands(Buffers(env.t, self.name), x, env.p[self.weight])
        bias = None if self.bias is None else env.p[self.bias]
        self.scaling.multiply(*operands, y, bias, fast=True)
        if self.residual is not None:
            y.add_(env.t[self.residual])

    def backward_input(self, env: OpEnv) -> None:
        assert (self.x in env.accumulate) == self.adds, f"{self.name} adds to a gradient where it was made not to"
        grad_x, buffers = env.g[self.x], Buffers(env.t, self.name, env.chunk.dropout, env.layer)
        grad_y = None if "grad8" in self.coded else env.g[self.y]
        grad8, weight8_t = self.scaling.input_operands(buffers, grad_y, env.p[self.weight], self.gradient_in_fp8)
        if not self.adds:
            return self.scaling.multiply(grad8, weight8_t, grad_x)
        for start in range(0, len(grad_x), self._added_rows):
            target = grad_x[start : start + self._added_rows]
            part = torch.empty_like(target)
            self.scaling.multiply(grad8.rows(start, start + len(target)), weight8_t, part)
            target.add_(part)

    def backward_weight(self, env: OpEnv) -> None:
        if not self.scaling.gradient_in_fp8:
            return super().backward_weight(env)
        acc: Tensor = env.gp[self.weight]
        grad8_t, x8_t = self.scaling.weight_operands(Buffers(env.t, self.name), env.t[self.x_again])
        if env.first:
            self.scaling.multiply(grad8_t, x8_t, acc)
        elif not self.scaling.add_product(grad8_t, x8_t, acc):
            product, step = env.t[f"{self.name}_product"], self._product_rows
            for start in range(0, self.out_features, step):
                rows = grad8_t.rows(start, min(start + step, self.out_features))
                part = product[: len(rows.codes)]
                self.scaling.multiply(rows, x8_t, part)
                acc[start : start + step].add_(part)
        self.add_bias_grad(env)

    @property
    def _added_rows(self) -> int:
        """Rows whose gradient is added at once: scales of later ones start where cuBLAS takes them, too."""
        multiple = self.scaling.row_multiple
        return max(multiple, PRODUCT_ELEMENTS // self.in_features // multiple * multiple)

    @property
    def _product_rows(self) -> int:
        return min(self.out_features, self._added_rows)

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        added = min(tokens, self._added_rows) * self.in_features * compute_bytes if self.adds else 0
        product = self.scaling.workspace_bytes(tokens, max(self.in_features, self.out_features))
        return product + super().workspace_bytes(tokens, compute_bytes) + added

    def plain_workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        own = self.scaling.plain_workspace_bytes(tokens, self.in_features, self.out_features)
        return super().plain_workspace_bytes(tokens, compute_bytes) + own

    def scratch(self, half: str) -> tuple[TensorSpec, ...]:
        if half == "forward":
            return self.scaling.forward_scratch(self.shape)
        shared = self.scaling.shared_scratch(self.shape, self.gradient_in_fp8)
        if half == "input":
            return *shared, *self.scaling.input_scratch(self.shape)
        if not self.scaling.gradient_in_fp8:
            return ()
        product = TensorSpec(f"{self.name}_product", (self.in_features,), "float32", rows=self._product_rows)
        return *shared, *self.scaling.weight_scratch(self.shape), product

    def _fp8_product(self, tokens: int) -> Work:
        """Of a pass. The rate of all three passes is measured together, and that of the two by the weight."""
        flops = 2.0 * tokens * self.in_features * self.out_features
        return Work(fp8_flops=flops, kernels=1) if self.gradient_in_fp8 else Work(fp8_weight_flops=flops, kernels=1)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        d, f = self.in_features, self.out_features
        work = self._fp8_product(tokens).plus(self.scaling.weight_work(d * f, compute_bytes, transposed=False))
        if "x8" not in self.coded:
            work = work.plus(self.scaling.rounding_work(tokens * d, compute_bytes))
        if self.residual is None:
            return work
        return work.plus(Work(memory_bytes=3.0 * tokens * f * compute_bytes, kernels=1))

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        d, f = self.in_features, self.out_features
        work = self._fp8_product(tokens).plus(self.scaling.weight_work(d * f, compute_bytes, transposed=True))
        results = 2 if self.gradient_in_fp8 else 1
        if "grad8" not in self.coded:
            work = work.plus(self.scaling.rounding_work(tokens * f, compute_bytes, results))
        return work.plus(Work(memory_bytes=4.0 * tokens * d * compute_bytes, kernels=2)) if self.adds else work

    def backward_weight_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        work = super().backward_weight_work(tokens, seq_len, compute_bytes)
        if not self.scaling.gradient_in_fp8:
            return work
        work = work._replace(matmul_flops=0.0, fp8_flops=self._fp8_product(tokens).fp8_flops)
        return work.plus(self.scaling.rounding_work(tokens * self.in_features, compute_bytes, transposed=True))

    def accumulation_work(self, compute_bytes: int) -> Work:
        """Work of writing the product and adding it to the accumulator, which is read and written."""
        if not self.scaling.gradient_in_fp8:
            return super().accumulation_work(compute_bytes)
        return Work(memory_bytes=16.0 * self.in_features * self.out_features, kernels=1)
