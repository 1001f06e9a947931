"""NF4: four bits for each element, blocks of 64 elements with a largest magnitude, and these in eight bits.

An element is the nearest of 16 numbers, quantiles of a normal distribution, times the magnitude of its block. The
blocks run over the flattened matrix. Double quantisation: the mean of all magnitudes is subtracted; of what is left,
256 blocks share a float32 magnitude, and each is the nearest of 256 numbers of the dynamic map times that.
Two elements lie in a byte, the first in the high half. Sources: Dettmers et al. 2023, "QLoRA",
https://arxiv.org/abs/2305.14314, appendix E (the 16 numbers) and section 3; Dettmers et al. 2021, "8-bit Optimizers via
Block-wise Quantization", https://arxiv.org/abs/2110.02861, section 1.3 (the dynamic map). Checkpoints that were stored
in 4 bits have the same codes, so that these are kept as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from flexengine.ops.formats.weight_format import (
    SLAB_ELEMENTS,
    Encoder,
    StoredMatrix,
    WeightFormat,
    require_finite,
    stored_matrix,
)

BLOCK = 64
"""Elements that share a magnitude."""
NESTED_BLOCK = 256
"""Blocks whose magnitudes share one."""
CODEBOOK = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_EXPONENTS = 7
"""Decades of the dynamic map, of which the i-th has 2**i numbers of either sign."""


@cache
def codebook(device: torch.device) -> Tensor:
    """The 16 numbers, float32 [16]."""
    return torch.tensor(CODEBOOK, device=device)


@cache
def dynamic_map(device: torch.device) -> Tensor:
    """256 numbers from -1 to 1, ascending, float32: denser towards 0, decade by decade.

    In decade i, of magnitudes up to 10**(i - 6), 2**i numbers lie in the middles of equal parts of [0.1, 1]; 0 and 1
    complete them.
    """
    found = [0.0, 1.0]
    for i in range(_EXPONENTS):
        edges = torch.linspace(0.1, 1.0, 2**i + 1)
        middles = (edges[:-1] + edges[1:]) / 2.0
        scaled = (10.0 ** (i + 1 - _EXPONENTS) * middles).tolist()
        found += [*scaled, *(-x for x in scaled)]
    return torch.tensor(sorted(found), device=device)


@cache
def _thresholds(device: torch.device, nested: bool) -> Tensor:
    """The largest float32 not above the middle of each two neighbours: x is nearer to the upper one if it is larger."""
    numbers = (dynamic_map if nested else codebook)(torch.device("cpu")).double()
    middles = (numbers[:-1] + numbers[1:]) / 2
    rounded = middles.float()
    below = torch.nextafter(rounded, torch.full_like(rounded, -math.inf))
    return torch.where(rounded.double() > middles, below, rounded).to(device)


def nearest(x: Tensor, nested: bool = False) -> Tensor:
    """The index of the nearest of the 16 numbers, or of the dynamic map, uint8; the lower of two that are as near."""
    return torch.bucketize(x, _thresholds(x.device, nested), out_int32=True).to(torch.uint8)


def _padded_rows(x: Tensor, width: int) -> Tensor:
    """Flat x in rows of `width`, the last filled up with zeros."""
    missing = -x.numel() % width
    return (torch.cat((x, x.new_zeros(missing))) if missing else x).view(-1, width)


def _scaled(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows over their largest magnitudes, rows of zeros as they are; and the magnitudes."""
    largest = rows.abs().amax(dim=1)
    return rows / torch.where(largest > 0, largest, 1.0)[:, None], largest


