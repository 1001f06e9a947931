"""Which cards multiply matrices inside Triton kernels."""

from __future__ import annotations

from functools import lru_cache

import torch

PRODUCTS_SINCE = (8, 0)
"""Compute capability from which Triton's products run on tensor cores. For older cards Triton 3.9 multiplies element by
element, from operands in more shared memory than these have."""


def multiplies_in_kernels(device: torch.device) -> bool:
    """Whether kernels with products are for this device; elsewhere torch's products are faster."""
    return device.type != "cuda" or _capability(device.index) >= PRODUCTS_SINCE


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a card."""
    return _capability(device.index)


@lru_cache
def _capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)
