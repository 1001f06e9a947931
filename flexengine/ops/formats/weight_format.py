"""What a format of weights in fewer bytes states: how a matrix is stored, made and turned back into numbers.

A stored matrix is one run of bytes, a multiple of 16 of them, in which every field (codes, scales) begins at a fixed
place. So matrices of one shape lie one behind the other, and any of them can be copied, skipped or decoded alone. The
decoded value is a float32 product that is rounded once, to nearest even, to the dtype that is computed in: the decoded
base IS what layers multiply.

Shape legend: U matrices of one shape, R rows, C columns, N = R * C elements.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from flexengine.ops.base import use_kernel

if TYPE_CHECKING:
    from types import ModuleType

BaseDtype = Literal["compute", "fp8", "nf4", "int8", "mxfp4"]
"""What a job stores frozen matrices in: the compute dtype, or a kind of format."""
Storage = Literal["compute", "fp8", "nf4", "nf4_float32", "int8", "mxfp4"]
"""What a frozen matrix is stored in: the compute dtype, or the name of a format, which begins with its kind."""
ALIGNMENT_BYTES = 16
"""Fields begin at multiples of this, so that kernels read them in the widest words."""
SLAB_ELEMENTS = 1 << 20
"""Elements that are encoded or decoded at a time outside of a step: about 30 MiB with all temporaries."""
MOST_ELEMENTS = 2**31 - 2**16
"""Elements of one matrix that kernels index in 32 bits; stacks of matrices are indexed in 64."""


class Field(NamedTuple):
    """An array within a stored matrix, `start` bytes from its beginning."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class StoredMatrix:
    """How a format stores a matrix of R rows and C columns: its fields by name, and its bytes."""

    rows: int
    columns: int
    fields: Mapping[str, Field]
    num_bytes: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.rows * self.columns

    def views(self, stored: Tensor) -> dict[str, Tensor]:
        """The fields of one stored matrix, uint8 [num_bytes], as tensors."""
        found = {}
        for name, field in self.fields.items():
            part = stored[field.start : field.start + field.num_bytes]
            found[name] = part.view(field.dtype).view(field.shape)
        return found


def stored_matrix(rows: int, columns: int, **fields: tuple[tuple[int, ...], torch.dtype]) -> StoredMatrix:
    """Lay fields, given as (shape, dtype), one behind the other."""
    if not 0 < rows * columns <= MOST_ELEMENTS:
        raise ValueError(
            f"a matrix of {rows} x {columns} elements cannot be stored in fewer bytes: at most {MOST_ELEMENTS} elements"
            " are; leave --base-dtype out"
        )
    placed, end = {}, 0
    for name, (shape, dtype) in fields.items():
        placed[name] = Field(end, shape, dtype)
        end += -(-placed[name].num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return StoredMatrix(rows, columns, MappingProxyType(placed), end)


class Encoder(ABC):
    """Stores one matrix slab by slab: `add` rows in order, then `finish`."""

    @abstractmethod
    def add(self, first_row: int, slab: Tensor) -> None:
        """Store rows [r, C] in float32, a multiple of the format's `row_step` but for the last slab.

        Raises: ValueError for NaN and infinity, which no format has.
        """

    @abstractmethod
    def finish(self) -> None:
        """Store what depends on all rows."""


class WeightFormat(ABC):
    """A way to store matrices in fewer bytes than the compute dtype takes."""

    name: str

    @abstractmethod
    def layout(self, rows: int, columns: int) -> StoredMatrix:
        """How a matrix is stored. Raises: ValueError for a shape that the format does not have."""

    @abstractmethod
    def row_step(self, columns: int) -> int:
        """Slabs that are encoded begin at multiples of so many rows."""

    @abstractmethod
    def encoder(self, stored: Tensor, layout: StoredMatrix) -> Encoder:
        """What writes one matrix into uint8 [num_bytes], on any device."""

    def constants(self) -> dict[str, Tensor]:
        """Tables of numbers, on the CPU, that codes stand for."""
        return {}

    @abstractmethod
    def values(self, fields: Mapping[str, Tensor], layout: StoredMatrix, first_row: int, num_rows: int) -> Tensor:
        """Some rows of a stored matrix in float32, [num_rows, C]; first_row is a multiple of `row_step`."""

    def rows_of(self, layout: StoredMatrix, first_row: int, num_rows: int) -> StoredMatrix:
        """Some rows of a stored matrix as a matrix of its own, whose fields lie within the same bytes.

        Where a matrix consists of several tensors, each is written and read so. first_row and, but for the last rows,
        num_rows are multiples of `row_step`.
        """
        raise ValueError(f"{self.name} stores no rows by themselves")

    @abstractmethod
    def launch(
        self, kernels: ModuleType, stored: Tensor, layout: StoredMatrix, out: Tensor, rows: Tensor | None = None
    ) -> None:
        """Launch the format's kernel of `kernels.decode_weights`; arguments are those of `decode`."""

    def slabs(self, layout: StoredMatrix) -> Iterator[tuple[int, int]]:
        """(first row, rows) of the slabs that a matrix is encoded and decoded in."""
        step = self.row_step(layout.columns)
        step *= max(1, SLAB_ELEMENTS // (step * layout.columns))
        return ((first, min(step, layout.rows - first)) for first in range(0, layout.rows, step))

    def decode(self, stored: Tensor, layout: StoredMatrix, out: Tensor, rows: Tensor | None = None) -> None:
        """out = the matrices' values, rounded once to out's dtype.

        Shapes: stored [U, num_bytes] uint8, out [U, N] contiguous in bf16, fp32 or fp64; rows [U] int32, None for all:
        a matrix with 0 rows is left out, and its part of out stays as it is.
        Cost: reads the stored bytes, writes out.
        Order: launches on the current stream, never synchronises.
        """
        if use_kernel(out) and out.dtype != torch.float64:
            from flexengine.kernels import decode_weights  # noqa: PLC0415 (Triton is imported when first used)

            return self.launch(decode_weights, stored, layout, out, rows)
        wanted = range(len(stored)) if rows is None else rows.nonzero().flatten().tolist()
        for number in wanted:
            fields, target = layout.views(stored[number]), out[number].view(layout.rows, layout.columns)
            for first, count in self.slabs(layout):
                target[first : first + count].copy_(self.values(fields, layout, first, count))


def on_device(value: float, like: Tensor) -> Tensor:
    """A scalar beside a tensor: by a Python number, CUDA would divide with a rounded reciprocal."""
    return torch.full((), value, dtype=torch.float32, device=like.device)


def require_finite(largest: Tensor) -> None:
    """Raise ValueError unless all of the largest magnitudes are finite."""
    if not bool(torch.isfinite(largest).all()):
        raise ValueError("it has values that are NaN or infinite, which no format of fewer bytes holds")
