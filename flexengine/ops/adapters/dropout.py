"""Dropout whose draws are counted, not remembered: backward and recomputation draw the same again.

Source: Srivastava et al. 2014, https://jmlr.org/papers/v15/srivastava14a.html, scaled while training.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from flexengine.ops.base import DropoutDraws, OpEnv, TensorSpec, Work, use_kernel
from flexengine.random_bits import random_bits16, stream_keys

_LEVELS = 1 << 16
_FIRST_STREAM = 1 << 32  # above those of the optimizer, which rounds at random by the same seed and step


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
        num_bytes = float(passes * tokens * self.buffer.shape[0] * compute_bytes)
        return Work(memory_bytes=num_bytes, kernels=passes // 2)


NO_DROPOUT = Dropout(0.0, 0, TensorSpec("", ()))
"""What leaves everything."""


def drop(x: Tensor, out: Tensor, probability: float, draws: DropoutDraws, layer: int, number: int) -> None:
    """out = x with elements set to zero with this probability and the others scaled so that the mean stays.

    Shapes: x and out [T, D], contiguous, maybe the same tensor. layer, number: of the op that draws, so that no two ops
    share draws. The probability is rounded to a multiple of 2**-16.
    Order: launches on the current stream, never synchronises.
    """
    threshold, stream = drop_threshold(probability), _FIRST_STREAM + (layer << 8) + number
    scale, first = _LEVELS / (_LEVELS - threshold), draws.first_row * x.shape[1]
    if use_kernel(x) and x.element_size() < 8:
        from flexengine.kernels.dropout import drop_  # noqa: PLC0415  imports Triton

        drop_(x, out, threshold, scale, stream_keys(draws.seed, draws.step, stream), first)
        return
    drawn = random_bits16(x.numel(), x.device, draws.seed, draws.step, first, stream).view(x.shape)
    out.copy_((x * scale).masked_fill_(drawn < threshold, 0.0))


def drop_threshold(probability: float) -> int:
    """How many of 65536 draws drop an element."""
    return round(probability * _LEVELS)
