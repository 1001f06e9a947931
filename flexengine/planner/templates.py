"""Bytes of the buffers that all layers share, read off layouts of a small model, so that memory numbers have one home.

What a layout takes is a part for parameter slots (decided by the structure and the slot counts), a part for activations
(by chunk and round size), and each block's own bytes; the parts add up, so few layouts price every plan exactly.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from flexengine.hardware.profile import HardwareProfile
from flexengine.models.spec import ModelSpec
from flexengine.plan import GroupPlan, LayerPlan, Plan, Request
from flexengine.planner.loads import LEVELS, RESIDENT, RESIDENT_BOTH, STREAMED, group_uses
from flexengine.planner.memory import gpu_overhead_bytes, host_required_bytes
from flexengine.schedule.layer_program import align
from flexengine.schedule.layout import GroupLayout, Layout, group_layout

LEAST_TILE = 1 << 12
"""Elements of the smallest optimizer tile."""
SMALL_BLOCKS = 4
"""Blocks of the small model: at least as many as there are weight slots."""


class SlotCounts(NamedTuple):
    """Prefetch depths."""

    weight: int = 2
    grad: int = 2
    save: int = 2
    optimizer: int = 2


class Structure(NamedTuple):
    """What decides which shared buffers exist: edge slots over block slots or not, a level per edge group (see
    loads.LEVELS), and which planes all blocks hold on the GPU, so that they need no slots."""

    share_edge_slots: bool
    edge_levels: tuple[int, ...]
    blocks_hold: int


class ActivationBytes(NamedTuple):
    """GPU bytes that a chunk and round size adds, the least scratch, and host bytes of the process without planes."""

    gpu_bytes: int
    scratch_floor: int
    host_bytes: int


def aligned_bytes(group: GroupLayout, level: GroupPlan) -> int:
    """GPU bytes of the planes that a level holds there, as slots."""
    homes = {"weights": level.weights, "grad": level.grads}
    return sum(align(num) for kind, num in group.plane_bytes.items() if homes.get(kind, level.states) == "gpu")


class Templates:
    """Shared bytes of plans for one model and request."""

    def __init__(self, model: ModelSpec, request: Request, profile: HardwareProfile) -> None:
        self.model, self.request, self.profile = model, request, profile
        self.block_layers = [i for i, layer in enumerate(model.layers) if layer.kind == "block"]
        self.block_groups = [model.layers[i].groups[0] for i in self.block_layers]
        self.edge_groups = [g for g in range(len(model.groups)) if g not in set(self.block_groups)]
        self.small = self._small_model()
        self.uses = group_uses(model)
        self.block_group = group_layout(model.groups[self.block_groups[0]], request.numerics)
        self.edge_layouts = [group_layout(model.groups[g], request.numerics) for g in self.edge_groups]
        self._parameters: dict[tuple[Structure, SlotCounts], tuple[int, int, int]] = {}
        self._activations: dict[tuple[int, int], ActivationBytes] = {}

    def _small_model(self) -> ModelSpec:
        """The model with its first blocks only, groups numbered anew."""
        layers = [self.model.layers[i] for i in (0, *self.block_layers[:SMALL_BLOCKS], len(self.model.layers) - 1)]
        kept = sorted({*self.edge_groups, *self.block_groups[:SMALL_BLOCKS]})
        number = {group: i for i, group in enumerate(kept)}
        layers = [
            replace(layer, params=tuple((local, number[group], name) for local, group, name in layer.params))
            for layer in layers
        ]
        groups = tuple(self.model.groups[g] for g in kept)
        return replace(self.model, layers=tuple(layers), groups=groups)

    @property
    def reference_size(self) -> tuple[int, int]:
        """A (chunk_tokens, chunks_per_round) to read parameter bytes off."""
        chunk = min(256, self.request.max_seq_len)
        return chunk, -(-self.request.max_seq_len // chunk)

    def parameter_bytes(self, structure: Structure, slots: SlotCounts) -> int:
        """GPU bytes beside blocks' resident planes and activations, CUDA's own and the edges' included."""
        return self._parameter_part(structure, slots)[0]

    def _parameter_part(self, structure: Structure, slots: SlotCounts) -> tuple[int, int, int]:
        """(bytes, room for optimizer tiles but for activations, bytes of a least tile; 0 without tiles)."""
        key = (structure, slots)
        if key not in self._parameters:
            level = LEVELS[structure.blocks_hold]
            layout = Layout(
                self.small, self._plan(self.reference_size, structure, slots, level, LayerPlan((), (), "host"))
            )
            activations = self._activation_part(layout)
            scalars = align(8 * len(self.model.groups)) - align(8 * len(self.small.groups))
            own = len(self.small.blocks) * aligned_bytes(self.block_group, level)
            room = 0
            if layout.has("tile[0]"):
                room = max(1, layout.gpu_bytes - layout.slots[layout.slot("tile[0]")].offset - activations)
            self._parameters[key] = (layout.gpu_bytes - activations - own + scalars, room, layout.tile_bytes)
        return self._parameters[key]

    @staticmethod
    def _activation_part(layout: Layout) -> int:
        names = ("hidden states", "key/value window", "scratch", "batch")
        return sum(align(s.num_bytes) for s in layout.slots if s.memory == "gpu" and s.category in names)

    def activation_bytes(self, chunk_tokens: int, chunks_per_round: int) -> ActivationBytes:
        """What a chunk and round size takes whatever is kept. `scratch_floor` comes on top, or a larger scratch."""
        size = (chunk_tokens, chunks_per_round)
        if size not in self._activations:
            structure = Structure(False, (RESIDENT,) * len(self.edge_groups), RESIDENT)
            layout = Layout(self.small, self._plan(size, structure, SlotCounts(), LEVELS[RESIDENT], LayerPlan()))
            keeps_all = Layout(self.small, replace(layout.plan, layers=self._layers_keeping_all()))
            scratch = layout.slots[layout.slot("scratch")].num_bytes
            floor = keeps_all.slots[keeps_all.slot("scratch")].num_bytes
            gpu = self._activation_part(layout) - align(scratch) + gpu_overhead_bytes(layout, self.profile)
            self._activations[size] = ActivationBytes(gpu, floor, host_required_bytes(layout, self.profile))
        return self._activations[size]

    def _layers_keeping_all(self) -> tuple[LayerPlan, ...]:
        names = tuple(op.name for op in self.small.blocks[0].ops)
        return (LayerPlan(), *(LayerPlan(names),) * len(self.small.blocks), LayerPlan())

    def _plan(
        self, size: tuple[int, int], structure: Structure, slots: SlotCounts, level: GroupPlan, keep: LayerPlan
    ) -> Plan:
        edges = iter(structure.edge_levels)
        groups = tuple(level if g.slot_class == "block" else LEVELS[next(edges)] for g in self.small.groups)
        layers = (LayerPlan(), *(keep,) * len(self.small.blocks), LayerPlan())
        return self.plan(size, structure, slots, layers, groups, LEAST_TILE)

    def plan(
        self,
        size: tuple[int, int],
        structure: Structure,
        slots: SlotCounts,
        layers: tuple[LayerPlan, ...],
        groups: tuple[GroupPlan, ...],
        tile: int,
    ) -> Plan:
        """A plan with everything named."""
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
            share_edge_slots=structure.share_edge_slots,
        )

    def tile(self, structure: Structure, slots: SlotCounts) -> int:
        """Elements of an optimizer tile: as large as is useful within the bytes of parameter slots."""
        _, room, least = self._parameter_part(structure, slots)
        limit = _power_of_two(self.model.num_parameters // 64)
        if room:
            limit = min(limit, room * LEAST_TILE // (slots.optimizer * least))
        return max(LEAST_TILE, _power_of_two(limit))

    @staticmethod
    def structures(num_edges: int, blocks_hold: int) -> list[Structure]:
        """Ways to lay the edges' slots and to hold each edge group: streamed, resident but for states, or resident.

        Beside the blocks' slots a single streamed edge group saves nothing, since another one's slots lie there anyway:
        either all are streamed or none.
        """
        found = [Structure(False, (STREAMED,) * num_edges, blocks_hold)]
        for share in (False, True):
            levels = (STREAMED, RESIDENT_BOTH, RESIDENT) if share else (RESIDENT_BOTH, RESIDENT)
            combos: list[tuple[int, ...]] = [()]
            for _ in range(num_edges):
                combos = [(*c, v) for c in combos for v in levels]
            found += [Structure(share, combo, blocks_hold) for combo in combos]
        return found


def _power_of_two(value: int) -> int:
    """The largest power of two not above value (at least 1)."""
    return 1 << max(0, value.bit_length() - 1)
