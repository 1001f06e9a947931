"""Where values that are not finite began: in which weight, or in whose gradient."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from flexengine.models.spec import ModelSpec
from flexengine.runtime.weights.weight_store import WeightStore


class NotFiniteError(ValueError):
    """A trained weight holds NaN or infinity, so the model is not worth exporting."""


def checked(name: str, weight: Tensor) -> Tensor:
    """Return a weight, or a piece of it, that is about to be written. Raises: NotFiniteError."""
    if not torch.isfinite(weight).all():
        raise NotFiniteError(
            f"{name} holds values that are not finite in {weight.dtype}, so nothing is exported; load an earlier export"
            " and train with a smaller learning rate"
        )
    return weight


def first_bad_weight(weights: WeightStore) -> str:
    """Name the first weight, in order of forward, with a value that is not finite; empty when there is none."""
    good = (all(bool(torch.isfinite(piece).all()) for piece in weights.pieces(name)) for name in weights.runs)
    return next((name for name, is_good in zip(weights.runs, good, strict=True) if not is_good), "")


def first_bad_gradient(model: ModelSpec, bad: Collection[int]) -> str:
    """Name the group whose gradient was the first to be bad: backward runs from the head to the embedding.

    bad: indices of the groups whose gradients are not finite. What several layers read, such as a tied embedding, is
    bad as soon as one of them is, so it is named only when nothing else is bad.
    """
    readers = [sum(group in layer.groups for layer in model.layers) for group in range(len(model.groups))]
    backward = [group for layer in reversed(model.layers) for group in layer.groups if group in bad]
    own = [group for group in backward if readers[group] == 1]
    found = (own or backward)[:1]
    return model.groups[found[0]].name if found else ""
