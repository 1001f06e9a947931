"""One chunk and round size as arrays: what every keep option and every residency takes and costs blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np

from flexengine.plan import Home
from flexengine.planner.blocks import PerKind
from flexengine.planner.cost.cost_model import CostModel
from flexengine.planner.cost.save_sets import SaveSets
from flexengine.planner.cost.stream_loads import (
    BC,
    BD,
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
    kept_slowdowns,
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
        self.runs = 2 if self.request.norm_first else 1
        self.full_rounds = self.runs * full_rounds(self.request, self.shape)
        self.num_blocks = len(buffers.block_layers)
        self.sliced = self.shape.chunks[0].is_slice

    @property
    def activations(self) -> ActivationBytes:
        """What this size takes whatever is kept."""
        return self.buffers.activation_bytes(self.chunk_tokens, self.chunks_per_round)

    @property
    def home_of_inputs_again(self) -> Home:
        """Where inputs that are made again wait."""
        return self.buffers.again.home(self.chunk_tokens, self.chunks_per_round)

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
        """GPU bytes [O] of a chunk that stay until backward; of slots that segments share, about a block's share."""
        return self.of_blocks(lambda kind: kind.kept_bytes[0])

    @cached_property
    def again_bytes(self) -> tuple[PerKind, PerKind]:
        """GPU and host bytes [O] of a chunk that a block which runs again keeps then; 0 for others."""
        gpu, host = (self.of_blocks(lambda kind, side=side: kind.again_bytes[side]) for side in (0, 1))
        return gpu, host

    @cached_property
    def option_staged(self) -> PerKind:
        """Bytes [O] that an offload slot must hold."""
        return self.of_blocks(lambda kind: kind.options.staged_bytes)

    @cached_property
    def option_drive_slot(self) -> PerKind:
        """Bytes [O] that a slot of the host for what is on its way to or from a drive must hold."""
        return self.of_blocks(lambda kind: kind.options.drive_slot_bytes)

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
                self.chunks_per_round * kind.kept_bytes[0][self.choice_option]
                + kind.residency_gpu[self.choice_residency]
            )
        )

    @cached_property
    def choice_host(self) -> PerKind:
        """Host bytes [K] that a block holds."""
        return self.of_blocks(
            lambda kind: (
                self.chunks_per_round * kind.kept_bytes[1][self.choice_option]
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
        self.kind, self.layer, self.group = kind, kind.layer, buffers.kind_layouts[number]
        use = buffers.uses[kind.group]
        runs = tables.runs
        self.use = use._replace(forward=runs * use.forward, backward=runs * (use.backward + kind.runs_again))
        self.again_on_host = tables.home_of_inputs_again == "host"
        mine = buffers.again.places[buffers.kind_of == number]
        chunks = tables.chunks_per_round // buffers.again.chunks(tables.chunks_per_round)  # that take turns, too
        self.sharing = chunks * max(1, len(mine) // max(1, len(set(mine.tolist()))))  # uses of slots in turn
        self.residencies, self.options = buffers.kind_residencies[number], options
        self.cost, self.shape, self.sliced = tables.cost, tables.shape, tables.sliced
        self.adapters = buffers.adapters.of_layer(kind.layer)
        self.rounds, self.full_rounds, self.second_planes = tables.rounds, tables.full_rounds, buffers.second_planes
        self.hidden_bytes = buffers.again.hidden_bytes(tables.chunk_tokens)

    @cached_property
    def seconds(self) -> tuple[LayerSeconds, ...]:
        """Compute per chunk, nothing recomputed; with the chunk that is first, the decoding of the weights. Backward
        has the forward of a block that runs again."""
        found = with_decoding(chunk_seconds(self.layer, self.shape, self.cost), self.group, self.use, self.cost)
        return tuple(map(_run_again, found)) if self.kind.runs_again else found

    # -- keep options ------------------------------------------------------------------------------------------------

    @cached_property
    def again_bytes(self) -> tuple[np.ndarray, np.ndarray]:
        """GPU and host bytes [O] of a chunk that are kept when the block runs again, in slots that segments share."""
        gpu, host = self.options.output_gpu_bytes, self.options.staged_bytes
        return (gpu, host) if self.kind.runs_again else (0 * gpu, 0 * host)

    @cached_property
    def again_share(self) -> tuple[np.ndarray, np.ndarray]:
        """About the part of these that one of the blocks, and chunks, sharing them takes."""
        gpu, host = self.again_bytes
        return gpu // self.sharing, host // self.sharing

    @cached_property
    def kept_bytes(self) -> tuple[np.ndarray, np.ndarray]:
        """GPU and host bytes [O] of a chunk that stay until backward, with that part of what is shared."""
        kept = self.options.gpu_bytes, self.options.host_bytes
        gpu, host = (num - all_ + own for num, all_, own in zip(kept, self.again_bytes, self.again_share, strict=True))
        return gpu, host

    @cached_property
    def recompute_s(self) -> np.ndarray:
        """Seconds [O] of recomputation per round."""
        return self.options.recompute_s(self.shape, self.cost)

    @cached_property
    def copies(self) -> np.ndarray:
        """Copies [O] of a chunk's tensors in one direction: the input's and the kept outputs'."""
        staged = self.options.staged_bytes
        return (self.options.sent_bytes > staged).astype(float) + (staged > 0)

    @cached_property
    def option_loads(self) -> np.ndarray:
        """Loads [O, 12] of a step; backward fetches every chunk's tensors twice when sequences are sliced."""
        p, options = self.cost.profile, self.options
        chunks, fetches = self.full_rounds * len(self.shape.chunks), 2 if self.sliced else 1
        table = np.zeros((len(options.plans), NUM_LOADS))
        forward, again = options.sent_bytes - self.again_bytes[1], self.again_bytes[1]
        fetched = fetches * options.sent_bytes + self.kind.runs_again * forward
        slower = np.where(options.drive_bytes > 0, np.array([kept_slowdowns(self.cost)]).T, 1.0)
        forward, fetched = forward * slower[1], fetched * slower[0]
        if self.again_on_host:
            again = again + self.kind.runs_again * self.hidden_bytes
            fetched = fetched + self.kind.again * (fetches + self.kind.runs_again) * self.hidden_bytes
        table[:, FD] = chunks * forward / p.link.d2h_duplex_bytes_per_s
        table[:, BD] = chunks * again / p.link.d2h_duplex_bytes_per_s
        table[:, BH] = chunks * fetched / p.link.h2d_duplex_bytes_per_s
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
        """Loads [V, 12] of the parameters, with those of adapters beside them."""
        own = [group_loads(self.group, home, self.use, self.rounds, self.cost) for home in self.residencies]
        beside = [group_loads(a.layout, a.home, a.use, self.rounds, self.cost) for a in self.adapters]
        return np.array(own) + np.sum(beside, axis=0) if beside else np.array(own)

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


def _run_again(seconds: LayerSeconds) -> LayerSeconds:
    """A chunk's seconds with its forward in backward once more."""
    return seconds._replace(
        backward_s=seconds.backward_s + seconds.forward_s,
        backward_issue_s=seconds.backward_issue_s + seconds.forward_issue_s,
    )
