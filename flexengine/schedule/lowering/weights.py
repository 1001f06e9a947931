"""Weights of a round: which slot holds a layer's parameters, and the copies that bring what is not on the GPU.

Copies are issued just before the command that needs them. The h2d stream runs them as early as slots allow.
"""

from __future__ import annotations

from flexengine.models.spec import LayerSpec
from flexengine.schedule.commands import Access, CommandName, CopyRegion, Stream
from flexengine.schedule.expert_fetch import fetch_of_experts
from flexengine.schedule.lowering.context import RoundContext, StagePart


class WeightLowering:
    """Brings weights into slots. A slot class's slots are a cache: least recently used ones are overwritten first."""

    def __init__(self, context: RoundContext) -> None:
        self._context, self._builder, self._layout = context, context.builder, context.layout
        self._pools: dict[str, dict[int, tuple[int, int] | None]] = {}  # slot class -> slot -> (group, part) it holds

    def acquire(self, layer: LayerSpec, at: StagePart) -> dict[int, int]:
        """Slots by group that hold this part of the layer's groups; fetches what is not on the GPU."""
        return {group: self._acquire_part(group, at, needed=layer.groups) for group in layer.groups}

    def reads(self, weights: dict[int, int], part: int) -> list[Access]:
        """What a command reads that computes with these slots."""
        return [Access(slot, self._content(group, part)) for group, slot in weights.items()]

    def _acquire_part(self, group: int, at: StagePart, needed: tuple[int, ...]) -> int:
        """The slot of a group's part. needed: groups whose parts the layer needs at once, so that none is evicted."""
        spec, wanted = self._context.model.groups[group], (group, at.part)
        if self._is_resident(group):
            slot = self._layout.slot("weights", spec.name)
            self._builder.holds(slot, self._content(group, at.part))
            return slot
        if spec.slot_class not in self._pools:
            self._pools[spec.slot_class] = dict.fromkeys(self._layout.ring("weights", spec.slot_class))
        pool, in_use = self._pools[spec.slot_class], {(g, at.part) for g in needed}
        slot = next((s for s, held in pool.items() if held == wanted and self._still_held(s)), None)
        if slot is None:
            slot = next(s for s, held in pool.items() if held not in in_use or not self._still_held(s))
            self._fetch(group, at, slot)
        pool.pop(slot)
        pool[slot] = wanted  # most recently used last
        return slot

    def _is_resident(self, group: int) -> bool:
        return self._context.plan.groups[group].weights == "gpu"

    def _content(self, group: int, part: int) -> str:
        """What a slot with weights holds; in their home on the GPU all parts lie together."""
        name = self._context.model.groups[group].name if self._is_resident(group) else None
        return f"weights {name or self._context.part_name(group, part)}"

    def _still_held(self, slot: int) -> bool:
        """False when an overlapping slot was written since the weights arrived."""
        writer = self._builder.last_writer(slot)
        return all(self._builder.last_writer(o) <= writer for o in self._layout.overlaps[slot] if o != slot)

    def _fetch(self, group: int, at: StagePart, slot: int) -> None:
        content, stored = self._content(group, at.part), self._layout.groups[group]
        name = CommandName("fetch", "weights", self._context.part_name(group, at.part))
        width, regions = stored.element_bytes("weights"), []
        for run in stored.parts[at.part].runs:
            source, first = self._layout.run_place("weights", group, run)
            self._builder.holds(source, content)
            regions.append(CopyRegion(source, first * width, slot, run.start * width, run.numel * width))
        if at.in_parts and self._context.plan.touched_only:
            self._fetch_experts(name, content, regions, at)
        else:
            self._builder.copy(name, Stream.H2D, content, regions)

    def _fetch_experts(self, name: CommandName, content: str, regions: list[CopyRegion], at: StagePart) -> None:
        """Fetch those of a part's experts that have rows in some chunk, as its slot of bounds tells."""
        routed = [Access(self._layout.slot("bounds", index=c), self._context.routed[c]) for c in self._context.chunks]
        slots, tokens = [access.slot for access in routed], self._context.shape.num_tokens
        args = fetch_of_experts(at.stage, at.part, regions, slots, tokens)
        reads = [*(Access(region.source, content) for region in regions), *routed]
        writes = [Access(slot, content) for slot in dict.fromkeys(region.target for region in regions)]
        self._builder.add("fetch_experts", name, Stream.H2D, reads, writes, args=args)
