"""For one chunk and round size: the placement of everything that fits a GPU budget at the least cost.

Blocks choose a keep option and a residency level each, by the dynamic programme; embedding and head choose a level;
what all share (slots, scratch) comes from the templates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from flexengine.models.spec import LayerSpec
from flexengine.plan import GroupPlan, LayerPlan, Plan
from flexengine.planner import knapsack, loads
from flexengine.planner.cost_model import CostModel, round_shape, rounds_per_step
from flexengine.planner.frontier import KeepOption, keep_options, save_set
from flexengine.planner.sketch import EdgeCosts, RowCosts, Sketch
from flexengine.planner.templates import SlotCounts, Structure, Templates, aligned_bytes
from flexengine.schedule.layer_program import align
from flexengine.schedule.layout import DTYPE_BYTES, GroupLayout


class Caps(NamedTuple):
    """Largest offload slot and scratch, in bytes, that the options of a solution may need."""

    staged_bytes: int
    scratch_bytes: int


class Solution(NamedTuple):
    """A choice for every block, as counts per row (option x level) of the table, and the structure around it."""

    objective: float
    structure: Structure
    slots: SlotCounts
    counts: Counter[int]


class Placement(NamedTuple):
    """A solution with its rows dealt out to the blocks: everything a plan says but for the sizes."""

    structure: Structure
    slots: SlotCounts
    rows: tuple[int, ...]


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
FEW_BLOCKS = 4
"""With so few blocks, slots weigh as much as blocks do, and every case is solved on its own."""


class RoundProblem:
    """All placements for chunks of `chunk_tokens` tokens, `chunks_per_round` to a round.

    Blocks are alike: one class of layers, one size of groups.
    """

    def __init__(
        self, templates: Templates, chunk_tokens: int, chunks_per_round: int, sets: tuple[tuple[str, ...], ...]
    ) -> None:
        self.templates, self.model, self.request = templates, templates.model, templates.request
        self.chunk_tokens, self.chunks_per_round = chunk_tokens, chunks_per_round
        self.compute_bytes = DTYPE_BYTES[self.request.numerics.compute]
        self.acc_bytes = 8 if self.request.numerics.compute == "float64" else 4
        self.cost = CostModel(templates.profile, self.compute_bytes, chunk_tokens, self.request.max_seq_len)
        self.shape = round_shape(self.request, chunk_tokens, chunks_per_round)
        self.rounds = rounds_per_step(self.request, self.shape)
        self.num_blocks = len(templates.block_layers)
        self.activations = templates.activation_bytes(chunk_tokens, chunks_per_round)
        self._build_options(sets)
        self._build_rows()
        self._build_edges()

    @property
    def block(self) -> LayerSpec:
        """One block; the others are like it."""
        return self.model.layers[self.templates.block_layers[0]]

    # -- tables ------------------------------------------------------------------------------------------------------

    def _build_options(self, sets: tuple[tuple[str, ...], ...]) -> None:
        hidden = align(self.chunk_tokens * self.model.hidden_size * self.compute_bytes)
        frontier = tuple(save_set(self.block, ops, self.shape, self.cost) for ops in sets)
        self.hidden_bytes = hidden
        self.options: tuple[KeepOption, ...] = keep_options(
            self.block, frontier, self.cost, self.request.recompute, hidden
        )

    def _build_rows(self) -> None:
        """Rows option x level: loads [K, 9], bytes on both sides, and what they need of shared buffers."""
        group, n = self.templates.block_group, self.chunks_per_round
        use = self.templates.uses[self.templates.block_groups[0]]
        self.block_costs = loads.block_costs(self.block, group, self.shape, self.acc_bytes, self.cost)
        fixed = np.zeros(loads.NUM_LOADS)
        fixed[loads.FC] = self.rounds * sum(self.block_costs.forward_s)
        fixed[loads.BC] = self.rounds * sum(self.block_costs.backward_s)
        refills = 2 if self.block_costs.refill else 1
        kept = [loads.option_loads(o, len(self.shape.chunks), refills, self.rounds, self.cost) for o in self.options]
        levels = [loads.group_loads(group, v, use, self.rounds, self.acc_bytes, self.cost) for v in loads.LEVELS]
        resident = [aligned_bytes(group, level) for level in loads.LEVELS]
        streamed = [loads.streamed_bytes(group, level) for level in loads.LEVELS]
        pairs = list(product(range(len(self.options)), range(len(loads.LEVELS))))
        self.row_of = {pair: row for row, pair in enumerate(pairs)}
        self.row_pairs = pairs
        self.row_loads = np.array([fixed + kept[o] + levels[v] for o, v in pairs])
        self.row_gpu = np.array([n * self.options[o].gpu_bytes + resident[v] for o, v in pairs], dtype=np.int64)
        self.row_host = np.array([n * self.options[o].host_bytes + streamed[v] for o, v in pairs], dtype=np.int64)
        self.row_staged = np.array([self.options[o].staged_bytes for o, _ in pairs], dtype=np.int64)
        self.row_scratch = np.array([self.options[o].scratch_bytes for o, _ in pairs], dtype=np.int64)
        self.row_level = np.array([v for _, v in pairs])
        self.row_holds = {hold: np.isin(self.row_level, held) for hold, held in BLOCKS_HOLD_LEVELS.items()}
        self.row_costs = [self._row_costs(self.options[o], loads.LEVELS[v], group) for o, v in pairs]

    def _row_costs(self, option: KeepOption, level: GroupPlan, group: GroupLayout) -> RowCosts:
        p = self.cost.profile
        inputs = self.hidden_bytes if option.plan.input_home == "host" else 0
        weights = group.plane_bytes["weights"] if level.weights == "host" else 0
        grad = group.plane_bytes["grad"] if level.grads == "host" else 0
        return RowCosts(
            option.recompute_s / len(self.shape.chunks),
            inputs / p.d2h_duplex_bytes_per_s,
            option.staged_bytes / p.d2h_duplex_bytes_per_s,
            inputs / p.h2d_duplex_bytes_per_s,
            option.staged_bytes / p.h2d_duplex_bytes_per_s,
            weights / p.h2d_duplex_bytes_per_s,
            grad / p.h2d_duplex_bytes_per_s,
            grad / p.d2h_duplex_bytes_per_s,
        )

    def _build_edges(self) -> None:
        """Loads of every edge group at every level, and the compute of embedding and head."""
        uses, groups = self.templates.uses, self.templates.edge_groups
        self.edge_loads = [
            [loads.group_loads(layout, v, uses[g], self.rounds, self.acc_bytes, self.cost) for v in loads.LEVELS]
            for g, layout in zip(groups, self.templates.edge_layouts, strict=True)
        ]
        self.edge_host = [[loads.streamed_bytes(x, v) for v in loads.LEVELS] for x in self.templates.edge_layouts]
        edges = [layer for layer in self.model.layers if layer.kind != "block"]
        self._edges: dict[tuple[int, tuple[int, ...]], EdgeCosts] = {}
        self.edge_seconds = [loads.layer_compute_s(layer, self.shape, self.cost) for layer in edges]
        self.edge_compute = np.zeros(loads.NUM_LOADS)
        self.edge_compute[loads.FC] = self.rounds * sum(f for f, _ in self.edge_seconds)
        self.edge_compute[loads.BC] = self.rounds * sum(b for _, b in self.edge_seconds)

    @property
    def compute_s(self) -> float:
        """Compute seconds of a step without recomputation or update."""
        blocks = sum(self.block_costs.forward_s) + sum(self.block_costs.backward_s)
        return self.rounds * (self.num_blocks * blocks + sum(f + b for f, b in self.edge_seconds))

    # -- bytes -------------------------------------------------------------------------------------------------------

    def fixed_bytes(self, structure: Structure, slots: SlotCounts, caps: Caps) -> int:
        """GPU bytes of the process beside what blocks hold resident or keep."""
        scratch = align(max(self.activations.scratch_floor, caps.scratch_bytes))
        staging = slots.save * align(caps.staged_bytes)
        return self.templates.parameter_bytes(structure, slots) + self.activations.gpu_bytes + scratch + staging

    def gpu_bytes(self, placement: Placement) -> int:
        """GPU bytes of the process under a placement."""
        rows = list(placement.rows)
        structure = self.normalised(placement).structure
        fixed = self.fixed_bytes(structure, self._used_slots(placement), self.caps_of(rows))
        return fixed + int(self.row_gpu[rows].sum())

    def _used_slots(self, placement: Placement) -> SlotCounts:
        """Slot counts of a layout: no more weight or gradient slots than groups that need one."""
        levels = [loads.LEVELS[self.row_level[row]] for row in placement.rows]
        weights, grads = (sum(getattr(v, kind) == "host" for v in levels) for kind in ("weights", "grads"))
        slots = placement.slots
        return slots._replace(weight=max(1, min(slots.weight, weights)), grad=max(1, min(slots.grad, grads)))

    def host_bytes(self, structure: Structure, counts: Counter[int]) -> int:
        """Host bytes of the process."""
        edges = sum(host[v] for host, v in zip(self.edge_host, structure.edge_levels, strict=True))
        return edges + self.activations.host_bytes + sum(n * int(self.row_host[row]) for row, n in counts.items())

    def caps_of(self, rows: Sequence[int]) -> Caps:
        """What the chosen rows need of shared buffers."""
        return Caps(int(self.row_staged[rows].max()), int(self.row_scratch[rows].max()))

    @property
    def widest_caps(self) -> Caps:
        """Caps that allow every option."""
        return Caps(int(self.row_staged.max()), int(self.row_scratch.max()))

    def normalised(self, placement: Placement) -> Placement:
        """With `blocks_hold` as the rows have it: planes that all blocks hold need no slots."""
        levels = [loads.LEVELS[self.row_level[row]] for row in set(placement.rows)]
        weights, grads = (all(getattr(v, k) == "gpu" for v in levels) for k in ("weights", "grads"))
        hold = {
            (False, False): loads.STREAMED,
            (True, False): loads.RESIDENT_WEIGHTS,
            (False, True): loads.RESIDENT_GRADS,
            (True, True): loads.RESIDENT_BOTH,
        }[weights, grads]
        if all(v.states == "gpu" for v in levels):
            hold = loads.RESIDENT
        return placement._replace(structure=placement.structure._replace(blocks_hold=hold))

    # -- the programme -----------------------------------------------------------------------------------------------

    def solve(self, goal: Goal, slots: SlotCounts, gpu_budget: int, caps: Caps) -> Solution | None:
        """The best solution within the budget (whole process) whose options respect the caps."""
        row_cost = goal.cost(self.row_loads, self.row_host)
        allowed = (self.row_staged <= caps.staged_bytes) & (self.row_scratch <= caps.scratch_bytes)
        best: Solution | None = None
        for hold, holding in self.row_holds.items():
            if hold != loads.STREAMED and self.num_blocks > FEW_BLOCKS and not self._all_hold(best, hold):
                continue
            rows = np.flatnonzero(allowed & holding)
            found = self._solve_holding(goal, slots, gpu_budget, caps, hold, rows, row_cost) if len(rows) else None
            if found is not None and (best is None or found.objective < best.objective * (1 - 1e-9)):
                best = found
        return best

    def _all_hold(self, solution: Solution | None, hold: int) -> bool:
        """Whether every block of a solution holds those planes anyway, so that their slots can be saved."""
        return solution is not None and all(self.row_holds[hold][row] for row in solution.counts)

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
        """The best choice among `rows`, over all structures of the edges."""
        structures = self.templates.structures(len(self.edge_host), hold)
        ranked = [(self.fixed_bytes(s, slots, caps), s) for s in structures]
        limit = gpu_budget - min(fixed for fixed, _ in ranked)
        if self.num_blocks * int(self.row_gpu[rows].min()) > limit:
            return None
        layer = knapsack.one_layer(self.row_gpu, row_cost, rows)
        choices = knapsack.repeat(layer, self.num_blocks, limit)
        edge_costs = {s.edge_levels: 0.0 for s in structures}
        edge_costs = {levels: self._edge_cost(goal, levels) for levels in edge_costs}
        best: tuple[float, Structure, int] | None = None
        for fixed, structure in ranked:
            point = choices.best_within(gpu_budget - fixed)
            if point is not None:
                cost = float(choices.cost[point]) + edge_costs[structure.edge_levels]
                if best is None or cost < best[0] * (1 - 1e-9):
                    best = (cost, structure, point)
        if best is None:
            return None
        return Solution(best[0], best[1], slots, choices.counts(best[2]))

    def _edge_cost(self, goal: Goal, levels: tuple[int, ...]) -> float:
        rows = np.array([self.edge_loads[i][v] for i, v in enumerate(levels)] + [self.edge_compute])
        host = [self.edge_host[i][v] for i, v in enumerate(levels)]
        return float(goal.cost(rows, np.array([*host, 0])).sum())

    def total_loads(self, structure: Structure, counts: Counter[int]) -> np.ndarray:
        """Loads [9] of the whole step."""
        total = self.edge_compute.copy()
        for i, level in enumerate(structure.edge_levels):
            total += self.edge_loads[i][level]
        for row, count in counts.items():
            total += count * self.row_loads[row]
        return total

    def is_resident(self, solution: Solution) -> bool:
        """Whether nothing but the batch crosses the link and nothing is recomputed: no placement is faster."""
        total = self.total_loads(solution.structure, solution.counts)
        recomputed = any(self.options[self.row_pairs[row][0]].recompute_s > 0 for row in solution.counts)
        return not recomputed and not total[[loads.FH, loads.FD, loads.BH, loads.BD, loads.UH, loads.UD]].any()

    # -- estimates ---------------------------------------------------------------------------------------------------

    def sketch_s(self, placement: Placement) -> float:
        """Estimated seconds of a step: rounds by the sketch (all as if they found earlier gradients), the update by its
        largest stream."""
        total = self.total_loads(placement.structure, Counter(placement.rows))
        update_s = float(total[[loads.UC, loads.UH, loads.UD]].max())
        return update_s + self.rounds * self.sketch_round_s(placement, self.rounds > 1)

    def sketch_round_s(self, placement: Placement, accumulating: bool) -> float:
        """Estimated seconds of one round."""
        edges = [self._edge_costs(i, placement.structure.edge_levels) for i in range(2)]
        rows = [self.row_costs[row] for row in placement.rows]
        slots = placement.slots[:3]
        share = placement.structure.share_edge_slots
        return Sketch(self.block_costs, rows, (edges[0], edges[1]), slots, share, accumulating).run()

    def _edge_costs(self, edge: int, edge_levels: tuple[int, ...]) -> EdgeCosts:
        """Embedding (0) or head (1) with the groups it reads."""
        if (edge, edge_levels) not in self._edges:
            self._edges[edge, edge_levels] = self._new_edge_costs(edge, edge_levels)
        return self._edges[edge, edge_levels]

    def _new_edge_costs(self, edge: int, edge_levels: tuple[int, ...]) -> EdgeCosts:
        p, width = self.cost.profile, self.acc_bytes + 2 * self.compute_bytes
        layer = self.model.layers[0 if edge == 0 else -1]
        weights = grads = finish_s = 0.0
        for i, group in enumerate(self.templates.edge_groups):
            if group in layer.groups:
                level, planes = loads.LEVELS[edge_levels[i]], self.templates.edge_layouts[i].plane_bytes
                weights += planes["weights"] if level.weights == "host" else 0
                grads += planes["grad"] if level.grads == "host" else 0
                finish_s += self.templates.edge_layouts[i].numel * width / p.memory_bytes_per_s
        return EdgeCosts(
            *self.edge_seconds[edge],
            finish_s,
            weights / p.h2d_duplex_bytes_per_s,
            grads / p.h2d_duplex_bytes_per_s,
            grads / p.d2h_duplex_bytes_per_s,
        )

    # -- plans -------------------------------------------------------------------------------------------------------

    def plan(self, placement: Placement) -> Plan:
        """The plan of a placement."""
        layers = [LayerPlan()] * len(self.model.layers)
        groups = [GroupPlan()] * len(self.model.groups)
        places = zip(self.templates.block_layers, self.templates.block_groups, placement.rows, strict=True)
        for index, group, row in places:
            option, level = self.row_pairs[row]
            layers[index], groups[group] = self.options[option].plan, loads.LEVELS[level]
        for group, level in zip(self.templates.edge_groups, placement.structure.edge_levels, strict=True):
            groups[group] = loads.LEVELS[level]
        tile = self.templates.tile(self.normalised(placement).structure, placement.slots)
        size = (self.chunk_tokens, self.chunks_per_round)
        return self.templates.plan(size, placement.structure, placement.slots, tuple(layers), tuple(groups), tile)
