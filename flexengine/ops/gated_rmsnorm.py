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

from flexengine.ops.base import Op, OpEnv, TensorSpec, Work, plain_bytes, use_kernel, wide
from flexengine.ops.columns import Columns
from flexengine.ops.rmsnorm import add_partials, grad_partials, parts_bytes, parts_of


class GatedRMSNorm(Op):
    """Writes the normalised and gated heads. Backward recomputes statistics, and writes its columns of z's gradient.
    Where the weight is trained, the input half leaves the parts of its gradient, which the weight half adds up."""

    def __init__(
        self, name: str, x: str, z: str, y: str, gate: Columns, head_dim: int, weight: str, eps: float
    ) -> None:
        self.name, self.x, self.z, self.y, self.gate = name, x, z, y, gate
        self.head_dim, self.weight, self.eps = head_dim, weight, eps
        self.inputs = self.needs_input = self.grad_inputs = (x, z)
        self.outputs = (TensorSpec(y, (gate.total,)),)
        self.params = (weight,)
        self.partials = TensorSpec(f"{name}_partials", (head_dim,), "float32", rows=grad_partials(head_dim))

    def _heads(self, rows: Tensor) -> Tensor:
        """View [T, N * V] as heads [T, groups, heads of a group, V]."""
        return rows.unflatten(1, (self.gate.groups, -1, self.head_dim))

    def _operands(self, env: OpEnv) -> tuple[Tensor, Tensor]:
        """x and z [T, groups, heads of a group, V]."""
        return self._heads(env.t[self.x]), self.gate.heads(env.t[self.z], self.head_dim)

    def _parts(self, env: OpEnv) -> tuple[Tensor, Tensor, Tensor]:
        """The normalised values n, the factors r and the gates z, wide."""
        x, z = (wide(part) for part in self._operands(env))
        r = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return x * r, r, z

    def forward(self, env: OpEnv) -> None:
        y, weight = self._heads(env.t[self.y]), env.p[self.weight]
        if use_kernel(y) and y.dtype != torch.float64:
            from flexengine.kernels import gated_rmsnorm  # noqa: PLC0415 (Triton is imported when first used)

            return gated_rmsnorm.gated_rmsnorm_forward(*self._operands(env), weight, self.eps, y)
        n, _, z = self._parts(env)
        y.copy_(n * wide(weight) * torch.nn.functional.silu(z))

    def backward_input(self, env: OpEnv) -> None:
        assert self.x not in env.accumulate, "nothing else reads what the norm does"
        grad_y, weight = self._heads(env.g[self.y]), env.p[self.weight]
        grad_x, grad_z = self._heads(env.g[self.x]), self.gate.heads(env.g[self.z], self.head_dim)
        if use_kernel(grad_y) and grad_y.dtype != torch.float64:
            from flexengine.kernels import gated_rmsnorm  # noqa: PLC0415

            sums = parts_of(env.t[self.partials.name], self._rows(len(grad_y))) if self.trained else None
            operands = (grad_y, *self._operands(env), weight, self.eps, grad_x, grad_z, sums)
            return gated_rmsnorm.gated_rmsnorm_backward(*operands)
        n, r, z = self._parts(env)
        s = torch.sigmoid(z)
        if self.trained:
            env.t[self.partials.name][0] = (wide(grad_y) * n * z * s).flatten(0, -2).sum(0)
        grad = wide(grad_y) * wide(weight)
        grad_z.copy_(grad * n * s * (1 + z * (1 - s)))
        grad = grad * z * s
        grad_x.copy_(r * (grad - n * (grad * n).mean(-1, keepdim=True)))

    def _rows(self, tokens: int) -> int:
        """Heads of so many tokens."""
        return tokens * (self.gate.total // self.head_dim)

    def backward_weight(self, env: OpEnv) -> None:
        add_partials(env.t[self.partials.name], self._rows(len(env.g[self.y])), env.gp[self.weight], not env.first)

    def scratch(self, half: str) -> tuple[TensorSpec, ...]:
        return (self.partials,) if self.trained and half != "forward" else ()

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        return plain_bytes(7 * tokens * self.gate.total, compute_bytes)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=3.0 * tokens * self.gate.total * compute_bytes, kernels=1)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        sums = parts_bytes(self.partials, self._rows(tokens)) if self.trained else 0.0
        return Work(memory_bytes=5.0 * tokens * self.gate.total * compute_bytes + sums, kernels=1)

    def backward_weight_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=parts_bytes(self.partials, self._rows(tokens)), kernels=1)
