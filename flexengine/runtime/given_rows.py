"""Makes rows that a tower gives: once for a batch, before its rounds, into a slot of the host that its chunks read."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.models.spec import ModelSpec
from flexengine.ops.custom_loss import IGNORE_INDEX
from flexengine.ops.given_rows import Columns, GivenRows
from flexengine.ops.placed_rows import PlacedRows
from flexengine.runtime.arena import Arenas
from flexengine.schedule.fixed_slots import tower_offsets
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
    """Runs the tower of one layout. Its weights and the rows of a batch lie in the host's arena."""

    def __init__(self, layout: Layout, arenas: Arenas) -> None:
        assert layout.model.given is not None, "the model has a tower"
        self._given, self._arenas = layout.model.given, arenas
        dtype = getattr(torch, layout.plan.request.numerics.compute)
        slot, offsets = layout.place("tower", memory="host"), tower_offsets(self._given, dtype.itemsize)
        shapes = self._given.tower.shapes
        self._weights = {name: arenas.view(slot, offsets[name], shape, dtype) for name, shape in shapes.items()}
        shape = self._given.max_tokens, layout.model.hidden_size
        self._rows = arenas.view(layout.place("given_rows", memory="host"), 0, shape, dtype)

    def load(self, folder: Path | None) -> None:
        """Read the tower's weights. Raises: ValueError where there is no checkpoint, or it lacks some."""
        if folder is None:
            raise ValueError(
                f"max_image_tokens={self._given.max_tokens}: the tower that reads {self._given.name} is not trained, so"
                " it needs a checkpoint; leave it out to train the text alone from random weights"
            )
        self._given.tower.read(folder, self._weights)

    def make(self, batch: GivenInput) -> None:
        """Make all rows of a batch. Waits for the device.

        Raises: ValueError unless they are as many as their tokens.
        """
        end, tower = 0, self._given.tower
        for call in tower.calls(batch.columns):
            rows = tower(self._weights, call, self._arenas.device)
            if end + len(rows) <= batch.starts[-1]:
                self._rows[end : end + len(rows)].copy_(rows)
            end += len(rows)
            del rows
        if end != batch.starts[-1]:
            raise ValueError(_wrong_count(self._given, batch.starts[-1], end))

    def of_chunk(self, batch: GivenInput, chunk: PackedChunk) -> PlacedRows | None:
        """The rows of a chunk; None where it has none. Order: after `make`."""
        placed, values, first, starts = torch.zeros(chunk.tokens, dtype=torch.bool), [], 0, batch.starts
        for piece in chunk.ranges:
            at = batch.at[piece.sequence]
            low, high = torch.searchsorted(at, torch.tensor([piece.start, piece.start + piece.length])).tolist()
            if low < high:
                placed[at[low:high] - piece.start + first] = True
                values.append(self._rows[starts[piece.sequence] + low : starts[piece.sequence] + high])
            first += piece.length
        if not values:
            return None
        at, others = (mask.nonzero().flatten().to(self._arenas.device) for mask in (placed, ~placed))
        return PlacedRows(at, others, values)


def _wrong_count(given: GivenRows, tokens: int, rows: int) -> str:
    return (
        f"the batch has {tokens} tokens that stand for {given.name} (id {given.token_id}), but its {given.name} give"
        f" {rows} rows; give input_ids and {given.tower.columns[0]} as the processor of this model makes them, uncut"
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


def without_targets(model: ModelSpec, ids: list[Tensor]) -> list[Tensor]:
    """Targets of a batch without labels: its tokens, but not those that stand for rows."""
    token = None if model.given is None else model.given.token_id
    return ids if token is None else [torch.where(row == token, IGNORE_INDEX, row) for row in ids]
