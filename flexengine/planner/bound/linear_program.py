"""A linear programme written by names: variables, rows, a sum to minimise; solved by HiGHS through scipy.

Searches of one request ask for the same programme several times, and one takes milliseconds: answers are remembered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import linprog

MOST_REMEMBERED = 512
"""Answers take a few KiB each."""
_remembered: dict[bytes, Any] = {}


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
        found = solved(
            cost,
            (_matrix([terms for terms, _ in self._rows.values()], column), [limit for _, limit in self._rows.values()]),
            (_matrix([terms for terms, _ in self._equal], column), [value for _, value in self._equal]),
            [np.inf if upper is None else upper for upper in self._upper.values()],
        )
        if found.status != 0:
            return None
        prices = {row: -float(price) for row, price in zip(self._rows, found.ineqlin.marginals, strict=True)}
        return Optimum(float(found.fun), {name: float(found.x[i]) for name, i in column.items()}, prices)


Rows = tuple[np.ndarray, Sequence[float] | np.ndarray]
"""Coefficients [R, V], and a limit for each row."""


def solved(cost: np.ndarray, at_most: Rows, equal: Rows, upper: Sequence[float] | None = None) -> Any:
    """What scipy's `linprog` finds for the least cost @ x with 0 <= x <= upper (None: no limit), as nobody may change
    it: the answer to the same question is given again."""
    told = (cost, *at_most, *equal, [] if upper is None else upper)
    digest = hashlib.blake2b(b"".join(np.asarray(part, dtype=np.float64).tobytes() for part in told))
    digest.update(repr([np.shape(part) for part in told]).encode())
    key = digest.digest()
    if key not in _remembered:
        (rows, limits), (equal_rows, values) = at_most, equal
        found = linprog(
            cost,
            A_ub=rows,
            b_ub=limits,
            A_eq=equal_rows if len(equal_rows) else None,
            b_eq=values if len(equal_rows) else None,
            bounds=(0, None) if upper is None else [(0.0, None if np.isinf(most) else most) for most in upper],
            method="highs",
        )
        if len(_remembered) == MOST_REMEMBERED:
            del _remembered[next(iter(_remembered))]
        _remembered[key] = found
    return _remembered[key]


def _matrix(rows: list[Mapping[str, float]], column: Mapping[str, int]) -> np.ndarray:
    matrix = np.zeros((len(rows), len(column)))
    for i, terms in enumerate(rows):
        for name, coefficient in terms.items():
            matrix[i, column[name]] = coefficient
    return matrix
