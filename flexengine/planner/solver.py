"""For one chunk and round size: what placements take of both memories, exactly, and what fits at all.

Blocks choose a keep option and a residency level each (a row of the tables), embedding and head choose a level; what
they share (slots, scratch) comes from the templates. `solve` is the dynamic programme over layers for a cost that adds
up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from flexengine.plan import GroupPlan, LayerPlan, Plan
from flexengine.planner import knapsack
from flexengine.planner.cost import loads
from flexengine.planner.tables import STREAMS_WEIGHTS, RoundTables
from flexengine.planner.templates import SlotCounts, Structure
from flexengine.schedule.layer_program import align


class Caps(NamedTuple):
    """Largest offload slot and scratch, in bytes, that the options of a solution may need."""

    staged_bytes: int
    scratch_bytes: int


class Solution(NamedTuple):
    """A row (option x level) for every block, in no particular order within a kind, and the structure around it."""

    objective: float
    structure: Structure
    slots: SlotCounts
    rows: tuple[int, ...]


class Placement(NamedTuple):
    """A solution with its rows dealt out to the blocks: everything a plan says but for the sizes."""

    structure: Structure
    slots: SlotCounts
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Goal:
    """What a solution minimises: the sum over layers of phase_seconds, or of loads weighted by `weights` [12].

    host_s_per_byte prices host memory when it is short.
    """

    weights: tuple[float, ...] | None = None
    host_s_per_byte: float = 0.0

    def cost(self, table: np.ndarray, host_bytes: np.ndarray) -> np.ndarray:
        """Cost of rows with loads [K, 12] and host bytes [K]."""
        seconds = loads.phase_seconds(table) if self.weights is None else table @ np.asarray(self.weights)
        return seconds + self.host_s_per_byte * host_bytes


BLOCKS_HOLD_LEVELS = {
    loads.STREAMED: loads.GPU_LEVELS,
    loads.RESIDENT_WEIGHTS: (loads.RESIDENT_WEIGHTS, loads.RESIDENT_BOTH, loads.RESIDENT),
    loads.RESIDENT_GRADS: (loads.RESIDENT_GRADS, loads.RESIDENT_BOTH, loads.RESIDENT),
    loads.RESIDENT_BOTH: (loads.RESIDENT_BOTH, loads.RESIDENT),
}
"""What all blocks hold on the GPU -> the levels that do."""


class RoundProblem(RoundTables):
    """All placements for chunks of `chunk_tokens` tokens, `chunks_per_round` to a round."""

    # -- bytes -------------------------------------------------------------------------------------------------------

    def fixed_bytes(self, structure: Structure, slots: SlotCounts, caps: Caps) -> int:
        """GPU bytes of the process beside what blocks hold resident or keep, but for optimizer tiles."""
        fixed = self.activations.fixed_gpu_bytes + self.templates.resident_edge_bytes(structure.edge_levels)
        return fixed + self._round_bytes(structure, slots, caps)

    def _round_bytes(
        self, structure: Structure, slots: SlotCounts, caps: Caps, largest: tuple[int, int] | None = None
    ) -> int:
        """Bytes of a round's slots beside what blocks keep; largest: as in Templates.parameter_slot_bytes."""
        scratch = align(max(self.activations.scratch_floor, caps.scratch_bytes))
        staging = slots.save * align(caps.staged_bytes)
        return (
            self.templates.parameter_slot_bytes(structure, slots, largest)
            + self.activations.round_gpu_bytes
            + scratch
            + staging
        )

    def region_bytes(self, placement: Placement) -> int:
        """Bytes of a round's slots, over which optimizer tiles lie."""
        rows = list(placement.rows)
        structure = self.normalised(placement).structure
        kept = self.chunks_per_round * int(self.option_gpu.at(self.row_option[rows]).sum())
        return self._round_bytes(structure, self.used_slots(placement), self.caps_of(rows), self._largest(rows)) + kept

    def _largest(self, rows: list[int]) -> tuple[int, int]:
        """Bytes of the weight and gradient slots that the blocks of such rows need."""
        levels, (weights, grads) = self.row_level[rows], self.templates.slot_bytes[:, self.templates.kind_of]
        return int((weights * STREAMS_WEIGHTS[levels]).max()), int((grads * self.streams_grads.at(levels)).max())

    def gpu_bytes(self, placement: Placement) -> int:
        """GPU bytes of the process under a placement."""
        edges, levels = placement.structure.edge_levels, self.row_level[list(placement.rows)]
        resident = self.templates.resident_edge_bytes(edges) + int(self.level_gpu.at(levels).sum())
        region = self.region_bytes(placement)
        if self.needs_tiles.at(levels).any() or self.edge_needs_tiles[np.arange(len(edges)), list(edges)].any():
            region = max(region, self.templates.least_tile_bytes)
        return self.activations.fixed_gpu_bytes + resident + region

    def used_slots(self, placement: Placement) -> SlotCounts:
        """Slot counts of a layout: no more weight or gradient slots than parts of blocks that need one."""
        levels, slots = self.row_level[list(placement.rows)], placement.slots
        parts = self.templates.parts_of_blocks
        weights, grads = int(parts @ STREAMS_WEIGHTS[levels]), int(parts @ self.streams_grads.at(levels))
        return slots._replace(weight=max(1, min(slots.weight, weights)), grad=max(1, min(slots.grad, grads)))

    def host_bytes(self, structure: Structure, rows: Sequence[int]) -> int:
        """Host bytes of the process."""
        edges = sum(int(host[v]) for host, v in zip(self.edge_host, structure.edge_levels, strict=True))
        by_cpu = bool(self.by_cpu.at(self.row_level[list(rows)]).any())
        scale = self.templates.cpu_update_host_bytes * by_cpu
        planes = edges + int(self.row_host.at(np.array(rows)).sum())
        return self.activations.host_bytes + planes + scale

    def caps_of(self, rows: Sequence[int]) -> Caps:
        """What the chosen rows need of shared buffers."""
        options = self.row_option[list(rows)]
        return Caps(int(self.option_staged.at(options).max()), int(self.option_scratch.at(options).max()))

    @property
    def widest_caps(self) -> Caps:
        """Caps that allow every option."""
        return Caps(int(self.row_staged.max()), int(self.row_scratch.max()))

    def normalised(self, placement: Placement) -> Placement:
        """With `blocks_hold` as the rows have it: planes that all blocks hold need no slots."""
        levels = self.row_level[list(placement.rows)]
        weights, grads = not STREAMS_WEIGHTS[levels].any(), not self.streams_grads.at(levels).any()
        hold = {
            (False, False): loads.STREAMED,
            (True, False): loads.RESIDENT_WEIGHTS,
            (False, True): loads.RESIDENT_GRADS,
            (True, True): loads.RESIDENT_BOTH,
        }[weights, grads]
        return placement._replace(structure=placement.structure._replace(blocks_hold=hold))

    # -- the programme -----------------------------------------------------------------------------------------------

    @cached_property
    def row_holds(self) -> dict[int, np.ndarray]:
        """For everything that all blocks may hold, the rows [K] that do."""
        return {hold: np.isin(self.row_level, held) for hold, held in BLOCKS_HOLD_LEVELS.items()}

    def solve(self, goal: Goal, slots: SlotCounts, gpu_budget: int, caps: Caps) -> Solution | None:
        """The best solution within the budget (whole process) whose options respect the caps."""
        row_cost = goal.cost(self.row_loads.by_kind, self.row_host.by_kind)
        allowed = (self.row_staged <= caps.staged_bytes) & (self.row_scratch <= caps.scratch_bytes)
        found = [
            self._solve_holding(goal, slots, gpu_budget, caps, hold, np.flatnonzero(allowed & holding), row_cost)
            for hold, holding in self.row_holds.items()
        ]
        return min((s for s in found if s is not None), key=lambda s: s.objective, default=None)

    def _solve_holding(
        self,
        goal: Goal,
        slots: SlotCounts,
        gpu_budget: int,
        caps: Caps,
        hold: int,
        rows: np.ndarray,
        row_cost: np.ndarray,
    ) -> Solution | None:
        """The best choice among `rows`, over all structures of the edges; row_cost: [C, K]."""
        structures = self.templates.structures(len(self.edge_host), hold)
        ranked = [(self.fixed_bytes(s, slots, caps), s) for s in structures]
        limit = gpu_budget - min(fixed for fixed, _ in ranked)
        counts, gpu = self.row_gpu.counts, self.row_gpu.by_kind
        if not len(rows) or int(counts @ gpu[:, rows].min(axis=1)) > limit:
            return None
        choices = knapsack.together(
            [
                knapsack.repeat(knapsack.one_layer(gpu.ravel(), row_cost.ravel(), kind * gpu.shape[1] + rows), n, limit)
                for kind, n in enumerate(counts.tolist())
            ],
            limit,
        )
        best: tuple[float, Structure, int] | None = None
        for fixed, structure in ranked:
            point = choices.best_within(gpu_budget - fixed)
            if point is not None:
                cost = float(choices.cost[point]) + self._edge_cost(goal, structure.edge_levels)
                if best is None or cost < best[0] * (1 - 1e-9):
                    best = (cost, structure, point)
        if best is None:
            return None
        return Solution(best[0], best[1], slots, self._dealt(choices.counts(best[2])))

    def _dealt(self, counts: Counter[int]) -> tuple[int, ...]:
        """Rows of the blocks from how many of each kind take each row, counted under kind * K + row."""
        width = len(self.row_option)
        by_kind = [
            sorted(m % width for m in counts.elements() if m // width == kind) for kind in range(len(self.kinds))
        ]
        dealt = [iter(rows) for rows in by_kind]
        return tuple(next(dealt[kind]) for kind in self.templates.kind_of.tolist())

    def _edge_cost(self, goal: Goal, levels: tuple[int, ...]) -> float:
        groups = np.arange(len(levels))
        return float(goal.cost(self.edge_loads[groups, levels], self.edge_host[groups, levels]).sum())

    # -- plans -------------------------------------------------------------------------------------------------------

    def plan(self, placement: Placement) -> Plan:
        """The plan of a placement."""
        layers = [LayerPlan()] * len(self.model.layers)
        groups = [GroupPlan()] * len(self.model.groups)
        t = self.templates
        for index, group, kind, row in zip(t.block_layers, t.block_groups, t.kind_of, placement.rows, strict=True):
            layers[index] = self.kinds[kind].options.plans[self.row_option[row]]
            groups[group] = t.kind_levels[kind][self.row_level[row]]
        for group, levels, level in zip(t.edge_groups, t.edge_levels, placement.structure.edge_levels, strict=True):
            groups[group] = levels[level]
        count, tile = self.templates.tiles(self.region_bytes(placement), placement.slots.optimizer)
        slots = placement.slots._replace(optimizer=count)
        size = (self.chunk_tokens, self.chunks_per_round)
        return self.templates.plan(size, placement.structure, slots, tuple(layers), tuple(groups), tile)
