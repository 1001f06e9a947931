"""Many placements of one size as arrays: their bytes on both sides, and the sketch's estimate of a step under each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from flexengine.planner.cost import loads
from flexengine.planner.cost.updates import exposed_s, stations
from flexengine.planner.kinds import OfBlocks
from flexengine.planner.sketch import Batch, EdgeCosts, RoundCosts, RowCosts, Sketch
from flexengine.planner.solver import Placement, RoundProblem
from flexengine.planner.tables import NUM_LEVELS, STREAMS_WEIGHTS, streams_grads
from flexengine.planner.templates import SlotCounts
from flexengine.schedule.layer_program import ALIGNMENT

MAX_NUMBER = np.iinfo(np.int64).max


class Drafts(NamedTuple):
    """Placements [P]: rows [P, L] of the blocks, an index into Drafting.structures, and weight, gradient and offload
    slots [P, 3]."""

    rows: np.ndarray
    structures: np.ndarray
    slots: np.ndarray

    def take(self, index: np.ndarray) -> Drafts:
        """Some of them."""
        return Drafts(self.rows[index], self.structures[index], self.slots[index])

    def distinct(self) -> Drafts:
        """Without repetitions, order kept."""
        columns = (*self.rows.T, self.structures, *self.slots.T)
        _, first = np.unique(numbered(columns), return_index=True)
        return self.take(np.sort(first))

    @staticmethod
    def joined(parts: list[Drafts]) -> Drafts:
        """All of them, in order."""
        return Drafts(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


class Mix(NamedTuple):
    """How many blocks do what: blocks per keep option [O] and per level [V], an index into Drafting.structures, and
    weight, gradient and offload slots."""

    options: np.ndarray
    levels: np.ndarray
    structure: int
    slots: tuple[int, int, int]


def numbered(columns: Sequence[np.ndarray]) -> np.ndarray:
    """A number [P] for every row of columns [P] of small counts, the same for equal rows alone: many times faster to
    sort than rows."""
    numbers, count = np.zeros(len(columns[0]), dtype=np.int64), 1
    for column in columns:
        width = int(column.max(initial=0)) + 1
        if count * width > MAX_NUMBER:
            _, numbers = np.unique(numbers, return_inverse=True)
            count = len(numbers)
        numbers, count = numbers * width + column, count * width
    return numbers


def aligned(num_bytes: np.ndarray) -> np.ndarray:
    """The next multiples of ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Drafting:
    """Bytes and seconds of drafts of one problem."""

    def __init__(self, problem: RoundProblem) -> None:
        self.problem = problem
        self.structures = problem.templates.structures(len(problem.edge_host), loads.STREAMED)
        self.edge_levels = np.array([s.edge_levels for s in self.structures])
        self.share = np.array([s.share_edge_slots for s in self.structures])
        self.grads_over_weights = np.array([s.grads_over_weights for s in self.structures])

    @cached_property
    def families(self) -> list[int]:
        """A number per structure, the same for those that differ in where the edges' gradients lie alone."""
        known: dict[tuple, int] = {}
        return [known.setdefault((s.share_edge_slots, s.edge_levels), len(known)) for s in self.structures]

    @property
    def none(self) -> Drafts:
        """No placement."""
        shapes = ((0, self.problem.num_blocks), (0,), (0, 3))
        return Drafts(*(np.zeros(shape, dtype=np.int64) for shape in shapes))

    def mix(self, drafts: Drafts, index: int) -> Mix:
        """How many blocks do what in one of them."""
        rows, (weight, grad, save) = drafts.rows[index], (int(count) for count in drafts.slots[index])
        options = np.bincount(rows // NUM_LEVELS, minlength=self.problem.num_options)
        levels = np.bincount(rows % NUM_LEVELS, minlength=NUM_LEVELS)
        return Mix(options, levels, int(drafts.structures[index]), (weight, grad, save))

    def placement(self, drafts: Drafts, index: int) -> Placement:
        """One of them as the planner's own value."""
        weight, grad, save = (int(count) for count in drafts.slots[index])
        slots = SlotCounts(weight, grad, save)
        rows = tuple(int(row) for row in drafts.rows[index])
        return self.problem.normalised(Placement(self.structures[int(drafts.structures[index])], slots, rows))

    def drafts(self, placements: list[Placement]) -> Drafts:
        """The planner's own values as arrays."""
        numbers = {s: i for i, s in enumerate(self.structures)}
        keys = [p.structure._replace(blocks_hold=loads.STREAMED) for p in placements]
        return Drafts(
            np.array([p.rows for p in placements]),
            np.array([numbers[key] for key in keys]),
            np.array([p.slots[:3] for p in placements]),
        )

    # -- bytes -------------------------------------------------------------------------------------------------------

    @cached_property
    def edge_gpu(self) -> np.ndarray:
        """GPU bytes [S] of the edge groups' resident planes under every structure."""
        return np.array([self.problem.templates.resident_edge_bytes(s.edge_levels) for s in self.structures])

    @cached_property
    def edge_slots(self) -> np.ndarray:
        """Bytes [S] of the edges' slots, and [S] where the head's gradient slots start, under every structure."""
        return np.array([self.problem.templates.edge_slots(s) for s in self.structures]).T

    @cached_property
    def edge_tiles(self) -> np.ndarray:
        """Whether updates of the edge groups pass through tiles [S], under every structure."""
        groups = np.arange(self.edge_levels.shape[1])
        return np.any(self.problem.edge_needs_tiles[groups, self.edge_levels], axis=1)

    @cached_property
    def edge_host(self) -> np.ndarray:
        """Host bytes [S] of the edge groups' planes under every structure."""
        groups = np.arange(self.edge_levels.shape[1])
        return self.problem.edge_host[groups, self.edge_levels].sum(axis=1)

    def block_slot_bytes(self, drafts: Drafts) -> np.ndarray:
        """Bytes [P] of the blocks' weight, accumulator and gradient slots, no more than parts that need one."""
        levels = drafts.rows % NUM_LEVELS
        templates = self.problem.templates
        total = np.full(len(levels), templates.accumulator_bytes)
        sizes = templates.slot_bytes[:, templates.kind_of]
        streams = STREAMS_WEIGHTS[levels], self.problem.streams_grads.at(levels)
        for size, count, streamed in zip(sizes, drafts.slots.T[:2], streams, strict=True):
            total = total + np.minimum(count, streamed @ templates.parts_of_blocks) * (size * streamed).max(axis=1)
        return total

    def region_bytes(self, drafts: Drafts) -> np.ndarray:
        """Bytes [P] of a round's slots, over which optimizer tiles lie."""
        p, options = self.problem, drafts.rows // NUM_LEVELS
        block, edges = self.block_slot_bytes(drafts), self.edge_slots[0][drafts.structures]
        slots = np.where(self.share[drafts.structures], np.maximum(block, edges), block + edges)
        staging = drafts.slots[:, 2] * aligned(p.option_staged.at(options).max(axis=1))
        scratch = np.maximum(p.activations.scratch_floor, p.option_scratch.at(options).max(axis=1))
        kept = p.chunks_per_round * p.option_gpu.at(options).sum(axis=1)
        return slots + p.activations.round_gpu_bytes + staging + aligned(scratch) + kept

    def gpu_bytes(self, drafts: Drafts) -> np.ndarray:
        """GPU bytes [P] of the process."""
        p, levels = self.problem, drafts.rows % NUM_LEVELS
        resident = self.edge_gpu[drafts.structures] + p.level_gpu.at(levels).sum(axis=1)
        tiled = p.needs_tiles.at(levels).any(axis=1) | self.edge_tiles[drafts.structures]
        region = np.maximum(self.region_bytes(drafts), np.where(tiled, p.templates.least_tile_bytes, 0))
        return p.activations.fixed_gpu_bytes + resident + region

    def host_bytes(self, drafts: Drafts) -> np.ndarray:
        """Host bytes [P] of the process."""
        p = self.problem
        planes = self.edge_host[drafts.structures] + p.row_host.at(drafts.rows).sum(axis=1)
        by_cpu = p.by_cpu.at(drafts.rows % NUM_LEVELS).any(axis=1)
        scale = np.where(by_cpu, p.templates.cpu_update_host_bytes, 0)
        return p.activations.host_bytes + planes + scale

    def fitting(self, drafts: Drafts, gpu_bytes: int, host_bytes: int) -> Drafts:
        """Those within both budgets."""
        fits = (self.gpu_bytes(drafts) <= gpu_bytes) & (self.host_bytes(drafts) <= host_bytes)
        return drafts.take(np.flatnonzero(fits))

    # -- seconds -----------------------------------------------------------------------------------------------------

    def step_s(self, drafts: Drafts) -> np.ndarray:
        """Estimated seconds [P] of a step: a first round, the others, which add to its gradients, and the update."""
        if self.problem.rounds == 1:
            return self.round_s(drafts, np.zeros(len(drafts.rows), dtype=bool)) + self.update_s(drafts)
        both = self.round_s(Drafts.joined([drafts, drafts]), np.arange(2 * len(drafts.rows)) >= len(drafts.rows))
        first, again = np.split(both, 2)
        return first + (self.problem.full_rounds - 1) * again + self.update_s(drafts)

    def round_s(self, drafts: Drafts, accumulating: np.ndarray) -> np.ndarray:
        """Estimated seconds [P] of a round."""
        rows = RowCosts(**{name: column.at(drafts.rows).T for name, column in self.row_costs.items()})
        embedding, head = (
            EdgeCosts(*edge[:5], *(column[drafts.structures] for column in edge[5:])) for edge in self.edge_costs
        )
        share, starts = self.share[drafts.structures], self.edge_slots[1][drafts.structures]
        refilled = share & STREAMS_WEIGHTS[drafts.rows % NUM_LEVELS].any(axis=1)
        if self.problem.model.tie_word_embeddings:  # what the embedding read is still there for the head
            head = head._replace(weights_h2d_s=np.where(refilled, head.weights_h2d_s, 0.0))
        grads_share = share & (self.block_slot_bytes(drafts) > starts)
        over_weights = self.grads_over_weights[drafts.structures]
        batch = Batch(rows, embedding, head, drafts.slots.T, share, over_weights, refilled, grads_share, accumulating)
        return Sketch(self.round_costs, batch, self.problem.cost.profile).run()

    @cached_property
    def round_costs(self) -> RoundCosts:
        """The blocks' compute per chunk."""
        p = self.problem
        return RoundCosts(
            p.of_blocks(lambda kind: np.array([s.forward_s for s in kind.seconds])).each(),
            p.of_blocks(lambda kind: np.array([s.backward_s for s in kind.seconds])).each(),
            p.of_blocks(lambda kind: np.array(self._finish_s(kind.group, kind.use.gradients))).each(),
            p.sliced,
            np.array([p.model.groups[layer.groups[0]].num_parts > 1 for layer in p.model.blocks]),
            sum(not layer.has_backward for layer in p.model.blocks),
        )

    def _finish_s(self, group, gradients: int) -> float:
        """Seconds to round a group's gradient, adding what was stored; 0 where it has none."""
        if not gradients:
            return 0.0
        profile = self.problem.cost.profile
        touched = group.numel * self.problem.acc_bytes + 2 * group.plane_bytes["grad"]
        return touched / profile.memory_bytes_per_s + 2 * profile.launch_s

    def _copy_s(self, num_bytes: np.ndarray, up: bool) -> np.ndarray:
        """Seconds of copies to (`up`) or from the device at the rate of a busy link; 0 for nothing."""
        p = self.problem.cost.profile
        alone, busy = (
            (p.h2d_bytes_per_s, p.h2d_duplex_bytes_per_s) if up else (p.d2h_bytes_per_s, p.d2h_duplex_bytes_per_s)
        )
        return np.where(num_bytes > 0, (num_bytes + p.copy_latency_s * alone) / busy, 0.0)

    @cached_property
    def row_costs(self) -> dict[str, OfBlocks]:
        """What the rows [K] cost in a round, by field of RowCosts."""
        found = [self._row_costs(number) for number in range(len(self.problem.kinds))]
        columns = zip(RowCosts._fields, zip(*found, strict=True), strict=True)
        return {name: OfBlocks(np.stack(column), self.problem.templates.kind_of) for name, column in columns}

    def _row_costs(self, number: int) -> RowCosts:
        p, kind, cost = self.problem, self.problem.kinds[number], self.problem.cost
        options = kind.options
        copy_s = loads.issue_s(cost, "copy")
        option, level = p.row_option, p.row_level
        chunks, planes = len(p.shape.chunks), kind.group.plane_bytes
        inputs = np.where(options.host_bytes > options.staged_bytes, p.hidden_bytes, 0)[option]
        staged = options.staged_bytes[option]
        weights, streams = STREAMS_WEIGHTS[level] * planes["weights"], p.streams_grads.by_kind[number][level]
        copies_s = copy_s * kind.copies[option]
        forward_s = sum(s.forward_issue_s for s in kind.seconds) / chunks
        backward_s = sum(s.backward_issue_s for s in kind.seconds) / chunks + kind.issue_s[option]
        return RowCosts(
            recompute_s=kind.recompute_s[option] / chunks,
            input_d2h_s=self._copy_s(inputs, False),
            save_d2h_s=self._copy_s(staged, False),
            input_h2d_s=self._copy_s(inputs, True),
            save_h2d_s=self._copy_s(staged, True),
            weights_h2d_s=self._copy_s(weights, True),
            grad_h2d_s=self._copy_s(streams * planes["grad"], True),
            grad_d2h_s=self._copy_s(streams * planes["grad"], False),
            forward_issue_s=forward_s + copies_s,
            backward_issue_s=backward_s + (2 if p.sliced else 1) * copies_s,
            fetch_issue_s=np.full(len(option), copy_s),
            finish_issue_s=kind.use.gradients * loads.issue_s(cost, "finish_gradient") + 2 * copy_s * streams,
        )

    @cached_property
    def edge_costs(self) -> tuple[EdgeCosts, EdgeCosts]:
        """Embedding and head with the groups they read, under every structure [S]."""
        return self._edge_costs(0), self._edge_costs(1)

    def _edge_costs(self, edge: int) -> EdgeCosts:
        p, templates = self.problem, self.problem.templates
        layer = p.model.layers[0 if edge == 0 else -1]
        weights, grads, again = (np.zeros(len(self.structures)) for _ in range(3))
        finish_s, other = 0.0, set(p.model.layers[-1 if edge == 0 else 0].groups)
        for i, group in enumerate(templates.edge_groups):
            if group not in layer.groups:
                continue
            planes, levels = templates.edge_layouts[i].plane_bytes, self.edge_levels[:, i]
            weights += self._copy_s(STREAMS_WEIGHTS[levels] * planes["weights"], True)
            streams = np.array([streams_grads(level) for level in templates.edge_levels[i]])[levels]
            grads += self._copy_s(streams * planes["grad"], True)
            if edge == 0 and group in other:
                again += self._copy_s(streams * planes["grad"], True)
            finish_s += self._finish_s(templates.edge_layouts[i], templates.uses[group].gradients)
        sent = grads * p.cost.profile.h2d_duplex_bytes_per_s / p.cost.profile.d2h_duplex_bytes_per_s
        seconds = p.edge_seconds[edge]
        return EdgeCosts(
            seconds.forward_s,
            seconds.backward_s,
            finish_s,
            seconds.forward_issue_s,
            seconds.backward_issue_s + (loads.issue_s(p.cost, "finish_gradient") if finish_s else 0.0),
            weights,
            grads,
            sent,
            again,
        )

    def update_s(self, drafts: Drafts) -> np.ndarray:
        """Estimated seconds [P] of the optimizer's update."""
        region = self.region_bytes(drafts)
        found = np.zeros(len(region))
        most = SlotCounts().optimizer
        steps = np.minimum(region // self.problem.templates.least_tile_bytes, 1 << 40)  # tiles depend on no more
        known = {
            int(n): self.problem.templates.tiles(int(n) * self.problem.templates.least_tile_bytes, most)
            for n in set(steps.tolist())
        }
        tiles = [known[n] for n in steps.tolist()]
        levels = drafts.rows % NUM_LEVELS
        for tile in set(tiles):
            mine = np.array([t == tile for t in tiles])
            blocks, edges, first_s = self.update_parts(*tile)
            parts = self._of_levels(blocks, levels[mine]) + edges[drafts.structures[mine]]
            found[mine] = exposed_s(parts, first_s, self.problem.hidden_update_s, self.problem.cost)
            if not self.problem.request.clipping:
                found[mine] += self._slowed_s(drafts.rows[mine], parts[:, 3])
        return found

    def _of_levels(self, blocks: OfBlocks, levels: np.ndarray) -> np.ndarray:
        """The sum [P, 4] over blocks of what their levels [P, L] take."""
        total = np.zeros((len(levels), blocks.by_kind.shape[-1]))
        for kind, table in enumerate(blocks.by_kind):
            own = levels[:, blocks.kind_of == kind]
            total += np.stack([(own == v).sum(axis=1) for v in range(NUM_LEVELS)], axis=1) @ table
        return total

    def _slowed_s(self, rows: np.ndarray, cpu_s: np.ndarray) -> np.ndarray:
        """Seconds [P] by which updates of cpu_s seconds [P] under the last backward slow it: the link has a part of its
        rate beside them, and compute waits where backward asks for more than that."""
        base, p = self.round_costs, self.problem.cost.profile
        costs = RowCosts(**{name: column.at(rows) for name, column in self.row_costs.items()})
        chunks = base.backward_s.shape[1]
        saved_s = chunks * (costs.input_h2d_s + costs.save_h2d_s) * (1 + base.refill + base.in_parts)
        link_s = saved_s + costs.weights_h2d_s + (costs.grad_h2d_s if self.problem.rounds > 1 else 0.0)
        compute_s = base.backward_s.sum(axis=1) + base.finish_s + chunks * costs.recompute_s
        link_s, compute_s = link_s.sum(axis=1), compute_s.sum(axis=1)
        has = min(1.0, p.h2d_beside_cpu_bytes_per_s / p.h2d_duplex_bytes_per_s)
        asks = np.maximum(has, np.minimum(1.0, link_s / compute_s))
        return np.minimum(cpu_s, compute_s) * (1 - has / asks)

    def update_parts(self, slots: int, tile: int) -> tuple[OfBlocks, np.ndarray, float]:
        """`Stations.seconds` of blocks by level [V, 4] and of the edges by structure [S, 4] in an update with such
        tiles, and those of the first tile's way."""
        key = (slots, tile)
        if key not in self._updates:
            cost, templates = self.problem.cost, self.problem.templates
            kinds = len(templates.kinds)
            groups = [*templates.kind_layouts, *templates.edge_layouts]
            levels = [*templates.kind_levels, *templates.edge_levels]
            found = [[stations(group, v, tile, cost) for v in of] for group, of in zip(groups, levels, strict=True)]
            parts = np.array([[s.seconds(slots, cost) for s in by_level] for by_level in found])
            edges = parts[np.arange(kinds, len(groups)), self.edge_levels].sum(axis=1)
            blocks = OfBlocks(parts[:kinds], templates.kind_of)
            first_s = next((s.first_s for s in (by_level[loads.STREAMED] for by_level in found) if s.first_s), 0.0)
            self._updates[key] = blocks, edges, first_s
        return self._updates[key]

    @cached_property
    def _updates(self) -> dict[tuple[int, int], tuple[OfBlocks, np.ndarray, float]]:
        return {}
