"""States in 8 bits: codes of a published codebook for every element, and a float32 scale for every block of elements.

A block is divided by its largest magnitude, so that an outlier costs precision in its own block alone, and each value
becomes the nearest of 256. The codebook spends its codes on seven decades of magnitudes, since the elements of a moment
differ by orders of magnitude. Source: Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization",
https://arxiv.org/abs/2110.02861, dynamic (tree) quantization with a sign bit, and without one for what is never
negative.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 256
"""Elements that share a scale."""
NUM_DECADES = 7
_BUCKETS = 1 << 16
_GATHERED = 3  # bytes that vector instructions, which gather four at a time, may read behind the table


class Codebook(NamedTuple):
    """256 values in ascending order, from -1 (or 0) to 1, and what finds the nearest of a value quickly.

    thresholds [256]: code k becomes k + 1 from thresholds[k] on; the last is NaN, which none reaches. first_codes
    [65536] uint8: the code of the least float32 whose upper 16 bits are the index. A value's code is that, or one more,
    since a bucket of equal upper bits is narrower than the distance of two codes.
    """

    values: Tensor
    thresholds: Tensor
    first_codes: Tensor

    def to(self, device: torch.device) -> Codebook:
        """The same tables on a device."""
        return Codebook(*(table.to(device) for table in self))


@cache
def codebook(signed: bool, device: torch.device | None = None) -> Codebook:
    """The codebook for values from -1 to 1, or from 0 to 1, on a device (default: the CPU)."""
    if device is not None and device.type != "cpu":
        return codebook(signed).to(device)
    exact = _values(signed)
    values = exact.float()
    middles = (values[:-1].double() + values[1:].double()) / 2
    thresholds = torch.cat([_least_float32_from(middles), torch.tensor([torch.nan])])
    least = _least_of_buckets()
    first_codes = torch.zeros(_BUCKETS + _GATHERED, dtype=torch.uint8)
    first_codes[:_BUCKETS] = _code_of(least, thresholds)
    return Codebook(values, thresholds, first_codes[:_BUCKETS])


def encode_blocks(x: Tensor, book: Codebook) -> tuple[Tensor, Tensor]:
    """Codes [n] uint8 and scales [blocks] float32 of float32 values [n]; blocks count from the first element.

    A value midway between two codes takes the higher. A NaN takes code 0, in a block whose scale is NaN.
    """
    padding = -len(x) % BLOCK
    blocks = torch.nn.functional.pad(x, (0, padding)).view(-1, BLOCK)
    # As bit patterns, so that every implementation finds the same largest magnitude: NaN above infinity above the rest.
    magnitudes = torch.where(torch.isnan(blocks), 0x7FC0_0000, blocks.view(torch.int32) & 0x7FFF_FFFF)
    scales = magnitudes.amax(dim=1).to(torch.int32).view(torch.float32)
    divisors = torch.where(scales == 0, 1.0, scales)
    codes = _code_of(blocks / divisors[:, None], book.thresholds).to(torch.uint8)
    return codes.flatten()[: len(x)], scales


def decode_blocks(codes: Tensor, scales: Tensor, book: Codebook) -> Tensor:
    """The float32 values [n] of codes [n] and scales [blocks]."""
    return book.values[codes.long()] * scales.repeat_interleave(BLOCK)[: len(codes)]


def _values(signed: bool) -> Tensor:
    """The codebook in float64.

    A byte's bits are a sign (if any), zeros that tell the decade, a one, and a fraction: the fewer zeros, the more bits
    are left. The fractions of a decade are the middles of equal intervals of [0.1, 1]. 0 and 1 take the codes left.
    """
    found = [torch.tensor([0.0, 1.0], dtype=torch.float64)]
    for decade in range(NUM_DECADES):
        count = 2**decade if signed else 2 ** (decade + 1)
        bounds = torch.linspace(0.1, 1.0, count + 1, dtype=torch.float64)
        fractions = (bounds[:-1] + bounds[1:]) / 2 * 10.0 ** (decade - NUM_DECADES + 1)
        found += [fractions, -fractions] if signed else [fractions]
    return torch.cat(found).sort().values


def _least_float32_from(x: Tensor) -> Tensor:
    """The least float32 that is not below each float64."""
    near = x.float()
    return torch.where(near.double() < x, torch.nextafter(near, torch.tensor(torch.inf)), near)


def _least_of_buckets() -> Tensor:
    """The least float32 of every pattern of upper 16 bits; NaN for the patterns of NaN."""
    upper = torch.arange(_BUCKETS, dtype=torch.int64)
    bits = (upper << 16) | torch.where(upper >= 0x8000, 0xFFFF, 0)  # of negative numbers the largest magnitude
    least = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)
    return torch.where((upper & 0x7F80) == 0x7F80, torch.where((upper & 0x7F) == 0, _infinity(upper), torch.nan), least)


def _infinity(upper: Tensor) -> Tensor:
    return torch.where(upper >= 0x8000, -torch.inf, torch.inf)


def _code_of(x: Tensor, thresholds: Tensor) -> Tensor:
    """The number of thresholds that each value reaches: of the nearest codebook value. 0 for NaN."""
    codes = torch.searchsorted(thresholds[:-1].contiguous(), x.contiguous(), right=True)
    return torch.where(torch.isnan(x), 0, codes)
