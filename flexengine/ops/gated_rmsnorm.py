"""RMSNorm of every head, times a gate: y = x * r * weight * silu(z), r = 1 / sqrt(mean(x^2) + eps).

Source: Yang et al. 2024, "Gated Delta Networks" (the output of linear attention); Zhang & Sennrich 2019, "Root Mean
Square Layer Normalization". With n = x * r, s = sigmoid(z) and gw = grad_y * weight * z * s: grad_x = r * (gw - n *
mean(gw * n)), grad_z = grad_y * weight * n * s * (1 + z * (1 - s)), grad_weight = sum of grad_y * n * z * s. All in
float32 (float64), rounded once.

Shapes: x and y [T, N * V], z columns of another tensor, weight [V].
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexengine.ops.base import Op, OpEnv, TensorSpec, Work, wide
from flexengine.ops.columns import Columns


class GatedRMSNorm(Op):
    """The normalised and gated heads. Backward finds its statistics again, and writes its columns of z's gradient."""

    def __init__(
        self, name: str, x: str, z: str, y: str, gate: Columns, head_dim: int, weight: str, eps: float
    ) -> None:
        self.name, self.x, self.z, self.y, self.gate = name, x, z, y, gate
        self.head_dim, self.weight, self.eps = head_dim, weight, eps
        self.inputs = self.needs_input = self.needs_weight = self.grad_inputs = (x, z)
        self.outputs = (TensorSpec(y, (gate.total,)),)
        self.params = (weight,)

    def _heads(self, rows: Tensor) -> Tensor:
        """[T, N * V] -> [T, groups, heads of a group, V]."""
        return rows.unflatten(1, (self.gate.groups, -1, self.head_dim))

    def _parts(self, env: OpEnv) -> tuple[Tensor, Tensor, Tensor]:
        """n, r and z, wide."""
        x = wide(self._heads(env.t[self.x]))
        r = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return x * r, r, wide(self.gate.heads(env.t[self.z], self.head_dim))

    def forward(self, env: OpEnv) -> None:
        n, _, z = self._parts(env)
        self._heads(env.t[self.y]).copy_(n * wide(env.p[self.weight]) * torch.nn.functional.silu(z))

    def backward_input(self, env: OpEnv) -> None:
        n, r, z = self._parts(env)
        grad, s = wide(self._heads(env.g[self.y])) * wide(env.p[self.weight]), torch.sigmoid(z)
        assert self.x not in env.accumulate, "nothing else reads what the norm does"
        by_gate = self.gate.heads(env.g[self.z], self.head_dim)
        by_gate.copy_(grad * n * s * (1 + z * (1 - s)))
        grad = grad * z * s
        self._heads(env.g[self.x]).copy_(r * (grad - n * (grad * n).mean(-1, keepdim=True)))

    def backward_weight(self, env: OpEnv) -> None:
        n, _, z = self._parts(env)
        total = (wide(self._heads(env.g[self.y])) * n * z * torch.sigmoid(z)).flatten(0, -2).sum(0)
        env.gp[self.weight].copy_(total) if env.first else env.gp[self.weight].add_(total)

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        return 7 * tokens * self.gate.total * max(4, compute_bytes)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=3.0 * tokens * self.gate.total * compute_bytes, kernels=1)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=5.0 * tokens * self.gate.total * compute_bytes, kernels=1)

    def backward_weight_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=3.0 * tokens * self.gate.total * compute_bytes, kernels=2)
