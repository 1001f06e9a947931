"""Squared ReLU: a = max(h, 0)^2, with grad_h = 2 max(h, 0) grad_a, by torch's operators.

Source: So et al. 2021, "Primer: Searching for Efficient Transformers for Language Modeling".
"""

from __future__ import annotations

import torch

from flexengine.ops.base import Op, OpEnv, TensorSpec, Work


class SquaredReLU(Op):
    """a [T, F] = max(h [T, F], 0)^2. The gradient overwrites h, which nothing reads afterwards."""

    def __init__(self, name: str, x: str, y: str, width: int) -> None:
        self.name, self.x, self.y, self.width = name, x, y, width
        self.inputs = (x,)
        self.outputs = (TensorSpec(y, (width,)),)
        self.needs_input = self.grad_inputs = self.grad_over = (x,)

    def forward(self, env: OpEnv) -> None:
        y = env.t[self.y]
        torch.clamp(env.t[self.x], min=0.0, out=y)
        y.mul_(y)

    def backward_input(self, env: OpEnv) -> None:
        grad_x = env.g[self.x]
        torch.clamp(env.t[self.x], min=0.0, out=grad_x)
        grad_x.mul_(env.g[self.y]).mul_(2.0)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=4.0 * tokens * self.width * compute_bytes, kernels=2)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=7.0 * tokens * self.width * compute_bytes, kernels=3)
