"""Experts with low-rank adapters and a magnitude for each output: y = g[e] * (x @ (W[e] + scale * B[e] @ A[e]).T).

g = m / |W + scale * B @ A| by expert and output; no gradient passes through the norm. What is stored is m - |W|, as in
ops/adapters/dora.py. Shapes as in ops/adapters/lora_experts.py; magnitudes [E, rows of the adapted modules].
Source: Liu et al. 2024, "DoRA: Weight-Decomposed Low-Rank Adaptation", https://arxiv.org/abs/2402.09353, section 4.3,
for each expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexengine.ops.adapters.dora import adapted_norms
from flexengine.ops.adapters.lora import AdaptedRows
from flexengine.ops.adapters.lora_experts import LoRAGroupedLinear
from flexengine.ops.base import OpEnv, TensorSpec, Work, wide
from flexengine.ops.experts.experts import GroupedLinear
from flexengine.ops.experts.grouped_products import LowRank, bias_gradient, grouped_product

BLOCK_ROWS = 1 << 12
"""Rows whose gains are gathered at a time; fewer take less memory and more calls."""


class DoRAGroupedLinear(LoRAGroupedLinear):
    """A frozen product of experts with adapters and trained magnitudes. Sums are multiplied before they are rounded.

    Norms are computed in each call, from the weights of the call's experts alone. Where only touched experts are
    fetched, those of the others are undefined, and nothing reads them.
    """

    def __init__(
        self, base: GroupedLinear, rank: int, scale: float, adapted: tuple[AdaptedRows, ...], one_tensor: bool
    ) -> None:
        assert not one_tensor, "one tensor of all experts has no magnitudes"
        assert base.bias is None, "no family with experts of their own names has biases of them"
        super().__init__(base, rank, scale, adapted, one_tensor)
        self.magnitude = f"{self.name}.lora_magnitude_vector"
        self.params = (*self.params, self.magnitude)
        outputs = self.per_token * self.out_features
        self.product = TensorSpec(f"{self.name}.product", (outputs,))
        self.grad_product = TensorSpec(f"{self.name}.grad_product", (outputs,))
        self.gains = TensorSpec(f"{self.name}.gains", (self.out_features,), "float32", rows=self.num_experts)
        self.norms = TensorSpec(f"{self.name}.norms", (self.adapted_features,), "float32", rows=self.num_experts)

    def scratch(self, half: str) -> tuple[TensorSpec, ...]:
        own = {
            "forward": (self.gains, self.norms),
            "input": (self.grad_product, self.gains, self.norms),
            "weight": (self.grad_product, self.norms, self.spread, self.product),
        }
        return (*super().scratch(half), *own[half])

    # -- gains -------------------------------------------------------------------------------------------------------

    def _write_gains(self, env: OpEnv) -> Tensor:
        """Leave norms of the adapted outputs and return what all outputs of the call's experts are multiplied by."""
        experts, weight = self._experts(env), self._matrices(env)
        gains, norms = env.t[self.gains.name][experts], env.t[self.norms.name][experts]
        gains.fill_(1.0)
        first = 0
        for number, rows in enumerate(self.adapted):
            end = first + rows.end - rows.start
            down = env.p[self.down][experts, number * self.rank : (number + 1) * self.rank]
            own, adapted = adapted_norms(
                weight[:, rows.start : rows.end], down, env.p[self.up][experts, first:end], self.scale
            )
            norms[:, first:end].copy_(adapted)
            own.add_(wide(env.p[self.magnitude][experts, first:end])).div_(adapted)
            gains[:, rows.start : rows.end].copy_(own)
            first = end
        return gains

    def _matrices(self, env: OpEnv) -> Tensor:
        """The weights of the call's experts as [experts, F, D]."""
        return env.p[self.weight].mT if self.transposed else env.p[self.weight]

    # -- passes ------------------------------------------------------------------------------------------------------

    def forward(self, env: OpEnv) -> None:
        self._multiply(env, "forward", adapter=self._adapter(env), gains=self._write_gains(env))

    def _grad_y(self, env: OpEnv) -> Tensor:
        return env.t[self.grad_product.name].view(-1, self.out_features)

    def _write_grad_x(self, env: OpEnv) -> None:
        grad_y, grad_product, bounds = self._y(env.g), self._grad_y(env), self._bounds(env)
        gains = self._write_gains(env)
        rows = torch.arange(len(grad_y), device=bounds.device, dtype=bounds.dtype)
        expert = torch.searchsorted(bounds[1:], rows, right=True).clamp_(max=len(gains) - 1)
        for first in range(0, len(grad_y), BLOCK_ROWS):
            block = slice(first, first + BLOCK_ROWS)
            torch.mul(grad_y[block], gains[expert[block]], out=grad_product[block])
        super()._write_grad_x(env)

    def backward_weight(self, env: OpEnv) -> None:
        super().backward_weight(env)
        bounds, experts = self._bounds(env), self._experts(env)
        product = env.t[self.product.name].view(-1, self.out_features)
        adapter = LowRank(self._low(env, self.low), self._write_spread(env))
        grouped_product(self._x(env.t), env.p[self.weight], bounds, product, self.transposed, adapter=adapter)
        product.mul_(self._y(env.g))
        norms, total = env.t[self.norms.name][experts], env.gp[self.magnitude][experts]
        sums = total.new_empty((len(total), self.out_features))
        bias_gradient(product, bounds, None, sums, False)
        adapted = torch.cat([sums[:, rows.start : rows.end] for rows in self.adapted], dim=1)
        # Experts without rows have no norms where only touched ones are fetched.
        found = torch.where((bounds.diff() > 0)[:, None], adapted.div_(norms), 0.0)
        total.copy_(found) if env.first else total.add_(found)

    # -- costs -------------------------------------------------------------------------------------------------------

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        wide_bytes, rows = max(4, compute_bytes), tokens * self.per_token
        norms = self.num_experts * self.adapted_features * (6 + 3 * self.rank)
        gathered = min(rows, BLOCK_ROWS) * 2 * self.out_features
        sums = 3 * self.num_experts * self.out_features
        own = wide_bytes * (max(norms, sums) + gathered) + 24 * rows
        return super().workspace_bytes(tokens, compute_bytes) + own

    def plain_workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        elements = self.num_experts * self.in_features * (self.out_features + self.width)
        widened = 4 * (elements + tokens * self.per_token * self.out_features) if compute_bytes == 2 else 0
        return super().plain_workspace_bytes(tokens, compute_bytes) + widened

    def _norm_work(self, compute_bytes: int) -> Work:
        """Reading the adapted rows of all experts twice."""
        elements = float(self.num_experts * self.adapted_features * self.in_features)
        kernels = 12 * len(self.adapted) + 2
        return Work(2.0 * elements * self.rank, memory_bytes=2.0 * elements * compute_bytes, kernels=kernels)

    def _passes(self, tokens: int, passes: int, compute_bytes: int) -> Work:
        """Reading or writing the outputs so many times."""
        num_bytes = float(passes * tokens * self.per_token * self.out_features * compute_bytes)
        return Work(memory_bytes=num_bytes, kernels=passes)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return super().forward_work(tokens, seq_len, compute_bytes).plus(self._norm_work(compute_bytes))

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        work = super().backward_input_work(tokens, seq_len, compute_bytes).plus(self._norm_work(compute_bytes))
        return work.plus(self._passes(tokens, 4, compute_bytes))

    def backward_weight_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        work = super().backward_weight_work(tokens, seq_len, compute_bytes).plus(self._work(tokens))
        return work.plus(self._small_work(tokens, compute_bytes, 0, 0)).plus(self._passes(tokens, 5, compute_bytes))
