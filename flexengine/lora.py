"""Which low-rank adapters a job trains, as a value that options, models and files share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

ALL_LINEAR = "all-linear"
"""The target that means every linear layer of the blocks."""


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters of the blocks' linear layers, which are trained in place of the model.

    targets: all-linear (every linear layer of the blocks), names of modules (q_proj, mlp.down_proj) or regular
    expressions that match a whole name. rank, alpha: the product of an adapter is multiplied by alpha / rank, with
    use_rslora by alpha / sqrt(rank). dropout: probability for an element of what an adapter reads, while training.
    Raises: ValueError for values that no adapter can have.
    """

    targets: str | Sequence[str] = (ALL_LINEAR,)
    rank: int = 16
    alpha: float = 16.0
    use_rslora: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", (self.targets,) if isinstance(self.targets, str) else tuple(self.targets))
        if self.rank < 1:
            raise ValueError(f"lora rank must be at least 1, got {self.rank}")
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"lora alpha must be finite and more than 0, got {self.alpha}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"lora dropout must be at least 0 and below 1, got {self.dropout}")
        if not self.targets:
            raise ValueError(f"lora targets is empty; give {ALL_LINEAR} or names of modules, such as q_proj v_proj")

    @property
    def scale(self) -> float:
        """What the product of an adapter is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)
