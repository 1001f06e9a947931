"""Which low-rank adapters a job trains, as a value that options, models and files share."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

ALL_LINEAR = "all-linear"
"""The target that means every linear layer of the blocks."""
ALL_EXPERTS = "all-experts"
"""The target that means every product of the experts of the blocks."""
EVERYTHING = "all"
"""The target that means both, where there are experts."""
KINDS = (ALL_LINEAR, ALL_EXPERTS, EVERYTHING)
"""Targets that mean all modules of a kind."""
PISSA = "pissa"
_INITS = re.compile(rf"default|orthogonal|{PISSA}(_niter_[1-9][0-9]?)?")


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters of the blocks' linear layers, which are trained in place of the model.

    targets: all-linear (every linear layer of the blocks but experts'), all-experts, all (both), names of modules
    (q_proj, mlp.down_proj) or regular expressions that match a whole name. rank, alpha: the product of an adapter is
    multiplied by alpha / rank, with use_rslora by alpha / sqrt(rank). dropout: probability for an element of what an
    adapter reads, while training. use_dora: each output has a trained magnitude beside the direction of its weights.
    init: default (A uniform, B zeros), orthogonal, pissa (the principal parts of the weights, which are taken out of
    them) or pissa_niter_N (the same by N iterations, which is faster). modules_to_save: modules that are trained in
    full beside the adapters, by the ends of their names: embed_tokens, lm_head, norms.
    Raises: ValueError for values that no adapter can have.
    """

    targets: str | Sequence[str] = (ALL_LINEAR,)
    rank: int = 16
    alpha: float = 16.0
    use_rslora: bool = False
    dropout: float = 0.0
    use_dora: bool = False
    init: str = "default"
    modules_to_save: str | Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in ("targets", "modules_to_save"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        if self.rank < 1:
            raise ValueError(f"lora rank must be at least 1, got {self.rank}")
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"lora alpha must be finite and more than 0, got {self.alpha}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"lora dropout must be at least 0 and below 1, got {self.dropout}")
        if not self.targets:
            raise ValueError(f"lora targets is empty; give {ALL_LINEAR} or names of modules, such as q_proj v_proj")
        self._check_init()

    def _check_init(self) -> None:
        if not isinstance(self.init, str) or not _INITS.fullmatch(self.init):
            raise ValueError(f"lora init={self.init!r} is not known; give default, orthogonal, pissa or pissa_niter_16")
        if self.init == "orthogonal" and self.rank % 2:
            raise ValueError(f"lora init='orthogonal' needs an even rank, got {self.rank}")

    @property
    def changes_base(self) -> bool:
        """Whether adapters start with a part of the frozen weights, which lose it."""
        return self.init.startswith(PISSA)

    @property
    def scale(self) -> float:
        """What the product of an adapter is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


class Targets(NamedTuple):
    """How a file of adapters names what they belong to.

    modules, parameters: adapted modules, and adapted tensors that are found by their own names. saved: modules that are
    trained in full. adapted: the whole names of adapted modules. doubled: the parameters whose adapters PEFT stacks of
    two. of_experts: whether single experts have adapters.
    """

    modules: Collection[str]
    parameters: Collection[str]
    saved: Collection[str]
    adapted: Collection[str]
    doubled: Collection[str]
    of_experts: bool
