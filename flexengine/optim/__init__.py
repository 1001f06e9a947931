"""Update formulas, gradient clipping and learning-rate schedules: mathematics on tensors, no streams and no budgets."""

from flexengine.optim.adamw import AdamW
from flexengine.optim.lion import Lion
from flexengine.optim.sgd import SGD

Optimizer = AdamW | Lion | SGD
OPTIMIZERS: dict[str, type[Optimizer]] = {"adamw": AdamW, "lion": Lion, "sgd": SGD}
"""Settings of optimizers by the names that options have for them."""

__all__ = ["OPTIMIZERS", "SGD", "AdamW", "Lion", "Optimizer", "name_of"]


def name_of(optimizer: Optimizer) -> str:
    """The name that options have for an optimizer's settings."""
    return next(name for name, kind in OPTIMIZERS.items() if type(optimizer) is kind)
