"""Numbers of the target tokens of a batch, by which losses on blocks of logits find what belongs to each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

IGNORE = -100


def target_numbers(labels: Sequence[Sequence[int]]) -> Tensor:
    """Numbers [sequences, longest] int64 of tokens that have a loss, in the order of sequences; -1 for others.

    The first token of a sequence has none: nothing predicts it.
    """
    found = torch.full((len(labels), max(map(len, labels))), -1)
    count = 0
    for row, own in zip(found, labels, strict=True):
        places = 1 + (torch.tensor(list(own[1:]), dtype=torch.int64) != IGNORE).nonzero()[:, 0]
        row[places] = torch.arange(count, count + len(places))
        count += len(places)
    return found
