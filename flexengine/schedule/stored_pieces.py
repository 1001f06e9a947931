"""Where the bytes of a frozen group lie whose matrices are stored in fewer bytes: pieces, run after run.

A run of elements (schedule/parts.py) becomes a run of bytes: matrices of one shape and format one behind the other, and
between them what stays in the compute dtype. So parts cross the link as runs of bytes, and are decoded piece by piece
into the elements that layers read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, reduce
from itertools import groupby
from typing import NamedTuple

from flexengine.models.spec import GroupSpec, ParamSpec
from flexengine.ops.base import Work
from flexengine.ops.formats.weight_format import StoredMatrix
from flexengine.ops.formats.weight_formats import FORMATS
from flexengine.schedule.layer_program import align
from flexengine.schedule.parts import Part, Run


class Piece(NamedTuple):
    """`count` matrices of one shape in a format, or as one row elements that stay as they are (storage `compute`).

    first: its first element in the group. start: its first byte in the plane. num_bytes: of one matrix.
    """

    storage: str
    first: int
    start: int
    count: int
    rows: int
    columns: int
    num_bytes: int

    @property
    def numel(self) -> int:
        """Elements of all matrices."""
        return self.count * self.rows * self.columns

    @property
    def total_bytes(self) -> int:
        """Bytes of all matrices."""
        return self.count * self.num_bytes

    @property
    def layout(self) -> StoredMatrix:
        """How one matrix is stored."""
        return _layout(self.storage, self.rows, self.columns)

    def decode_work(self, compute_bytes: int) -> Work:
        """Work of decoding: the bytes are read, and the elements written in the compute dtype."""
        return Work(memory_bytes=float(self.total_bytes + self.numel * compute_bytes), kernels=1)


@lru_cache(maxsize=1024)
def _layout(storage: str, rows: int, columns: int) -> StoredMatrix:
    return FORMATS[storage].layout(rows, columns)


def total_work(works: Iterable[Work]) -> Work:
    """The sum of several pieces of work."""
    return reduce(Work.plus, works, Work())


class RunBytes(NamedTuple):
    """The bytes of a run: where they begin in the plane and in a slot with the run's part, and how many they are."""

    start: int
    slot_start: int
    num_bytes: int


class StoredPieces(NamedTuple):
    """A group's pieces in order of their elements, the bytes of every run by its number, and those of the plane.

    decoded: whether layers read decoded elements; else they read the stored bytes, which are one run.
    """

    pieces: tuple[Piece, ...]
    runs: Mapping[int, RunBytes]
    num_bytes: int
    decoded: bool = True

    def place_of(self, first: int) -> tuple[Piece, int]:
        """The piece with this element of the group, and the byte of the plane where the element, or the matrix that
        begins with it, lies."""
        piece = next(p for p in self.pieces if p.first <= first < p.first + p.numel)
        return piece, piece.start + (first - piece.first) * piece.total_bytes // piece.numel

    def pieces_of(self, run: Run) -> list[Piece]:
        """The pieces of a run."""
        return [p for p in self.pieces if run.first <= p.first < run.first + run.numel]

    def decode_work(self, compute_bytes: int) -> Work:
        """Work of decoding the whole group."""
        return total_work(piece.decode_work(compute_bytes) for piece in self.pieces)

    def part_bytes(self, part: Part) -> int:
        """Bytes of a slot for a part."""
        return max(
            (self.runs[r.number].slot_start + align(self.runs[r.number].num_bytes) for r in part.runs), default=0
        )


def stored_pieces(
    group: GroupSpec, offsets: Mapping[str, int], parts: tuple[Part, ...], element_bytes: int
) -> StoredPieces | None:
    """Lay out a group's bytes; None when all of it stays in the compute dtype, which takes `element_bytes` each."""
    if all(param.storage == "compute" for param in group.params):
        return None
    assert group.frozen, f"{group.name} is trained, so that its weights are stored as they are"
    units = [unit for param in group.params for unit in _units(param, offsets[param.name], element_bytes)]
    units.sort(key=lambda unit: unit.first)
    pieces: list[Piece] = []
    runs: dict[int, RunBytes] = {}
    end = 0
    for run in sorted((run for part in parts for run in part.runs), key=lambda run: run.number):
        begin = align(end)
        end = begin
        own = [unit for unit in units if run.first <= unit.first < run.first + run.numel]
        for _, alike in groupby(own, key=lambda unit: unit._replace(first=0)):
            members = list(alike)
            piece = members[0]._replace(start=align(end), count=len(members))
            end = piece.start + piece.total_bytes
            pieces.append(piece)
        runs[run.number] = RunBytes(begin, 0, end - begin)
    for part in parts:
        slot_end = 0
        for run in part.runs:
            runs[run.number] = runs[run.number]._replace(slot_start=slot_end)
            slot_end += align(runs[run.number].num_bytes)
    decoded = any(param.storage != "compute" and not param.multiplied_as_stored for param in group.params)
    assert decoded or len(runs) == 1, f"{group.name} comes in parts, of which layers find no stored bytes"
    return StoredPieces(tuple(pieces), runs, align(end), decoded)


def stored_shapes(param: ParamSpec) -> tuple[tuple[int, ...], ...]:
    """Shapes of the matrices, or stacks of them, that a parameter is stored in."""
    if param.multiplied_as_stored:
        return (param.shape,)
    return tuple(source.shape for source in param.sources)


def _units(param: ParamSpec, first: int, element_bytes: int) -> Iterator[Piece]:
    """The matrices of a parameter, source by source; what stays as it is comes in rows of its first dimension."""
    if param.storage == "compute":
        rows, width = (param.shape[0], math.prod(param.shape[1:])) if len(param.shape) > 1 else (1, param.numel)
        for row in range(rows):
            yield Piece("compute", first + row * width, 0, 1, 1, width, width * element_bytes)
        return
    for *stack, rows, columns in stored_shapes(param):
        num_bytes = _layout(param.storage, rows, columns).num_bytes
        for _ in range(math.prod(stack)):
            yield Piece(param.storage, first, 0, 1, rows, columns, num_bytes)
            first += rows * columns
