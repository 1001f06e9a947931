"""What a layer can keep: the Pareto frontier of its save sets, and where each saved part may wait.

A save set is worth keeping in mind when no other saves fewer bytes and recomputes in less time. How the bytes of one
set are split between GPU and host changes no cost but bytes, so a few splits, evenly apart, stand for all.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Literal, NamedTuple

from flexengine.models.spec import LayerSpec
from flexengine.ops.base import Op, Work
from flexengine.plan import Home, LayerPlan
from flexengine.planner.cost_model import CostModel
from flexengine.schedule.layer_program import LayerProgram, align, compile_layer, savable_ops, save_sets
from flexengine.schedule.lowering import RoundShape

NUM_SPLITS = 4
"""GPU shares of a save set that are tried beside all and nothing: 1/4, 1/2, 3/4 as near as its parts allow."""


class SaveSet(NamedTuple):
    """Ops whose outputs are kept, their bytes per chunk, and the seconds that recomputing the rest takes per round."""

    ops: tuple[str, ...]
    num_bytes: int
    recompute_s: float
    scratch_bytes: int


@dataclass(frozen=True)
class KeepOption:
    """One way to keep a layer's activations, with its bytes per chunk and its recompute seconds per round.

    gpu_bytes and host_bytes stay from forward to backward; staged_bytes is what one offload slot must hold.
    """

    plan: LayerPlan
    gpu_bytes: int
    host_bytes: int
    staged_bytes: int
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


def keep_options(
    layer: LayerSpec,
    sets: tuple[SaveSet, ...],
    cost: CostModel,
    recompute: Literal["auto", "none", "full"],
    hidden_bytes: int,
) -> tuple[KeepOption, ...]:
    """Placements of a block's input and save sets. `sets` is its frontier; recompute `none` keeps all that backward
    needs, `full` only the layer's input."""
    if recompute == "full":
        sets = tuple(s for s in sets if not s.ops)
    elif recompute == "none":
        everything = savable_ops(layer.ops)
        sets = tuple(s for s in sets if s.ops == everything) or sets[-1:]
    options = []
    for kept in sets:
        for on_gpu in splits(layer.ops, kept.ops, cost):
            for home in ("gpu", "host"):
                options.append(_option(layer.ops, kept, on_gpu, home, cost, hidden_bytes))
    return tuple(options)


@lru_cache(maxsize=1024)
def splits(ops: tuple[Op, ...], kept: tuple[str, ...], cost: CostModel) -> list[tuple[str, ...]]:
    """Parts of a save set to keep on the GPU: nothing, all, and those nearest to even shares of its bytes."""
    sizes = {op.name: output_bytes(op, cost) for op in ops if op.name in kept}
    parts = [part for count in range(len(kept) + 1) for part in combinations(kept, count)]
    total = sum(sizes.values())
    chosen: dict[tuple[str, ...], None] = {}
    for i in range(NUM_SPLITS + 1):
        share = total * i / NUM_SPLITS
        chosen[min(parts, key=lambda part: (abs(sum(sizes[n] for n in part) - share), len(part), part))] = None
    return list(chosen)


def output_bytes(op: Op, cost: CostModel) -> int:
    """Bytes of an op's outputs for one chunk, as a save area holds them."""
    return sum(align(spec.num_bytes(cost.chunk_tokens, cost.compute_bytes)) for spec in op.outputs)


def _option(
    ops: tuple[Op, ...], kept: SaveSet, on_gpu: tuple[str, ...], home: Home, cost: CostModel, hidden_bytes: int
) -> KeepOption:
    gpu = sum(output_bytes(op, cost) for op in ops if op.name in on_gpu)
    staged = kept.num_bytes - gpu
    on_host = tuple(name for name in kept.ops if name not in on_gpu)
    return KeepOption(
        plan=LayerPlan(on_gpu, on_host, home),
        gpu_bytes=gpu + (hidden_bytes if home == "gpu" else 0),
        host_bytes=staged + (hidden_bytes if home == "host" else 0),
        staged_bytes=staged,
        recompute_s=kept.recompute_s,
        scratch_bytes=kept.scratch_bytes,
    )
