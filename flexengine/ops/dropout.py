"""Dropout whose draws are counted, not remembered: backward and recomputation draw the same again.

Source: Srivastava et al. 2014, https://jmlr.org/papers/v15/srivastava14a.html, scaled while training.
"""

from __future__ import annotations

from torch import Tensor

from flexengine.ops.base import DropoutDraws, use_kernel
from flexengine.random_bits import random_bits16, stream_keys

_LEVELS = 1 << 16
_FIRST_STREAM = 1 << 32  # above those of the optimizer, which rounds at random by the same seed and step


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