class Nf4(WeightFormat):
    """NF4 with double quantisation: codes, magnitudes in 8 bits, their magnitudes, and the mean."""

    name = "nf4"

    def layout(self, rows: int, columns: int) -> StoredMatrix:
        codes, blocks = _pairs(rows, columns), -(-rows * columns // BLOCK)
        return stored_matrix(
            rows,
            columns,
            codes=((codes,), torch.uint8),
            absmax=((blocks,), torch.uint8),
            nested_absmax=((-(-blocks // NESTED_BLOCK),), torch.float32),
            offset=((1,), torch.float32),
        )

    def row_step(self, columns: int) -> int:
        return BLOCK // math.gcd(BLOCK, columns)

    def encoder(self, stored: Tensor, layout: StoredMatrix) -> Encoder:
        return _Nf4Encoder(layout.views(stored), layout)

    def constants(self) -> dict[str, Tensor]:
        cpu = torch.device("cpu")
        return {"codebook": codebook(cpu), "dynamic_map": dynamic_map(cpu)}

    def values(self, fields: Mapping[str, Tensor], layout: StoredMatrix, first_row: int, num_rows: int) -> Tensor:
        first, end = first_row * layout.columns, (first_row + num_rows) * layout.columns
        pairs = fields["codes"][first // 2 : end // 2].int()
        codes = torch.stack((pairs >> 4, pairs & 15), dim=-1).view(-1)
        blocks = slice(first // BLOCK, -(-end // BLOCK))
        numbers = codebook(codes.device)[codes]
        scales = self.magnitudes(fields, blocks).repeat_interleave(BLOCK)[: numbers.numel()]
        return (numbers * scales).view(num_rows, layout.columns)

    def magnitudes(self, fields: Mapping[str, Tensor], blocks: slice) -> Tensor:
        """The magnitudes of some blocks of a stored matrix, float32."""
        return block_magnitudes(fields, blocks)

    def launch(
        self, kernels: ModuleType, stored: Tensor, layout: StoredMatrix, out: Tensor, rows: Tensor | None = None
    ) -> None:
        starts = tuple(layout.fields[name].start for name in ("absmax", "nested_absmax", "offset"))
        kernels.decode_nf4(stored, starts, codebook(out.device), dynamic_map(out.device), out, rows)


class PlainNf4(Nf4):
    """NF4 without double quantisation: codes, and magnitudes in float32, as some checkpoints have them."""

    name = "nf4_float32"

    def layout(self, rows: int, columns: int) -> StoredMatrix:
        codes, blocks = _pairs(rows, columns), -(-rows * columns // BLOCK)
        return stored_matrix(
            rows, columns, codes=((codes,), torch.uint8), absmax=((blocks,), torch.float32)
        )  # fmt: skip

    def encoder(self, stored: Tensor, layout: StoredMatrix) -> Encoder:
        return _PlainNf4Encoder(layout.views(stored), layout)

    def constants(self) -> dict[str, Tensor]:
        return {"codebook": codebook(torch.device("cpu"))}

    def magnitudes(self, fields: Mapping[str, Tensor], blocks: slice) -> Tensor:
        return fields["absmax"][blocks]

    def launch(
        self, kernels: ModuleType, stored: Tensor, layout: StoredMatrix, out: Tensor, rows: Tensor | None = None
    ) -> None:
        start = layout.fields["absmax"].start
        kernels.decode_nf4(stored, (start, start, start), codebook(out.device), None, out, rows)


def _pairs(rows: int, columns: int) -> int:
    """Bytes of codes. Raises: ValueError for an odd number of elements."""
    if rows * columns % 2:
        raise ValueError(f"NF4 stores pairs of elements, and {rows} x {columns} is odd; leave --base-dtype nf4 out")
    return rows * columns // 2


def block_magnitudes(fields: Mapping[str, Tensor], blocks: slice) -> Tensor:
    """The magnitudes of some blocks of a stored matrix, float32."""
    numbers = dynamic_map(fields["absmax"].device)[fields["absmax"][blocks].int()]
    first = blocks.start // NESTED_BLOCK
    nested = fields["nested_absmax"][first : -(-blocks.stop // NESTED_BLOCK)].repeat_interleave(NESTED_BLOCK)
    begin = blocks.start - first * NESTED_BLOCK
    return numbers * nested[begin : begin + numbers.numel()] + fields["offset"]


class _Nf4Encoder(Encoder):
    def __init__(self, fields: dict[str, Tensor], layout: StoredMatrix) -> None:
        self.fields, self.columns, self.device = fields, layout.columns, torch.device("cpu")
        self.magnitudes: list[Tensor] = []

    def add(self, first_row: int, slab: Tensor) -> None:
        flat = slab.flatten()
        scaled, largest = _scaled(_padded_rows(flat, BLOCK))
        require_finite(largest)
        codes = nearest(scaled).view(-1)[: flat.numel()]
        first = first_row * self.columns // 2
        self.fields["codes"][first : first + flat.numel() // 2].copy_(codes[0::2] << 4 | codes[1::2])
        # Those of a large matrix would be tens of MiB on the device, and their mean is the same wherever it is taken.
        self.magnitudes.append(largest.cpu())
        self.device = slab.device

    def finish(self) -> None:
        magnitudes = torch.cat(self.magnitudes)
        mean = magnitudes.double().mean().float()
        self.fields["offset"].copy_(mean.view(1))
        for first in range(0, magnitudes.numel(), SLAB_ELEMENTS):  # a multiple of NESTED_BLOCK
            part = (magnitudes[first : first + SLAB_ELEMENTS] - mean).to(self.device)
            scaled, largest = _scaled(_padded_rows(part, NESTED_BLOCK))
            codes = nearest(scaled, nested=True).view(-1)[: part.numel()]
            self.fields["absmax"][first : first + part.numel()].copy_(codes)
            nested = first // NESTED_BLOCK
            self.fields["nested_absmax"][nested : nested + largest.numel()].copy_(largest)


class _PlainNf4Encoder(_Nf4Encoder):
    def finish(self) -> None:
        self.fields["absmax"].copy_(torch.cat(self.magnitudes))
