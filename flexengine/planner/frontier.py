"""What a layer can keep: the Pareto frontier of its save sets.

A save set is worth keeping in mind when no other saves fewer bytes and recomputes in less time.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from flexengine.models.spec import LayerSpec
from flexengine.ops.base import Work
from flexengine.planner.cost_model import CostModel
from flexengine.planner.recompute_hull import kept_ops, needed_in_backward, run_again
from flexengine.schedule.layer_program import LayerProgram, align, compile_layer
from flexengine.schedule.lowering import RoundShape

SAME = 1e-9
"""Seconds that differ by no more of themselves are equal."""


class SaveSet(NamedTuple):
    """Ops whose outputs are kept, their bytes per chunk, and the seconds that recomputing the rest takes per round."""

    ops: tuple[str, ...]
    num_bytes: int
    recompute_s: float
    scratch_bytes: int


def frontier(layer: LayerSpec, shape: RoundShape, cost: CostModel) -> tuple[SaveSet, ...]:
    """Save sets of a layer that no other set beats in both bytes and recompute seconds, fewest bytes first."""
    return pareto_sets([save_set(layer, ops, shape, cost) for ops in unbeaten_sets(layer, shape, cost)])


def unbeaten_sets(layer: LayerSpec, shape: RoundShape, cost: CostModel) -> list[tuple[str, ...]]:
    """The save sets that are on the frontier, and those that equal one of them in bytes and seconds: of a layer with
    many ops there are too many to compile all, so these are priced by their ops alone."""
    kept = kept_ops(layer.ops)
    sizes = [sum(align(o.num_bytes(cost.chunk_tokens, cost.compute_bytes)) for o in op.outputs) for op in layer.ops]
    num_bytes, seconds = kept @ np.array(sizes), np.zeros(len(kept))
    backward = run_again(layer.ops, needed_in_backward(layer.ops))
    window = run_again(layer.ops, frozenset(name for op in layer.ops if op.carried for name in op.inputs))
    for (tokens, seq_len, is_slice), count in Counter((c.tokens, c.seq_len, c.is_slice) for c in shape.chunks).items():
        works = [op.forward_work(tokens, seq_len, cost.compute_bytes) for op in layer.ops]
        op_s = count * np.array([cost.work_s(work) for work in works])
        seconds += (backward.astype(int) + window if is_slice else backward) @ op_s
    order = np.lexsort((seconds, num_bytes))
    least = np.minimum.accumulate(seconds[order])  # of all that keep no more
    unbeaten = order[seconds[order] <= least * (1 + SAME)]
    return [tuple(layer.ops[place].name for place in np.flatnonzero(kept[i])) for i in unbeaten]


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
