"""Adds the gated output of the expert that all tokens share: y = residual + sigmoid(x . weight) * shared.

Source: Qwen Team 2024, "Qwen1.5-MoE". With g = sigmoid(x . weight) and d = sum over columns of grad_y * shared:
grad_shared = g * grad_y, grad_gate = d * g * (1 - g), grad_x += grad_gate * weight, grad_weight = sum of grad_gate * x.
Shapes: x, shared, residual, y [T, D], weight [1, D].
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexengine.ops.base import Op, OpEnv, TensorSpec, Work, wide
from flexengine.ops.linear import accumulate_weight_grad, widened_bytes
from flexengine.ops.products import write_product


class SharedGate(Op):
    """Writes the gated sum. The gradient of the residual is that of y itself."""

    def __init__(self, name: str, shared: str, x: str, y: str, width: int, weight: str, residual: str) -> None:
        self.name, self.shared, self.x, self.y, self.width = name, shared, x, y, width
        self.weight, self.residual = weight, residual
        self.inputs = (shared, x, residual)
        self.outputs = (TensorSpec(y, (width,)),)
        self.params = (weight,)
        self.needs_input = (shared, x)
        self.needs_weight = (x,)
        self.grad_inputs = (shared, x, residual)
        self.grad_alias = ((residual, y),)
        self.grad_gate = TensorSpec(f"{name}_grad_gate", (1,))

    def _gate(self, env: OpEnv) -> Tensor:
        """The gate [T, 1], wide."""
        return torch.sigmoid(wide(env.t[self.x] @ env.p[self.weight].t()))

    def forward(self, env: OpEnv) -> None:
        gated = wide(env.t[self.shared]) * self._gate(env)
        env.t[self.y].copy_(gated.add_(env.t[self.residual]))

    def backward_input(self, env: OpEnv) -> None:
        gate, grad_y = self._gate(env), env.g[self.y]
        total = (wide(grad_y) * env.t[self.shared]).sum(-1, keepdim=True)
        grad_gate = env.t[self.grad_gate.name]
        grad_gate.copy_(total * gate * (1 - gate))
        env.g[self.shared].copy_(wide(grad_y) * gate)
        write_product(env.g[self.x], grad_gate, env.p[self.weight], self.x in env.accumulate)

    def backward_weight(self, env: OpEnv) -> None:
        accumulate_weight_grad(env.gp[self.weight], env.t[self.grad_gate.name], env.t[self.x], env.first)

    def scratch(self, half: str) -> tuple[TensorSpec, ...]:
        return () if half == "forward" else (self.grad_gate,)

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        return 3 * tokens * (self.width + 8) * max(4, compute_bytes)

    def plain_workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        widened = widened_bytes(tokens, 1, self.width, compute_bytes)
        return max(super().plain_workspace_bytes(tokens, compute_bytes), widened)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=8.0 * tokens * self.width * max(4, compute_bytes), kernels=6)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=12.0 * tokens * self.width * max(4, compute_bytes), kernels=12)

    def backward_weight_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=1.0 * tokens * self.width * compute_bytes, kernels=1)
