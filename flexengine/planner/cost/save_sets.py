"""What blocks can keep: bytes and recompute seconds of save sets, their Pareto frontier, and sets of unlike blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from flexengine.models.spec import LayerSpec
from flexengine.ops.base import Op, Work
from flexengine.planner.cost.cost_model import CostModel
from flexengine.schedule.layer_compiler import compile_layer
from flexengine.schedule.layer_program import Half, LayerProgram, OpStep, align
from flexengine.schedule.lowering import RoundShape
from flexengine.schedule.save_sets import (
    needed_by_backward,
    needed_by_input_halves,
    needed_by_window,
    remade,
    savable_ops,
    save_sets,
)

ROUNDING_S = 1e-12
"""Sums of the same seconds in another order differ by less."""
FEW_SHAPES = 8
"""Chunks of so many shapes are priced one by one, whatever steps programs share."""

Counts = tuple[tuple[tuple[int, int, bool], int], ...]
"""Shapes of a round's chunks, as (tokens, tokens of the longest sequence, whether it is a slice), with how many."""

SaveSets = tuple[tuple[tuple[str, ...], ...], ...]
"""Save sets by kind [C][S]; those of one number go together."""


class SaveSet(NamedTuple):
    """Bytes that a set keeps per chunk, seconds per round to recompute the rest, and the ops whose outputs it keeps.

    The seconds leave out the copies into a key/value window, which are the same for all sets.
    """

    num_bytes: int
    recompute_s: float
    ops: tuple[str, ...]


class SaveChoices(NamedTuple):
    """Every save set of a layer: ops whose outputs are kept, ops whose forward then runs again in backward, and those
    that run to fill a key/value window again.

    Each is [N, sets]: indices of ops in the order in which they run, filled up with the number of ops.
    """

    kept: np.ndarray
    recomputed: np.ndarray
    refilled: np.ndarray


class Keeping(NamedTuple):
    """Bytes kept from forward to backward, and the seconds that recomputing the rest takes."""

    num_bytes: float
    recompute_s: float


@lru_cache(maxsize=64)
def save_choices(ops: tuple[Op, ...], layer_input: str | None) -> SaveChoices:
    """Every save set of a layer, the one that keeps nothing first."""
    sets, index = save_sets(ops), {op.name: i for i, op in enumerate(ops)}
    kept = np.full((len(ops), len(sets)), len(ops))
    for number, names in enumerate(sets):
        kept[: len(names), number] = [index[name] for name in names]
    again = _run_again(ops, layer_input, kept, needed_by_backward(ops))
    return SaveChoices(_trimmed(kept, len(ops)), again, _run_again(ops, layer_input, kept, needed_by_window(ops)))


def _run_again(ops: tuple[Op, ...], layer_input: str | None, kept: np.ndarray, needed: Iterable[str]) -> np.ndarray:
    """`schedule.save_sets.recomputed` for all sets [N, sets] at once: a tensor is looked at for those that lack it."""
    is_kept = np.stack([(kept == i).any(axis=0) for i in range(len(ops))])
    at_hand = {output.name: np.zeros(kept.shape[1], bool) for op in ops for output in op.outputs}
    at_hand |= {layer_input: np.ones(kept.shape[1], bool)}
    for op, kept_sets in zip(ops, is_kept, strict=True):
        for output in op.kept_outputs:  # its own, and some of other ops, before it or behind it
            at_hand[output.name] |= kept_sets
    if written := remade(ops):
        made = {name: sets.copy() for name, sets in at_hand.items()}
        _make(ops, made, needed_by_input_halves(ops), kept.shape)
        at_hand |= {name: at_hand[name] | ~made[name] for name in written}
    return _trimmed(_make(ops, at_hand, needed, kept.shape), len(ops))


def _make(
    ops: tuple[Op, ...], at_hand: dict[str | None, np.ndarray], needed: Iterable[str], shape: tuple[int, ...]
) -> np.ndarray:
    """The ops [N, sets] that make what is needed, for the sets that lack it. Adds to `at_hand` what they make."""
    producer = {output.name: i for i, op in enumerate(ops) for output in op.outputs}
    again, lengths = np.full(shape, len(ops)), np.zeros(shape[1], dtype=np.int64)

    def make(name: str, lacking: np.ndarray) -> None:
        lacking = lacking & ~at_hand[name]
        if not lacking.any():
            return
        number = producer[name]
        for source in ops[number].inputs:
            make(source, lacking)
        again[lengths[lacking], lacking] = number
        lengths[lacking] += 1
        for output in ops[number].outputs:
            at_hand[output.name] |= lacking

    for name in needed:
        make(name, np.ones(shape[1], bool))
    return again


