"""What launchers have in common. They check shapes at the door: a kernel that reads a wrong one would read somebody
else's memory."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def bit_pattern(tensor: Tensor) -> Tensor:
    """The bits of bfloat16 as int16, which kernels round and join by hand; others as they are."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def signed_words(keys: Iterable[int]) -> list[int]:
    """Unsigned words of 32 bits as the signed ones of the same bits, which Triton takes for int32."""
    return [key - (1 << 32) if key >= 1 << 31 else key for key in keys]


def check_tensor(
    name: str, tensor: Tensor, shape: Sequence[int], dtypes: Sequence[torch.dtype], strided_rows: bool = False
) -> None:
    """Raise ValueError unless tensor has this shape, one of these dtypes, and is contiguous.

    strided_rows: all but the last dimension may have any stride; the elements of the last one lie side by side.
    """
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} must be {' or '.join(str(dtype) for dtype in dtypes)}, got {tensor.dtype}")
    rows_fit = strided_rows and (tensor.shape[-1] <= 1 or tensor.stride(-1) == 1)
    if not rows_fit and not tensor.is_contiguous():
        needed = "a last dimension of stride 1" if strided_rows else "to be contiguous"
        raise ValueError(f"{name} needs {needed}, got shape {list(shape)} with strides {list(tensor.stride())}")
