"""Measured curves: (x, rate) points with units, and rates between the points. Plain Python."""

import math
import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from flexengine.wording import shown

Points = tuple[tuple[int, float], ...]
"""(x, rate) pairs: x is whole, at least 1 and strictly ascending; rates are finite and above 0."""
MAX_WHOLE = 2**63 - 1
"""Largest count of bytes or tokens, what 64 bits hold: longer whole numbers would overflow arithmetic with floats."""
LEAST_RATE, MOST_RATE = 1.0, 1e21
"""Bytes or operations per second of any machine. Planning with rates far outside of these would not end: at 1e-300
bytes/s no two plans differ in floating point."""


@dataclass(frozen=True)
class Curve:
    """One line of the chart: `points` are (x, y) pairs in plain units such as bytes and bytes/s.

    `name` says what was measured, in words; `x_unit` and `y_unit` are "tokens", "bytes", "threads", "FLOP/s" or
    "bytes/s". Curves are for people: the planner reads the fields of the profile.
    Raises: ValueError naming the curve, what it has and what is allowed.
    """

    name: str
    x_unit: str
    y_unit: str
    points: Points

    def __post_init__(self) -> None:
        for field in ("name", "x_unit", "y_unit"):
            value = getattr(self, field)
            if not isinstance(value, str) or not value:
                raise ValueError(f"hardware profile: curves: {field} is {shown(value)}, expected a non-empty string")
        check_points(f"curve {shown(self.name)}", self.points, self.x_unit, self.y_unit)

    @classmethod
    def from_dict(cls, values: Any) -> "Curve":
        """Make the curve that `dataclasses.asdict` described. Raises: ValueError."""
        keys = ("name", "x_unit", "y_unit", "points")
        if not isinstance(values, dict) or set(values) != set(keys):
            raise ValueError(f"hardware profile: curves: expected objects of {', '.join(keys)}, got {shown(values)}")
        return cls(values["name"], values["x_unit"], values["y_unit"], as_points("curves", values["points"]))


def interpolate(points: Sequence[tuple[int, float]], x: int) -> float:
    """Give the rate at x: linear in the logarithm of x between points, constant outside them.

    Rates are measured at powers of two, which are spaced evenly in the logarithm.
    """
    right = bisect_right(points, x, key=lambda point: point[0])
    if right == 0:
        return points[0][1]
    if right == len(points):
        return points[-1][1]
    (low_x, low_rate), (high_x, high_rate) = points[right - 1], points[right]
    share = math.log(x / low_x) / math.log(high_x / low_x)
    return low_rate + share * (high_rate - low_rate)


def as_points(name: str, values: Any) -> Any:
    """Turn lists of JSON into tuples, unchecked. Raises: ValueError if `values` is no list of lists."""
    if not isinstance(values, list | tuple) or not all(isinstance(point, list | tuple) for point in values):
        raise ValueError(f"hardware profile: {name} is {shown(values)}, expected a list of [x, rate] pairs")
    return tuple(tuple(point) for point in values)


def check_points(name: str, points: Any, x_unit: str, y_unit: str) -> None:
    """Check that `points` are `Points`. Raises: ValueError."""
    form = f"({x_unit}, {y_unit}) pairs"
    if not isinstance(points, tuple) or not points:
        raise ValueError(f"hardware profile: {name} is {shown(points)}, expected at least one of {form}")
    if any(not isinstance(point, tuple) or len(point) != 2 for point in points):
        raise ValueError(f"hardware profile: {name} is {shown(points)}, expected {form}")
    for x, rate in points:
        if not is_whole(x, 1):
            raise ValueError(f"hardware profile: {name} has a point at {shown(x)} {x_unit}, expected 1 to {MAX_WHOLE}")
        check_rate(f"{name} at {x} {x_unit}", rate)
    places = [x for x, _ in points]
    if any(later <= earlier for earlier, later in pairwise(places)):
        raise ValueError(
            f"hardware profile: {name} has points at {shown(places)} {x_unit}, expected strictly ascending ones"
        )


def check_positive(name: str, value: Any) -> None:
    """Check that `value` is a finite number above 0. Raises: ValueError."""
    if not is_finite(value) or value <= 0:
        raise ValueError(f"hardware profile: {name} is {shown(value)}, expected a finite number above 0")


def check_rate(name: str, value: Any) -> None:
    """Raises: ValueError unless `value` is a rate that a machine can have."""
    check_positive(name, value)
    if not LEAST_RATE <= value <= MOST_RATE:
        raise ValueError(
            f"hardware profile: {name} is {shown(value)}, expected {LEAST_RATE:g} to {MOST_RATE:g} per second"
        )


def is_finite(value: Any) -> bool:
    """Tell whether `value` is a number that a float can hold; JSON has whole numbers of any length."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return math.isfinite(value) if isinstance(value, float) else abs(value) <= sys.float_info.max


def is_whole(value: object, least: int) -> bool:
    """Tell whether `value` is a whole number from `least` to MAX_WHOLE."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MAX_WHOLE
