"""Low-rank adapters of experts: every row times W[e].T + scale * A[e].T @ B[e].T of its expert e.

Shapes: R rows sorted by expert, E experts, J adapted modules of a fused product (gate and up, or 1), rank r, x [R, D],
y [R, F], A [E, J * r, D]. B [E, rows of the adapted modules, r], or of experts that one tensor holds [F, r * E], whose
last index runs over experts first, as PEFT stores it.
Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685, for each expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexengine.ops.adapters.lora import AdaptedRows
from flexengine.ops.base import OpEnv, TensorSpec, Work
from flexengine.ops.experts.experts import GroupedLinear
from flexengine.ops.experts.grouped_products import LowRank, grouped_product, grouped_weight_gradient


class LoRAGroupedLinear(GroupedLinear):
    """A frozen product of experts with adapters, which are never merged.

    A call first spreads B, times scale, over a matrix U [E, F, J * r] with zeros where a module's columns of
    low = x @ A.T do not belong to its rows: U takes little, and grouped products then serve all modules at once. The
    large product adds low @ U.T to its sums before it rounds them.
    """

    def __init__(
        self, base: GroupedLinear, rank: int, scale: float, adapted: tuple[AdaptedRows, ...], one_tensor: bool
    ) -> None:
        super().__init__(
            base.name, base.x, base.bounds, base.y, base.in_features, base.out_features, base.num_experts,
            base.per_token, base.weight, base.bias, base.row_weight, base.transposed, base.divisions,
        )  # fmt: skip
        self.fp8 = base.fp8
        self.rank, self.scale, self.adapted, self.one_tensor = rank, scale, adapted, one_tensor
        assert not one_tensor or len(adapted) == 1, "one tensor of a fused product has one adapter"
        self.down, self.up = f"{self.name}.lora_A", f"{self.name}.lora_B"
        self.params = (self.down, self.up)
        width = len(adapted) * rank
        rows = self.num_experts * self.out_features
        self.low = TensorSpec(f"{self.name}.low", (self.per_token * width,))
        self.grad_low = TensorSpec(f"{self.name}.grad_low", (self.per_token * width,))
        self.spread = TensorSpec(f"{self.name}.spread", (width,), rows=rows)
        self.grad_spread = TensorSpec(f"{self.name}.grad_spread", (width,), "float32", rows=rows)

    @property
    def width(self) -> int:
        """Columns of low."""
        return len(self.adapted) * self.rank

    @property
    def adapted_features(self) -> int:
        """Columns of the output that the adapters of an expert add to."""
        return sum(rows.end - rows.start for rows in self.adapted)

    def scratch(self, half: str) -> tuple[TensorSpec, ...]:
        if half == "weight":
            return self.grad_low, self.low, self.grad_spread
        return self.low if half == "forward" else self.grad_low, self.spread, *super().scratch(half)

    # -- operands ----------------------------------------------------------------------------------------------------

    def _experts(self, env: OpEnv) -> slice:
        """The experts of this call's part."""
        count = self.num_experts // self.num_parts
        return slice(env.part * count, (env.part + 1) * count)

    def _low(self, env: OpEnv, spec: TensorSpec) -> Tensor:
        return env.t[spec.name].view(-1, self.width)

    def _spread_of(self, env: OpEnv, spec: TensorSpec) -> Tensor:
        """A matrix like U for the experts of this call."""
        return env.t[spec.name].view(self.num_experts, self.out_features, self.width)[self._experts(env)]

    def _blocks(self, up: Tensor, spread: Tensor, experts: slice) -> list[tuple[Tensor, Tensor]]:
        """Pair what each module has of a tensor like B with what it has of one like U, both [E, rows, r]."""
        if self.one_tensor:
            return [(up.view(self.out_features, self.rank, self.num_experts).permute(2, 0, 1)[experts], spread)]
        found, first = [], 0
        for number, rows in enumerate(self.adapted):
            end, columns = first + rows.end - rows.start, slice(number * self.rank, (number + 1) * self.rank)
            found.append((up[experts, first:end], spread[:, rows.start : rows.end, columns]))
            first = end
        return found

    def _write_spread(self, env: OpEnv) -> Tensor:
        spread = self._spread_of(env, self.spread)
        spread.zero_()
        for own, block in self._blocks(env.p[self.up], spread, self._experts(env)):
            torch.mul(own, self.scale, out=block) if block.is_contiguous() else block.copy_(own).mul_(self.scale)
        return spread

    def _write_low(self, env: OpEnv) -> Tensor:
        low = self._low(env, self.low)
        grouped_product(self._x(env.t), env.p[self.down][self._experts(env)], self._bounds(env), low, False)
        return low

    # -- passes ------------------------------------------------------------------------------------------------------

    def forward(self, env: OpEnv) -> None:
        bias = None if self.bias is None else env.p[self.bias]
        self._multiply(env, "forward", bias, self._row_weight(env.t), self._adapter(env))

    def _adapter(self, env: OpEnv) -> LowRank:
        """What the adapters add to y."""
        return LowRank(self._write_low(env), self._write_spread(env))

    def _write_grad_x(self, env: OpEnv) -> None:
        grad_low = self._low(env, self.grad_low)
        grouped_product(self._grad_y(env), self._write_spread(env), self._bounds(env), grad_low, True)
        adapter = LowRank(grad_low, env.p[self.down][self._experts(env)], transposed=True)
        self._multiply(env, "input", adapter=adapter)

    def backward_weight(self, env: OpEnv) -> None:
        x, grad_y, bounds, experts = self._x(env.t), self._grad_y(env), self._bounds(env), self._experts(env)
        grad_low, low = self._low(env, self.grad_low), self._write_low(env)
        grouped_weight_gradient(grad_low, x, bounds, env.gp[self.down][experts], not env.first)
        grad_spread = self._spread_of(env, self.grad_spread)
        grouped_weight_gradient(grad_y, low, bounds, grad_spread, False)
        grad_spread.mul_(self.scale)
        for total, block in self._blocks(env.gp[self.up], grad_spread, experts):
            total.copy_(block) if env.first else total.add_(block)

    # -- costs -------------------------------------------------------------------------------------------------------

    def _small_work(self, tokens: int, compute_bytes: int, ins: int, outs: int) -> Work:
        """Products of W columns that read x or its gradient `ins` times and those of y `outs` times, which take as long
        as these bytes; what the large product takes for low @ U.T or its like; and U itself."""
        rows, elements = tokens * self.per_token, ins * self.in_features + outs * self.out_features
        spread = 2.0 * self.num_experts * self.out_features * self.width
        num_bytes = (rows * (elements + 2 * self.width) + spread) * compute_bytes
        flops = 2.0 * rows * self.width * (self.in_features + self.out_features)
        return Work(grouped_flops=flops, memory_bytes=num_bytes, kernels=4)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        work = super().forward_work(tokens, seq_len, compute_bytes)
        return work.plus(self._small_work(tokens, compute_bytes, 1, 0))

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        work = super().backward_input_work(tokens, seq_len, compute_bytes)
        return work.plus(self._small_work(tokens, compute_bytes, 0, 1))

    def backward_weight_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        """low again, then the gradients of A and U."""
        small, rows = self._small_work(tokens, compute_bytes, 2, 1), tokens * self.per_token
        accumulators = 8.0 * self.num_experts * self.width * (self.in_features + 2 * self.out_features)
        again = Work(2.0 * rows * self.in_features * self.width, memory_bytes=accumulators, kernels=4)
        return small.plus(again)

    def model_flops(self, seq_len: int) -> float:
        """The frozen product forward and for the gradient of x, the adapters' once more for their own gradients."""
        rows = seq_len * self.per_token
        adapters = 2.0 * rows * self.rank * (len(self.adapted) * self.in_features + self.adapted_features)
        return 2 * self._work(seq_len).flops + 3 * adapters
