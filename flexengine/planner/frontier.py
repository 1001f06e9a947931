"""What a layer can keep: the Pareto frontier of its save sets.

A save set is worth keeping in mind when no other saves fewer bytes and recomputes in less time.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from flexengine.models.spec import LayerSpec
from flexengine.ops.base import Work
from flexengine.planner.cost_model import CostModel
from flexengine.schedule.layer_program import LayerProgram, compile_layer, save_sets
from flexengine.schedule.lowering import RoundShape


class SaveSet(NamedTuple):
    """Ops whose outputs are kept, their bytes per chunk, and the seconds that recomputing the rest takes per round."""

    ops: tuple[str, ...]
    num_bytes: int
    recompute_s: float
    scratch_bytes: int


def frontier(layer: LayerSpec, shape: RoundShape, cost: CostModel) -> tuple[SaveSet, ...]:
    """Save sets of a layer that no other set beats in both bytes and recompute seconds, fewest bytes first."""
    return pareto_sets([save_set(layer, ops, shape, cost) for ops in save_sets(layer.ops)])


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
