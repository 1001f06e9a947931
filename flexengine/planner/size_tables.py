"""One chunk and round size as arrays: what every keep option and every residency takes and costs blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np

from flexengine.planner.blocks import PerKind
from flexengine.planner.cost.cost_model import CostModel
from flexengine.planner.cost.save_sets import SaveSets
from flexengine.planner.cost.stream_loads import (
    BC,
    BH,
    BI,
    FC,
    FD,
    FI,
    NUM_LOADS,
    RESIDENCIES,
    LayerSeconds,
    chunk_seconds,
    group_loads,
    issue_s,
    plane_bytes_in,
    round_seconds,
    with_decoding,
)
from flexengine.planner.keep_options import KeepOptions
from flexengine.planner.shared_buffers import ActivationBytes, SharedBuffers
from flexengine.schedule.layer_compiler import compile_layer
from flexengine.schedule.packing import full_round, full_rounds, rounds_per_step
from flexengine.schedule.second_planes import second_plane_bytes

NUM_RESIDENCIES = len(RESIDENCIES)
STREAMS_WEIGHTS = np.array([home.weights == "host" for home in RESIDENCIES])
COMPUTE_AND_ISSUE = [FC, BC, FI, BI]
"""Columns that the seconds of a layer load, in the order of LayerSeconds."""


class SizeTables:
    """Tables of rounds of `chunks_per_round` chunks of `chunk_tokens` tokens, made when they are first read.

    [O]: keep options, [V]: residencies, [E, V]: edge groups by residency, [K]: choices, an option and a residency each,
    choice = option * NUM_RESIDENCIES + residency. Blocks may be of several kinds, for which a number means different
    things.
    """

    def __init__(self, buffers: SharedBuffers, chunk_tokens: int, chunks_per_round: int, sets: SaveSets) -> None:
        self.buffers, self.model, self.request = buffers, buffers.model, buffers.request
        self.limits = buffers.limits
        self.chunk_tokens, self.chunks_per_round, self.sets = chunk_tokens, chunks_per_round, sets
        self.cost = CostModel.of(self.request, buffers.profile, chunk_tokens)
        self.shape = full_round(self.request, chunk_tokens, chunks_per_round)
        self.rounds = rounds_per_step(self.request, self.shape)
        self.full_rounds = full_rounds(self.request, self.shape)
        self.num_blocks = len(buffers.block_layers)
        self.sliced = self.shape.chunks[0].is_slice

    @property
    def activations(self) -> ActivationBytes:
        """What this size takes whatever is kept."""
        return self.buffers.activation_bytes(self.chunk_tokens, self.chunks_per_round)

    @cached_property
    def kinds(self) -> tuple[BlockTables, ...]:
        """What one block of every kind takes and costs."""
        options = self.buffers.keep_options(self.cost, self.sets)
        return tuple(BlockTables(self, number, own) for number, own in enumerate(options))

    def of_blocks(self, column: Callable[[BlockTables], np.ndarray]) -> PerKind:
        """A table of every kind, to be read by block."""
        return PerKind(np.stack([column(kind) for kind in self.kinds]), self.buffers.kind_of)

    # -- seconds that no choice changes ------------------------------------------------------------------------------

    @cached_property
    def edge_seconds(self) -> tuple[LayerSeconds, LayerSeconds]:
        """Compute of embedding and head per round."""
        first, last = self.model.layers[0], self.model.layers[-1]
        return round_seconds(first, self.shape, self.cost), round_seconds(last, self.shape, self.cost)

    # -- keep options ------------------------------------------------------------------------------------------------

    @property
    def num_options(self) -> int:
        """O: ways a block can keep its activations."""
        return len(self.kinds[0].options.plans)

    @cached_property
    def option_gpu(self) -> PerKind:
        """GPU bytes [O] of a chunk that stay from forward to backward."""
        return self.of_blocks(lambda kind: kind.options.gpu_bytes)

    @cached_property
    def option_staged(self) -> PerKind:
        """Bytes [O] that an offload slot must hold."""
        return self.of_blocks(lambda kind: kind.options.staged_bytes)

    @cached_property
    def option_scratch(self) -> PerKind:
        """Scratch bytes [O]."""
        return self.of_blocks(lambda kind: kind.options.scratch_bytes)

    # -- parameters --------------------------------------------------------------------------------------------------

    @cached_property
    def streams_grads(self) -> PerKind:
        """Whether a block's gradient leaves for the host [V]."""
        return self.of_blocks(lambda kind: np.array([home.streams_grads for home in kind.residencies]))

    @cached_property
    def stages_grads(self) -> PerKind:
        """Whether a block's gradient passes through slots [V]."""
        return self.of_blocks(lambda kind: np.array([home.stages_grads for home in kind.residencies]))

    @cached_property
    def needs_tiles(self) -> PerKind:
        """Whether a block's update passes through tiles [V]."""
        return self.of_blocks(lambda kind: np.array([home.uses_tiles for home in kind.residencies]))

    @cached_property
    def by_cpu(self) -> PerKind:
        """Whether the CPU updates a block [V]."""
        return self.of_blocks(lambda kind: np.array([home.update == "cpu" for home in kind.residencies]))

    @cached_property
    def residency_gpu(self) -> PerKind:
        """GPU bytes [V] of a block's resident planes."""
        return self.of_blocks(lambda kind: kind.residency_gpu)

    # -- choices-----------------------------------------------------------------------------------------------------

    @cached_property
    def choice_option(self) -> np.ndarray:
        """Option [K] of every choice."""
        return np.repeat(np.arange(self.num_options), NUM_RESIDENCIES)

    @cached_property
    def choice_residency(self) -> np.ndarray:
        """Residency [K] of every choice."""
        return np.tile(np.arange(NUM_RESIDENCIES), self.num_options)

    @cached_property
    def choice_loads(self) -> PerKind:
        """Loads [K, 12] of a block."""

        def of(kind: BlockTables) -> np.ndarray:
            table = kind.option_loads[self.choice_option] + kind.residency_loads[self.choice_residency]
            table[:, COMPUTE_AND_ISSUE] += self.full_rounds * sum(np.array(s) for s in kind.seconds)
            return table

        return self.of_blocks(of)

    @cached_property
    def choice_gpu(self) -> PerKind:
        """GPU bytes [K] that a block holds: planes, and a round's kept activations."""
        return self.of_blocks(
            lambda kind: (
                self.chunks_per_round * kind.options.gpu_bytes[self.choice_option]
                + kind.residency_gpu[self.choice_residency]
            )
        )

    @cached_property
    def choice_host(self) -> PerKind:
        """Host bytes [K] that a block holds."""
        return self.of_blocks(
            lambda kind: (
                self.chunks_per_round * kind.options.host_bytes[self.choice_option]
                + kind.residency_host[self.choice_residency]
            )
        )

    @cached_property
    def choice_staged(self) -> np.ndarray:
        """Bytes [K] that an offload slot must hold at the most."""
        return self.option_staged.largest[self.choice_option]

    @cached_property
    def choice_scratch(self) -> np.ndarray:
        """Scratch bytes [K] at the most."""
        return self.option_scratch.largest[self.choice_option]


