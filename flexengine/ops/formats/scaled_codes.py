"""Matrices in eight bits: a code for each element, and a float32 scale that neighbours share.

FP8: codes of E4M3, a scale for every block of 128 rows by 128 columns, cut at the edges; a scale is the largest
magnitude of its block over 448, the largest E4M3. Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section
3.3; checkpoints that are stored so keep their codes and scales.
int8: codes from -127 to 127, a scale for every row, its largest magnitude over 127. Source: Dettmers et al. 2022,
"LLM.int8()", https://arxiv.org/abs/2208.07339, section 2.1 (row-wise absmax quantisation).
Both divide and round to nearest even. A block of zeros has scale 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, ModuleType

import torch
from torch import Tensor

from flexengine.ops.formats.weight_format import (
    Encoder,
    Field,
    StoredMatrix,
    WeightFormat,
    on_device,
    require_finite,
    stored_matrix,
)


class ScaledCodes(WeightFormat):
    """Codes [R, C] of one dtype, and scales of blocks of `block_rows` rows by `block_columns` columns (None: all)."""

    def __init__(
        self, name: str, dtype: torch.dtype, largest: float, block_rows: int, block_columns: int | None
    ) -> None:
        self.name, self.dtype, self.largest = name, dtype, largest
        self.block_rows, self.block_columns = block_rows, block_columns

    def layout(self, rows: int, columns: int) -> StoredMatrix:
        across = 1 if self.block_columns is None else -(-columns // self.block_columns)
        scales = (-(-rows // self.block_rows), across)
        return stored_matrix(
            rows, columns, codes=((rows, columns), self.dtype), scales=(scales, torch.float32)
        )  # fmt: skip

    def row_step(self, columns: int) -> int:
        return self.block_rows

    def encoder(self, stored: Tensor, layout: StoredMatrix) -> Encoder:
        return _ScaledEncoder(self, layout.views(stored))

    def values(self, fields: Mapping[str, Tensor], layout: StoredMatrix, first_row: int, num_rows: int) -> Tensor:
        codes = fields["codes"][first_row : first_row + num_rows].float()
        first = first_row // self.block_rows
        scales = fields["scales"][first : first + -(-num_rows // self.block_rows)]
        return codes * self.spread(scales, num_rows, layout.columns)

    def rows_of(self, layout: StoredMatrix, first_row: int, num_rows: int) -> StoredMatrix:
        part = self.layout(num_rows, layout.columns)
        skipped = {"codes": first_row, "scales": first_row // self.block_rows}
        fields = {
            name: Field(
                whole.start + skipped[name] * whole.num_bytes // whole.shape[0], part.fields[name].shape, whole.dtype
            )
            for name, whole in layout.fields.items()
        }
        return StoredMatrix(num_rows, layout.columns, MappingProxyType(fields), layout.num_bytes)

    def spread(self, scales: Tensor, rows: int, columns: int) -> Tensor:
        """Scales of blocks as one for every element, or for every row."""
        by_row = scales.repeat_interleave(self.block_rows, dim=0)[:rows]
        if self.block_columns is None:
            return by_row
        return by_row.repeat_interleave(self.block_columns, dim=1)[:, :columns]

    def launch(
        self, kernels: ModuleType, stored: Tensor, layout: StoredMatrix, out: Tensor, rows: Tensor | None = None
    ) -> None:
        blocks = self.block_rows, self.block_columns or layout.columns
        start, shape = layout.fields["scales"].start, (layout.rows, layout.columns)
        kernels.decode_scaled(stored, self.dtype, start, blocks, shape, out, rows)


class _ScaledEncoder(Encoder):
    def __init__(self, form: ScaledCodes, fields: dict[str, Tensor]) -> None:
        self.form, self.fields = form, fields

    def add(self, first_row: int, slab: Tensor) -> None:
        form, (rows, columns) = self.form, slab.shape
        tall, wide = form.block_rows, form.block_columns or columns
        padded = torch.nn.functional.pad(slab, (0, -columns % wide, 0, -rows % tall))
        blocks = padded.view(padded.shape[0] // tall, tall, padded.shape[1] // wide, wide)
        magnitudes = blocks.abs().amax(dim=(1, 3))
        require_finite(magnitudes)
        scales = torch.where(magnitudes > 0, magnitudes / on_device(form.largest, slab), 1.0)
        scaled = (slab / form.spread(scales, rows, columns)).clamp(-form.largest, form.largest)
        codes = scaled if form.dtype.is_floating_point else scaled.round()
        self.fields["codes"][first_row : first_row + rows].copy_(codes.to(form.dtype))
        first = first_row // tall
        self.fields["scales"][first : first + len(scales)].copy_(scales)

    def finish(self) -> None:
        """Nothing is left: every slab has whole blocks."""


FP8_BLOCKS = ScaledCodes("fp8", torch.float8_e4m3fn, 448.0, 128, 128)
INT8_ROWS = ScaledCodes("int8", torch.int8, 127.0, 1, None)
