"""What a block may keep, for the linear relaxation: bytes against recompute seconds, as a convex frontier."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from flexengine.ops.base import Op
from flexengine.schedule.save_sets import save_sets


class Keeping(NamedTuple):
    """One choice: bytes kept from forward to backward, and the seconds that recomputing the rest takes."""

    num_bytes: float
    recompute_s: float


class SaveChoice(NamedTuple):
    """Ops whose outputs are kept and ops whose forward then runs again in backward, by index."""

    kept: tuple[int, ...]
    recomputed: tuple[int, ...]


@lru_cache(maxsize=64)
def save_choices(ops: tuple[Op, ...], layer_input: str | None) -> tuple[SaveChoice, ...]:
    """Every save set of a layer, the one that keeps nothing first."""
    index, sets = {op.name: i for i, op in enumerate(ops)}, save_sets(ops)
    return tuple(SaveChoice(tuple(index[n] for n in kept), recomputed(ops, layer_input, kept)) for kept in sets)


def recomputed(ops: tuple[Op, ...], layer_input: str | None, kept: tuple[str, ...]) -> tuple[int, ...]:
    """Indices of the ops whose forward runs again in a backward that finds the outputs of the ops named in `kept`."""
    return _ran_again(ops, layer_input, kept, (n for op in reversed(ops) for n in (*op.needs_input, *op.needs_weight)))


def refilled(ops: tuple[Op, ...], layer_input: str | None, kept: tuple[str, ...]) -> tuple[int, ...]:
    """The same for what the key/value window of a sliced sequence is filled from."""
    return _ran_again(ops, layer_input, kept, (n for op in ops if op.carried for n in op.inputs))


def _ran_again(
    ops: tuple[Op, ...], layer_input: str | None, kept: tuple[str, ...], needed: Iterable[str]
) -> tuple[int, ...]:
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

    for name in needed:
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
