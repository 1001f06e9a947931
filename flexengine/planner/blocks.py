"""Blocks of one kind as arrays: what keep options and residencies take and cost one of them, and tables by kind.

The search says of every block which option and residency it takes, by number. What a number means depends on the
block's kind: the same numbers are, for every kind, save sets at about the same price of a byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from flexengine.models.spec import LayerSpec, ModelSpec
from flexengine.ops.base import Op
from flexengine.plan import GroupPlan
from flexengine.planner.cost.cost_model import CostModel
from flexengine.planner.cost.stream_loads import (
    BC,
    BH,
    BI,
    FD,
    FI,
    NUM_LOADS,
    GroupUse,
    LayerSeconds,
    chunk_seconds,
    group_loads,
    issue_s,
    plane_bytes_in,
)
from flexengine.planner.keep_options import KeepOptions
from flexengine.schedule.group_storage import GroupStorage
from flexengine.schedule.layer_compiler import compile_layer
from flexengine.schedule.lowering import RoundShape


class BlockKind(NamedTuple):
    """Blocks with the same ops, which frozen and trained ones have not: one of them, and its parameter group."""

    layer: LayerSpec
    group: int


def block_kinds(model: ModelSpec) -> tuple[tuple[BlockKind, ...], np.ndarray]:
    """The kinds of a model's blocks in order of their first, and the kind [L] of every block."""
    kinds: dict[tuple[Op, ...], BlockKind] = {}
    for layer in model.blocks:
        kinds.setdefault(layer.ops, BlockKind(layer, layer.groups[0]))
    number = {ops: i for i, ops in enumerate(kinds)}
    return tuple(kinds.values()), np.array([number[layer.ops] for layer in model.blocks])


@dataclass(frozen=True, eq=False)
class PerKind:
    """Numbers [C, N, ...] of N members (options, levels or rows) by kind, and the kind [L] of every block."""

    by_kind: np.ndarray
    kind_of: np.ndarray

    @cached_property
    def counts(self) -> np.ndarray:
        """Blocks [C] of every kind."""
        return np.bincount(self.kind_of, minlength=len(self.by_kind))

    @cached_property
    def total(self) -> np.ndarray:
        """The sum [N, ...] over all blocks, when all take the same member."""
        return np.tensordot(self.counts, self.by_kind, axes=1)

    @cached_property
    def largest(self) -> np.ndarray:
        """The largest [N, ...] of all kinds."""
        return self.by_kind.max(axis=0)

    def at(self, members: np.ndarray) -> np.ndarray:
        """What the blocks take [..., L] of the members [..., L] that they have."""
        if len(self.by_kind) == 1:
            return self.by_kind[0].take(members, axis=0)
        return self.by_kind[self.kind_of, members]

    def each(self) -> np.ndarray:
        """By block: [L, N, ...]."""
        return self.by_kind[self.kind_of]


class BlockTables:
    """Tables of one block, made when they are first read.

    [O]: keep options, [V]: residencies, by what they mean for this kind.

    rounds: of a step, and the same as a fraction.
    """

    def __init__(
        self,
        layer: LayerSpec,
        group: GroupStorage,
        residencies: tuple[GroupPlan, ...],
        use: GroupUse,
        options: KeepOptions,
        cost: CostModel,
        shape: RoundShape,
        rounds: tuple[int, float],
    ) -> None:
        self.layer, self.group, self.residencies, self.use, self.options = layer, group, residencies, use, options
        self.cost, self.shape = cost, shape
        self.rounds, self.full_rounds = rounds
        self.sliced = shape.chunks[0].is_slice

    @cached_property
    def seconds(self) -> tuple[LayerSeconds, ...]:
        """Compute per chunk, nothing recomputed."""
        return chunk_seconds(self.layer, self.shape, self.cost)

    # -- keep options ------------------------------------------------------------------------------------------------

    @cached_property
    def recompute_s(self) -> np.ndarray:
        """Seconds [O] of recomputation per round."""
        return self.options.recompute_s(self.shape, self.cost)

    @cached_property
    def copies(self) -> np.ndarray:
        """Copies [O] of a chunk's tensors in one direction: the input's and the kept outputs'."""
        staged = self.options.staged_bytes
        return (self.options.host_bytes > staged).astype(float) + (staged > 0)

    @cached_property
    def option_loads(self) -> np.ndarray:
        """Loads [O, 12] of a step; backward fetches every chunk's tensors twice when sequences are sliced."""
        p, options = self.cost.profile, self.options
        chunks, fetches = self.full_rounds * len(self.shape.chunks), 2 if self.sliced else 1
        table = np.zeros((len(options.plans), NUM_LOADS))
        table[:, FD] = chunks * options.host_bytes / p.d2h_duplex_bytes_per_s
        table[:, BH] = fetches * chunks * options.host_bytes / p.h2d_duplex_bytes_per_s
        table[:, BC] = self.full_rounds * self.recompute_s
        copies_s = chunks * issue_s(self.cost, "copy") * self.copies
        table[:, FI] = copies_s
        table[:, BI] = fetches * copies_s + chunks * self.issue_s
        return table

    @cached_property
    def issue_s(self) -> np.ndarray:
        """Host seconds [O] per chunk to issue backward, less those with everything recomputed."""
        program = compile_layer(self.layer, (), (), self.cost.chunk_tokens, self.cost.compute_bytes)
        return self.options.issue_s(self.cost, self.sliced) - issue_s(self.cost, "backward", program)

    # -- parameters --------------------------------------------------------------------------------------------------

    @cached_property
    def residency_loads(self) -> np.ndarray:
        """Loads [V, 12] of the parameters."""
        return np.array([group_loads(self.group, home, self.use, self.rounds, self.cost) for home in self.residencies])

    @cached_property
    def residency_gpu(self) -> np.ndarray:
        """GPU bytes [V] of the resident planes."""
        return np.array([plane_bytes_in("gpu", self.group, home) for home in self.residencies], dtype=np.int64)

    @cached_property
    def residency_host(self) -> np.ndarray:
        """Host bytes [V] of the planes."""
        return np.array([plane_bytes_in("host", self.group, home) for home in self.residencies], dtype=np.int64)
