"""Products of experts with what low-rank adapters add, and their magnitudes: the rows of expert e give
y = g[e] * (x @ W[e].T + low @ (scale * B[e]).T).

Shapes: R rows sorted by expert, E experts, J adapted modules of a fused product (gate and up, or 1), rank r, x [R, D],
low = x @ A[e].T [R, J * r], y [R, F], A [E, J * r, D]. B [E, rows of the adapted modules, r], or of experts that one
tensor holds [F, r * E], whose last index runs over experts first, as PEFT stores it. Magnitudes [E, rows of the adapted
modules]: g = m / |W + scale * B @ A| by expert and output, through which no gradient passes; what is stored is m - |W|,
as in ops/adapters/dora.py. Without magnitudes there is no g. Sources: those of low_rank.py and dora.py beside this.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexengine.ops.adapters.dora import module_gains
from flexengine.ops.adapters.low_rank import Adapters
from flexengine.ops.base import OpEnv, TensorSpec, Work
from flexengine.ops.experts.experts import GroupedLinear
from flexengine.ops.experts.grouped_products import (
    Added,
    LowRank,
    bias_gradient,
    grouped_product,
    grouped_weight_gradient,
)
from flexengine.ops.row_range import experts_of_part, experts_of_rows

BLOCK_ROWS = 1 << 12
"""Rows whose gains are gathered at a time; fewer take less memory and more calls."""


class GroupedLoraUp(GroupedLinear):
    """A frozen product of experts that adds low @ U.T to its sums before it rounds them, and likewise in backward.

    A call first spreads B, times scale, over a matrix U [E, F, J * r] with zeros where a module's columns of low do not
    belong to its rows: U takes little, and grouped products then serve all modules at once.
    """

    def __init__(self, base: GroupedLinear, adapters: Adapters) -> None:
        vars(self).update(vars(base))
        assert adapters.experts is not None
        self.adapters, self.of, self.one_tensor = adapters, adapters.experts, adapters.experts.one_tensor
        assert not self.one_tensor or len(adapters.rows) == 1, "one tensor of a fused product has one adapter"
        self.low, self.width, rows = adapters.low.name, adapters.width, self.num_experts * self.out_features
        self.inputs, self.grad_inputs = (*self.inputs, self.low), (*self.grad_inputs, self.low)
        self.params, self.needs_weight = adapters.params[1:], (self.low, self.bounds)
        self.spread = TensorSpec(f"{self.name}.spread", (self.width,), rows=rows)
        self.grad_spread = TensorSpec(f"{self.name}.grad_spread", (self.width,), "float32", rows=rows)

    def scratch(self, half: str) -> tuple[TensorSpec, ...]:
        return (self.grad_spread,) if half == "weight" else (self.spread, *super().scratch(half))

    def _experts(self, env: OpEnv) -> slice:
        """The experts of this call's part, of all."""
        return experts_of_part(self.num_experts, env.part, self.num_parts)

    def _spread_of(self, env: OpEnv, spec: TensorSpec) -> Tensor:
        """A matrix like U for the experts of this call."""
        return env.t[spec.name].view(self.num_experts, self.out_features, self.width)[self._experts(env)]

    def _blocks(self, env: OpEnv, up: Tensor, spread: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Pair what each module has of a tensor like B with what it has of one like U, both [E, rows, r]."""
        if self.one_tensor:
            up = up.view(self.out_features, self.adapters.rank, self.num_experts).permute(2, 0, 1)
        _, held = self.of.of_call(env, self.num_parts)
        return [(up[held, module.up], spread[:, module.columns, module.low]) for module in self.adapters.modules]

    def _write_spread(self, env: OpEnv) -> Tensor:
        spread, scale = self._spread_of(env, self.spread), self.adapters.scale
        spread.zero_()
        for own, block in self._blocks(env, env.p[self.adapters.up], spread):
            torch.mul(own, scale, out=block) if block.is_contiguous() else block.copy_(own).mul_(scale)
        return spread

    def forward(self, env: OpEnv) -> None:
        if not env.adapters:
            return super().forward(env)
        added = self._biases(env)._replace(adapter=self._adapter(env))
        self._multiply(env, "forward", added._replace(gains=self._gains(env)))

    def _adapter(self, env: OpEnv) -> LowRank:
        """What the adapters add to y."""
        return LowRank(env.t[self.low].view(-1, self.width), self._write_spread(env))

    def _gains(self, env: OpEnv) -> Tensor | None:
        """What outputs are multiplied by [E, F], wide."""
        return None

    def _write_grad_x(self, env: OpEnv) -> None:
        grad_low, (bounds, held) = env.g[self.low].view(-1, self.width), self.of.of_call(env, self.num_parts)
        grouped_product(self._grad_y(env), self._write_spread(env), bounds, grad_low, True)
        adapter = LowRank(grad_low, env.p[self.adapters.down][held], transposed=True)
        self._multiply(env, "input", Added(adapter=adapter))

    def backward_weight(self, env: OpEnv) -> None:
        low, grad_spread = env.t[self.low].view(-1, self.width), self._spread_of(env, self.grad_spread)
        grouped_weight_gradient(self._grad_y(env), low, self._bounds(env), grad_spread, False)
        grad_spread.mul_(self.adapters.scale)
        for total, block in self._blocks(env, env.gp[self.adapters.up], grad_spread):
            total.copy_(block) if env.first else total.add_(block)

    def _up_work(self, tokens: int, compute_bytes: int, passes: int, kernels: int) -> Work:
        """A product with U, so many passes over y, one over low, and U itself."""
        rows = tokens * self.per_token
        num_bytes = (rows * (passes * self.out_features + self.width) + 2.0 * self.spread.elements(0)) * compute_bytes
        flops = 2.0 * rows * self.out_features * self.width
        return Work(memory_bytes=num_bytes, kernels=kernels, grouped_flops=flops)

    def half_work(self, half: str, tokens: int, compute_bytes: int) -> Work:
        passes, kernels = {"forward": (0, 3), "input": (1, 3), "weight": (1, 5)}[half]
        work = self._up_work(tokens, compute_bytes, passes, kernels)
        if half == "weight":
            return work.plus(Work(memory_bytes=16.0 * self.spread.elements(0)))  # accumulators
        work = work.plus(super().half_work(half, tokens, compute_bytes))
        return work if half == "forward" else work.plus(self.adapters.down_work(tokens, 0, compute_bytes))

    def model_flops(self, seq_len: int) -> float:
        """The frozen product forward and for the gradient of x, that of B once more for its own gradient."""
        return 2 * self._work(seq_len).flops + 3 * self.adapters.up_work(seq_len * self.per_token, 1, 2).flops


class GroupedMagnitude(GroupedLoraUp):
    """The same with trained magnitudes of the adapted outputs. Sums are multiplied before they are rounded.

    Norms are computed in each call, from the weights of the call's experts alone. Where only touched experts are
    fetched, those of the others are undefined, and nothing reads them.
    """

    def __init__(self, base: GroupedLinear, adapters: Adapters) -> None:
        super().__init__(base, adapters)
        assert not self.one_tensor, "one tensor of all experts has no magnitudes"
        assert base.bias is None, "no family with experts of their own names has biases of them"
        self.needs_weight, outputs = (self.x, *self.needs_weight), self.per_token * self.out_features
        self.product = TensorSpec(f"{self.name}.product", (outputs,))
        self.grad_product = TensorSpec(f"{self.name}.grad_product", (outputs,))
        self.gains = TensorSpec(f"{self.name}.gains", (self.out_features,), "float32", rows=self.num_experts)
        self.norms = TensorSpec(f"{self.name}.norms", (adapters.adapted_features,), "float32", rows=self.num_experts)

    def scratch(self, half: str) -> tuple[TensorSpec, ...]:
        own = {
            "forward": (self.gains, self.norms),
            "input": (self.grad_product, self.gains, self.norms),
            "weight": (self.grad_product, self.norms, self.spread, self.product),
        }
        return (*super().scratch(half), *own[half])

    def _gains(self, env: OpEnv) -> Tensor:
        """Leave norms of the adapted outputs and return what all outputs of the call's experts are multiplied by."""
        experts, weight = self._experts(env), env.p[self.weight]
        gains, norms = env.t[self.gains.name][experts], env.t[self.norms.name][experts]
        gains.fill_(1.0)
        for module, own, adapted in module_gains(self.adapters, weight.mT if self.transposed else weight, env.p):
            gains[:, module.columns].copy_(own)
            norms[:, module.up].copy_(adapted)
        return gains

    def _grad_y(self, env: OpEnv) -> Tensor:
        return env.t[self.grad_product.name].view(-1, self.out_features)

    def _write_grad_x(self, env: OpEnv) -> None:
        grad_y, grad_product, bounds, gains = self._y(env.g), self._grad_y(env), self._bounds(env), self._gains(env)
        expert = experts_of_rows(bounds, len(grad_y)).clamp_(max=len(gains) - 1)
        for first in range(0, len(grad_y), BLOCK_ROWS):
            block = slice(first, first + BLOCK_ROWS)
            torch.mul(grad_y[block], gains[expert[block]], out=grad_product[block])
        super()._write_grad_x(env)

    def backward_weight(self, env: OpEnv) -> None:
        super().backward_weight(env)
        bounds, product = self._bounds(env), env.t[self.product.name].view(-1, self.out_features)
        operands = (self._x(env.t), env.p[self.weight], bounds, product, self.transposed)
        grouped_product(*operands, Added(adapter=self._adapter(env)))
        product.mul_(self._y(env.g))
        norms, total = env.t[self.norms.name][self._experts(env)], env.gp[self.adapters.magnitude]
        sums = total.new_empty((len(total), self.out_features))
        bias_gradient(product, bounds, None, sums, False)
        adapted = torch.cat([sums[:, module.columns] for module in self.adapters.modules], dim=1)
        # Experts without rows have no norms where only touched ones are fetched.
        found = torch.where((bounds.diff() > 0)[:, None], adapted.div_(norms), 0.0)
        total.copy_(found) if env.first else total.add_(found)

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        wide_bytes, rows = max(4, compute_bytes), tokens * self.per_token
        norms = self.num_experts * self.adapters.adapted_features * (6 + 3 * self.adapters.rank)
        gathered = min(rows, BLOCK_ROWS) * 2 * self.out_features
        sums = 3 * self.num_experts * self.out_features
        own = wide_bytes * (max(norms, sums) + gathered) + 24 * rows
        return super().workspace_bytes(tokens, compute_bytes) + own

    def plain_workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        elements = self.num_experts * self.in_features * (self.out_features + self.width)
        widened = 4 * (elements + tokens * self.per_token * self.out_features) if compute_bytes == 2 else 0
        return super().plain_workspace_bytes(tokens, compute_bytes) + widened

    def half_work(self, half: str, tokens: int, compute_bytes: int) -> Work:
        passes = self._pass(tokens, compute_bytes).times({"forward": 0, "input": 4, "weight": 5}[half])
        work = super().half_work(half, tokens, compute_bytes).plus(passes)
        if half != "weight":
            return work.plus(self.adapters.norm_work(compute_bytes, 12, 2))
        return work.plus(self._work(tokens)).plus(self._up_work(tokens, compute_bytes, 0, 3))
