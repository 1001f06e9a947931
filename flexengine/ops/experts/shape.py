"""What the speed of experts' products depends on, in plain Python: the probe measures it, ops declare it."""

from __future__ import annotations

from typing import NamedTuple


class ExpertShape(NamedTuple):
    """A matrix that every expert has: how many there are, how many of them take a token, inputs and outputs."""

    experts: int
    per_token: int
    in_features: int
    out_features: int

    def flops(self, tokens: int) -> float:
        """FLOPs of one pass over `tokens` tokens."""
        return 2.0 * tokens * self.per_token * self.in_features * self.out_features
