"""The ways blocks can keep their activations at one chunk size, as arrays: save sets, split between GPU and host.

How the bytes of one set are split between the two sides changes no cost but bytes, so a few splits, evenly apart, stand
for all. Bytes are per chunk; what recomputation takes is per round, as it depends on where sequences are cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, product
from typing import Literal

import numpy as np

from flexengine.models.spec import LayerSpec
from flexengine.ops.base import Op
from flexengine.plan import Home, LayerPlan
from flexengine.planner.blocks import BlockKind
from flexengine.planner.cost.cost_model import CostModel
from flexengine.planner.cost.save_sets import SaveSets, output_bytes, recompute_s, scratch_bytes
from flexengine.planner.cost.stream_loads import issue_s
from flexengine.schedule.layer_compiler import compile_layer
from flexengine.schedule.layer_program import LayerProgram
from flexengine.schedule.lowering import RoundShape
from flexengine.schedule.save_sets import savable_ops


@dataclass(frozen=True, eq=False)
class KeepOptions:
    """Keep options [O] of blocks of one kind. All bytes are int64 and of one chunk.

    gpu_bytes, host_bytes and drive_bytes stay until backward; staged_bytes is what one offload slot must hold;
    input_bytes are the input's, wherever it is; set_of says which of `programs` an option runs.
    """

    plans: tuple[LayerPlan, ...]
    programs: tuple[LayerProgram, ...]
    set_of: np.ndarray
    gpu_bytes: np.ndarray
    host_bytes: np.ndarray
    drive_bytes: np.ndarray
    staged_bytes: np.ndarray
    scratch_bytes: np.ndarray
    input_on_gpu: np.ndarray
    input_bytes: int

    @property
    def output_gpu_bytes(self) -> np.ndarray:
        """GPU bytes [O] of outputs alone."""
        return self.gpu_bytes - np.where(self.input_on_gpu, self.input_bytes, 0)

    @property
    def sent_bytes(self) -> np.ndarray:
        """Bytes [O] that leave the GPU."""
        return self.host_bytes + self.drive_bytes

    @property
    def drive_slot_bytes(self) -> np.ndarray:
        """Bytes [O] that a slot of the host for what is on its way to or from a drive must hold."""
        inputs = np.where(self.drive_bytes > self.staged_bytes, self.input_bytes, 0)
        return np.where(self.drive_bytes > 0, np.maximum(inputs, self.staged_bytes), 0)

    def recompute_s(self, shape: RoundShape, cost: CostModel) -> np.ndarray:
        """Seconds [O] per round that backward spends on recomputation."""
        return np.array([recompute_s(program, shape, cost) for program in self.programs])[self.set_of]

    def issue_s(self, cost: CostModel, sliced: bool) -> np.ndarray:
        """Host seconds [O] to issue a chunk's backward, and what fills the window of a sliced sequence."""
        found = [issue_s(cost, "backward", program) for program in self.programs]
        if sliced:
            found = [s + issue_s(cost, "fill_window", p) for s, p in zip(found, self.programs, strict=True)]
        return np.array(found)[self.set_of]


def keep_options(
    kinds: Sequence[BlockKind],
    sets: SaveSets,
    cost: CostModel,
    recompute: Literal["auto", "none", "full"],
    hidden_bytes: int,
    sliced: bool,
    num_splits: int,
    on_drive: bool = False,
) -> tuple[KeepOptions, ...]:
    """Placements of input and save sets at the chunk size of `cost`, by kind of block.

    on_drive: what leaves the GPU from forward to backward lies on a drive.

    num_splits: even shares of a save set, of which any may stay on the GPU, as near as its parts allow.
    recompute `none` keeps all that backward needs, `full` only the layer's input. sliced: the chunk is part of a
    sequence, whose key/value window backward must fill again.
    """
    layers = [kind.layer for kind in kinds]
    if recompute == "full":
        sets = (((),),) * len(layers)
    elif recompute == "none":
        sets = tuple((savable_ops(layer.ops),) for layer in layers)
    homes: tuple[Home, ...] = ("gpu", "host")
    parts = [_splits_side_by_side(layers, together, cost, num_splits) for together in zip(*sets, strict=True)]
    found = [(number, *pair) for number, on_gpu in enumerate(parts) for pair in product(on_gpu, homes)]
    return tuple(
        _options(
            kind,
            sets[i],
            [
                (number, sets[i][number] if kind.by_chunk and kind.runs_again else on_gpu[i], _home(kind, home))
                for number, on_gpu, home in found
            ],
            cost,
            hidden_bytes,
            sliced,
            on_drive,
        )
        for i, kind in enumerate(kinds)
    )