def _trimmed(places: np.ndarray, absent: int) -> np.ndarray:
    """Without the rows that no set fills."""
    return places[: (places < absent).sum(axis=0).max(initial=0)]


def frontier(layer: LayerSpec, shape: RoundShape, cost: CostModel) -> tuple[SaveSet, ...]:
    """Save sets of a layer that no other set beats in both bytes and recompute seconds, fewest bytes first.

    Of equal sets it is the one with the least scratch.
    """
    best: list[list[SaveSet]] = []  # those in one list are equal
    for one in sorted(_promising(layer, shape, cost)):
        if not best or one.recompute_s < best[-1][0].recompute_s - ROUNDING_S:
            best.append([one])
        elif one.num_bytes == best[-1][0].num_bytes and one.recompute_s < best[-1][0].recompute_s + ROUNDING_S:
            best[-1].append(one)
    sizes, sliced = (cost.chunk_tokens, cost.compute_bytes), shape.chunks[0].is_slice
    return tuple(min(eq, key=lambda s: scratch_bytes(compile_layer(layer, s.ops, (), *sizes), sliced)) for eq in best)


def _promising(layer: LayerSpec, shape: RoundShape, cost: CostModel) -> list[SaveSet]:
    """The save sets that no set of fewer bytes beats in recompute seconds by more than rounding."""
    choices, (seconds, refill_s) = save_choices(layer.ops, layer.input), _op_seconds(layer, shape, cost)
    sizes = [output_bytes(op, cost.chunk_tokens, cost.compute_bytes) for op in layer.ops]
    num_bytes = totals(sizes, choices.kept)
    again_s = totals(seconds, choices.recomputed) + totals(refill_s, choices.refilled)
    order = np.lexsort((again_s, num_bytes))
    near = order[again_s[order] < np.minimum.accumulate(again_s[order]) + 2 * ROUNDING_S]
    names = [[layer.ops[i].name for i in choices.kept[:, n] if i < len(layer.ops)] for n in near]
    return [SaveSet(int(num_bytes[n]), float(again_s[n]), tuple(kept)) for n, kept in zip(near, names, strict=True)]


def totals(numbers: Sequence[float], places: np.ndarray) -> np.ndarray:
    """The sum [S] of the numbers at every column's places [N, S], added up from the first row to the last."""
    found, total = np.array([*numbers, 0.0]), np.zeros(places.shape[1])
    for row in places:
        total += found[row]
    return total


def scratch_bytes(program: LayerProgram, sliced: bool) -> int:
    """Scratch of a chunk; sliced: it is part of a sequence."""
    window = program.window_scratch_bytes if sliced else 0
    return max(program.forward_scratch_bytes, program.backward_scratch_bytes, window)


def output_bytes(op: Op, chunk_tokens: int, compute_bytes: int) -> int:
    """Bytes of an op's outputs for one chunk, as a save area holds them."""
    return sum(align(spec.num_bytes(chunk_tokens, compute_bytes)) for spec in op.kept_outputs)


def _op_seconds(layer: LayerSpec, shape: RoundShape, cost: CostModel) -> tuple[list[float], list[float]]:
    """Seconds per round of every op's forward, over all chunks and over those that continue a sequence."""
    counts = Counter((chunk.tokens, chunk.seq_len, chunk.is_slice) for chunk in shape.chunks)

    def total(op: Op, slices: bool) -> float:
        keys = ((tokens, seq_len, n) for (tokens, seq_len, is_slice), n in counts.items() if is_slice or not slices)
        return sum(n * cost.work_s(op.forward_work(tokens, length, cost.compute_bytes)) for tokens, length, n in keys)

    return [total(op, False) for op in layer.ops], [total(op, True) for op in layer.ops]


def recompute_s(program: LayerProgram, shape: RoundShape, cost: CostModel) -> float:
    """Seconds per round that backward spends on recomputation, refilling the key/value window included."""
    counts = Counter((chunk.tokens, chunk.seq_len, chunk.is_slice) for chunk in shape.chunks)
    if len(counts) > FEW_SHAPES:
        return cost.work_s(_work_of_slices(program, tuple(counts.items()), cost.compute_bytes))
    return sum(n * cost.work_s(_recompute_work(program, *key, cost.compute_bytes)) for key, n in counts.items())


