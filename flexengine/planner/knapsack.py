"""The dynamic programme over layers: least cost against GPU bytes for many layers that choose among the same options.

States are exact (bytes, cost) points, not bins, so nothing is lost to rounding; between layers they are thinned to the
cheapest point of each of MAX_POINTS equal stretches. Layers of one class are alike, so n of them take log2(n) merges.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

MAX_POINTS = 48


@dataclass(frozen=True, eq=False)
class Choices:
    """Points on the way to a selection: bytes ascending, cost strictly descending.

    left, right: for every point the index into `parts`' two frontiers, or into the options when `parts` is None.
    """

    num_bytes: np.ndarray
    cost: np.ndarray
    left: np.ndarray
    right: np.ndarray
    parts: tuple[Choices, Choices] | None

    def best_within(self, budget_bytes: int) -> int | None:
        """Index of the cheapest point of at most so many bytes; None when there is none."""
        count = int(np.searchsorted(self.num_bytes, budget_bytes, side="right"))
        return count - 1 if count else None

    def counts(self, point: int) -> Counter[int]:
        """How many layers take each option at a point."""
        found: Counter[int] = Counter()
        pending: dict[tuple[Choices, int], int] = {(self, point): 1}
        while pending:
            (node, at), times = pending.popitem()
            if node.parts is None:
                found[int(node.left[at])] += times
                continue
            for part, index in zip(node.parts, (node.left[at], node.right[at]), strict=True):
                pending[part, int(index)] = pending.get((part, int(index)), 0) + times
        return found


def one_layer(num_bytes: np.ndarray, cost: np.ndarray, options: np.ndarray) -> Choices:
    """The undominated ones of `options` (indices into num_bytes and cost)."""
    keep = options[_pareto(num_bytes[options], cost[options])]
    return Choices(num_bytes[keep], cost[keep], keep, keep, None)


def merge(a: Choices, b: Choices, limit_bytes: int, thin: bool = True) -> Choices:
    """Undominated sums of a point of each, at most `limit_bytes` large."""
    num_bytes = (a.num_bytes[:, None] + b.num_bytes[None, :]).ravel()
    cost = (a.cost[:, None] + b.cost[None, :]).ravel()
    fitting = np.flatnonzero(num_bytes <= limit_bytes)
    keep = fitting[_pareto(num_bytes[fitting], cost[fitting])]
    if thin and len(keep) > MAX_POINTS:
        keep = keep[_thinned(num_bytes[keep])]
    width = len(b.num_bytes)
    return Choices(num_bytes[keep], cost[keep], keep // width, keep % width, (a, b))


def repeat(layer: Choices, count: int, limit_bytes: int) -> Choices:
    """The frontier of `count` layers alike, by doubling. The last merge is not thinned."""
    power, total, left = layer, None, count
    while left:
        last = left == left & 1
        if left & 1:
            total = power if total is None else merge(total, power, limit_bytes, thin=not last)
        left >>= 1
        if left:
            power = merge(power, power, limit_bytes, thin=left != 1 or total is not None)
    assert total is not None, "a class has at least one layer"
    return total


def together(classes: list[Choices], limit_bytes: int) -> Choices:
    """The frontier of layers of several classes."""
    total = classes[0]
    for other in classes[1:]:
        total = merge(total, other, limit_bytes, thin=other is not classes[-1])
    return total


def _pareto(num_bytes: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """Positions of the points that no other beats in bytes and cost, fewest bytes first."""
    order = np.argsort(num_bytes, kind="stable")
    ranked = cost[order]
    before = np.concatenate(([np.inf], np.minimum.accumulate(ranked)))[: len(ranked)]
    return order[ranked < before]


def _thinned(num_bytes: np.ndarray) -> np.ndarray:
    """Positions of the first point and of the last one in each of MAX_POINTS equal stretches of bytes."""
    first, last = num_bytes[0], num_bytes[-1]
    stretch = ((num_bytes - first) * MAX_POINTS) // (last - first + 1)
    keep = np.flatnonzero(np.concatenate((stretch[1:] != stretch[:-1], [True])))
    return keep if keep[0] == 0 else np.concatenate(([0], keep))
