"""Which attention kernels a machine is fastest with, by shape and length: measured by the probe, read by the op."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

from flexengine.ops.attention.style import AttentionShape

KernelName = Literal["flash", "cudnn", "triton", "efficient", "flash2", "flash3", "flash4"]
"""Attention kernels on CUDA. flash: FlashAttention-2, any lengths. cudnn: faster on Hopper, equal lengths only. triton:
our own, for 16 bits of every style. efficient: torch's memory-efficient ones, for float16 on cards before 8.0 too.
flash2, flash3, flash4: of the packages flash-attn, flash_attn_interface and flash-attn-4, where they are installed."""
KERNEL_NAMES: tuple[KernelName, ...] = get_args(KernelName)


class AttentionChoice(NamedTuple):
    """Kernels for attention of one shape, fastest first, by tokens of a sequence."""

    shape: AttentionShape
    orders: tuple[tuple[int, tuple[KernelName, ...]], ...]

    def order(self, length: int) -> tuple[KernelName, ...]:
        """Kernels for sequences of so many tokens: the order at the nearest length that was measured."""
        return min(self.orders, key=lambda order: abs(math.log(max(1, length) / order[0])))[1]


def order_of(choices: tuple[AttentionChoice, ...], shape: AttentionShape, length: int) -> tuple[KernelName, ...]:
    """Kernels for a shape and length, fastest first; none where the shape was not measured."""
    return next((choice.order(length) for choice in choices if choice.shape == shape), ())
