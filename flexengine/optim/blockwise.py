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
ZERO_CODE = 127
"""The code of 0 in the signed codebook, whose lesser codes mirror the greater ones; without a sign it is 0."""
LEAST_BUCKET, LAST_BUCKET = 0x33FF, 0x3F80
"""Upper 16 bits of float32: just below the least magnitude that reaches a middle between values, and of 1."""
RANK_SHIFT, TIE_SHIFT = 18, 17
_NO_MIDDLE = 1 << 16


class Codebook(NamedTuple):
    """256 values in ascending order, from -1 (or 0) to 1, and what finds the nearest of a value.

    thresholds [255]: code k becomes k + 1 from thresholds[k] on.

    steps [2946] int32 find it quickly. They are those of buckets of magnitudes of equal upper 16 bits, LEAST_BUCKET to
    LAST_BUCKET; lesser magnitudes are in the first. A bucket is narrower than the distance of two values, so that it
    has one middle between neighbours at the most. An entry packs how many middles are below the bucket (from bit
    RANK_SHIFT on), whether a float32 is the middle itself (bit TIE_SHIFT), which of negative values takes the lesser
    magnitude, and the lower 16 bits of the least magnitude from the middle on, or 2^16 where there is none.
    """

    values: Tensor
    thresholds: Tensor
    steps: Tensor

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
    thresholds = _least_float32_from(middles)
    return Codebook(values, thresholds, _steps(thresholds, middles, ZERO_CODE if signed else 0))


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


def _steps(thresholds: Tensor, middles: Tensor, zero_code: int) -> Tensor:
    """The steps of buckets, from the thresholds of codes from zero on and the middles that they are to reach."""
    reached = thresholds[zero_code:].contiguous()
    ties, patterns = reached.double() == middles[zero_code:], reached.view(torch.int32).long()
    buckets = torch.arange(LEAST_BUCKET, LAST_BUCKET + 1)
    ranks = torch.searchsorted(patterns, buckets << 16)
    following = ranks.clamp(max=len(patterns) - 1)
    pattern = patterns[following]
    inside = (ranks < len(patterns)) & (pattern >> 16 == buckets)
    middle_in_it = ties[following].long() << TIE_SHIFT | pattern & 0xFFFF
    return (ranks << RANK_SHIFT | torch.where(inside, middle_in_it, _NO_MIDDLE)).to(torch.int32)


def _code_of(x: Tensor, thresholds: Tensor) -> Tensor:
    """The number of thresholds that each value reaches: of the nearest codebook value. 0 for NaN."""
    codes = torch.searchsorted(thresholds, x.contiguous(), right=True)
    return torch.where(torch.isnan(x), 0, codes)
