"""Update formulas, gradient clipping and learning-rate schedules: mathematics on tensors, no streams and no budgets."""

from flexengine.optim.adamw import AdamW
from flexengine.optim.lion import Lion
from flexengine.optim.muon import Muon
from flexengine.optim.sgd import SGD

Optimizer = AdamW | Muon | Lion | SGD
OPTIMIZERS: dict[str, type[Optimizer]] = {"adamw": AdamW, "muon": Muon, "lion": Lion, "sgd": SGD}
"""Settings of optimizers by the names that options have for them."""

__all__ = ["OPTIMIZERS", "SGD", "AdamW", "Lion", "Muon", "Optimizer", "name_of"]


def name_of(optimizer: Optimizer) -> str:
    """The name that options have for an optimizer's settings."""
    return next(name for name, kind in OPTIMIZERS.items() if type(optimizer) is kind)
