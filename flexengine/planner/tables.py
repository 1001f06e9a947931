"""One chunk and round size as arrays: what every keep option and every level of residency takes and costs a block."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from flexengine.models.spec import LayerSpec
from flexengine.planner import loads
from flexengine.planner.cost_model import CostModel, full_rounds, round_shape, rounds_per_step
from flexengine.planner.options import Options
from flexengine.planner.templates import ActivationBytes, Templates, gpu_plane_bytes, host_plane_bytes
from flexengine.schedule.layer_program import align, compile_layer
from flexengine.schedule.layout import DTYPE_BYTES, GroupLayout

NUM_LEVELS = len(loads.LEVELS)
NEEDS_TILES = np.array([level.update == "gpu" and "host" in (level.grads, level.states) for level in loads.LEVELS])
STREAMS_WEIGHTS = np.array([level.weights == "host" for level in loads.LEVELS])
STREAMS_GRADS = np.array([level.grads == "host" for level in loads.LEVELS])


class RoundTables:
    """Tables of rounds of `chunks_per_round` chunks of `chunk_tokens` tokens, made when they are first read.

    [O]: keep options, [V]: levels, [E, V]: edge groups by level, [K]: rows, an option and a level each,
    row = option * NUM_LEVELS + level. Blocks are alike: one class of layers, one size of groups.
    """

    def __init__(
        self, templates: Templates, chunk_tokens: int, chunks_per_round: int, sets: tuple[tuple[str, ...], ...]
    ) -> None:
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

    @property
    def block(self) -> LayerSpec:
        """One block; the others are like it."""
        return self.model.layers[self.templates.block_layers[0]]

    # -- seconds that no choice changes ------------------------------------------------------------------------------

    @cached_property
    def block_seconds(self) -> tuple[loads.LayerSeconds, ...]:
        """A block's compute per chunk, nothing recomputed."""
        return loads.chunk_seconds(self.block, self.shape, self.cost)

    @cached_property
    def edge_seconds(self) -> tuple[loads.LayerSeconds, loads.LayerSeconds]:
        """Compute of embedding and head per round."""
        first, last = self.model.layers[0], self.model.layers[-1]
        return loads.layer_seconds(first, self.shape, self.cost), loads.layer_seconds(last, self.shape, self.cost)

    @cached_property
    def base_loads(self) -> np.ndarray:
        """Loads [12] of a step: forward and backward of all layers."""
        total = np.zeros(loads.NUM_LOADS)
        layers = [*((self.num_blocks, seconds) for seconds in self.block_seconds), *((1, s) for s in self.edge_seconds)]
        for count, seconds in layers:
            total[[loads.FC, loads.BC, loads.FI, loads.BI]] += self.full_rounds * count * np.array(seconds)
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

    @cached_property
    def options(self) -> Options:
        """Ways a block can keep its activations; bytes per chunk."""
        return self.templates.keep_options(self.cost, self.sets)

    @cached_property
    def option_recompute_s(self) -> np.ndarray:
        """Seconds [O] of recomputation per round."""
        return self.options.recompute_s(self.shape, self.cost)

    @cached_property
    def option_copies(self) -> np.ndarray:
        """Copies [O] of a chunk's tensors in one direction: the input's and the kept outputs'."""
        staged = self.options.staged_bytes
        return (self.options.host_bytes > staged).astype(float) + (staged > 0)

    @cached_property
    def option_loads(self) -> np.ndarray:
        """Loads [O, 12] of a step; backward fetches every chunk's tensors twice when sequences are sliced."""
        p, options = self.cost.profile, self.options
        chunks, fetches = self.full_rounds * len(self.shape.chunks), 2 if self.sliced else 1
        table = np.zeros((len(options.plans), loads.NUM_LOADS))
        table[:, loads.FD] = chunks * options.host_bytes / p.d2h_duplex_bytes_per_s
        table[:, loads.BH] = fetches * chunks * options.host_bytes / p.h2d_duplex_bytes_per_s
        table[:, loads.BC] = self.full_rounds * self.option_recompute_s
        copies_s = chunks * loads.issue_s(self.cost, "copy") * self.option_copies
        table[:, loads.FI] = copies_s
        table[:, loads.BI] = fetches * copies_s + chunks * self.option_issue_s
        return table

    @cached_property
    def option_issue_s(self) -> np.ndarray:
        """Host seconds [O] per chunk to issue a block's backward, less those with everything recomputed."""
        program = compile_layer(self.block, (), (), self.chunk_tokens, self.compute_bytes)
        return self.options.issue_s(self.cost, self.sliced) - loads.issue_s(self.cost, "backward", program)

    # -- parameters --------------------------------------------------------------------------------------------------

    def _group_loads(self, group: GroupLayout, index: int) -> list[np.ndarray]:
        use, rounds = self.templates.uses[index], self.rounds
        return [loads.group_loads(group, level, use, rounds, self.acc_bytes, self.cost) for level in loads.LEVELS]

    @cached_property
    def level_loads(self) -> np.ndarray:
        """Loads [V, 12] of a block's parameters."""
        return np.array(self._group_loads(self.templates.block_group, self.templates.block_groups[0]))

    @cached_property
    def edge_loads(self) -> np.ndarray:
        """Loads [E, V, 12] of the edge groups' parameters."""
        pairs = zip(self.templates.edge_layouts, self.templates.edge_groups, strict=True)
        return np.array([self._group_loads(group, index) for group, index in pairs])

    @cached_property
    def level_gpu(self) -> np.ndarray:
        """GPU bytes [V] of a block's resident planes."""
        return np.array([gpu_plane_bytes(self.templates.block_group, v) for v in loads.LEVELS], dtype=np.int64)

    @cached_property
    def level_host(self) -> np.ndarray:
        """Host bytes [V] of a block's planes."""
        return np.array([host_plane_bytes(self.templates.block_group, v) for v in loads.LEVELS], dtype=np.int64)

    @cached_property
    def edge_host(self) -> np.ndarray:
        """Host bytes [E, V] of the edge groups' planes."""
        groups = self.templates.edge_layouts
        return np.array([[host_plane_bytes(g, v) for v in loads.LEVELS] for g in groups], dtype=np.int64)

    # -- rows --------------------------------------------------------------------------------------------------------

    @cached_property
    def row_option(self) -> np.ndarray:
        """Option [K] of every row."""
        return np.repeat(np.arange(len(self.options.plans)), NUM_LEVELS)

    @cached_property
    def row_level(self) -> np.ndarray:
        """Level [K] of every row."""
        return np.tile(np.arange(NUM_LEVELS), len(self.options.plans))

    @cached_property
    def row_loads(self) -> np.ndarray:
        """Loads [K, 12] of a block."""
        seconds = sum(np.array(s) for s in self.block_seconds)
        table = self.option_loads[self.row_option] + self.level_loads[self.row_level]
        table[:, [loads.FC, loads.BC, loads.FI, loads.BI]] += self.full_rounds * seconds
        return table

    @cached_property
    def row_gpu(self) -> np.ndarray:
        """GPU bytes [K] that a block holds: planes, and a round's kept activations."""
        return self.chunks_per_round * self.options.gpu_bytes[self.row_option] + self.level_gpu[self.row_level]

    @cached_property
    def row_host(self) -> np.ndarray:
        """Host bytes [K] that a block holds."""
        return self.chunks_per_round * self.options.host_bytes[self.row_option] + self.level_host[self.row_level]

    @cached_property
    def row_staged(self) -> np.ndarray:
        """Bytes [K] that an offload slot must hold."""
        return self.options.staged_bytes[self.row_option]

    @cached_property
    def row_scratch(self) -> np.ndarray:
        """Scratch bytes [K]."""
        return self.options.scratch_bytes[self.row_option]
