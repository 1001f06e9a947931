"""Dropout of what adapters read, which backward and recomputation draw again."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from flexengine.ops.base import OpEnv, TensorSpec, Work
from flexengine.ops.dropout import drop


class Dropout(NamedTuple):
    """Dropout of what an adapter reads: drawn once for all modules of a fused projection.

    number: of the layer among the ops, for the draws. buffer: for what is left of a tensor. A probability of 0 leaves
    everything, without a buffer and without any work.
    """

    probability: float
    number: int
    buffer: TensorSpec

    @property
    def buffers(self) -> tuple[TensorSpec, ...]:
        """The buffer, where there is dropout."""
        return (self.buffer,) if self.probability else ()

    def left_of(self, x: Tensor, env: OpEnv) -> Tensor:
        """What dropout leaves of x, which may be the buffer itself; x where nothing is trained."""
        if env.chunk.dropout is None or not self.probability:
            return x
        left = env.t[self.buffer.name]
        drop(x, left, self.probability, env.chunk.dropout, env.layer, self.number)
        return left

    def work(self, tokens: int, passes: int, compute_bytes: int) -> Work:
        """Passes over tensors like x, to read and to write."""
        if not self.probability:
            return Work()
        return Work(memory_bytes=float(passes * tokens * self.buffer.shape[0] * compute_bytes), kernels=passes // 2)


NO_DROPOUT = Dropout(0.0, 0, TensorSpec("", ()))
"""What leaves everything."""
