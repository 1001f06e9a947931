"""y = factor * x with a factor that the checkpoint holds and nothing trains, written over x.

Source: the scalar at the end of a layer in Gemma 4. Shapes: x and y [T, D]; factor [1], in float32.
"""

from __future__ import annotations

import torch

from flexengine.ops.base import Op, OpEnv, TensorSpec, Work


class LayerScale(Op):
    """y [T, D] = factor * x, in place. No backward reads anything."""

    def __init__(self, name: str, x: str, y: str, width: int, factor: str) -> None:
        self.name, self.x, self.y, self.width, self.factor = name, x, y, width, factor
        self.inputs = self.grad_inputs = (x,)
        self.outputs = (TensorSpec(y, (width,)),)
        self.in_place = (x, y)
        self.buffers = (factor,)

    def forward(self, env: OpEnv) -> None:
        torch.mul(env.t[self.x], self._factor(env), out=env.t[self.y])

    def backward_input(self, env: OpEnv) -> None:
        torch.mul(env.g[self.y], self._factor(env), out=env.g[self.x])

    def _factor(self, env: OpEnv) -> torch.Tensor:
        """Give the factor as a tensor without dimensions, which leaves the type of what it multiplies as it is."""
        return env.p[self.factor].view(())

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=2.0 * tokens * self.width * compute_bytes, kernels=1)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return self.forward_work(tokens, seq_len, compute_bytes)
