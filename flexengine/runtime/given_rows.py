"""Makes rows that a tower gives, call by call as chunks ask for them, into a slot of the host; and their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.models.spec import ModelSpec
from flexengine.ops.custom_loss import IGNORE_INDEX
from flexengine.ops.given_rows import AddGrad, Columns, GivenRows, TowerCall
from flexengine.ops.placed_rows import PlacedRows, SeenBlocks, spans_of
from flexengine.runtime.arena import Arenas
from flexengine.schedule.layout import Layout
from flexengine.schedule.packing import PackedChunk


class GivenInput(NamedTuple):
    """What a batch says of rows that are given: the tower's columns, and which tokens of each sequence stand for rows.

    at: positions [n] int64, sequence by sequence. axes: positions [axes, T] of each sequence in several axes; empty
    where the model has one.
    """

    columns: Columns
    at: list[Tensor]
    axes: tuple[Tensor, ...] = ()

    @property
    def starts(self) -> list[int]:
        """The number of the first row of each sequence, and of the end."""
        return [0, *accumulate(len(at) for at in self.at)]


class RowMaker:
    """Runs the tower of one layout. The rows of a batch, and their gradients, lie in the host's arena."""

    def __init__(self, layout: Layout, arenas: Arenas) -> None:
        assert layout.model.given is not None, "the model has a tower"
        self._given, self._device = layout.model.given, arenas.device
        self._dtype = getattr(torch, layout.plan.request.numerics.compute)
        self.trained, shape = layout.model.trains_tower, layout.model.rows_shape
        self.rows = arenas.view(layout.place("given_rows", memory="host"), 0, shape, self._dtype)
        grads = layout.place("given_grads", memory="host") if self.trained else None
        self._grads = self.rows if grads is None else arenas.view(grads, 0, shape, self._dtype)
        self._calls = list[TowerCall]()

    def begin(self, batch: GivenInput, rounds: Sequence[Sequence[PackedChunk]]) -> None:
        """Take a batch, which is run in these rounds: no call is of two, as several ranks may run them.

        Raises: ValueError unless its things give as many rows as there are tokens for them, in each of its parts.
        """
        borders = _borders(batch, rounds)
        self._calls = self._given.tower.calls(batch.columns, borders)
        self._ends = [0, *accumulate(call.rows for call in self._calls)]
        if self._ends[-1] != batch.starts[-1]:
            raise ValueError(_wrong_count(self._given, batch.starts[-1], self._ends[-1]))
        if not borders <= {*self._ends}:
            raise ValueError(_cut(self._given))
        self._made, self._left = [False] * len(self._calls), [call.rows for call in self._calls]

    def of_chunk(self, batch: GivenInput, chunk: PackedChunk) -> PlacedRows | None:
        """The rows of a chunk; None where it has none. Order: after `begin`."""
        placed, first = torch.zeros(chunk.tokens, dtype=torch.bool), 0
        for piece in chunk.ranges:
            at = batch.at[piece.sequence]
            placed[at[(at >= piece.start) & (at < piece.start + piece.length)] - piece.start + first] = True
            first += piece.length
        pieces = tuple(_pieces(batch, chunk))
        return PlacedRows(placed.nonzero().flatten().to(self._device), pieces, self) if pieces else None

    def _reached(self, pieces: Iterable[slice]) -> Iterator[tuple[int, int]]:
        """The calls that rows are of, and how many of each."""
        for piece in pieces:
            for number, (start, end) in enumerate(pairwise(self._ends)):
                count = min(end, piece.stop) - max(start, piece.start)
                if count > 0:
                    yield number, count

    def _columns(self, number: int) -> Columns:
        """What a call reads, on the device."""
        found = self._calls[number].columns
        return {
            name: column.to(self._device, self._dtype if column.is_floating_point() else None)
            for name, column in found.items()
        }

    # -- as of RowStore ----------------------------------------------------------------------------------------------

    def make(self, weights: Mapping[str, Tensor], pieces: Sequence[slice]) -> None:
        """Make those of these rows that are not there."""
        for number, _ in self._reached(pieces):
            if not self._made[number]:
                rows = self._given.tower(weights, self._columns(number))
                place = self.rows[:, self._ends[number] : self._ends[number + 1]]
                assert rows.shape == place.shape, f"a call gave {list(rows.shape)} rows, not {list(place.shape)}"
                for own, found in zip(place, rows, strict=True):
                    own.copy_(found, non_blocking=True)
                self._made[number] = True

    def take(self, depth: int, pieces: Sequence[slice], grads: Tensor) -> None:
        """Keep the gradients [n, D] of these rows."""
        start = 0
        for piece in pieces:
            end = start + piece.stop - piece.start
            self._grads[depth, piece].copy_(grads[start:end], non_blocking=True)
            start = end

    def backward(
        self, weights: Mapping[str, Tensor], pieces: Sequence[slice], trained: Sequence[str], add: AddGrad
    ) -> None:
        """Run backward of calls all of whose rows have gradients, now that these have."""
        for number, count in self._reached(pieces):
            self._left[number] -= count
            if self._left[number] == 0:
                own = self._grads[:, self._ends[number] : self._ends[number + 1]]
                grads = torch.stack([one.to(self._device, non_blocking=True) for one in own])
                self._given.tower.backward(weights, trained, self._columns(number), grads, add)


