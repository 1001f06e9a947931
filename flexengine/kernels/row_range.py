"""Kernels over the rows of some experts: `bounds` [E + 1] int32, of which the first and last are theirs alone."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import check_tensor


def row_range(bounds: Tensor | None, unused: Tensor) -> tuple[Tensor, int]:
    """Bounds and the number of experts for a kernel's arguments, of which `unused` is in the place of none.

    Raises: ValueError on other shapes or dtypes.
    """
    if bounds is None:
        return unused, 0
    check_tensor("bounds", bounds, (len(bounds),), (torch.int32,))
    return bounds, len(bounds) - 1


@triton.jit
def is_within(row, bounds_ptr, experts):
    """Whether a row is one of these experts'."""
    return (row >= tl.load(bounds_ptr)) & (row < tl.load(bounds_ptr + experts))
