"""MXFP4: four bits for each element, and 32 inputs of an output share a scale, a power of two.

An element is a number of E2M1 (one sign, two exponent and one mantissa bit: 0, 0.5, 1, 1.5, 2, 3, 4 or 6) times the
scale of its block, 2^(byte - 127) (E8M0; byte 255 is NaN). A matrix here is used as x @ weight, [inputs, outputs], as
gpt-oss has its experts; its codes lie output by output, two in a byte, the first in the low half, as checkpoints hold
them, so that these are kept as they are.
Source: Open Compute Project 2023, "OCP Microscaling Formats (MX) Specification", version 1.0, sections 5.3 and 6.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from flexengine.ops.formats.weight_format import Encoder, StoredMatrix, WeightFormat, require_finite, stored_matrix

SPAN = 32
"""Inputs that share a scale."""
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LARGEST_EXPONENT = 2
"""The exponent of 6 = 1.5 * 2^2, the largest element."""
_BIAS = 127


@cache
def numbers(device: torch.device) -> Tensor:
    """What the 16 codes stand for, float32."""
    return torch.tensor([*MAGNITUDES, *(-x for x in MAGNITUDES)], device=device)


@cache
def _thresholds(device: torch.device) -> Tensor:
    """The largest magnitudes that become each code but the last: of two as near, the one with an even code is taken."""
    numbers = torch.tensor(MAGNITUDES)
    middles = (numbers[:-1] + numbers[1:]) / 2
    below = torch.nextafter(middles, torch.zeros_like(middles))
    return torch.where(torch.arange(len(middles)) % 2 == 0, middles, below).to(device)


def nearest(x: Tensor) -> Tensor:
    """The codes of the nearest numbers of E2M1, uint8; beyond 6 that of 6."""
    magnitudes = torch.bucketize(x.abs().contiguous(), _thresholds(x.device), out_int32=True)
    return (magnitudes + 8 * torch.signbit(x)).to(torch.uint8)


def scale_values(scales: Tensor) -> Tensor:
    """float32 of E8M0 bytes, exact."""
    return scales.view(torch.float8_e8m0fnu).float()


class Mxfp4(WeightFormat):
    """MXFP4 of matrices [inputs, outputs]."""

    name = "mxfp4"

    def layout(self, rows: int, columns: int) -> StoredMatrix:
        if rows % SPAN:
            raise ValueError(
                f"MXFP4 stores {SPAN} inputs with one scale, and {rows} x {columns} has {rows}; leave --base-dtype"
                " mxfp4 out"
            )
        blocks = rows // SPAN
        codes, scales = (columns, blocks, SPAN // 2), (columns, blocks)
        return stored_matrix(rows, columns, codes=(codes, torch.uint8), scales=(scales, torch.uint8))

    def row_step(self, columns: int) -> int:
        return SPAN

    def encoder(self, stored: Tensor, layout: StoredMatrix) -> Encoder:
        return _Mxfp4Encoder(layout.views(stored))

    def values(self, fields: Mapping[str, Tensor], layout: StoredMatrix, first_row: int, num_rows: int) -> Tensor:
        blocks = slice(first_row // SPAN, (first_row + num_rows) // SPAN)
        pairs = fields["codes"][:, blocks].int()
        codes = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(2)
        scaled = numbers(codes.device)[codes] * scale_values(fields["scales"][:, blocks])[:, :, None]
        return scaled.view(layout.columns, num_rows).t()

    def launch(
        self, kernels: ModuleType, stored: Tensor, layout: StoredMatrix, out: Tensor, rows: Tensor | None = None
    ) -> None:
        kernels.decode_mxfp4(stored, layout.fields["scales"].start, (layout.rows, layout.columns), out, rows)


class _Mxfp4Encoder(Encoder):
    def __init__(self, fields: dict[str, Tensor]) -> None:
        self.fields = fields

    def add(self, first_row: int, slab: Tensor) -> None:
        blocks = slab.t().reshape(slab.shape[1], -1, SPAN)
        largest = blocks.abs().amax(dim=2)
        require_finite(largest)
        exponents = torch.frexp(largest).exponent - 1 - _LARGEST_EXPONENT
        exponents = torch.where(largest > 0, exponents, -_BIAS).clamp(-_BIAS, _BIAS)
        codes = nearest(torch.ldexp(blocks, -exponents[:, :, None]))
        place = slice(first_row // SPAN, first_row // SPAN + blocks.shape[1])
        self.fields["codes"][:, place].copy_(codes[:, :, 0::2] | codes[:, :, 1::2] << 4)
        self.fields["scales"][:, place].copy_((exponents + _BIAS).to(torch.uint8))

    def finish(self) -> None:
        """Nothing is left: every slab has whole blocks."""
