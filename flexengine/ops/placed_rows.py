"""Rows of the hidden state that a tower gives, as a chunk finds them, and which of their tokens see each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flexengine.ops.attention.kernels import Lengths


class RowStore(Protocol):
    """Holds the rows of a batch and their gradients on the host, and runs the tower."""

    rows: Tensor
    """[depth, R, D], page-locked where there is a GPU."""
    trained: bool
    """Whether something of the tower is, so that gradients of rows are wanted."""

    def make(self, weights: Mapping[str, Tensor], pieces: Sequence[slice]) -> None:
        """Make those of these rows that are not there."""
        ...

    def take(self, depth: int, pieces: Sequence[slice], grads: Tensor) -> None:
        """Keep the gradients [n, D] of these rows."""
        ...

    def backward(
        self, weights: Mapping[str, Tensor], pieces: Sequence[slice], trained: Sequence[str],
        add: Callable[[str, Tensor], object],
    ) -> None:  # fmt: skip
        """Run backward of calls all of whose rows have gradients, now that these have."""
        ...


class PlacedRows(NamedTuple):
    """Rows of a chunk that a tower gives. at [n] int64: which rows these are. pieces: their numbers in the batch."""

    at: Tensor
    pieces: tuple[slice, ...]
    store: RowStore

    def values(self, depth: int, device: torch.device) -> Tensor:
        """The rows [n, D] of one depth on a device. Order: after `make`, on the stream that it ran on."""
        return torch.cat([self.store.rows[depth, piece].to(device, non_blocking=True) for piece in self.pieces])

    def take(self, depth: int, grad: Tensor) -> None:
        """Keep the gradients of the rows, of that of the chunk [T, D]."""
        self.store.take(depth, self.pieces, grad.index_select(0, self.at))


@dataclass
class SeenBlocks:
    """Which tokens of a chunk see each other: spans (start, end) of two tokens or more."""

    spans: tuple[tuple[int, int], ...]
    device: torch.device

    def within(self, rows: slice) -> SeenBlocks | None:
        """Those within these rows, counted from the first of them; None if there are none."""
        own = ((a, b) for a, b in self.spans if rows.start <= a and b <= rows.stop)
        spans = tuple((a - rows.start, b - rows.start) for a, b in own)
        return SeenBlocks(spans, self.device) if spans else None

    @cached_property
    def queries(self) -> Tensor:
        """Rows [n] of tokens that see later ones, each block from its end."""
        return torch.tensor([row for a, b in self.spans for row in range(b - 2, a - 1, -1)]).to(self.device)

    @cached_property
    def keys(self) -> Tensor:
        """Rows [n] of tokens that are seen by earlier ones."""
        return self.queries + 1

    @cached_property
    def lengths(self) -> Lengths:
        """Each block's share of these rows."""
        lengths = [b - a - 1 for a, b in self.spans]
        ends = torch.tensor([0, *lengths]).cumsum(0).to(self.device, torch.int32)
        return Lengths(tuple(lengths), ends)


def spans_of(at: Tensor, start: int) -> Iterator[tuple[int, int]]:
    """Runs of two or more among ascending positions [n], moved by `start`."""
    if len(at):
        for run in at.tensor_split((at.diff() != 1).nonzero().flatten() + 1):
            if len(run) > 1:
                yield int(run[0]) + start, int(run[-1]) + 1 + start
