"""GELU in its tanh form: a = gelu(h), by torch's operators, which compute in float32 and round once.

Source: Hendrycks & Gimpel 2016, "Gaussian Error Linear Units".
"""

from __future__ import annotations

import torch

from flexengine.ops.base import Op, OpEnv, TensorSpec, Work


class Gelu(Op):
    """a [T, F] = gelu(h [T, F]). The gradient overwrites h, which nothing reads afterwards."""

    def __init__(self, name: str, x: str, y: str, width: int) -> None:
        self.name, self.x, self.y, self.width = name, x, y, width
        self.inputs = (x,)
        self.outputs = (TensorSpec(y, (width,)),)
        self.needs_input = (x,)
        self.grad_inputs = (x,)
        self.grad_over = (x,)

    def forward(self, env: OpEnv) -> None:
        torch.ops.aten.gelu.out(env.t[self.x], approximate="tanh", out=env.t[self.y])

    def backward_input(self, env: OpEnv) -> None:
        operands = (env.g[self.y], env.t[self.x])
        torch.ops.aten.gelu_backward.grad_input(*operands, approximate="tanh", grad_input=env.g[self.x])

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=2.0 * tokens * self.width * compute_bytes, kernels=1)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=3.0 * tokens * self.width * compute_bytes, kernels=1)
