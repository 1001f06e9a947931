"""What a model's attention does with its scores: how they are scaled and bounded, and which keys a query sees."""

from __future__ import annotations

import math
from typing import NamedTuple


class AttentionStyle(NamedTuple):
    """Scores are scale * q.k, None for 1 / sqrt(H), as `soft_cap * tanh(scores / soft_cap)` where that is not 0.

    A query sees the last `window` keys up to its own; 0: all of them. sinks: every head has one, a parameter
    (sinks.py). Source of the soft cap: Gemma Team 2024, "Gemma 2"; of the window: Child et al. 2019,
    "Generating Long Sequences with Sparse Transformers".
    """

    scale: float | None = None
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False

    def scale_of(self, head_dim: int) -> float:
        """The factor on q.k for heads of width `head_dim`."""
        return 1.0 / math.sqrt(head_dim) if self.scale is None else self.scale

    def within(self, keys: int) -> AttentionStyle:
        """The same for queries that have at most `keys` keys up to their own: without a window that hides none."""
        return self._replace(window=0) if self.window >= keys else self

    def first_key(self, query: int) -> int:
        """Index of the first key that the query of this index sees."""
        return max(0, query - self.window + 1) if self.window else 0

    def mean_keys(self, seq_len: float) -> float:
        """Keys that a query sees, on average over a sequence of `seq_len` tokens."""
        if not self.window or seq_len <= self.window:
            return seq_len / 2
        return self.window - self.window**2 / (2 * seq_len)


class AttentionShape(NamedTuple):
    """What the speed of attention depends on, beside lengths: query heads of a key head, widths of a key and of a
    value, the window (0: none), and whether scores have a soft cap."""

    members: int
    head_dim: int
    value_dim: int
    window: int = 0
    capped: bool = False

    @property
    def style(self) -> AttentionStyle:
        """A style of this shape; any soft cap is as fast as another."""
        return AttentionStyle(window=self.window, soft_cap=50.0 if self.capped else 0.0)

    def forward_flops(self, seq_len: float) -> float:
        """FLOPs of a query of one head, on average over a sequence: a product with keys and one with values."""
        return 2.0 * (self.head_dim + self.value_dim) * self.style.mean_keys(seq_len)

    def backward_flops(self, seq_len: float) -> float:
        """The same backward: three products with keys and two with values."""
        return 2.0 * (3 * self.head_dim + 2 * self.value_dim) * self.style.mean_keys(seq_len)


CAUSAL = AttentionStyle()
"""All keys up to the query's own, scaled by 1 / sqrt(H)."""
