"""Factors on the learning rate or the weight decay of some of a model's groups."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flexengine.models.freezing import groups_named
from flexengine.models.spec import ModelSpec
from flexengine.wording import shown


def group_factors(model: ModelSpec, option: str, given: Sequence[str]) -> tuple[float, ...]:
    """The factor of every group: 1, or what `given` says of it as NAME=FACTOR, where a later entry wins.

    NAME is one of those that `freeze` takes. Raises ValueError for other texts.
    """
    factors = [1.0] * len(model.groups)
    for text in given:
        name, equals, number = text.rpartition("=")
        factor = _number(number)
        if not equals or factor is None:
            raise ValueError(
                f"{option}={shown(text)}: write NAME=FACTOR with a number of at least 0, such as embed=0.1"
            )
        for group in groups_named(model, name, option):
            factors[group] = factor
    return tuple(factors)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None
