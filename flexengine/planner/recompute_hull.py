"""What a block may keep, for the linear relaxation: bytes against recompute seconds, as a convex frontier."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from flexengine.ops.base import Op
from flexengine.schedule.layer_program import savable_ops


class Keeping(NamedTuple):
    """One choice: bytes kept from forward to backward, and the seconds that recomputing the rest takes."""

    num_bytes: float
    recompute_s: float


@lru_cache(maxsize=64)
def kept_ops(ops: tuple[Op, ...]) -> np.ndarray:
    """Whether [S, O] an op's outputs are kept, under every save set of a layer, the one that keeps nothing first."""
    names = savable_ops(ops)
    places = [next(i for i, op in enumerate(ops) if op.name == name) for name in names]
    kept = np.zeros((1 << len(names), len(ops)), dtype=bool)
    kept[:, places] = np.arange(len(kept))[:, None] >> np.arange(len(names)) & 1
    return kept


def needed_in_backward(ops: tuple[Op, ...]) -> frozenset[str]:
    """Tensors that some backward reads."""
    return frozenset(name for op in ops for name in (*op.needs_input, *op.needs_weight))


@lru_cache(maxsize=64)
def run_again(ops: tuple[Op, ...], read: frozenset[str]) -> np.ndarray:
    """Whether [S, O] an op's forward runs again to bring the tensors `read` back, under every save set."""
    kept = kept_ops(ops)
    again, wanted = np.zeros_like(kept), {name: np.ones(len(kept), dtype=bool) for name in read}
    for i in reversed(range(len(ops))):
        for output in ops[i].outputs:
            again[:, i] |= wanted.get(output.name, False)
        again[:, i] &= ~kept[:, i]
        for name in ops[i].inputs:
            wanted[name] = wanted.get(name, False) | again[:, i]
    return again


def recomputed(ops: tuple[Op, ...], layer_input: str | None, kept: tuple[str, ...]) -> tuple[int, ...]:
    """Indices of the ops whose forward runs again in a backward that finds the outputs of the ops named in `kept`."""
    producer = {output.name: i for i, op in enumerate(ops) for output in op.outputs}
    at_hand = {layer_input, *(output.name for op in ops if op.name in kept for output in op.outputs)}
    found: list[int] = []

    def ensure(name: str) -> None:
        if name not in at_hand:
            index = producer[name]
            for source in ops[index].inputs:
                ensure(source)
            found.append(index)
            at_hand.update(output.name for output in ops[index].outputs)

    for op in reversed(ops):
        for name in (*op.needs_input, *op.needs_weight):
            ensure(name)
    return tuple(found)


def lower_hull(points: Iterable[Keeping]) -> tuple[Keeping, ...]:
    """The points that are least for some weighting of bytes and seconds, fewest bytes first."""
    hull: list[Keeping] = []
    for point in sorted(points):
        if hull and point.recompute_s >= hull[-1].recompute_s:
            continue
        while len(hull) > 1 and _on_or_above(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return tuple(hull)


def _on_or_above(a: Keeping, b: Keeping, c: Keeping) -> bool:
    """Whether b lies on or above the line from a to c."""
    run, rise = c.num_bytes - a.num_bytes, c.recompute_s - a.recompute_s
    return (b.recompute_s - a.recompute_s) * run >= (b.num_bytes - a.num_bytes) * rise