def _work_of_slices(program: LayerProgram, counts: Counts, compute_bytes: int) -> Work:
    """The sum of `_recompute_work` over chunks, step by step: programs share steps, and a long sequence's slices are
    all different."""
    total = Work()
    for step in (*(s for s in program.backward if s.recompute), *program.window):
        total = total.plus(_step_work(step.op, step.half, counts, compute_bytes))
    return total


@lru_cache(maxsize=4096)
def _step_work(op: Op, half: Half, counts: Counts, compute_bytes: int) -> Work:
    total, step = Work(), OpStep(op, half, ())
    for (tokens, seq_len, is_slice), n in counts:
        if is_slice or half != "window":
            total = total.plus(step.work(tokens, seq_len, compute_bytes).times(n))
    return total


@lru_cache(maxsize=4096)
def _recompute_work(program: LayerProgram, tokens: int, seq_len: int, is_slice: bool, compute_bytes: int) -> Work:
    work = program.recompute_work(tokens, seq_len, compute_bytes)
    return work.plus(program.window_work(tokens, seq_len, compute_bytes)) if is_slice else work


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


# ---- blocks of several kinds -----------------------------------------------------------------------------------


def side_by_side(
    layers: Sequence[LayerSpec],
    counts: np.ndarray,
    frontier_of: Callable[[LayerSpec], tuple[SaveSet, ...]],
    most: int,
) -> SaveSets:
    """Save sets of every kind of block that together no others beat in bytes and recompute seconds of all blocks.

    layers: one block of each kind; counts: how many there are; most: sets of kinds
    that keep different ones. Kinds whose ops have the same names, such as those with
    and without a window, keep the same ones.
    """
    if len({savable_ops(layer.ops) for layer in layers}) == 1:
        return (tuple(s.ops for s in frontier_of(layers[0])),) * len(layers)
    keeping = [number for number, layer in enumerate(layers) if savable_ops(layer.ops)]
    if len(keeping) < len(layers):  # those without a backward go along with any
        found = side_by_side([layers[i] for i in keeping], counts[keeping], frontier_of, most)
        beside = iter(found)
        return tuple(next(beside) if i in keeping else ((),) * len(found[0]) for i in range(len(layers)))
    chosen, num_bytes, seconds = np.zeros((1, 0), dtype=np.int64), np.zeros(1), np.zeros(1)
    frontiers = [frontier_of(layer) for layer in layers]
    for sets, count in zip(frontiers, counts, strict=True):
        num_bytes = (num_bytes[:, None] + [count * s.num_bytes for s in sets]).ravel()
        seconds = (seconds[:, None] + [count * s.recompute_s for s in sets]).ravel()
        before, added = np.indices((len(chosen), len(sets))).reshape(2, -1)
        chosen = np.column_stack((chosen[before], added))
        if chosen.shape[1] > 1:
            best = _undominated(num_bytes, seconds, most)
            chosen, num_bytes, seconds = chosen[best], num_bytes[best], seconds[best]
    return tuple(tuple(sets[i].ops for i in column) for sets, column in zip(frontiers, chosen.T.tolist(), strict=True))


def _undominated(num_bytes: np.ndarray, seconds: np.ndarray, most: int) -> np.ndarray:
    """Positions that no other beats, fewest bytes first; of many those evenly apart in bytes, and both ends."""
    order = np.lexsort((seconds, num_bytes))
    before = np.concatenate(([np.inf], np.minimum.accumulate(seconds[order])))[: len(order)]
    kept = order[seconds[order] < before - ROUNDING_S]
    if len(kept) <= most:
        return kept
    wanted = np.linspace(num_bytes[kept[0]], num_bytes[kept[-1]], most)
    return kept[np.unique(np.searchsorted(num_bytes[kept], wanted))]


def ever_smaller_sets(layers: Sequence[LayerSpec]) -> SaveSets:
    """For every kind from nothing kept to all: the last ops first."""
    names = [savable_ops(layer.ops) for layer in layers]
    most = max(map(len, names))
    return tuple(tuple(own[max(0, len(own) - kept) :] for kept in range(most + 1)) for own in names)
