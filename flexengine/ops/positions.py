"""Learned positions: y [T, D] = x [T, D] + weight [P, D][positions]; the weight's gradient adds rows of grad_y."""

from __future__ import annotations

import torch

from flexengine.ops.base import Op, OpEnv, TensorSpec, Work


class LearnedPositions(Op):
    """x plus a row for each token's position. The gradient of x is that of y itself."""

    def __init__(self, name: str, x: str, y: str, num_positions: int, width: int, weight: str) -> None:
        self.name, self.x, self.y, self.weight = name, x, y, weight
        self.num_positions, self.width = num_positions, width
        self.inputs = (x,)
        self.outputs = (TensorSpec(y, (width,)),)
        self.params = (weight,)
        self.grad_inputs = (x,)
        self.grad_alias = ((x, y),)

    def forward(self, env: OpEnv) -> None:
        y = env.t[self.y]
        torch.index_select(env.p[self.weight], 0, env.chunk.positions, out=y)
        y.add_(env.t[self.x])

    def backward_input(self, env: OpEnv) -> None:
        """Do nothing: the gradient of x is that of y."""

    def backward_weight(self, env: OpEnv) -> None:
        acc = env.gp[self.weight]
        if env.first:
            acc.zero_()
        acc.index_add_(0, env.chunk.positions, env.g[self.y].to(acc.dtype))

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        # float32 copy of the gradient and, in deterministic mode, the sorted copy with its indices
        return 2 * tokens * self.width * max(4, compute_bytes) + 64 * tokens

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=5.0 * tokens * self.width * compute_bytes, kernels=2)

    def backward_weight_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=4.0 * self.num_positions * self.width + 16.0 * tokens * self.width, kernels=3)