def _home(kind: BlockKind, home: Home) -> Home:
    """Where a block's input waits from forward, if it does."""
    return "gpu" if kind.again else home


def _splits_side_by_side(
    layers: Sequence[LayerSpec], together: tuple[tuple[str, ...], ...], cost: CostModel, num_splits: int
) -> list[tuple[tuple[str, ...], ...]]:
    """What kinds keep on the GPU of save sets that go together: about the same share of each."""
    sizes = (cost.chunk_tokens, cost.compute_bytes, num_splits)
    shares = zip(*(splits(layer.ops, ops, *sizes) for layer, ops in zip(layers, together, strict=True)), strict=True)
    return list(dict.fromkeys(shares))


def _options(
    kind: BlockKind,
    sets: tuple[tuple[str, ...], ...],
    found: list[tuple[int, tuple[str, ...], Home]],
    cost: CostModel,
    hidden_bytes: int,
    sliced: bool,
    on_drive: bool,
) -> KeepOptions:
    """The options of one kind: (set, its part on the GPU, home of the input) of each. Without a backward they are all
    one: nothing is kept. An input that is made again takes no bytes of the block's."""
    layer = kind.layer
    programs = tuple(compile_layer(layer, ops, (), cost.chunk_tokens, cost.compute_bytes) for ops in sets)
    sizes = {op.name: output_bytes(op, cost.chunk_tokens, cost.compute_bytes) for op in layer.ops}
    kept = np.array([sum(sizes[name] for name in on_gpu) for _, on_gpu, _ in found], dtype=np.int64)
    set_of = np.array([number for number, _, _ in found])
    staged = np.array([sum(sizes[name] for name in ops) for ops in sets], dtype=np.int64)[set_of] - kept
    hidden_bytes = hidden_bytes if layer.has_backward and not kind.again else 0
    if not layer.has_backward:
        found = [(number, (), "gpu") for number, _, _ in found]
    input_on_gpu = np.array([home == "gpu" for _, _, home in found])
    sent = staged + np.where(input_on_gpu, 0, hidden_bytes)
    there = on_drive * (np.where(staged > 0, 0, sent) if kind.runs_again else sent)
    return KeepOptions(
        plans=tuple(
            LayerPlan(on_gpu, tuple(x for x in sets[s] if x not in on_gpu), home, kind.again, drive > 0)
            for (s, on_gpu, home), drive in zip(found, there.tolist(), strict=True)
        ),
        programs=programs,
        set_of=set_of,
        gpu_bytes=kept + np.where(input_on_gpu, hidden_bytes, 0),
        host_bytes=sent - there,
        drive_bytes=there,
        staged_bytes=staged,
        scratch_bytes=np.array([scratch_bytes(p, sliced) for p in programs], dtype=np.int64)[set_of],
        input_on_gpu=input_on_gpu,
        input_bytes=hidden_bytes,
    )


@lru_cache(maxsize=4096)
def splits(
    ops: tuple[Op, ...], kept: tuple[str, ...], chunk_tokens: int, compute_bytes: int, num_splits: int
) -> list[tuple[str, ...]]:
    """Parts of a save set to keep on the GPU: those nearest to even shares of its bytes, from nothing to all."""
    sizes = {op.name: output_bytes(op, chunk_tokens, compute_bytes) for op in ops if op.name in kept}
    parts = [part for count in range(len(kept) + 1) for part in combinations(kept, count)]
    taken = np.array([sum(sizes[name] for name in part) for part in parts])
    # of parts equally near the one with the fewest ops, as they come ordered by their number
    shares = taken[-1] * np.arange(num_splits + 1) / num_splits
    return [parts[int(np.abs(taken - share).argmin())] for share in shares]
