"""Attention's output, gated: y = o * sigmoid(z), one gate for every column of every head.

Source: Qiu et al. 2025, "Gated Attention for Large Language Models". With s = sigmoid(z): grad_o = grad_y * s, grad_z =
grad_y * o * s * (1 - s). Shapes: o and y [T, N * H], z columns of the projection that has the queries, too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexengine.ops.base import Op, OpEnv, TensorSpec, Work, plain_bytes, use_kernel, wide
from flexengine.ops.columns import Columns


class HeadGate(Op):
    """Writes the gated output. Backward writes its columns of z's gradient."""

    def __init__(self, name: str, o: str, z: str, y: str, gate: Columns) -> None:
        self.name, self.o, self.z, self.y, self.gate = name, o, z, y, gate
        self.inputs = self.needs_input = self.grad_inputs = (o, z)
        self.outputs = (TensorSpec(y, (gate.total,)),)

    def _heads(self, rows: Tensor) -> Tensor:
        """View [T, N * H] as [T, groups, columns of a group]."""
        return rows.unflatten(1, (self.gate.groups, -1))

    def forward(self, env: OpEnv) -> None:
        o, z, y = self._heads(env.t[self.o]), self.gate.of(env.t[self.z]), self._heads(env.t[self.y])
        if use_kernel(o) and o.dtype != torch.float64:
            from flexengine.kernels import head_gate  # noqa: PLC0415 (Triton is imported when first used)

            return head_gate.head_gate_forward(o, z, y)
        y.copy_(torch.sigmoid(wide(z)).mul_(o))

    def backward_input(self, env: OpEnv) -> None:
        assert self.o not in env.accumulate, "nothing else reads attention's output"
        o, z, grad = self._heads(env.t[self.o]), self.gate.of(env.t[self.z]), self._heads(env.g[self.y])
        grad_o, grad_z = self._heads(env.g[self.o]), self.gate.of(env.g[self.z])
        if use_kernel(o) and o.dtype != torch.float64:
            from flexengine.kernels import head_gate  # noqa: PLC0415

            return head_gate.head_gate_backward(grad, o, z, grad_o, grad_z)
        s = torch.sigmoid(wide(z))
        grad_z.copy_(s * (1 - s) * o * grad)
        grad_o.copy_(s.mul_(grad))

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        return plain_bytes(4 * tokens * self.gate.total, compute_bytes)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=3.0 * tokens * self.gate.total * compute_bytes, kernels=1)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=5.0 * tokens * self.gate.total * compute_bytes, kernels=1)
