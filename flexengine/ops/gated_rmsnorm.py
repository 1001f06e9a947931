"""RMSNorm of every head, times a gate: y = x * r * weight * silu(z), r = 1 / sqrt(mean(x^2) + eps); or of what the gate
has multiplied: y = h * r * weight, h = x * silu(z), r = 1 / sqrt(mean(h^2) + eps).

Source: Yang et al. 2024, "Gated Delta Networks" (the output of linear attention); Dao & Gu 2024, "Transformers are
SSMs" (the gate first); Zhang & Sennrich 2019, "Root Mean Square Layer Normalization". With n = x * r, s = sigmoid(z)
and gw = grad_y * weight * z * s: grad_x = r * (gw - n * mean(gw * n)), grad_z = grad_y * weight * n * s * (1 + z *
(1 - s)), grad_weight = sum of grad_y * n * z * s. With the gate first n = h * r, gw = grad_y * weight, grad_h = r *
(gw - n * mean(gw * n)), grad_x = grad_h * z * s, grad_z = grad_h * x * s * (1 + z * (1 - s)), grad_weight = sum of
grad_y * n. All in float32 (float64), rounded once.

Shapes: x and y [T, N * V], z columns of another tensor, weight [V], which heads share, or [N * V].
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
        self, name: str, x: str, z: str, y: str, gate: Columns, head_dim: int, weight: str, eps: float,
        shared: bool = True, gate_first: bool = False,
    ) -> None:  # fmt: skip
        """head_dim: columns that are normalised together. shared: whether heads share the weight."""
        self.gate_first, self.weights = gate_first, 1 if shared else gate.total // head_dim
        self.name, self.x, self.z, self.y, self.gate = name, x, z, y, gate
        self.head_dim, self.weight, self.eps = head_dim, weight, eps
        self.inputs = self.needs_input = self.grad_inputs = (x, z)
        self.outputs = (TensorSpec(y, (gate.total,)),)
        self.params = (weight,)
        width = self.weights * head_dim
        self.partials = TensorSpec(f"{name}_partials", (width,), "float32", rows=grad_partials(head_dim))

    def _heads(self, rows: Tensor) -> Tensor:
        """View [T, N * V] as heads [T, groups, heads of a group, V]."""
        return rows.unflatten(1, (self.gate.groups, -1, self.head_dim))

    def _operands(self, env: OpEnv) -> tuple[Tensor, Tensor]:
        """x and z [T, groups, heads of a group, V]."""
        return self._heads(env.t[self.x]), self.gate.heads(env.t[self.z], self.head_dim)

    def _parts(self, env: OpEnv) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The values x, the normalised ones n, the factors r and the gates z, wide."""
        x, z = (wide(part) for part in self._operands(env))
        h = x * torch.nn.functional.silu(z) if self.gate_first else x
        r = torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)
        return x, h * r, r, z

    def _weight(self, env: OpEnv) -> Tensor:
        """The weight [V] or, of every head, [groups, heads of a group, V], wide."""
        weight = wide(env.p[self.weight])
        return weight if self.weights == 1 else weight.view(self.gate.groups, -1, self.head_dim)

    def forward(self, env: OpEnv) -> None:
        y, weight = self._heads(env.t[self.y]), env.p[self.weight]
        if use_kernel(y) and y.dtype != torch.float64:
            from flexengine.kernels import gated_rmsnorm  # noqa: PLC0415 (Triton is imported when first used)

            return gated_rmsnorm.gated_rmsnorm_forward(*self._operands(env), weight, self.eps, y, self.gate_first)
        _, n, _, z = self._parts(env)
        n *= self._weight(env)
        y.copy_(n if self.gate_first else n * torch.nn.functional.silu(z))

    def backward_input(self, env: OpEnv) -> None:
        assert self.x not in env.accumulate, "nothing else reads what the norm does"
        grad_y, weight = self._heads(env.g[self.y]), env.p[self.weight]
        grad_x, grad_z = self._heads(env.g[self.x]), self.gate.heads(env.g[self.z], self.head_dim)
        if use_kernel(grad_y) and grad_y.dtype != torch.float64:
            from flexengine.kernels import gated_rmsnorm  # noqa: PLC0415

            sums = parts_of(env.t[self.partials.name], self._rows(len(grad_y))) if self.trained else None
            operands = (grad_y, *self._operands(env), weight, self.eps, grad_x, grad_z, sums, self.gate_first)
            return gated_rmsnorm.gated_rmsnorm_backward(*operands)
        x, n, r, z = self._parts(env)
        s = torch.sigmoid(z)
        if self.trained:
            found = wide(grad_y) * (n if self.gate_first else n * z * s)
            env.t[self.partials.name][0] = found.view(-1, self.weights * self.head_dim).sum(0)
        grad, slope = wide(grad_y) * self._weight(env), s * (1 + z * (1 - s))  # slope: of the gate in z
        if not self.gate_first:
            grad_z.copy_(grad * n * slope)
            grad = grad * z * s
        grad = r * (grad - n * (grad * n).mean(-1, keepdim=True))
        if self.gate_first:
            grad_z.copy_(grad * x * slope)
            grad *= z * s
        grad_x.copy_(grad)

    def _rows(self, tokens: int) -> int:
        """Heads of so many tokens that have one weight."""
        return tokens * (self.gate.total // self.head_dim // self.weights)

    def backward_weight(self, env: OpEnv) -> None:
        add_partials(env.t[self.partials.name], self._rows(len(env.g[self.y])), env.gp[self.weight], not env.first)

    def scratch(self, half: str) -> tuple[TensorSpec, ...]:
        return (self.partials,) if self.trained and half != "forward" else ()

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        return plain_bytes((9 if self.gate_first else 8) * tokens * self.gate.total, compute_bytes)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=3.0 * tokens * self.gate.total * compute_bytes, kernels=1)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        sums = parts_bytes(self.partials, self._rows(tokens)) if self.trained else 0.0
        return Work(memory_bytes=5.0 * tokens * self.gate.total * compute_bytes + sums, kernels=1)

    def backward_weight_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=parts_bytes(self.partials, self._rows(tokens)), kernels=1)
