"""Where Triton kernels that multiply matrices run."""

from __future__ import annotations

from torch import Tensor

from flexengine.ops.base import use_kernel
from flexengine.ops.cards import multiplies_in_kernels


def use_product_kernel(tensor: Tensor) -> bool:
    """Whether a Triton kernel that multiplies matrices should run: where others do, but on cards before 8.0."""
    return use_kernel(tensor) and multiplies_in_kernels(tensor.device)