def _pieces(batch: GivenInput, chunk: PackedChunk) -> Iterator[slice]:
    """The numbers of a chunk's rows in the batch."""
    for piece in chunk.ranges:
        start = batch.starts[piece.sequence]
        bounds = torch.tensor([piece.start, piece.start + piece.length])
        low, high = torch.searchsorted(batch.at[piece.sequence], bounds).tolist()
        if low < high:
            yield slice(start + low, start + high)


def _borders(batch: GivenInput, rounds: Sequence[Sequence[PackedChunk]]) -> set[int]:
    """The numbers of rows with which those of another round begin, in the order of sequences."""
    run_in = {p.sequence: number for number, chunks in enumerate(rounds) for chunk in chunks for p in chunk.ranges}
    own = [(start, run_in.get(i)) for i, start in enumerate(batch.starts[:-1]) if len(batch.at[i])]
    return {start for (_, before), (start, number) in pairwise(own) if number != before}


def _wrong_count(given: GivenRows, tokens: int, rows: int) -> str:
    return (
        f"the batch has {tokens} tokens that stand for {given.name} (id {given.token_id}), but its {given.name} give"
        f" {rows} rows; give input_ids and {given.tower.columns[0]} as the processor of this model makes them, uncut"
    )


def _cut(given: GivenRows) -> str:
    return (
        f"tokens of one of the {given.name} of the batch lie in two sequences; give input_ids and"
        f" {given.tower.columns[0]} as the processor of this model makes them, uncut"
    )


def split_columns(model: ModelSpec, columns: Mapping[str, object]) -> tuple[dict[str, object], dict[str, Tensor]]:
    """Divide a batch's columns into those of tokens and those that a tower reads.

    Raises: ValueError where some of the tower's are missing.
    """
    given = model.given
    if given is None:
        return dict(columns), {}
    own = {name: torch.as_tensor(columns[name]) for name in given.tower.columns if columns.get(name) is not None}
    first = given.tower.columns[0]
    if own and first not in own:
        raise ValueError(f"the batch has {', '.join(own)} without {first}; give both, as the processor makes them")
    return {name: value for name, value in columns.items() if name not in given.tower.columns}, own


def given_input(model: ModelSpec, ids: list[Tensor], columns: dict[str, Tensor]) -> GivenInput | None:
    """What a batch of these token ids says of rows that are given; None where it has none.

    Raises: ValueError for more tokens that stand for rows than a batch may have.
    """
    given = model.given
    if given is None or not columns:
        return None
    found = GivenInput(columns, [(row == given.token_id).nonzero().flatten() for row in ids])
    if found.starts[-1] > given.max_tokens:
        raise ValueError(
            f"the batch has {found.starts[-1]} tokens of {given.name}, more than max_image_tokens={given.max_tokens};"
            " give it in several fwd_bwd calls before step(), or raise max_image_tokens"
        )
    axes = given.tower.positions(ids, columns) if given.num_axes > 1 else ()
    return found._replace(axes=tuple(axes))


def axes_of(batch: GivenInput | None, chunk: PackedChunk, num_axes: int) -> Tensor:
    """Positions [axes, T] of a chunk: equal in all axes where a batch has no images."""
    if batch is None:
        counted = torch.cat([torch.arange(p.start, p.start + p.length) for p in chunk.ranges])
        return counted.expand(num_axes, -1)
    return torch.cat([batch.axes[p.sequence][:, p.start : p.start + p.length] for p in chunk.ranges], 1)


def blocks_of(
    model: ModelSpec, batch: GivenInput | None, chunk: PackedChunk, device: torch.device
) -> SeenBlocks | None:
    """Which tokens of a chunk see each other, as tokens of one thing; None where none do."""
    if batch is None or model.given is None or not model.given.block_rows:
        return None
    spans, first = list[tuple[int, int]](), 0
    for piece in chunk.ranges:
        at = batch.at[piece.sequence]
        own = at[(at >= piece.start) & (at < piece.start + piece.length)]
        spans += spans_of(own, first - piece.start)
        first += piece.length
    return SeenBlocks(tuple(spans), device) if spans else None


def without_targets(model: ModelSpec, ids: list[Tensor]) -> list[Tensor]:
    """Targets of a batch without labels: its tokens, but not those that stand for rows."""
    token = None if model.given is None else model.given.token_id
    return ids if token is None else [torch.where(row == token, IGNORE_INDEX, row) for row in ids]
