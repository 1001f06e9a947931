"""One chunk and round size as arrays: what every keep option and every level of residency takes and costs blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np

from flexengine.plan import GroupPlan
from flexengine.planner.cost import loads
from flexengine.planner.cost.cost_model import CostModel, full_rounds, round_shape, rounds_per_step
from flexengine.planner.kind_tables import KindTables
from flexengine.planner.kinds import OfBlocks, Sets
from flexengine.planner.templates import ActivationBytes, Templates, host_plane_bytes
from flexengine.schedule.group_storage import DTYPE_BYTES
from flexengine.schedule.layer_program import align

NUM_LEVELS = len(loads.LEVELS)
STREAMS_WEIGHTS = np.array([level.weights == "host" for level in loads.LEVELS])
COMPUTE_AND_ISSUE = [loads.FC, loads.BC, loads.FI, loads.BI]
"""What the seconds of a layer load, in the order of loads.LayerSeconds."""


def needs_tiles(level: GroupPlan) -> bool:
    """Whether the GPU updates what does not live there altogether."""
    return level.update == "gpu" and "host" in (level.grads, level.states)


def streams_grads(level: GroupPlan) -> bool:
    """Whether gradients leave for the host."""
    return level.trained and level.grads == "host"


class RoundTables:
    """Tables of rounds of `chunks_per_round` chunks of `chunk_tokens` tokens, made when they are first read.

    [O]: keep options, [V]: levels, [E, V]: edge groups by level, [K]: rows, an option and a level each,
    row = option * NUM_LEVELS + level. Blocks may be of several kinds, for which a number means different things.
    """

    def __init__(self, templates: Templates, chunk_tokens: int, chunks_per_round: int, sets: Sets) -> None:
        self.templates, self.model, self.request = templates, templates.model, templates.request
        self.chunk_tokens, self.chunks_per_round, self.sets = chunk_tokens, chunks_per_round, sets
        self.compute_bytes = DTYPE_BYTES[self.request.numerics.compute]
        self.acc_bytes = 8 if self.request.numerics.compute == "float64" else 4
        sizes = (self.compute_bytes, chunk_tokens, self.request.max_seq_len)
        self.cost = CostModel(templates.profile, *sizes, self.request.numerics.state)
        self.shape = round_shape(self.request, chunk_tokens, chunks_per_round)
        self.rounds = rounds_per_step(self.request, self.shape)
        self.full_rounds = full_rounds(self.request, self.shape)
        self.num_blocks = len(templates.block_layers)
        self.sliced = self.shape.chunks[0].is_slice
        self.hidden_bytes = align(chunk_tokens * self.model.hidden_size * self.compute_bytes)

    @property
    def activations(self) -> ActivationBytes:
        """What this size takes whatever is kept."""
        return self.templates.activation_bytes(self.chunk_tokens, self.chunks_per_round)

    @cached_property
    def kinds(self) -> tuple[KindTables, ...]:
        """What one block of every kind takes and costs."""
        t, rounds = self.templates, (self.rounds, self.full_rounds)
        options = t.keep_options(self.cost, self.sets)
        return tuple(
            KindTables(
                kind.layer, group, levels, t.uses[kind.group], own, self.cost, self.shape, rounds, self.acc_bytes
            )
            for kind, group, levels, own in zip(t.kinds, t.kind_layouts, t.kind_levels, options, strict=True)
        )

    def of_blocks(self, column: Callable[[KindTables], np.ndarray]) -> OfBlocks:
        """A table of every kind, to be read by block."""
        return OfBlocks(np.stack([column(kind) for kind in self.kinds]), self.templates.kind_of)

    # -- seconds that no choice changes ------------------------------------------------------------------------------

    @cached_property
    def edge_seconds(self) -> tuple[loads.LayerSeconds, loads.LayerSeconds]:
        """Compute of embedding and head per round."""
        first, last = self.model.layers[0], self.model.layers[-1]
        return loads.layer_seconds(first, self.shape, self.cost), loads.layer_seconds(last, self.shape, self.cost)

    @cached_property
    def base_loads(self) -> np.ndarray:
        """Loads [12] of a step: forward and backward of all layers."""
        total = np.zeros(loads.NUM_LOADS)
        blocks = zip(np.bincount(self.templates.kind_of), self.kinds, strict=True)
        layers = [(int(count), seconds) for count, kind in blocks for seconds in kind.seconds]
        for count, seconds in [*layers, *((1, s) for s in self.edge_seconds)]:
            total[COMPUTE_AND_ISSUE] += self.full_rounds * count * np.array(seconds)
        return total

    @property
    def compute_s(self) -> float:
        """Compute seconds of a step without recomputation or update."""
        return float(self.base_loads[loads.FC] + self.base_loads[loads.BC])

    @property
    def hidden_update_s(self) -> float:
        """Seconds of the CPU's part of the update that may go on under the first round's forward, and without clipping
        under the last round's backward, as it has about half of host memory's rate then."""
        phases = (loads.FC,) if self.request.clipping else (loads.FC, loads.BC)
        return 0.5 * float(self.base_loads[list(phases)].sum()) / self.full_rounds

    # -- keep options ------------------------------------------------------------------------------------------------

    @property
    def num_options(self) -> int:
        """O: ways a block can keep its activations."""
        return len(self.kinds[0].options.plans)

    @cached_property
    def option_gpu(self) -> OfBlocks:
        """GPU bytes [O] of a chunk that stay from forward to backward."""
        return self.of_blocks(lambda kind: kind.options.gpu_bytes)

    @cached_property
    def option_host(self) -> OfBlocks:
        """Host bytes [O] of a chunk that stay from forward to backward."""
        return self.of_blocks(lambda kind: kind.options.host_bytes)

    @cached_property
    def option_staged(self) -> OfBlocks:
        """Bytes [O] that an offload slot must hold."""
        return self.of_blocks(lambda kind: kind.options.staged_bytes)

    @cached_property
    def option_scratch(self) -> OfBlocks:
        """Scratch bytes [O]."""
        return self.of_blocks(lambda kind: kind.options.scratch_bytes)

    @cached_property
    def option_recompute_s(self) -> OfBlocks:
        """Seconds [O] of recomputation per round."""
        return self.of_blocks(lambda kind: kind.recompute_s)

    @cached_property
    def option_loads(self) -> OfBlocks:
        """Loads [O, 12] of a step."""
        return self.of_blocks(lambda kind: kind.option_loads)

    # -- parameters --------------------------------------------------------------------------------------------------

    @cached_property
    def level_loads(self) -> OfBlocks:
        """Loads [V, 12] of a block's parameters."""
        return self.of_blocks(lambda kind: kind.level_loads)

    @cached_property
    def edge_loads(self) -> np.ndarray:
        """Loads [E, V, 12] of the edge groups' parameters."""
        t, sizes = self.templates, (self.rounds, self.acc_bytes, self.cost)
        edges = list(zip(t.edge_layouts, t.edge_levels, t.edge_groups, strict=True))
        return np.array([[loads.group_loads(g, level, t.uses[i], *sizes) for level in v] for g, v, i in edges])

    @cached_property
    def streams_grads(self) -> OfBlocks:
        """Whether a block's gradient leaves for the host [V]."""
        return self.of_blocks(lambda kind: np.array([streams_grads(level) for level in kind.levels]))

    @cached_property
    def needs_tiles(self) -> OfBlocks:
        """Whether a block's update passes through tiles [V]."""
        return self.of_blocks(lambda kind: np.array([needs_tiles(level) for level in kind.levels]))

    @cached_property
    def by_cpu(self) -> OfBlocks:
        """Whether the CPU updates a block [V]."""
        return self.of_blocks(lambda kind: np.array([level.update == "cpu" for level in kind.levels]))

    @cached_property
    def edge_needs_tiles(self) -> np.ndarray:
        """Whether the edge groups' updates pass through tiles [E, V]."""
        return np.array([[needs_tiles(level) for level in levels] for levels in self.templates.edge_levels])

    @cached_property
    def level_gpu(self) -> OfBlocks:
        """GPU bytes [V] of a block's resident planes."""
        return self.of_blocks(lambda kind: kind.level_gpu)

    @cached_property
    def level_host(self) -> OfBlocks:
        """Host bytes [V] of a block's planes."""
        return self.of_blocks(lambda kind: kind.level_host)

    @cached_property
    def edge_host(self) -> np.ndarray:
        """Host bytes [E, V] of the edge groups' planes."""
        edges = zip(self.templates.edge_layouts, self.templates.edge_levels, strict=True)
        return np.array([[host_plane_bytes(g, v) for v in levels] for g, levels in edges], dtype=np.int64)

    # -- rows --------------------------------------------------------------------------------------------------------

    @cached_property
    def row_option(self) -> np.ndarray:
        """Option [K] of every row."""
        return np.repeat(np.arange(self.num_options), NUM_LEVELS)

    @cached_property
    def row_level(self) -> np.ndarray:
        """Level [K] of every row."""
        return np.tile(np.arange(NUM_LEVELS), self.num_options)

    @cached_property
    def row_loads(self) -> OfBlocks:
        """Loads [K, 12] of a block."""

        def of(kind: KindTables) -> np.ndarray:
            table = kind.option_loads[self.row_option] + kind.level_loads[self.row_level]
            table[:, COMPUTE_AND_ISSUE] += self.full_rounds * sum(np.array(s) for s in kind.seconds)
            return table

        return self.of_blocks(of)

    @cached_property
    def row_gpu(self) -> OfBlocks:
        """GPU bytes [K] that a block holds: planes, and a round's kept activations."""
        return self.of_blocks(
            lambda kind: (
                self.chunks_per_round * kind.options.gpu_bytes[self.row_option] + kind.level_gpu[self.row_level]
            )
        )

    @cached_property
    def row_host(self) -> OfBlocks:
        """Host bytes [K] that a block holds."""
        return self.of_blocks(
            lambda kind: (
                self.chunks_per_round * kind.options.host_bytes[self.row_option] + kind.level_host[self.row_level]
            )
        )

    @cached_property
    def row_staged(self) -> np.ndarray:
        """Bytes [K] that an offload slot must hold at the most."""
        return self.option_staged.largest[self.row_option]

    @cached_property
    def row_scratch(self) -> np.ndarray:
        """Scratch bytes [K] at the most."""
        return self.option_scratch.largest[self.row_option]
