"""For one chunk and round size: the placement of everything that fits a GPU budget at the least cost.

Blocks choose a keep option and a residency level each, by the dynamic programme; embedding and head choose a level; the buffers
that all share (slots, scratch) are fixed bytes read off a small layout, so that memory numbers have one home.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np

from flexengine.models.spec import LayerSpec, ModelSpec
from flexengine.plan import GroupPlan, LayerPlan, Plan, Request
from flexengine.planner import knapsack, loads
from flexengine.planner.cost_model import CostModel, round_shape, rounds_per_step
from flexengine.planner.frontier import KeepOption, SaveSet, keep_options, save_set
from flexengine.planner.memory import gpu_overhead_bytes, host_required_bytes
from flexengine.hardware.profile import HardwareProfile
from flexengine.schedule.layer_program import align
from flexengine.schedule.layout import DTYPE_BYTES, Layout, group_layout


LEAST_TILE = 1 << 12
"""Elements of the smallest optimizer tile."""


class SlotCounts(NamedTuple):
    """Prefetch depths."""

    weight: int = 2
    grad: int = 2
    save: int = 2
    optimizer: int = 2


class Structure(NamedTuple):
    """What decides which shared buffers exist: edge slots over block slots or not, a level per edge group (see loads.LEVELS),
    and which planes all blocks hold on the GPU, so that they need no slots."""

    share_edge_slots: bool
    edge_levels: tuple[int, ...]
    blocks_hold: int


class Caps(NamedTuple):
    """Largest offload slot and scratch, in bytes, that the options of a solution may need."""

    staged_bytes: int
    scratch_bytes: int


class Solution(NamedTuple):
    """A choice for every block, as counts per row (option x level) of the table, and the structure around it."""

    objective: float
    structure: Structure
    counts: Counter[int]
    total_loads: np.ndarray


@dataclass(frozen=True)
class Goal:
    """What a solution minimises: the sum over layers of phase_seconds, or of loads weighted by `weights` [9].

    host_s_per_byte prices host memory when it is short.
    """

    weights: tuple[float, ...] | None = None
    host_s_per_byte: float = 0.0

    def cost(self, table: np.ndarray, host_bytes: np.ndarray) -> np.ndarray:
        """Cost of rows with loads [K, 9] and host bytes [K]."""
        seconds = loads.phase_seconds(table) if self.weights is None else table @ np.asarray(self.weights)
        return seconds + self.host_s_per_byte * host_bytes


BLOCKS_HOLD_LEVELS = {
    loads.STREAMED: tuple(range(len(loads.LEVELS))),
    loads.RESIDENT_WEIGHTS: (loads.RESIDENT_WEIGHTS, loads.RESIDENT_BOTH, loads.RESIDENT),
    loads.RESIDENT_GRADS: (loads.RESIDENT_GRADS, loads.RESIDENT_BOTH, loads.RESIDENT),
    loads.RESIDENT_BOTH: (loads.RESIDENT_BOTH, loads.RESIDENT),
}
"""What all blocks hold on the GPU -> the levels that do."""


class RoundProblem:
    """All placements for chunks of `chunk_tokens` tokens, `chunks_per_round` to a round.

    Blocks must be alike (one class of layers, one size of groups) except in their weights' values.
    """

    def __init__(
        self,
        model: ModelSpec,
        request: Request,
        profile: HardwareProfile,
        chunk_tokens: int,
        chunks_per_round: int,
        sets: tuple[tuple[str, ...], ...],
    ) -> None:
        self.model, self.request, self.profile = model, request, profile
        self.chunk_tokens, self.chunks_per_round = chunk_tokens, chunks_per_round
        self.compute_bytes = DTYPE_BYTES[request.numerics.compute]
        self.acc_bytes = 8 if request.numerics.compute == "float64" else 4
        self.cost = CostModel(profile, self.compute_bytes, chunk_tokens)
        self.shape = round_shape(request, chunk_tokens, chunks_per_round)
        self.rounds = rounds_per_step(request, self.shape)
        self.block_indices = [i for i, layer in enumerate(model.layers) if layer.kind == "block"]
        self.block_groups = [model.layers[i].groups[0] for i in self.block_indices]
        self.edge_groups = [g for g in range(len(model.groups)) if g not in set(self.block_groups)]
        self.group_layouts = {g: group_layout(model.groups[g], request.numerics) for g in self._sample_groups}
        self._build_options(sets)
        self._build_rows()
        self._build_edges()
        self._fixed: dict[tuple, tuple[int, int]] = {}
        self._tiles: dict[tuple, int] = {}

    @property
    def _sample_groups(self) -> list[int]:
        return [self.block_groups[0], *self.edge_groups]

    @property
    def block(self) -> LayerSpec:
        """One block; the others are like it."""
        return self.model.layers[self.block_indices[0]]

    # -- tables ------------------------------------------------------------------------------------------------------

    def _build_options(self, sets: tuple[tuple[str, ...], ...]) -> None:
        hidden = align(self.chunk_tokens * self.model.hidden_size * self.compute_bytes)
        frontier: tuple[SaveSet, ...] = tuple(save_set(self.block, ops, self.shape, self.cost) for ops in sets)
        self.options: tuple[KeepOption, ...] = keep_options(
            self.block, frontier, self.cost, self.request.recompute, hidden
        )

    def _build_rows(self) -> None:
        """Rows option x level: loads [K, 9], bytes on both sides, and what they need of shared buffers."""
        group, n = self.group_layouts[self.block_groups[0]], self.chunks_per_round
        use = loads.group_uses(self.model)[self.block_groups[0]]
        forward, backward = loads.layer_compute_s(self.block, self.shape, self.cost)
        fixed = np.zeros(loads.NUM_LOADS)
        fixed[loads.FC], fixed[loads.BC] = self.rounds * forward, self.rounds * backward
        refills = 2 if self.shape.chunks[0].is_slice else 1
        kept = [loads.option_loads(o, len(self.shape.chunks), refills, self.rounds, self.cost) for o in self.options]
        levels = [
            loads.group_loads(group, level, use, self.rounds, self.acc_bytes, self.cost) for level in loads.LEVELS
        ]
        resident = [_aligned_resident(group.plane_bytes, level) for level in loads.LEVELS]
        streamed = [loads.streamed_bytes(group, level) for level in loads.LEVELS]
        pairs = list(product(range(len(self.options)), range(len(loads.LEVELS))))
        self.row_pairs = pairs
        self.row_loads = np.array([fixed + kept[o] + levels[v] for o, v in pairs])
        self.row_gpu = np.array([n * self.options[o].gpu_bytes + resident[v] for o, v in pairs], dtype=np.int64)
        self.row_host = np.array([n * self.options[o].host_bytes + streamed[v] for o, v in pairs], dtype=np.int64)
        self.row_staged = np.array([self.options[o].staged_bytes for o, _ in pairs], dtype=np.int64)
        self.row_scratch = np.array([self.options[o].scratch_bytes for o, _ in pairs], dtype=np.int64)
        self.row_level = np.array([v for _, v in pairs])

    def _build_edges(self) -> None:
        """Loads of every edge group at every level, and the compute of embedding and head."""
        uses = loads.group_uses(self.model)
        self.edge_loads = [
            [
                loads.group_loads(self.group_layouts[g], v, uses[g], self.rounds, self.acc_bytes, self.cost)
                for v in loads.LEVELS
            ]
            for g in self.edge_groups
        ]
        self.edge_compute = np.zeros(loads.NUM_LOADS)
        for layer in self.model.layers:
            if layer.kind != "block":
                forward, backward = loads.layer_compute_s(layer, self.shape, self.cost)
                self.edge_compute[loads.FC] += self.rounds * forward
                self.edge_compute[loads.BC] += self.rounds * backward

    # -- fixed bytes -------------------------------------------------------------------------------------------------

    def fixed_bytes(self, structure: Structure, slots: SlotCounts, caps: Caps) -> int:
        """GPU bytes of the process beside what blocks hold resident or keep."""
        arena, scratch_floor = self._template(structure, slots)
        scratch = max(scratch_floor, caps.scratch_bytes)
        return arena + align(scratch) + slots.save * align(caps.staged_bytes)

    def _template(self, structure: Structure, slots: SlotCounts) -> tuple[int, int]:
        """(GPU bytes without scratch, offload slots and blocks' own bytes; least scratch) of a small model's layout."""
        key = (structure, slots)
        if key not in self._fixed:
            level = loads.LEVELS[structure.blocks_hold]
            everything = max(self.options, key=lambda o: len(o.plan.keep_gpu) + len(o.plan.keep_host))
            keep = LayerPlan((*everything.plan.keep_gpu, *everything.plan.keep_host), (), "host")
            layout = Layout(self._small_model, self._small_plan(structure, slots, level, keep))
            scratch = layout.slots[layout.slot("scratch")].num_bytes
            small_blocks = len(self._small_model.blocks)
            own = small_blocks * _aligned_resident(self.group_layouts[self.block_groups[0]].plane_bytes, level)
            own += small_blocks * self.chunks_per_round * align(layout.programs[1].save_gpu_bytes)
            overhead = gpu_overhead_bytes(layout, self.profile)
            self._fixed[key] = (layout.gpu_bytes - align(scratch) - own + overhead, scratch)
        return self._fixed[key]

    @cached_property
    def _small_model(self) -> ModelSpec:
        """The model with as many blocks as decide how many slots there are."""
        kept = self.block_indices[:4]
        layers = [self.model.layers[i] for i in (0, *kept, len(self.model.layers) - 1)]
        groups = [g for i, g in enumerate(self.model.groups) if i in self.edge_groups or i in self.block_groups[:4]]
        return replace(self.model, layers=tuple(layers), groups=tuple(groups))

    def _small_plan(self, structure: Structure, slots: SlotCounts, level: GroupPlan, keep: LayerPlan) -> Plan:
        edges = iter(structure.edge_levels)
        groups = tuple(
            level if g.slot_class == "block" else loads.LEVELS[next(edges)] for g in self._small_model.groups
        )
        blocks = (keep,) * len(self._small_model.blocks)
        return self._plan(structure, slots, (LayerPlan(), *blocks, LayerPlan()), groups, LEAST_TILE)

    def _plan(
        self,
        structure: Structure,
        slots: SlotCounts,
        layers: tuple[LayerPlan, ...],
        groups: tuple[GroupPlan, ...],
        tile: int,
    ) -> Plan:
        return Plan(
            model=self.model.name,
            request=self.request,
            chunk_tokens=self.chunk_tokens,
            chunks_per_round=self.chunks_per_round,
            layers=layers,
            groups=groups,
            weight_slots=slots.weight,
            grad_slots=slots.grad,
            save_slots=slots.save,
            optimizer_slots=slots.optimizer,
            optimizer_tile=tile,
            share_edge_slots=structure.share_edge_slots,
        )

    # -- the programme -----------------------------------------------------------------------------------------------

    def structures(self, blocks_hold: int) -> list[Structure]:
        """Without shared edge slots a streamed edge group takes the same bytes as a resident one, so it is resident."""
        found = []
        for share in (False, True):
            levels = (loads.STREAMED,) if share else ()
            levels += (loads.RESIDENT_BOTH, loads.RESIDENT)
            found += [Structure(share, edges, blocks_hold) for edges in product(levels, repeat=len(self.edge_groups))]
        return found

    def solve(self, goal: Goal, slots: SlotCounts, gpu_budget: int, caps: Caps) -> Solution | None:
        """The best solution within the budget (whole process) whose options respect the caps."""
        row_cost = goal.cost(self.row_loads, self.row_host)
        allowed = (self.row_staged <= caps.staged_bytes) & (self.row_scratch <= caps.scratch_bytes)
        best: tuple[float, Structure, knapsack.Choices, int] | None = None
        for hold, hold_levels in BLOCKS_HOLD_LEVELS.items():
            rows = np.flatnonzero(allowed & np.isin(self.row_level, hold_levels))
            ranked = [(self.fixed_bytes(s, slots, caps), s) for s in self.structures(hold)]
            limit = gpu_budget - min(fixed for fixed, _ in ranked)
            if not len(rows) or len(self.block_indices) * int(self.row_gpu[rows].min()) > limit:
                continue
            layer = knapsack.one_layer(self.row_gpu, row_cost, rows)
            choices = knapsack.repeat(layer, len(self.block_indices), limit)
            for fixed, structure in ranked:
                point = choices.best_within(gpu_budget - fixed)
                if point is None:
                    continue
                cost = float(choices.cost[point]) + self._edge_cost(goal, structure)
                if best is None or cost < best[0] * (1 - 1e-9):
                    best = (cost, structure, choices, point)
        if best is None:
            return None
        cost, structure, choices, point = best
        counts = choices.counts(point)
        return Solution(cost, structure, counts, self.total_loads(structure, counts))

    def _edge_cost(self, goal: Goal, structure: Structure) -> float:
        rows = np.array([self.edge_loads[i][v] for i, v in enumerate(structure.edge_levels)] + [self.edge_compute])
        host = [
            loads.streamed_bytes(self.group_layouts[g], loads.LEVELS[v])
            for g, v in zip(self.edge_groups, structure.edge_levels, strict=True)
        ]
        return float(goal.cost(rows, np.array([*host, 0])).sum())

    def total_loads(self, structure: Structure, counts: Counter[int]) -> np.ndarray:
        """Loads [9] of the whole step."""
        total = self.edge_compute.copy()
        for i, level in enumerate(structure.edge_levels):
            total += self.edge_loads[i][level]
        for row, count in counts.items():
            total += count * self.row_loads[row]
        return total

    def caps_of(self, counts: Counter[int]) -> Caps:
        """What the chosen rows need of shared buffers."""
        rows = list(counts)
        return Caps(int(self.row_staged[rows].max()), int(self.row_scratch[rows].max()))

    @cached_property
    def host_overhead_bytes(self) -> int:
        """Host bytes of the process beside parameter planes and offloaded activations."""
        structure = self.structures(loads.STREAMED)[0]
        level, keep = loads.LEVELS[-1], LayerPlan((), (), "gpu")
        resident = structure._replace(edge_levels=(loads.RESIDENT,) * len(self.edge_groups))
        layout = Layout(self._small_model, self._small_plan(resident, SlotCounts(), level, keep))
        return host_required_bytes(layout, self.profile)

    @property
    def widest_caps(self) -> Caps:
        """Caps that allow every option."""
        return Caps(int(self.row_staged.max()), int(self.row_scratch.max()))

    # -- plans -------------------------------------------------------------------------------------------------------

    def plan(self, structure: Structure, slots: SlotCounts, rows: list[int]) -> Plan:
        """The plan that gives block i the row rows[i]."""
        layers = [LayerPlan()] * len(self.model.layers)
        groups = [GroupPlan()] * len(self.model.groups)
        for index, group, row in zip(self.block_indices, self.block_groups, rows, strict=True):
            option, level = self.row_pairs[row]
            layers[index], groups[group] = self.options[option].plan, loads.LEVELS[level]
        for group, level in zip(self.edge_groups, structure.edge_levels, strict=True):
            groups[group] = loads.LEVELS[level]
        return self._plan(structure, slots, tuple(layers), tuple(groups), self.tile(structure, slots))

    def tile(self, structure: Structure, slots: SlotCounts) -> int:
        """Elements of an optimizer tile: as large as is useful within bytes that forward and backward need anyway."""
        key = (structure, slots)
        if key not in self._tiles:
            level = loads.LEVELS[structure.blocks_hold]
            layout = Layout(self._small_model, self._small_plan(structure, slots, level, LayerPlan((), (), "host")))
            tile, limit = LEAST_TILE, self._largest_tile
            if layout.has("tile[0]"):
                room = layout.gpu_bytes - layout.slots[layout.slot("tile[0]")].offset
                limit = min(limit, room // (slots.optimizer * (layout.tile_bytes // LEAST_TILE)))
            self._tiles[key] = max(tile, _power_of_two(limit))
        return self._tiles[key]

    @property
    def _largest_tile(self) -> int:
        """Enough tiles to overlap copies with updates, not so many that each is small."""
        numel = self.model.num_parameters
        return max(_power_of_two(numel // 1024), min(1 << 24, _power_of_two(numel // 64)))


def _power_of_two(value: int) -> int:
    """The largest power of two not above value (at least 1)."""
    return 1 << max(0, value.bit_length() - 1)


def _aligned_resident(plane_bytes: dict[str, int], level: GroupPlan) -> int:
    homes = {"weights": level.weights, "grad": level.grads}
    return sum(align(num) for kind, num in plane_bytes.items() if homes.get(kind, level.states) == "gpu")
