"""A router with a low-rank adapter: its logits are x @ weight.T (+ bias) + scale * (x @ A.T) @ B.T.

Shapes: x [T, D], weight [E, D], A [R, D], B [E, R]; the rest as in ops/experts/router.py.
Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexengine.ops.adapters.lora import AdaptedRows
from flexengine.ops.base import OpEnv, TensorSpec, Work, wide
from flexengine.ops.experts.router import Router
from flexengine.ops.linear import accumulate_weight_grad, widened_bytes


class LoRARouter(Router):
    """A frozen router and its adapter, which is never merged. Both products are added wide."""

    transposed = False

    def __init__(self, base: Router, rank: int, scale: float) -> None:
        super().__init__(
            base.name, base.x, base.width, base.num_experts, base.per_token, base.param, base.normalised,
            base.bias, base.style,
        )  # fmt: skip
        self.rank, self.scale, self.adapted = rank, scale, (AdaptedRows(0, base.num_experts),)
        self.down, self.up = f"{self.name}.lora_A", f"{self.name}.lora_B"
        self.params = (self.down, self.up)
        self.low = TensorSpec(f"{self.name}.low", (rank,))
        self.grad_low = TensorSpec(f"{self.name}.grad_low", (rank,))
        self.added = TensorSpec(f"{self.name}.added", (base.num_experts,))

    @property
    def in_features(self) -> int:
        """Columns of x."""
        return self.width

    @property
    def out_features(self) -> int:
        """Logits of a token."""
        return self.num_experts

    @property
    def adapted_features(self) -> int:
        """Logits that the adapter adds to."""
        return self.num_experts

    def scratch(self, half: str) -> tuple[TensorSpec, ...]:
        if half == "weight":
            return (*super().scratch(half), self.grad_low, self.low)
        own = (self.grad_low,) if half == "input" else ()
        return (*super().scratch(half), *own, self.low, self.added)

    def _write_low(self, env: OpEnv) -> Tensor:
        """low = scale * x @ A.T."""
        low = env.t[self.low.name]
        return torch.addmm(low, env.t[self.x], env.p[self.down].t(), beta=0, alpha=self.scale, out=low)

    def _logits_of(self, env: OpEnv) -> Tensor:
        added = env.t[self.added.name]
        torch.mm(self._write_low(env), env.p[self.up].t(), out=added)
        return super()._logits_of(env).add_(wide(added))

    def _write_grad_x(self, env: OpEnv, grad_logits: Tensor) -> None:
        super()._write_grad_x(env, grad_logits)
        grad_x, grad_low = env.g[self.x], env.t[self.grad_low.name]
        torch.addmm(grad_low, grad_logits, env.p[self.up], beta=0, alpha=self.scale, out=grad_low)
        torch.addmm(grad_x, grad_low, env.p[self.down], out=grad_x)

    def backward_weight(self, env: OpEnv) -> None:
        grad_logits, grad_low = env.t[self.grad_logits.name], env.t[self.grad_low.name]
        accumulate_weight_grad(env.gp[self.down], grad_low, env.t[self.x], env.first)
        accumulate_weight_grad(env.gp[self.up], grad_logits, self._write_low(env), env.first)

    # -- costs -------------------------------------------------------------------------------------------------------

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        return super().workspace_bytes(tokens, compute_bytes) + tokens * self.num_experts * max(4, compute_bytes)

    def plain_workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        shapes = ((self.rank, self.width), (self.num_experts, self.rank))
        widened = max(widened_bytes(tokens, *shape, compute_bytes) for shape in shapes)
        return max(super().plain_workspace_bytes(tokens, compute_bytes), widened)

    def _small(self, tokens: int, compute_bytes: int) -> Work:
        """One product with A and one with B."""
        num_bytes = float(tokens * (self.width + 2 * self.num_experts) * compute_bytes)
        return Work(2.0 * tokens * self.rank * (self.width + self.num_experts), memory_bytes=num_bytes, kernels=3)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return super().forward_work(tokens, seq_len, compute_bytes).plus(self._small(tokens, compute_bytes))

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        small = self._small(tokens, compute_bytes)
        return super().backward_input_work(tokens, seq_len, compute_bytes).plus(small).plus(small)

    def backward_weight_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return self._small(tokens, compute_bytes).plus(self._small(tokens, compute_bytes))

    def model_flops(self, seq_len: int) -> float:
        """The frozen product forward and for the gradient of x, the adapter's once more for its own gradients."""
        return 2 * self._logits(seq_len) + 3 * self._small(seq_len, 2).flops
