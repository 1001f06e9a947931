"""A linear programme written by names: variables, rows, a sum to minimise; solved by HiGHS through scipy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog


class Optimum(NamedTuple):
    """The least value, every variable's value, and by row how much a unit of slack in it would save (at least 0)."""

    least: float
    values: dict[str, float]
    prices: dict[str, float]


class LinearProgram:
    """Variables are at least 0. Rows say: sum of coefficient * variable <= (or =) a number."""

    def __init__(self) -> None:
        self._upper: dict[str, float | None] = {}
        self._rows: dict[str, tuple[Mapping[str, float], float]] = {}
        self._equal: list[tuple[Mapping[str, float], float]] = []

    def variable(self, name: str, upper: float | None = None) -> str:
        """A variable between 0 and `upper` (None: no limit); returns its name."""
        self._upper[name] = upper
        return name

    def at_most(self, row: str, terms: Mapping[str, float], limit: float) -> None:
        """sum of terms <= limit."""
        self._rows[row] = (terms, limit)

    def equals(self, terms: Mapping[str, float], value: float) -> None:
        """sum of terms = value."""
        self._equal.append((terms, value))

    def minimise(self, objective: Mapping[str, float]) -> Optimum | None:
        """The least sum of coefficient * variable; None when no point satisfies all rows."""
        column = {name: i for i, name in enumerate(self._upper)}
        cost = _matrix([objective], column)[0]
        found = linprog(
            cost,
            A_ub=_matrix([terms for terms, _ in self._rows.values()], column),
            b_ub=[limit for _, limit in self._rows.values()],
            A_eq=_matrix([terms for terms, _ in self._equal], column) if self._equal else None,
            b_eq=[value for _, value in self._equal] if self._equal else None,
            bounds=[(0.0, upper) for upper in self._upper.values()],
            method="highs",
        )
        if found.status != 0:
            return None
        prices = {row: -float(price) for row, price in zip(self._rows, found.ineqlin.marginals, strict=True)}
        return Optimum(float(found.fun), {name: float(found.x[i]) for name, i in column.items()}, prices)


def _matrix(rows: list[Mapping[str, float]], column: Mapping[str, int]) -> np.ndarray:
    matrix = np.zeros((len(rows), len(column)))
    for i, terms in enumerate(rows):
        for name, coefficient in terms.items():
            matrix[i, column[name]] = coefficient
    return matrix
