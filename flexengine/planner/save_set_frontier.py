"""What a layer can keep: the Pareto frontier of its save sets.

A save set is worth keeping in mind when no other saves fewer bytes and recomputes in less time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from flexengine.models.spec import LayerSpec
from flexengine.ops.base import Op, Work
from flexengine.planner.bound.recompute_hull import refilled, save_choices
from flexengine.planner.cost.cost_model import CostModel
from flexengine.schedule.layer_compiler import compile_layer
from flexengine.schedule.layer_program import LayerProgram, align
from flexengine.schedule.lowering import RoundShape

ROUNDING_S = 5e-13
"""Sums of the same seconds in another order differ by less."""


class SaveSet(NamedTuple):
    """Ops whose outputs are kept, their bytes per chunk, and the seconds that recomputing the rest takes per round."""

    ops: tuple[str, ...]
    num_bytes: int
    recompute_s: float
    scratch_bytes: int


def frontier(layer: LayerSpec, shape: RoundShape, cost: CostModel) -> tuple[SaveSet, ...]:
    """Save sets of a layer that no other set beats in both bytes and recompute seconds, fewest bytes first."""
    return pareto_sets([save_set(layer, ops, shape, cost) for ops in promising_sets(layer, shape, cost)])


def promising_sets(layer: LayerSpec, shape: RoundShape, cost: CostModel) -> Iterator[tuple[str, ...]]:
    """All save sets that may be on the frontier. Bytes and seconds are sums over ops, and only what these leave is
    worth the milliseconds that compiling takes."""
    seconds, refilling = _op_seconds(layer, shape, cost)
    sizes = [sum(align(o.num_bytes(cost.chunk_tokens, cost.compute_bytes)) for o in op.outputs) for op in layer.ops]
    sets: list[tuple[int, float, tuple[str, ...]]] = []
    for choice in save_choices(layer.ops, layer.input):
        kept = tuple(layer.ops[i].name for i in choice.kept)
        taken = sum(seconds[i] for i in choice.recomputed)
        if any(refilling):
            taken += sum(refilling[i] for i in refilled(layer.ops, layer.input, kept))
        sets.append((sum(sizes[i] for i in choice.kept), taken, kept))
    least_bytes, least_s = -1, math.inf
    for num_bytes, taken, kept in sorted(sets):
        if taken < least_s - ROUNDING_S or (num_bytes == least_bytes and taken < least_s + ROUNDING_S):
            yield kept
        if taken < least_s - ROUNDING_S:
            least_bytes, least_s = num_bytes, taken


def _op_seconds(layer: LayerSpec, shape: RoundShape, cost: CostModel) -> tuple[list[float], list[float]]:
    """Seconds per round of every op's forward, over all chunks and over those that continue a sequence."""
    counts = Counter((chunk.tokens, chunk.seq_len, chunk.is_slice) for chunk in shape.chunks)

    def total(op: Op, slices: bool) -> float:
        keys = ((tokens, seq_len, n) for (tokens, seq_len, is_slice), n in counts.items() if is_slice or not slices)
        return sum(n * cost.work_s(op.forward_work(tokens, length, cost.compute_bytes)) for tokens, length, n in keys)

    return [total(op, False) for op in layer.ops], [total(op, True) for op in layer.ops]


def save_set(layer: LayerSpec, ops: tuple[str, ...], shape: RoundShape, cost: CostModel) -> SaveSet:
    """Bytes and recompute seconds of one save set."""
    program = compile_layer(layer, ops, (), cost.chunk_tokens, cost.compute_bytes)
    scratch = max(program.forward_scratch_bytes, program.backward_scratch_bytes)
    if any(chunk.is_slice for chunk in shape.chunks):
        scratch = max(scratch, program.window_scratch_bytes)
    return SaveSet(ops, program.save_gpu_bytes, recompute_s(program, shape, cost), scratch)


def recompute_s(program: LayerProgram, shape: RoundShape, cost: CostModel) -> float:
    """Seconds per round that backward spends on recomputation, refilling the key/value window included."""
    counts = Counter((chunk.tokens, chunk.seq_len, chunk.is_slice) for chunk in shape.chunks)
    return sum(n * cost.work_s(_recompute_work(program, *key, cost.compute_bytes)) for key, n in counts.items())


@lru_cache(maxsize=4096)
def _recompute_work(program: LayerProgram, tokens: int, seq_len: int, is_slice: bool, compute_bytes: int) -> Work:
    work = program.recompute_work(tokens, seq_len, compute_bytes)
    return work.plus(program.window_work(tokens, seq_len, compute_bytes)) if is_slice else work


def pareto_sets(sets: list[SaveSet]) -> tuple[SaveSet, ...]:
    """The sets that no other beats; of equals the one with less scratch."""
    best: list[SaveSet] = []
    for candidate in sorted(sets, key=lambda s: (s.num_bytes, s.recompute_s, s.scratch_bytes, s.ops)):
        if not best or candidate.recompute_s < best[-1].recompute_s - 1e-12:
            best.append(candidate)
    return tuple(best)
