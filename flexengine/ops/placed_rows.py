"""Rows of the hidden state that a tower gives, as a chunk finds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


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
