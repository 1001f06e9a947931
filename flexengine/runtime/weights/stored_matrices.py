"""Writes and reads matrices that are stored in fewer bytes than the compute dtype takes.

They are stored while they are loaded, one tensor after the other and some rows at a time, on the engine's device: about
30 MiB beside the arenas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.checkpoint.reader import CheckpointReader, ReadRequest
from flexengine.ops.formats.weight_format import StoredMatrix, WeightFormat
from flexengine.ops.formats.weight_formats import FORMATS
from flexengine.optim.rounding import round_bf16_ties_away
from flexengine.runtime.arena import DTYPES, Arenas
from flexengine.schedule.layout import Layout
from flexengine.schedule.slots import Slot
from flexengine.schedule.stored_pieces import Piece

READ_ELEMENTS = 1 << 20
"""Elements that are read from a checkpoint at a time: 4 MiB as float32."""


class Span(NamedTuple):
    """Matrices that lie one behind the other, uint8 [U, bytes]; without a format, elements that stay as they are."""

    form: WeightFormat | None
    layout: StoredMatrix | None
    stored: Tensor

    @property
    def slabs(self) -> list[int]:
        """Elements that are written and read at a time, in order."""
        if self.form is None or self.layout is None:
            return [len(self.stored)]
        of_one = [count * self.layout.columns for _, count in self.form.slabs(self.layout)]
        return of_one * len(self.stored)


class StoredMatrices:
    """Finds what lies in groups with matrices in fewer bytes, on whichever side they live, and writes and reads it.

    A tensor of a checkpoint may lie in several spans: the experts of a layer, where they may come in parts.
    """

    def __init__(self, layout: Layout, arenas: Arenas) -> None:
        self._layout, self._arenas = layout, arenas
        self._compute = DTYPES[layout.plan.request.numerics.compute]

    def spans(self, group: int, first_element: int, count: int) -> list[Span]:
        """Where `count` elements from `first_element` of a group lie; of a format, whole matrices or rows of one."""
        stored, found, end = self._layout.groups[group].stored, list[Span](), first_element + count
        assert stored is not None, "the group is stored as it is"
        slot = self._layout.slots[self._layout.stored_slot("weights", group)]
        for piece in stored.pieces:
            first, last = max(piece.first, first_element), min(piece.first + piece.numel, end)
            if first >= last:
                continue
            found.append(self._span(slot, piece, first - piece.first, last - first))
        return found

    def _span(self, slot: Slot, piece: Piece, skipped: int, count: int) -> Span:
        if piece.storage == "compute":
            start = piece.start + skipped * self._compute.itemsize
            return Span(None, None, self._arenas.view(slot, start, (count,), self._compute))
        form, layout, numel = FORMATS[piece.storage], piece.layout, piece.rows * piece.columns
        number, before = divmod(skipped, numel)
        if count % numel:
            assert before + count <= numel, "sources are whole matrices, or some rows of one"
            layout, count = form.rows_of(layout, before // piece.columns, count // piece.columns), numel
        start, shape = piece.start + number * piece.num_bytes, (count // numel, piece.num_bytes)
        return Span(form, layout, self._arenas.view(slot, start, shape, torch.uint8))

    # -- in ----------------------------------------------------------------------------------------------------------

    def write(self, spans: Sequence[Span], values: Iterable[Tensor], split: bool) -> None:
        """Store flat values, which come piece by piece in order. Raises: ValueError for NaN and infinity in a format.

        split: elements that stay as they are, are rounded as the upper halves of float32 masters.
        """
        slabs = regrouped(values, [size for span in spans for size in span.slabs])
        for form, layout, stored in spans:
            if form is None or layout is None:
                slab = next(slabs)
                stored.copy_(round_bf16_ties_away(slab.float()) if split else slab)
                continue
            for matrix in stored:
                encoder = form.encoder(matrix, layout)
                for first, count in form.slabs(layout):
                    slab = next(slabs).to(self._arenas.device, torch.float32)
                    encoder.add(first, slab.view(count, layout.columns))
                encoder.finish()

    def keep(self, spans: Sequence[Span], fields_of: Callable[[int], Mapping[str, Tensor]]) -> bool:
        """Take over codes and scales, matrix by matrix; False where they were made with other numbers.

        fields_of: gives those of a matrix by its number. Where the answer is False nothing was written.
        """
        number = 0
        for form, layout, stored in spans:
            assert form is not None
            assert layout is not None
            for matrix in stored:
                fields = fields_of(number)
                # The tables of numbers belong to a tensor: where the first matrix's are equal, all are.
                if any(not torch.equal(fields[name], numbers) for name, numbers in form.constants().items()):
                    return False
                for name, target in layout.views(matrix).items():
                    target.copy_(fields[name].view(target.shape))
                number += 1
        return True

    # -- out ---------------------------------------------------------------------------------------------------------

    def values(self, spans: Sequence[Span]) -> Iterator[Tensor]:
        """The values that layers multiply, flat and slab by slab: decoded, in the compute dtype.

        They are rounded to it also where layers multiply codes and scales as they are stored.
        """
        for form, layout, stored in spans:
            if form is None or layout is None:
                yield stored
                continue
            for matrix in stored:
                fields = layout.views(matrix)
                for first, count in form.slabs(layout):
                    yield form.values(fields, layout, first, count).to(self._compute).flatten()


def read_pieces(
    reader: CheckpointReader, name: str, numel: int, dtype: torch.dtype = torch.float32
) -> Iterator[Tensor]:
    """A tensor of a checkpoint, flat, READ_ELEMENTS at a time; the next piece overwrites the one before."""
    buffer = torch.empty(min(numel, READ_ELEMENTS), dtype=dtype)
    for start in range(0, numel, READ_ELEMENTS):
        piece = buffer[: numel - start]
        reader.read_many([ReadRequest(name, piece, None, start)])
        yield piece


def regrouped(pieces: Iterable[Tensor], sizes: Iterable[int]) -> Iterator[Tensor]:
    """The elements of flat pieces in groups of other sizes."""
    incoming, left = iter(pieces), list[Tensor]()
    for size in sizes:
        while sum(map(len, left)) < size:
            left = [part.clone() for part in left]  # a reader may overwrite its piece with the next one
            left.append(next(incoming))
        whole = left[0] if len(left) == 1 else torch.cat(left)
        yield whole[:size]
        left = [whole[size:]] if len(whole) > size else []
