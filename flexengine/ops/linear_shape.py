"""What the speed of linear layers and head depends on, in plain Python: the probe measures it, ops declare it."""

from __future__ import annotations

from typing import NamedTuple


class LinearShape(NamedTuple):
    """A linear layer: its inputs and outputs per token, whether a residual is added, and how its weight lies.

    transposed: the weight is [in_features, out_features]. count: so many layers of a model are alike.
    """

    name: str
    in_features: int
    out_features: int
    adds: bool = False
    transposed: bool = False
    count: int = 1

    def flops(self, tokens: int) -> float:
        """FLOPs of one pass of one layer over `tokens` tokens."""
        return 2.0 * tokens * self.in_features * self.out_features


class HeadShape(NamedTuple):
    """The LM head with its losses: width of the hidden state, words, and the soft cap of logits (0: none)."""

    width: int
    vocab_size: int
    soft_cap: float = 0.0
