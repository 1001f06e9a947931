"""Weights of a round: which slot holds a layer's parameters, the copies that bring what is not on the GPU, and the
decoding of what is stored in fewer bytes.

Copies are issued just before the command that needs them. The h2d stream runs them as early as slots allow.
"""

from __future__ import annotations

from flexengine.models.spec import LayerSpec
from flexengine.schedule.commands import Access, CommandName, CopyRegion, DecodedPiece, DecodeWeights, Stream
from flexengine.schedule.expert_fetch import fetch_of_experts, touched_experts
from flexengine.schedule.layer_program import align
from flexengine.schedule.lowering.context import RoundContext, StagePart
from flexengine.schedule.lowering.drive import DriveParts
from flexengine.schedule.stored_pieces import StoredPieces, total_work


class WeightLowering:
    """Brings weights into slots. A slot class's slots are a cache: least recently used ones are overwritten first."""

    def __init__(self, context: RoundContext) -> None:
        self._context, self._builder, self._layout = context, context.builder, context.layout
        self._pools: dict[str, dict[int, tuple[int, int] | None]] = {}  # slot class -> slot -> (group, part) it holds
        self._drive = DriveParts(context)
        self._decoded: dict[int, tuple[int, int]] = {}  # slot with decoded weights -> (group, part) it holds

    def acquire(
        self, layer: LayerSpec, at: StagePart, groups: tuple[int, ...] | None = None, beside: tuple[int, ...] = ()
    ) -> dict[int, int]:
        """Slots by group that hold this part of the layer's groups; fetches and decodes what is not there yet.

        groups: those of the layer's that are wanted; None = all. beside: other groups that are needed at once.
        """
        wanted, needed = layer.groups if groups is None else groups, (*layer.groups, *beside)
        return {group: self._ready_part(group, self._own(group, at), needed) for group in wanted}

    def reads(self, weights: dict[int, int], part: int) -> list[Access]:
        """What a command reads that computes with these slots."""
        return [Access(slot, self._content(group, part, slot)) for group, slot in weights.items()]

    def _own(self, group: int, at: StagePart) -> StagePart:
        """The stage as a group meets it: one that stays whole beside a group in parts has part 0."""
        return at if self._context.is_in_parts(group) else at._replace(part=0)

    def _ready_part(self, group: int, at: StagePart, needed: tuple[int, ...]) -> int:
        """The slot that layers read a group's part from."""
        stored = self._layout.groups[group].decoded
        if stored is None:
            return self._acquire_part(group, at, needed)
        target, wanted = self._layout.slot("decoded", self._context.model.groups[group].slot_class), (group, at.part)
        if self._decoded.get(target) != wanted or not self._still_held(target):
            self._decode(group, at, stored, self._acquire_part(group, at, needed), target)
            self._decoded[target] = wanted
        return target

    def _acquire_part(self, group: int, at: StagePart, needed: tuple[int, ...]) -> int:
        """The slot of a group's part. needed: groups whose parts the layer needs at once, so that none is evicted."""
        spec, wanted = self._context.model.groups[group], (group, at.part)
        if self._is_resident(group):
            slot = self._layout.slot("weights", spec.name)
            self._builder.holds(slot, self._content(group, at.part, slot))
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
        return self._layout.homes[group].weights == "gpu"

    def _content(self, group: int, part: int, slot: int) -> str:
        """What a slot with weights holds; in their home on the GPU all parts lie together."""
        if self._layout.slots[slot].key.role == "decoded":
            return f"decoded {self._context.part_name(group, part)}"
        name = self._context.model.groups[group].name if self._is_resident(group) else None
        return f"weights {name or self._context.part_name(group, part)}"

    def _still_held(self, slot: int) -> bool:
        """False when an overlapping slot was written since the weights arrived."""
        writer = self._builder.last_writer(slot)
        return all(self._builder.last_writer(o) <= writer for o in self._layout.overlaps[slot] if o != slot)

    # -- over the link -----------------------------------------------------------------------------------------------

    def _fetch(self, group: int, at: StagePart, slot: int) -> None:
        content, stored = self._content(group, at.part, slot), self._layout.groups[group]
        name = CommandName("fetch", "weights", self._context.part_name(group, at.part))
        if self._layout.homes[group].weights == "drive":
            regions = self._drive.read_weights(group, at.part, content, slot)
            if awaits := self._context.updated_before(group):
                self._builder.between_ranks(-1, awaits=awaits)
            self._bring_read(name, content, regions, at.part, group)
            return
        whole, regions = len(stored.parts) == 1, []
        for run in stored.parts[at.part].runs:
            source, _ = self._layout.run_place("weights", group, run)
            self._builder.holds(source, content)
            start, slot_start, num_bytes = stored.run_bytes("weights", run)
            if whole and stored.stored is not None:  # padding goes along, so that all runs are one copy
                num_bytes = align(num_bytes)
            regions.append(CopyRegion(source, start if whole else 0, slot, slot_start, num_bytes))
        if at.in_parts and self._context.plan.touched_only:
            self._fetch_experts(name, content, regions, at)
        else:
            self._bring(name, content, regions)
        awaits = self._context.updated_before(group)
        if awaits:
            fetch = self._builder.commands[-1] if self._builder.commands[-1].copies else self._builder.commands[-2]
            self._builder.between_ranks(fetch.index, awaits=awaits)

    def _bring(self, name: CommandName, content: str, regions: list[CopyRegion]) -> None:
        """Append what brings a part to its slot."""
        self._builder.copy(name, Stream.H2D, content, regions)

    def _bring_read(self, name: CommandName, content: str, regions: list[CopyRegion], part: int, group: int) -> None:
        """Append what brings a part to its slot that was read from a drive."""
        self._bring(name, content, regions)

    def _fetch_experts(self, name: CommandName, content: str, regions: list[CopyRegion], at: StagePart) -> None:
        """Fetch those of a part's experts that have rows in some chunk, as its slot of bounds tells."""
        routed = self._routed()
        slots, tokens = [access.slot for access in routed], self._context.shape.num_tokens
        args = fetch_of_experts(at.stage, at.part, regions, slots, tokens)
        reads = [*(Access(region.source, content) for region in regions), *routed]
        writes = [Access(slot, content) for slot in dict.fromkeys(region.target for region in regions)]
        self._builder.add("fetch_experts", name, Stream.H2D, reads, writes, args=args)

    def _routed(self) -> list[Access]:
        """Every chunk's slot of bounds, which says what rows are whose expert's."""
        return [Access(self._layout.slot("bounds", index=c), self._context.routed[c]) for c in self._context.chunks]

    # -- from fewer bytes --------------------------------------------------------------------------------------------

    def _decode(self, group: int, at: StagePart, stored: StoredPieces, source: int, target: int) -> None:
        """Decode a part once for all chunks of a round, just before the first of them."""
        pieces = tuple(self._decoded_pieces(group, at.part, stored))
        reads = [Access(source, self._content(group, at.part, source))]
        writes = [Access(target, self._content(group, at.part, target))]
        work = total_work(place.piece.decode_work(self._layout.compute_bytes) for place in pieces)
        touched = None
        if at.in_parts and self._context.plan.touched_only:
            routed = self._routed()
            reads += routed
            slots, tokens = [access.slot for access in routed], self._context.shape.num_tokens
            touched = touched_experts(at.stage, at.part, slots, tokens)
            work = work._replace(memory_bytes=touched.share * work.memory_bytes)
        name = CommandName("decode", "weights", self._context.part_name(group, at.part))
        args = DecodeWeights(group, source, target, self._layout.compute_bytes, pieces, touched)
        self._builder.add("decode", name, Stream.COMPUTE, reads, writes, work, args=args)

    def _decoded_pieces(self, group: int, part: int, stored: StoredPieces) -> list[DecodedPiece]:
        found, resident = [], self._is_resident(group)
        for run in self._layout.groups[group].parts[part].runs:
            start, slot_start, _ = stored.runs[run.number]
            for piece in stored.pieces_of(run):
                offset = piece.start if resident else piece.start - start + slot_start
                found.append(DecodedPiece(piece, offset, piece.first - run.first + run.start))
        return found
