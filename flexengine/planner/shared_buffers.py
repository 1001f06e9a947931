"""Bytes of the buffers that all layers share, read off layouts of a small model, so that memory numbers have one home.

What a layout takes is a part for parameter slots (decided by the edge choice and the slot counts), a part for
activations (by chunk and round size), and each block's own bytes; the parts add up, so few layouts price every plan
exactly.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np

from flexengine.models.spec import BLOCK_CLASSES, ModelSpec
from flexengine.plan import GroupPlan, LayerPlan, Plan, Request
from flexengine.planner.adapter_groups import AdapterGroups
from flexengine.planner.blocks import block_kinds
from flexengine.planner.cost.cost_model import CostModel
from flexengine.planner.cost.memory import gpu_overhead_bytes, host_required_bytes
from flexengine.planner.cost.save_sets import SaveSets
from flexengine.planner.cost.stream_loads import (
    GPU_RESIDENCIES,
    RESIDENT,
    RESIDENT_BOTH,
    STREAMED,
    UNSTORED_RESIDENCIES,
    UPDATED_BY_CPU,
    residencies_of,
)
from flexengine.planner.inputs_again import InputsAgain
from flexengine.planner.keep_options import KeepOptions, keep_options
from flexengine.planner.on_drive import drive_tile, homes_on_drive, staged_bytes
from flexengine.planner.problem import Problem
from flexengine.schedule.fixed_slots import host_scalar_bytes, norm_square_bytes
from flexengine.schedule.group_storage import DTYPE_BYTES, group_storage, tile_offsets
from flexengine.schedule.group_uses import group_uses
from flexengine.schedule.layer_program import align
from flexengine.schedule.layout import Layout
from flexengine.schedule.planned_sizes import spilled_bytes
from flexengine.schedule.replays import replay_bytes
from flexengine.schedule.save_sets import keepable_ops
from flexengine.schedule.slots import Slot, SlotKey

LEAST_TILE = 1 << 12
"""Elements of the smallest optimizer tile."""
TILES_PER_MODEL = 64
"""An optimizer tile is at most this share of the parameters: larger ones only fill and drain the pipeline longer."""
TILES_IN_ROUND, SLOTS_IN_ROUND = 16, 8
"""Tiles that lie beside a round's slots take at most this share of the GPU's budget, and are so many."""
SMALL_BLOCKS = 4
"""Blocks of the small model: at least as many as there are weight slots."""


class SlotCounts(NamedTuple):
    """Prefetch depths. `optimizer` is the most tiles in flight: fetched, updated, returned and one waiting."""

    weight: int = 2
    grad: int = 2
    save: int = 2
    optimizer: int = 4


class EdgeChoice(NamedTuple):
    """What embedding and head do: whether their slots lie over the blocks', whether their gradients lie over their
    weights, and a residency per edge group (see stream_loads.RESIDENCIES)."""

    share_slots: bool
    grads_over_weights: bool
    residencies: tuple[int, ...]


class ActivationBytes(NamedTuple):
    """What a chunk and round size takes whatever is kept.

    fixed_gpu_bytes: batch, scalars and CUDA's own; round_gpu_bytes: hidden states and key/value window, in the region
    that optimizer tiles share; scratch_floor: the least scratch; host_bytes: of the process without planes.
    """

    fixed_gpu_bytes: int
    round_gpu_bytes: int
    scratch_floor: int
    host_bytes: int


class SharedBuffers:
    """Shared bytes of plans for one model and request.

    second_planes: the host has them for all that the CPU updates, whether or not a plan speculates.
    """

    def __init__(self, problem: Problem, second_planes: bool = False) -> None:
        self.limits = problem.limits
        self.model, self.request, self.profile = problem.model, problem.request, problem.profile
        model, request = problem.model, problem.request
        self.second_planes = second_planes
        self._acc_bytes = max(4, DTYPE_BYTES[request.numerics.compute])
        self.block_layers = [i for i, layer in enumerate(model.layers) if layer.kind == "block"]
        self.block_groups = [model.layers[i].groups[0] for i in self.block_layers]
        self.streams_adapters = problem.streams_adapters or request.shares_node
        self.adapters = AdapterGroups(model, request, self.streams_adapters)
        others = {*self.block_groups, *(member.number for member in self.adapters.members)}
        self.edge_groups = [g for g in range(len(model.groups)) if g not in others]
        self.kinds, self.kind_of = block_kinds(model, request)
        self.again = InputsAgain(model, request, self.kinds, self.kind_of)
        self.small = self._small_model()
        self._reference_slots = _known_slots(self.small)
        self.num_parameters = model.num_trained_parameters
        self.uses = group_uses(model)
        self.kind_layouts = [group_storage(model.groups[kind.group], request.numerics) for kind in self.kinds]
        self.edge_layouts = [group_storage(model.groups[g], request.numerics) for g in self.edge_groups]
        by_cpu = problem.may_update_by_cpu and not any(layout.on_gpu_only for layout in self.kind_layouts)
        # what blocks may have: on the CPU both updates are one, and several ranks share one copy on the host
        self.unstored = request.gpu_updates == "unstored"
        on_gpu = (STREAMED,) if request.shares_node else UNSTORED_RESIDENCIES if self.unstored else GPU_RESIDENCIES
        self.residencies = np.array([*on_gpu, UPDATED_BY_CPU] if by_cpu else on_gpu)
        self.kept_on_drive, self.on_drive = problem.kept_on_drive, by_cpu and problem.on_drive
        self._drive = self.on_drive, by_cpu and problem.all_on_drive, request.ranks
        homes = self._residencies(model)
        self.kind_residencies = [homes[kind.group] for kind in self.kinds]
        self.edge_residencies = [homes[g] for g in self.edge_groups]
        self._tiles: dict[int, int] = {}
        # parts [L] in which parameters cross the link, and host bytes that updates by the CPU take beside planes
        self.parts_of_kinds = np.array([len(layout.parts) for layout in self.kind_layouts])
        numbers, layouts = [kind.group for kind in self.kinds] + self.edge_groups, self.kind_layouts + self.edge_layouts
        tiles, self.staged_part_bytes = staged_bytes(model, numbers, layouts, *self._drive)
        self.cpu_update_host_bytes = align(host_scalar_bytes(len(model.groups), self._acc_bytes)) + tiles
        self._options: dict[tuple[int, SaveSets], tuple[KeepOptions, ...]] = {}
        self._edge_slots: dict[EdgeChoice, tuple[int, int]] = {}
        self._activations: dict[tuple[int, int], ActivationBytes] = {}

    def _small_model(self) -> ModelSpec:
        """Make a model of the first blocks and one of each kind only."""
        firsts = {int(np.flatnonzero(self.kind_of == kind)[0]) for kind in range(len(self.kinds))}
        blocks = sorted({*range(min(SMALL_BLOCKS, len(self.block_layers))), *firsts})
        return self.model.with_layers((0, *(self.block_layers[b] for b in blocks), len(self.model.layers) - 1))

    def _residencies(self, model: ModelSpec, unstored: bool | None = None) -> list[tuple[GroupPlan, ...]]:
        """What the numbers of homes mean for each group.

        A gradient that is never whole at one place is stored in any case, and those of adapters on the GPU.
        """
        unstored = self.unstored if unstored is None else unstored
        whole = (
            use.gradients == 1 and (self.streams_adapters or not g.adapter)
            for g, use in zip(model.groups, group_uses(model), strict=True)
        )
        return [
            residencies_of(group, unstored and once and group.num_parts == 1, homes_on_drive(group, *self._drive))
            for group, once in zip(model.groups, whole, strict=True)
        ]

    # -- parameters --------------------------------------------------------------------------------------------------

    @cached_property
    def spilled_bytes(self) -> tuple[int, int]:
        """GPU and host bytes where one of several ranks keeps accumulators of what two layers add to."""
        edges = zip(self.edge_groups, self.edge_layouts, strict=True)
        twice = [layout for group, layout in edges if self.uses[group].gradients > 1 and self.request.shares_node]
        return spilled_bytes(twice, self._acc_bytes)

    @cached_property
    def accumulator_bytes(self) -> int:
        """Bytes of the blocks' gradient accumulator."""
        resident = (RESIDENT_BOTH,) * len(self.edge_groups)
        return _block_part(self._reference(EdgeChoice(False, False, resident), RESIDENT_BOTH, unstored=False))

    @cached_property
    def slot_bytes(self) -> np.ndarray:
        """Bytes [2, C] of a weight slot and of a gradient slot for blocks of every kind."""
        return np.array([[align(g.part_bytes(kind)) for g in self.kind_layouts] for kind in ("weights", "grad")])

    def edge_slots(self, edge: EdgeChoice) -> tuple[int, int]:
        """Bytes of the weight, accumulator and gradient slots of embedding and head, which lie over each other, and
        where the first gradient slot that the head needs starts."""
        if edge not in self._edge_slots:
            slots = self._reference(edge, RESIDENT_BOTH)
            start = min(s.offset for s in slots if s.key[:2] == ("accumulator", "block"))
            start += 0 if edge.share_slots else _block_part(slots)
            edges = [s for s in slots if s.key.owner not in BLOCK_CLASSES]
            heads = {SlotKey("grad", self.small.groups[g].slot_class, 0) for g in self.small.layers[-1].groups}
            end = max((align(s.end) for s in edges), default=start) - start
            head_grad = min((s.offset - start for s in edges if s.key in heads), default=end)
            self._edge_slots[edge] = (end, head_grad)
        return self._edge_slots[edge]

    def _reference(self, edge: EdgeChoice, residency: int, unstored: bool | None = None) -> tuple[Slot, ...]:
        """The parameter slots of the small model, with one slot of each kind. unstored: as of plans, or as given."""
        longest, whole = self.request.max_seq_len, self.request.segments_by_chunk
        chunk = longest if whole else max(min(256, longest), -(-longest // 64))
        plan = self._plan(
            (chunk, -(-longest // chunk)), edge, SlotCounts(1, 1), residency, keep_all=False, unstored=unstored
        )
        return _laid_out_once(self.small, plan, self._reference_slots)

    # -- activations -------------------------------------------------------------------------------------------------

    def activation_bytes(self, chunk_tokens: int, chunks_per_round: int) -> ActivationBytes:
        """What a chunk and round size takes beside parameters, staging, kept activations and larger scratch."""
        size = (chunk_tokens, chunks_per_round)
        if size not in self._activations:
            edge = EdgeChoice(False, False, (RESIDENT,) * len(self.edge_groups))
            layout = Layout(self.small, self._plan(size, edge, SlotCounts(), RESIDENT, keep_all=True))
            scalars = align(self._acc_bytes * len(self.model.groups)) - align(self._acc_bytes * len(self.small.groups))
            groups = [*(self.kind_layouts[kind] for kind in self.kind_of), *self.edge_layouts, *self.adapters.layouts]
            scalars += align(norm_square_bytes(groups)) - align(norm_square_bytes(layout.groups))
            again = {self.again.home(*size): self.again.num_bytes(*size)}
            self._activations[size] = ActivationBytes(
                _bytes_of(layout, "batch", "scalars")
                + scalars
                + (self.adapters.plane_bytes_in("gpu") + self.spilled_bytes[0])
                + gpu_overhead_bytes(layout, self.profile)
                + replay_bytes(self.model, layout.plan)
                - replay_bytes(self.small, layout.plan),
                _bytes_of(layout, "hidden states", "key/value window") + again.get("gpu", 0),
                layout.place("scratch").num_bytes,
                host_required_bytes(layout, self.profile)
                + (self.spilled_bytes[1] + self.staged_part_bytes)
                + self.adapters.host_bytes_beyond(self.small)
                + again.get("host", 0),
            )
        return self._activations[size]

    def keep_options(self, cost: CostModel, sets: SaveSets) -> tuple[KeepOptions, ...]:
        """The keep options of every kind at the chunk size of `cost`, over save sets."""
        key = (cost.chunk_tokens, sets)
        if key not in self._options:
            hidden = self.again.hidden_bytes(cost.chunk_tokens)
            sliced = self.request.max_seq_len > cost.chunk_tokens
            self._options[key] = keep_options(
                self.kinds, sets, cost, self.request.recompute, hidden, sliced, self.limits.splits, self.kept_on_drive
            )
        return self._options[key]

    # -- plans -------------------------------------------------------------------------------------------------------

    def _plan(
        self, size: tuple[int, int], edge: EdgeChoice, slots: SlotCounts, residency: int, *, keep_all: bool,
        unstored: bool | None = None,
    ) -> Plan:  # fmt: skip
        """Plan the small model for one rank: blocks keep all of their ops' outputs, or nothing, in one residency."""
        edges = iter(edge.residencies)
        nothing = LayerPlan((), (), "host")
        blocks = (LayerPlan(keepable_ops(b.ops) if b.keeps else ()) if keep_all else nothing for b in self.small.blocks)
        homes = (
            self.adapters.residency if g.adapter else residency if g.slot_class == "block" else next(edges)
            for g in self.small.groups
        )
        of_groups = self._residencies(self.small, unstored)
        groups = tuple(residencies[v] for residencies, v in zip(of_groups, homes, strict=True))
        layers = (LayerPlan(), *blocks, LayerPlan())
        plan = self.plan(size, edge, slots, layers, groups, LEAST_TILE)
        return replace(plan, request=replace(self.request, ranks=1, nodes=1))

    def plan(
        self,
        size: tuple[int, int],
        edge: EdgeChoice,
        slots: SlotCounts,
        layers: tuple[LayerPlan, ...],
        groups: tuple[GroupPlan, ...],
        tile: int,
    ) -> Plan:
        """Make a plan of its parts; size: tokens of a chunk, and chunks of a round."""
        return Plan(
            model=self.model.name,
            request=self.request,
            chunk_tokens=size[0],
            chunks_per_round=size[1],
            layers=layers,
            groups=groups,
            weight_slots=slots.weight,
            grad_slots=slots.grad,
            save_slots=slots.save,
            optimizer_slots=slots.optimizer,
            optimizer_tile=tile,
            drive_tile=drive_tile(self.num_parameters) if self.on_drive else Plan.drive_tile,
            share_edge_slots=edge.share_slots,
            grads_over_weights=edge.grads_over_weights,
            in_parts=any(group.num_parts > 1 for group in self.model.groups),
        )

    @cached_property
    def least_tile_bytes(self) -> int:
        """Bytes that an update takes with one slot of the smallest tile."""
        return self._tile_bytes(LEAST_TILE) + self.update_scratch_bytes

    @cached_property
    def update_scratch_bytes(self) -> int:
        """Bytes of temporaries of the update of the largest matrix, where matrices are multiplied; else 0."""
        return align(max(layout.update_scratch_bytes(self.request.numerics) for layout in self.kind_layouts))

    def _tile_bytes(self, tile: int) -> int:
        """Bytes of an optimizer slot for tiles of at most so many elements, as far as matrices may be cut."""
        if tile not in self._tiles:
            layouts = [*self.kind_layouts, *self.edge_layouts, *self.adapters.layouts]
            self._tiles[tile] = align(tile_offsets(layouts, tile, self.request.gpu_updates)["end"])
        return self._tiles[tile]

    def tiles_in_round(self, chunks: int) -> tuple[int, int]:
        """(slots, elements of a tile) for updates inside rounds of so many chunks, beside their slots: as many tiles of
        a block as `_tiles_of_block`, as far as there is room."""
        count, room = SLOTS_IN_ROUND, self.request.max_gpu_bytes // TILES_IN_ROUND - self.update_scratch_bytes
        block = max(layout.numel for layout in self.kind_layouts)
        tiles = _tiles_of_block(self.request, chunks)
        tile = max(LEAST_TILE, -(-block // (tiles * LEAST_TILE)) * LEAST_TILE)
        while tile > LEAST_TILE and count * self._tile_bytes(tile) > room:
            tile = max(LEAST_TILE, tile // (2 * LEAST_TILE) * LEAST_TILE)
        return count, tile

    def round_tile_bytes(self, chunks: int) -> int:
        """Bytes that updates inside rounds of so many chunks take beside their slots; 0 where there are none."""
        if not self.request.updates_in_round:
            return 0
        count, tile = self.tiles_in_round(chunks)
        return count * self._tile_bytes(tile) + self.update_scratch_bytes

    def tiles(self, region_bytes: int, most: int, chunks: int) -> tuple[int, int]:
        """(slots, elements of a tile) for the update: as many of at most `most` slots as fit the round's region, or
        those beside it, the tiles as large as is useful. One smallest tile there is in any case."""
        if self.request.updates_in_round:
            return self.tiles_in_round(chunks)
        room = region_bytes - self.update_scratch_bytes
        count = max(1, min(most, room // self._tile_bytes(LEAST_TILE)))
        tile = 1 << max(0, (self.num_parameters // TILES_PER_MODEL).bit_length() - 1)
        while tile > LEAST_TILE and count * self._tile_bytes(tile) > room:
            tile //= 2
        return count, max(LEAST_TILE, tile)

    def edge_choices(self) -> list[EdgeChoice]:
        """Ways to lay the edges' slots and to hold each edge group: streamed, resident but for states, or resident."""
        choices = (STREAMED,) if self.request.shares_node else (STREAMED, RESIDENT_BOTH, RESIDENT)
        homes = _homes_of_edges(self.edge_groups, self.model.layers[0].groups, choices)
        separate_or_shared = (EdgeChoice(share, False, edges) for share in (False, True) for edges in homes)
        return [*separate_or_shared, *(EdgeChoice(True, True, edges) for edges in homes if STREAMED in edges)]


def _tiles_of_block(request: Request, chunks: int) -> int:
    """Tiles that a block's update inside a round of so many chunks is cut into.

    They are updated between the chunks of the block below, and arrive meanwhile: all at once, or of many chunks in
    every other turn. Chunk by chunk those of a segment's blocks are updated between all chunks but the first of the
    next segment. Vectors are a tile more.
    """
    by_chunk, blocks = request.segments_by_chunk, request.segment_blocks or 1
    turns = (chunks - 1) / blocks if by_chunk else chunks // 2
    return max(SLOTS_IN_ROUND, int(SLOTS_IN_ROUND * turns) - 1) if chunks > 3 else SLOTS_IN_ROUND


def _homes_of_edges(edges: list[int], embedding: tuple[int, ...], choices: tuple[int, ...]) -> list[tuple[int, ...]]:
    """All ways to hold each edge group; what the embedding reads beside its table goes with that."""
    of = {group: embedding[0] if group in embedding else group for group in edges}
    leaders = list(dict.fromkeys(of.values()))
    chosen = (dict(zip(leaders, own, strict=True)) for own in product(choices, repeat=len(leaders)))
    return [tuple(homes[of[group]] for group in edges) for homes in chosen]


KnownSlots = dict[tuple[object, ...], tuple[Slot, ...]]
"""The parameter slots of a small model by what a plan decides."""


@lru_cache(maxsize=64)
def _known_slots(_: ModelSpec) -> KnownSlots:
    """What has been laid out of a small model; whoever asks fills it."""
    return {}


def _laid_out_once(small: ModelSpec, plan: Plan, known: KnownSlots) -> tuple[Slot, ...]:
    """The parameter slots of a plan. None depends on the budgets, which requests that are tried in turn differ in."""
    plan = replace(plan, request=replace(plan.request, max_gpu_bytes=1 << 60, max_host_bytes=1 << 60))
    decided = tuple(value for name, value in vars(plan).items() if name != "predicted")
    if decided not in known:
        known[decided] = _parameter_slots(Layout(small, plan))
    return known[decided]


def _block_part(slots: Iterable[Slot]) -> int:
    """Bytes of the blocks' parameter slots."""
    return sum(align(s.num_bytes) for s in slots if s.key.owner in BLOCK_CLASSES)


def _parameter_slots(layout: Layout) -> tuple[Slot, ...]:
    """Slots that weights and gradients of several groups pass through; each belongs to a slot class."""
    categories = ("weight slots", "gradient accumulators", "decoded weights", "gradient slots")
    return tuple(s for s in layout.slots if s.category in categories)


def _bytes_of(layout: Layout, *categories: str) -> int:
    """GPU bytes of some categories' slots."""
    return sum(align(s.num_bytes) for s in layout.slots if s.memory == "gpu" and s.category in categories)
