"""Update formulas, gradient clipping and learning-rate schedules: mathematics on tensors, no streams and no budgets."""

from flexengine.optim.adamw import AdamW

__all__ = ["AdamW"]
