"""Candidates of one chunk and round size as arrays, what they take of both memories, and the plan of each.

A candidate says for every block what it keeps and where its parameters live (a choice: keep option x residency), what
embedding and head do (an edge choice), and how many slots there are of each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from flexengine.plan import GroupPlan, LayerPlan, Plan
from flexengine.planner.block_totals import BlockSums, BlockTotals
from flexengine.planner.cost.stream_loads import group_loads, plane_bytes_in
from flexengine.planner.shared_buffers import SlotCounts
from flexengine.planner.size_tables import NUM_RESIDENCIES, SizeTables
from flexengine.schedule.group_storage import GroupStorage
from flexengine.schedule.group_uses import GroupUse
from flexengine.schedule.kept_on_drive import staged_kept_bytes
from flexengine.schedule.layer_program import ALIGNMENT

Slots = tuple[int, int, int]
"""Weight, gradient and offload slots."""


class Candidates(NamedTuple):
    """Candidates [P]: choices [P, L] of the blocks, indices [P] into the edge choices, and slots [P, 3]."""

    choices: np.ndarray
    edges: np.ndarray
    slots: np.ndarray

    def take(self, index: np.ndarray) -> Candidates:
        """Select some candidates."""
        return Candidates(self.choices[index], self.edges[index], self.slots[index])

    def distinct(self) -> Candidates:
        """Drop repetitions and keep the order."""
        rows = np.column_stack((self.choices, self.edges, self.slots))
        last = len(rows) - 1
        first = {row.tobytes(): last - i for i, row in enumerate(rows[::-1])}
        return self.take(np.array(sorted(first.values())))

    @staticmethod
    def joined(parts: Sequence[Candidates]) -> Candidates:
        """Concatenate several arrays of candidates."""
        return Candidates(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    @staticmethod
    def of(made: Sequence[tuple[np.ndarray, int, Slots]]) -> Candidates:
        """Build the arrays from single candidates: choices [L], an edge choice, slots."""
        return Candidates(*(np.array(column) for column in zip(*made, strict=True)))


def aligned(num_bytes: np.ndarray) -> np.ndarray:
    """Round up to multiples of ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class CandidateMemory:
    """Bytes of candidates of one size, exact to the byte on the GPU, and their plans."""

    def __init__(self, tables: SizeTables) -> None:
        self.tables, self.buffers = tables, tables.buffers
        self.budgets = np.array([tables.request.max_gpu_bytes, tables.request.max_host_bytes])
        self.round_tile_bytes = self.buffers.round_tile_bytes(tables.chunks_per_round)
        # slots for weights, and for gradients, of the other blocks of a segment beside those that candidates count
        request = tables.request
        self.held = (request.segment_blocks or 1) - 1 if request.segments_by_chunk else 0
        self.edge_choices = self.buffers.edge_choices()
        self.edge_residencies = np.array([edge.residencies for edge in self.edge_choices])
        self.share = np.array([edge.share_slots for edge in self.edge_choices])
        self.grads_over_weights = np.array([edge.grads_over_weights for edge in self.edge_choices])

    @property
    def none(self) -> Candidates:
        """No candidates."""
        shapes = ((0, self.tables.num_blocks), (0,), (0, 3))
        return Candidates(*(np.zeros(shape, dtype=np.int64) for shape in shapes))

    # -- edges, by edge choice [S] -----------------------------------------------------------------------------------

    @cached_property
    def edge_gpu(self) -> np.ndarray:
        """GPU bytes [S] of the edge groups' resident planes."""
        return self._of_edges(lambda group, home, _: plane_bytes_in("gpu", group, home)).sum(axis=1)

    @cached_property
    def edge_host(self) -> np.ndarray:
        """Host bytes [S] of the edge groups' planes."""
        ranks = self.tables.cost.ranks
        return self._of_edges(lambda group, home, _: plane_bytes_in("host", group, home) // ranks).sum(axis=1)

    @cached_property
    def edge_loads(self) -> np.ndarray:
        """Loads [S, 12] of the edge groups' parameters."""
        rounds, cost = self.tables.rounds, self.tables.cost
        return self._of_edges(lambda group, home, use: group_loads(group, home, use, rounds, cost)).sum(axis=1)

    @cached_property
    def edge_tiles(self) -> np.ndarray:
        """Whether updates of the edge groups pass through tiles [S]."""
        return np.asarray(self._of_edges(lambda _, home, use: home.uses_tiles).any(axis=1))

    def _of_edges(self, of: Callable[[GroupStorage, GroupPlan, GroupUse], object]) -> np.ndarray:
        """A number, or an array of them, of every edge group under every edge choice: [S, E, ...]."""
        t = self.buffers
        edges = zip(t.edge_layouts, t.edge_residencies, t.edge_groups, strict=True)
        table = np.array([[of(group, home, t.uses[i]) for home in homes] for group, homes, i in edges])
        return table[np.arange(len(table)), self.edge_residencies]

    @cached_property
    def edge_slots(self) -> np.ndarray:
        """Bytes [0, S] of the edges' slots, and offsets [1, S] of the head's gradient slots among them."""
        return np.array([self.buffers.edge_slots(edge) for edge in self.edge_choices]).T

    # -- bytes -------------------------------------------------------------------------------------------------------

    def fixed_gpu_bytes(self, slots: Slots, staged_bytes: int, scratch_bytes: int) -> np.ndarray:
        """GPU bytes [S] beside what blocks hold or keep, when slots and scratch have at most such bytes."""
        counts = (count + (self.held if count else 0) for count in slots[:2])
        weight, grad = (size * count for size, count in zip(self._largest_slots, counts, strict=True))
        block, edges = self.buffers.accumulator_bytes + weight + grad, self.edge_slots[0]
        region = np.where(self.share, np.maximum(block, edges), block + edges) + slots[2] * staged_bytes
        activations = self.tables.activations
        fixed = activations.fixed_gpu_bytes + activations.round_gpu_bytes + self.round_tile_bytes
        return fixed + max(activations.scratch_floor, scratch_bytes) + self.edge_gpu + region

    @cached_property
    def _largest_slots(self) -> list[int]:
        """Bytes of the largest weight slot, and gradient slot, of any residencies."""
        return self.buffers.slot_bytes.max(axis=1).tolist()

    @cached_property
    def block_tables(self) -> BlockSums:
        """What blocks take by their choices."""
        return BlockSums(self.tables)

    def totals(self, candidates: Candidates) -> BlockTotals:
        """What the blocks of candidates take together."""
        return self.block_tables.of(candidates.choices)

    def block_slot_bytes(self, candidates: Candidates, totals: BlockTotals | None = None) -> np.ndarray:
        """Bytes [P] of the blocks' weight, accumulator and gradient slots, no more of them than parts need."""
        blocks, (weight, grad, _) = totals or self.totals(candidates), self.slot_counts(candidates)
        weights = np.minimum(weight, blocks.weight_parts) * blocks.weight_slot
        return self.buffers.accumulator_bytes + weights + np.minimum(grad, blocks.grad_parts) * blocks.grad_slot

    def slot_counts(self, candidates: Candidates) -> np.ndarray:
        """Weight, gradient and offload slots [3, P] with those that are held."""
        return candidates.slots.T + np.array([[self.held], [self.held], [0]])

    def region_bytes(self, candidates: Candidates, totals: BlockTotals | None = None) -> np.ndarray:
        """Bytes [P] of a round's slots, over which optimizer tiles lie."""
        tables, blocks = self.tables, totals or self.totals(candidates)
        block, edges = self.block_slot_bytes(candidates, blocks), self.edge_slots[0][candidates.edges]
        slots = np.where(self.share[candidates.edges], np.maximum(block, edges), block + edges)
        staging = candidates.slots[:, 2] * aligned(blocks.staged)
        scratch = np.maximum(tables.activations.scratch_floor, blocks.scratch)
        kept = tables.chunks_per_round * blocks.kept + blocks.shared_gpu
        return slots + tables.activations.round_gpu_bytes + staging + aligned(scratch) + kept

    def gpu_bytes(self, candidates: Candidates, totals: BlockTotals | None = None) -> np.ndarray:
        """GPU bytes [P] of the process."""
        blocks = totals or self.totals(candidates)
        resident = self.edge_gpu[candidates.edges] + blocks.resident
        tiled = blocks.tiled | self.edge_tiles[candidates.edges] | self.buffers.adapters.uses_tiles
        region, scratch = self.region_bytes(candidates, blocks), self.buffers.update_scratch_bytes
        if self.round_tile_bytes:
            region = region + np.where(tiled, self.round_tile_bytes, scratch)
        else:
            region = np.maximum(region, np.where(tiled, self.buffers.least_tile_bytes, scratch))
        return self.tables.activations.fixed_gpu_bytes + resident + region

    def host_bytes(self, candidates: Candidates, totals: BlockTotals | None = None) -> np.ndarray:
        """Host bytes [P] of the process."""
        blocks = totals or self.totals(candidates)
        planes = self.edge_host[candidates.edges] + blocks.host + blocks.shared_host
        by_cpu = np.where(blocks.by_cpu, self.buffers.cpu_update_host_bytes, 0)
        if self.buffers.kept_on_drive:
            largest = self.tables.option_drive_slot.at(candidates.choices // NUM_RESIDENCIES).max(axis=1)
            planes = planes + [staged_kept_bytes(num_bytes) for num_bytes in largest.tolist()]
        return self.tables.activations.host_bytes + planes + by_cpu

    def num_bytes(self, candidates: Candidates, totals: BlockTotals | None = None) -> np.ndarray:
        """Bytes [2, P] on the GPU and the host. totals: of the blocks, where they are known."""
        blocks = totals or self.totals(candidates)
        return np.stack((self.gpu_bytes(candidates, blocks), self.host_bytes(candidates, blocks)))

    def fits(self, candidates: Candidates, totals: BlockTotals | None = None) -> np.ndarray:
        """Whether both budgets hold [P]."""
        return np.asarray((self.num_bytes(candidates, totals) <= self.budgets[:, None]).all(axis=0))

    # -- plans -------------------------------------------------------------------------------------------------------

    def plan(self, candidates: Candidates, index: int) -> Plan:
        """Make the plan of one candidate."""
        one = candidates.take(np.array([index]))
        tables, buffers, choices = self.tables, self.buffers, one.choices[0]
        layers = [LayerPlan()] * len(tables.model.layers)
        groups = [GroupPlan()] * len(tables.model.groups)
        blocks = zip(buffers.block_layers, buffers.block_groups, buffers.kind_of, choices, strict=True)
        for layer, group, kind, choice in blocks:
            option, residency = divmod(int(choice), NUM_RESIDENCIES)
            kept = tables.kinds[kind].options.plans[option]
            layers[layer] = replace(kept, input_home=tables.home_of_inputs_again) if kept.input_again else kept
            groups[group] = buffers.kind_residencies[kind][residency]
        edge = self.edge_choices[int(one.edges[0])]
        edges = zip(buffers.edge_groups, buffers.edge_residencies, edge.residencies, strict=True)
        for group, residencies, residency in edges:
            groups[group] = residencies[residency]
        for member in buffers.adapters.members:
            groups[member.number] = member.home
        weight, grad, save = self._used_slots(one)
        count, tile = buffers.tiles(int(self.region_bytes(one)[0]), SlotCounts().optimizer, tables.chunks_per_round)
        size = (tables.chunk_tokens, tables.chunks_per_round)
        return buffers.plan(size, edge, SlotCounts(weight, grad, save, count), tuple(layers), tuple(groups), tile)

    def _used_slots(self, one: Candidates) -> Slots:
        """Slots of one candidate's layout: no more weight or gradient slots than parts of blocks need one."""
        weight, grad, save = self.slot_counts(one)[:, 0].tolist()
        weights, grads = self.block_tables.streamed_parts(one.choices[0])
        return max(1 + self.held, min(weight, weights)), max(1, min(grad, grads)), save
