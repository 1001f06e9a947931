"""The dynamic programme over layers: least cost against GPU bytes for many blocks that choose among the same options.

States are exact (bytes, cost) points, not bins, so nothing is lost to rounding; between layers they are thinned to the
cheapest point of each of so many equal stretches. Blocks of one kind are alike, so n of them take log2(n) merges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Frontier:
    """Points that no other beats: bytes ascending, cost strictly descending.

    left, right: for every point its index in the two frontiers of `parts`, or its member when `parts` is None.
    """

    num_bytes: np.ndarray
    cost: np.ndarray
    left: np.ndarray
    right: np.ndarray
    parts: tuple[Frontier, Frontier] | None

    def best_within(self, budget_bytes: np.ndarray) -> np.ndarray:
        """Index [N] of the cheapest point of at most so many bytes [N]; -1 where there is none."""
        return np.searchsorted(self.num_bytes, budget_bytes, side="right") - 1

    def counts(self, point: int) -> Counter[int]:
        """Count how many blocks take each member at a point."""
        found: Counter[int] = Counter()
        pending: dict[tuple[Frontier, int], int] = {(self, point): 1}
        while pending:
            (node, at), times = pending.popitem()
            if node.parts is None:
                found[int(node.left[at])] += times
                continue
            for part, index in zip(node.parts, (node.left[at], node.right[at]), strict=True):
                pending[part, int(index)] = pending.get((part, int(index)), 0) + times
        return found


def frontier_of(
    num_bytes: np.ndarray, cost: np.ndarray, choices: np.ndarray, counts: Sequence[int], limit_bytes: int, points: int
) -> Frontier | None:
    """Find the frontier of all blocks from what one of each kind takes.

    num_bytes, cost: [C, K] of a block by kind and choice; choices: those that may be taken; counts: blocks of every
    kind; limit_bytes: of all blocks; points: kept between merges. Members are kind * K + choice. Returns None when not
    even the least bytes fit.
    """
    if int(np.asarray(counts) @ num_bytes[:, choices].min(axis=1)) > limit_bytes:
        return None
    total: Frontier | None = None
    for kind, count in enumerate(counts):
        members = kind * num_bytes.shape[1] + choices[_pareto(num_bytes[kind, choices], cost[kind, choices])]
        block = Frontier(num_bytes.ravel()[members], cost.ravel()[members], members, members, None)
        same = repeat(block, count, limit_bytes, points)
        total = same if total is None else merge(total, same, limit_bytes, points if kind < len(counts) - 1 else None)
    return total


def merge(a: Frontier, b: Frontier, limit_bytes: int, points: int | None) -> Frontier:
    """Add a point of each, and keep the sums of at most `limit_bytes` that no other beats; of more than `points` those
    evenly apart in bytes."""
    num_bytes = (a.num_bytes[:, None] + b.num_bytes[None, :]).ravel()
    cost = (a.cost[:, None] + b.cost[None, :]).ravel()
    fitting = np.flatnonzero(num_bytes <= limit_bytes)
    keep = fitting[_pareto(num_bytes[fitting], cost[fitting])]
    if points is not None and len(keep) > points:
        keep = keep[_thinned(num_bytes[keep], points)]
    width = len(b.num_bytes)
    return Frontier(num_bytes[keep], cost[keep], keep // width, keep % width, (a, b))


def repeat(block: Frontier, count: int, limit_bytes: int, points: int) -> Frontier:
    """Find the frontier of `count` blocks alike, by doubling. The last merge is not thinned."""
    power, total, left = block, None, count
    while left:
        last = left == left & 1
        if left & 1:
            total = power if total is None else merge(total, power, limit_bytes, None if last else points)
        left >>= 1
        if left:
            power = merge(power, power, limit_bytes, points if left != 1 or total is not None else None)
    assert total is not None, "a kind has at least one block"
    return total


def _pareto(num_bytes: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """Positions of the points that no other beats in bytes and cost, fewest bytes first."""
    order = np.argsort(num_bytes, kind="stable")
    ranked = cost[order]
    before = np.concatenate(([np.inf], np.minimum.accumulate(ranked)))[: len(ranked)]
    return order[ranked < before]


def _thinned(num_bytes: np.ndarray, points: int) -> np.ndarray:
    """Positions of the first point and of the last one in each of so many equal stretches of bytes."""
    first, last = num_bytes[0], num_bytes[-1]
    stretch = ((num_bytes - first) * points) // (last - first + 1)
    keep = np.flatnonzero(np.concatenate((stretch[1:] != stretch[:-1], [True])))
    return keep if keep[0] == 0 else np.concatenate(([0], keep))
