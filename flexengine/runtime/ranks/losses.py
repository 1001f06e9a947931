"""Adds losses of chunks in their order, which decides the bits of the sum: those of one rank, or what all have told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def added(losses: Iterable[Tensor], device: torch.device) -> Tensor:
    """The sum of the losses of rounds [chunks], chunk by chunk, float64 [] on the device."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for row in losses:
        for loss in row:
            total += loss
    return total


def added_of_ranks(told: Sequence[Sequence[Sequence[float]]], tellers: Iterable[int]) -> float:
    """The same of what ranks have told: by rank, the losses of the chunks of a round, round after round.

    tellers: whose turn it is to tell, in the order of rounds and within a round of chunks.
    """
    rows, total = [iter(rounds) for rounds in told], 0.0
    for rank in tellers:
        for loss in next(rows[rank]):
            total += loss
    return total
