"""Ways to keep a number in 16 bits: round it, round it at random, or keep the missing 16 bits beside it.

A bf16 number is the upper half of a float32: sign, 8 exponent bits, 7 mantissa bits. So every conversion here is
integer arithmetic on the bit pattern, which gives the same bits on every device and in any tiling.
`kernels/rounding.py` holds the same formulas for Triton; tests/kernels compares them bit by bit.
"""

import torch
from torch import Tensor

from flexengine.random_bits import random_bits16

_EXPONENT = 0x7F80_0000  # all ones: infinity (mantissa 0) or NaN
_QUIET_NAN = 0x7FC0_0000


def round_bf16_ties_away(x_f32: Tensor) -> Tensor:
    """Round float32 to the nearest bf16; ties go away from zero.

    Shapes: any; x_f32 float32, the result bf16 on the same device. Reads 4 and writes 2 bytes per element.
    Values above the largest bf16 become infinite, infinities stay, any NaN becomes the quiet NaN 0x7fc0.
    Raises: ValueError if x_f32 is not float32.
    Source: adding half of the last kept place to the magnitude and truncating; ties away (torch rounds ties to even)
    makes the rounding readable from the remainder alone, see `join_fp32`.
    """
    return _upper_half_as_bf16(_canonical_bits(x_f32) + 0x8000)


def split_fp32(master_f32: Tensor, weight_bf16_out: Tensor, remainder_int16_out: Tensor) -> None:
    """Write a float32 as bf16 weight (nearest, ties away) and the 16 mantissa bits that the weight lacks.

    Shapes: three tensors of one shape in float32, bf16 and int16. Together the outputs hold the float32 exactly, in the
    same 4 bytes; only the bf16 half has to cross the link for forward and backward.
    Exact for every finite value, both zeros and both infinities; every NaN becomes the one quiet NaN 0x7fc00000.
    Raises: ValueError on other dtypes.
    """
    _require_dtype("weight_bf16_out", weight_bf16_out, torch.bfloat16)
    _require_dtype("remainder_int16_out", remainder_int16_out, torch.int16)
    bits = _canonical_bits(master_f32)
    weight_bf16_out.copy_(_upper_half_as_bf16(bits + 0x8000))
    remainder_int16_out.copy_(((bits & 0xFFFF) ^ 0x8000) - 0x8000)  # the unsigned low half, read as a signed int16


def join_fp32(weight_bf16: Tensor, remainder_int16: Tensor) -> Tensor:
    """The float32 that `split_fp32` took apart.

    Shapes: weight_bf16 bf16 and remainder_int16 int16 of one shape; the result is a new float32 tensor of that shape.
    The weight was rounded up in magnitude exactly when the remainder, read unsigned, is at least 0x8000.
    Raises: ValueError on other dtypes.
    """
    _require_dtype("weight_bf16", weight_bf16, torch.bfloat16)
    _require_dtype("remainder_int16", remainder_int16, torch.int16)
    low = remainder_int16.to(torch.int32) & 0xFFFF
    upper = weight_bf16.contiguous().view(torch.int16).to(torch.int32) - (low >> 15)
    return ((upper << 16) | low).view(torch.float32)


def stochastic_round_bf16(x_f32: Tensor, seed: int, step: int, element_offset: int, stream: int = 0) -> Tensor:
    """Round float32 to one of its two bf16 neighbours at random, so that the expected value is x.

    Shapes: any; x_f32 float32, the result bf16. Element i of the flattened tensor uses the 16 random bits of counter
    `element_offset + i`, so cutting a tensor into tiles (with the offset of each) never changes a bit.
    `stream` separates tensors rounded in the same step (weight, first and second moment); step is any integer >= 0.
    The mean is exact: of the 65536 random values, exactly `low` round away from zero, where low are the 16 cut bits.
    Infinities pass, any NaN becomes the quiet NaN; a finite value above the largest bf16 may become infinite.
    Raises: ValueError if x_f32 is not float32.
    Source: Zamirai et al. 2020, Revisiting BFloat16 Training, https://arxiv.org/abs/2010.06192.
    """
    bits = _canonical_bits(x_f32)
    random16 = random_bits16(x_f32.numel(), x_f32.device, seed, step, element_offset, stream).view(x_f32.shape)
    finite = (bits & _EXPONENT) != _EXPONENT
    return _upper_half_as_bf16(torch.where(finite, bits + random16, bits))


def _canonical_bits(x_f32: Tensor) -> Tensor:
    """Bit pattern as int32, every NaN replaced by the quiet one: a payload must not round to infinity or to zero."""
    _require_dtype("x_f32", x_f32, torch.float32)
    bits = x_f32.contiguous().view(torch.int32)
    return torch.where(torch.isnan(x_f32), _QUIET_NAN, bits)


def _upper_half_as_bf16(bits: Tensor) -> Tensor:
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)


def _require_dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")
