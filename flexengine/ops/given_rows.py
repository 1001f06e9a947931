"""Rows that a tower gives to tokens of one kind, in the place of rows of the embedding.

A tower is what makes rows of the hidden state from something that is no text. It is frozen: it runs once for a batch,
before the batch's rounds, and nothing flows back to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flexengine.ops.base import OpEnv, Work
from flexengine.ops.embedding import Embedding

Columns = Mapping[str, Tensor]
"""What a tower reads of a batch, by the names that a processor of transformers gives."""


class Tower(Protocol):
    """What makes rows from columns of a batch. It knows nothing of where its weights lie."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of what it reads, of which the first must be there."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of its weights, by name."""
        ...

    def read(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Fill the weights from a checkpoint. Raises: ValueError for one that lacks some."""
        ...

    def calls(self, columns: Columns) -> list[Columns]:
        """Divide a batch's columns into those of single calls, in order; no plan has a say in it.

        Raises: ValueError for columns that do not go together, or for one thing of more rows than a call may have.
        """
        ...

    def positions(self, ids: Sequence[Tensor], columns: Columns) -> list[Tensor]:
        """Positions [axes, T] of sequences of these tokens, where positions have several axes.

        Raises: ValueError where tokens and columns do not go together.
        """
        ...

    def __call__(self, weights: Mapping[str, Tensor], call: Columns, device: torch.device) -> Tensor:
        """The rows [n, D] of a call, on a device. weights: on the host; each crosses when it is used."""
        ...


class TowerCost(NamedTuple):
    """What rows cost: most device bytes of a call beside the arena, work of a row, host bytes of columns for a row."""

    peak_bytes: int
    row_work: Work
    column_bytes: int


@dataclass(frozen=True)
class GivenRows:
    """Which tokens get their rows from a tower, and how many a batch may have of them.

    token_id: the token that stands for a row. name: what people call its things, for messages. max_tokens: most such
    tokens of a batch; share: the share of a full batch's tokens that these are. num_axes: axes that positions have.
    """

    name: str
    token_id: int
    max_tokens: int
    share: float
    tower: Tower
    cost: TowerCost
    num_axes: int = 1

    @property
    def num_parameters(self) -> int:
        """Elements of the tower's weights."""
        return sum(torch.Size(shape).numel() for shape in self.tower.shapes.values())

    @property
    def column_bytes(self) -> int:
        """Host bytes of the columns of the largest batch."""
        return self.max_tokens * self.cost.column_bytes


class EmbeddingWithRows(Embedding):
    """An embedding, some of whose rows are given. Those get no gradient; the work of making them is counted here."""

    def __init__(self, embedding: Embedding, given: GivenRows) -> None:
        e = embedding
        super().__init__(e.name, e.y, e.vocab_size, e.width, e.weight, e.scale)
        self.given = given

    def forward(self, env: OpEnv) -> None:
        super().forward(env)
        if env.chunk.given is not None:
            y, start = env.t[self.y], 0
            for rows in env.chunk.given.values:
                at = env.chunk.given.at[start : start + len(rows)]
                y.index_copy_(0, at, rows.to(y.device, non_blocking=True))
                start += len(rows)

    def _text_rows(self, env: OpEnv) -> tuple[Tensor, Tensor]:
        ids, grad, given = env.chunk.input_ids, env.g[self.y], env.chunk.given
        return (ids, grad) if given is None else (ids[given.others], grad[given.others])

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        placed = tokens * self.given.share
        copies = Work(memory_bytes=2.0 * placed * self.width * compute_bytes, kernels=1)
        return super().forward_work(tokens, seq_len, compute_bytes).plus(copies).plus(self._tower_work(placed))

    def _tower_work(self, rows: float) -> Work:
        # kernels of a call are launched for many rows at once, which the work of a row does not tell
        return self.given.cost.row_work.times(rows)

    def model_flops(self, seq_len: int) -> float:
        return 0.0  # as of every embedding: what a text of this length takes; images are not known by its length

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        placed = min(tokens, self.given.max_tokens) * self.width * compute_bytes
        return max(super().workspace_bytes(tokens, compute_bytes) + 2 * placed, self.given.cost.peak_bytes)

    def plain_workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        return max(super().plain_workspace_bytes(tokens, compute_bytes), self.given.cost.peak_bytes)