class BlockTables:
    """Tables of one block of a kind, made when they are first read.

    [O]: keep options, [V]: residencies, by what they mean for this kind.
    """

    def __init__(self, tables: SizeTables, number: int, options: KeepOptions) -> None:
        buffers, kind = tables.buffers, tables.buffers.kinds[number]
        self.layer, self.group, self.use = kind.layer, buffers.kind_layouts[number], buffers.uses[kind.group]
        self.residencies, self.options = buffers.kind_residencies[number], options
        self.cost, self.shape, self.sliced = tables.cost, tables.shape, tables.sliced
        self.rounds, self.full_rounds, self.second_planes = tables.rounds, tables.full_rounds, buffers.second_planes

    @cached_property
    def seconds(self) -> tuple[LayerSeconds, ...]:
        """Compute per chunk, nothing recomputed; with the chunk that is first, the decoding of the weights."""
        return with_decoding(chunk_seconds(self.layer, self.shape, self.cost), self.group, self.use, self.cost)

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
        table[:, FD] = chunks * options.host_bytes / p.link.d2h_duplex_bytes_per_s
        table[:, BH] = fetches * chunks * options.host_bytes / p.link.h2d_duplex_bytes_per_s
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
        """Host bytes [V] of the planes; each of several ranks counts its share."""
        num_bytes = np.array([plane_bytes_in("host", self.group, home) for home in self.residencies], dtype=np.int64)
        if self.second_planes:
            num_bytes += [second_plane_bytes(self.group, home) for home in self.residencies]
        return num_bytes // self.cost.ranks
