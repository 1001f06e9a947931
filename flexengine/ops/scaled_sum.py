"""y = residual + factor * x, or factor * x, by torch's operators, which round once.

Source: the residual and logit multipliers of Yang et al. 2022, "Tensor Programs V", as IBM's Granite has them.
"""

from __future__ import annotations

import torch

from flexengine.ops.base import Op, OpEnv, TensorSpec, Work


class ScaledSum(Op):
    """y [T, D] = (residual +) factor * x. No backward reads anything; the residual's gradient is that of y."""

    def __init__(self, name: str, x: str, y: str, width: int, factor: float, residual: str | None = None) -> None:
        self.name, self.x, self.y, self.width, self.factor, self.residual = name, x, y, width, factor, residual
        self.inputs = self.grad_inputs = (x,) if residual is None else (x, residual)
        self.outputs = (TensorSpec(y, (width,)),)
        self.grad_alias = () if residual is None else ((residual, y),)

    def forward(self, env: OpEnv) -> None:
        x, y = env.t[self.x], env.t[self.y]
        if self.residual is None:
            torch.mul(x, self.factor, out=y)
        else:
            torch.add(env.t[self.residual], x, alpha=self.factor, out=y)

    def backward_input(self, env: OpEnv) -> None:
        assert self.x not in env.accumulate, "nothing else reads what is scaled"
        torch.mul(env.g[self.y], self.factor, out=env.g[self.x])

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        rows = 2.0 if self.residual is None else 3.0
        return Work(memory_bytes=rows * tokens * self.width * compute_bytes, kernels=1)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=2.0 * tokens * self.width * compute_bytes, kernels=1)
