"""Where everything lies: the slots of both arenas that a plan implies, with offsets, before anything runs.

Planner (does it fit?), lowering (which slot?), runtime (how large is the arena?) and reports (which category?) all
read this one layout.
"""

from __future__ import annotations

from copy import copy
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple, Self

from flexengine.models.spec import ModelSpec
from flexengine.plan import Plan
from flexengine.schedule.arena_slots import STAGED_GRADS, STAGED_WEIGHTS, host_memory, lay_out
from flexengine.schedule.drive import PartBlocks, drive_bytes, drive_kinds, drive_start, part_blocks, tiles_of_ranks
from flexengine.schedule.group_storage import Plane, Segment
from flexengine.schedule.group_uses import group_uses
from flexengine.schedule.kept_on_drive import kept_slots
from flexengine.schedule.layer_program import align
from flexengine.schedule.parts import Run
from flexengine.schedule.pieces import Piece, Range
from flexengine.schedule.planned_sizes import PlannedSizes
from flexengine.schedule.second_planes import second_key, swapped_slots
from flexengine.schedule.shares import ALONE, Division, Share
from flexengine.schedule.slots import Memory, PlaneKind, Role, Slot, SlotKey, overlapping_slots


class OwnPlane(NamedTuple):
    """Bytes of a plane that lie on a rank's GPU, and their place in the node's memory: slots, and where in them."""

    kind: PlaneKind
    on_gpu: Slot
    start: int
    in_node: Slot
    node_start: int
    num_bytes: int
    frozen: bool


class Layout(PlannedSizes):
    """Slots of both arenas for a plan. Commands name a slot by its index into `slots`.

    side: 0, or 1 where second planes lie where first ones lay, and the other way round: see `swapped`.
    """

    side = 0

    def __init__(self, model: ModelSpec, plan: Plan) -> None:
        super().__init__(model, plan)
        self.slots, arenas = lay_out(self)
        self.gpu_bytes, self.host_bytes, self.node_bytes = arenas["gpu"], arenas["host"], arenas["node"]
        self.drive_bytes = arenas["drive"]
        self._index = {slot.key: i for i, slot in enumerate(self.slots)}

    @property
    def drive_written_bytes(self) -> int:
        """Bytes that a full step writes to a drive: gradients as often as layers leave some, what is kept of each
        round."""
        found = 0
        for stored, home, use in zip(self.groups, self.plan.groups, group_uses(self.model), strict=True):
            kinds = drive_kinds(stored, home)
            times = self.plan.num_rounds * use.gradients if "grad" in kinds else 1
            found += drive_bytes(stored, kinds) + (times - 1) * drive_bytes(stored, ("grad",))
        kept = self.plan.num_rounds * sum(num_bytes for _, num_bytes in kept_slots(self))
        return found + kept

    @cached_property
    def overlaps(self) -> list[tuple[int, ...]]:
        """Overlapping slots, by slot index."""
        return overlapping_slots(self.slots)

    def swapped(self) -> Self:
        """The layout after a speculation that held: first and second planes have changed places.

        Slots have the same indices, so that a program of one layout with the slots of the other is right, too.
        """
        other = copy(self)
        other.side, other.slots = 1 - self.side, swapped_slots(self.slots)
        other.__dict__.pop("overlaps", None)
        return other

    def slot(self, role: Role, owner: str | int = "", index: int = -1, memory: Memory = "gpu") -> int:
        """Index of the slot with this key. Raises KeyError when the plan gives none."""
        return self._index[SlotKey(role, owner, index, memory)]

    def slot_of(self, key: SlotKey) -> int:
        """Index of the slot with this key, which may lie within another. Raises KeyError when the plan gives none."""
        return self._index[key]

    def place(self, role: Role, owner: str | int = "", index: int = -1, memory: Memory = "gpu") -> Slot:
        """The slot with this key. Raises KeyError when the plan gives none."""
        return self.slots[self.slot(role, owner, index, memory)]

    def window(self, role: Literal["window", "grad_window"], layer: int) -> int:
        """The slot of what a layer carries along a sliced sequence. Layers take turns where there are several."""
        ring = self.ring(role)
        return ring[layer % len(ring)]

    def ring(self, role: Role, owner: str | int = "", memory: Memory = "gpu") -> list[int]:
        """Indices of all slots 0, 1, ... of a role and owner; empty when the plan gives none."""
        found: list[int] = []
        while (slot := self._index.get(SlotKey(role, owner, len(found), memory))) is not None:
            found.append(slot)
        return found

    def plane_slot(self, kind: PlaneKind, group: int) -> int:
        """The slot that holds a plane of a group from step to step, in the memory where the plan puts it."""
        home = self.homes[group].home_of(kind)
        memory: Memory = host_memory(self.plan) if home == "host" else "drive" if home == "drive" else "gpu"
        return self.slot(kind, self.model.groups[group].name, memory=memory)

    def stored_slot(self, kind: PlaneKind, group: int) -> int:
        """The slot where all ranks find a plane between steps. In stages its rank's GPU may have a newer copy, and of
        shards the GPUs of all."""
        if self.plan.groups[group].sharded:
            return self.slot(kind, self.model.groups[group].name, memory="node")
        return self.plane_slot(kind, group)

    def own_planes(self, rank: int) -> list[OwnPlane]:
        """What of planes lies on a rank's GPU and has a place in the node's memory, too."""
        found = list[OwnPlane]()
        for group in (group for group, home in enumerate(self.homes) if home.sharded):
            frozen, kinds = self.model.groups[group].frozen, self.groups[group].plane_bytes
            for kind in (kind for kind, num_bytes in kinds.items() if num_bytes):
                here, there = self.slots[self.plane_slot(kind, group)], self.slots[self.stored_slot(kind, group)]
                parts = (part for part in self.shards(group).division(kind)[rank] if part.num_bytes)
                found += [OwnPlane(kind, here, p.start, there, p.whole_start, p.num_bytes, frozen) for p in parts]
        return found

    def second_slot(self, kind: PlaneKind, group: int) -> int:
        """The slot of the second plane of a group that is updated speculatively."""
        return self._index[second_key(self.slots[self.plane_slot(kind, group)].key)]

    def share_of(self, group: int, share: Share) -> Share:
        """What a rank updates of a group in its `homes`, where `share` is the rank's of what all update together."""
        return share._replace(cuts=self.trained_shards(group).cuts) if self.homes[group].sharded else share

    def plane_start(self, group: int, segment: Segment, plane: Plane, share: Share) -> tuple[int, int]:
        """Where a rank finds a segment in the slot of a plane: its first byte there, and the first element it has."""
        home = self.homes[group]
        if home.trained and home.home_of(plane.kind) == "drive":
            return drive_start(self.groups[group], segment, plane.kind), 0
        if self.homes[group].sharded and share.size > 1:
            return self.trained_shards(group).place(segment, plane, share)[:2]
        if not self.is_dealt(plane.kind, group):
            return plane.start, 0
        return self.dealt_states(self.groups[group]).place(segment, plane, share)[:2]

    def parts_of_states(self, group: int, segment: Segment, plane: Plane, share: Share) -> list[tuple[int, int, int]]:
        """Where a rank keeps its parts of a segment's plane of divided states: first byte in the plane's slot, first
        element, elements. The ranks of a node share what nodes divide."""
        if group not in self.node_states:
            return [self.dealt_states(self.groups[group]).place(segment, plane, share)]
        states = self.node_states[group]
        return [(states.offset(segment, plane, span.place), *span[:2]) for span in states.spans(segment, share)]

    def drive_slot(self, kind: PlaneKind, group: int, segment: str, start: int) -> int:
        """The slot on a drive of a tile of a plane."""
        return self._index[SlotKey(kind, self.model.groups[group].name, memory="drive", within=(segment, start))]

    def second_tile(self, first: int) -> int:
        """The slot on a drive of a tile of a second plane, by that of the first one."""
        return self._index[second_key(self.slots[first].key)]

    def tiles_on_drive(self, kind: PlaneKind, group: int) -> list[int]:
        """The slots on a drive of all tiles of a plane."""
        kinds, segments = drive_kinds(self.groups[group], self.plan.groups[group]), self.groups[group].segments
        sizes = kinds, self.plan.drive_tile, self.plan.request.ranks
        tiles = ((s.name, start) for s in segments for start, _ in tiles_of_ranks(s, *sizes))
        return [self.drive_slot(kind, group, *tile) for tile in tiles]

    def staged_part(self, kind: PlaneKind, group: int, part: int, share: Share = ALONE) -> list[tuple[PartBlocks, int]]:
        """The blocks of a part of weights or a gradient on a drive, or of a rank's share, each with its slot there."""
        stored, whole = self.groups[group], SlotKey(kind, self.model.groups[group].name, memory="drive")
        found = part_blocks(stored, stored.parts[part], kind, trained=self.plan.groups[group].trained, share=share)
        return [(blocks, self._index[whole._replace(within=("blocks", *blocks.key))]) for blocks in found]

    def staging_place(self, staging: int, blocks: PartBlocks) -> int:
        """The slot within one of the host, for a part on its way, where what blocks hold is found."""
        return self.place_within(staging, (blocks.place, blocks.held))

    def place_within(self, slot: int, within: tuple[str | int, ...]) -> int:
        """The slot of this name within another."""
        return self._index[self.slots[slot].key._replace(within=within)]

    def staging_ring(self, role: Role, group: int) -> list[int]:
        """The slots of the host for parts of a group's class on their way from or to a drive."""
        owner = self.model.groups[group].slot_class
        keys = (SlotKey(role, owner, k, "host") for k in range(max(STAGED_WEIGHTS, STAGED_GRADS)))
        return [self._index[key] for key in keys if key in self._index]

    def division(self, kind: PlaneKind, group: int) -> Division:
        """How ranks divide a plane of a group; empty where all have one, or each has it whole."""
        return self.dealt_states(self.groups[group]).division(kind) if self.is_dealt(kind, group) else ()

    def is_dealt(self, kind: PlaneKind, group: int) -> bool:
        """Whether ranks divide a plane of a group over their GPUs."""
        return self.plan.groups[group].states == "dealt" and kind in self.groups[group].rule_states

    def is_divided(self, kind: PlaneKind, group: int) -> bool:
        """Whether ranks or nodes divide a plane of a group, so that nobody has it whole."""
        return self.is_dealt(kind, group) or (group in self.node_states and kind in self.groups[group].state_kinds)

    def run_place(self, kind: PlaneKind, group: int, run: Run) -> tuple[int, int]:
        """The slot of a run within a plane, and its first element there.

        A group in one part has no slots for its runs: then it is the plane's.
        """
        plane = self.stored_slot(kind, group) if kind == "weights" else self.plane_slot(kind, group)
        if len(self.groups[group].parts) == 1:
            return plane, run.first
        return self._index[self.slots[plane].key._replace(within=(run.number,))], 0

    def piece_places(self, group: int, piece: Piece) -> list[tuple[int, int]]:
        """For each run of a piece of a gradient, the slot where it lies between rounds, and its first element there."""
        if not self.plan.shares_node:
            return [self.run_place("grad", group, run.run) for run in piece.runs]
        if self.homes[group].sharded:  # its owner has this piece alone
            return [(self.plane_slot("grad", group), run.start - piece.start) for run in piece.runs]
        plane = self.slots[self.plane_slot("grad", group)].key
        slots = [(found, self._index[plane._replace(within=("piece", found.first))]) for found in piece.ranges]
        return [_place_in(slots, run.first) for run in piece.runs]

    def spilled_slot(self, group: int, piece: Piece) -> int:
        """The slot of a piece where a tied group's accumulator waits on the host."""
        whole = SlotKey("spilled", self.model.groups[group].name, memory="host")
        return self._index[whole._replace(within=("piece", piece.start))]

    def spilled_section(self, group: int, section: int) -> int:
        """The slot of a section of what ranks received of a tied group's accumulators, on the host."""
        return self._index[
            SlotKey("spilled", self.model.groups[group].name, memory="host", within=("section", section))
        ]

    def first_run(self, group: int) -> int:
        """The number of a group's first run among those of all groups."""
        return self._first_runs[group]

    @cached_property
    def _first_runs(self) -> list[int]:
        return [0, *accumulate(group.num_runs for group in self.groups)]

    def categories(self, memory: Memory) -> dict[str, int]:
        """Bytes by category, overlapping slots counted once.

        Of slots that overlap, later ones count only what reaches beyond; optimizer tiles, which lie over the slots of a
        round, come last.
        """
        totals: dict[str, int] = {}
        reached = 0
        slots = (s for s in self.slots if s.memory == memory)
        for slot in sorted(slots, key=lambda s: (s.category == "optimizer slots", s.offset, -s.num_bytes)):
            fresh = max(0, align(slot.end) - max(reached, slot.offset))
            if fresh:
                totals[slot.category] = totals.get(slot.category, 0) + fresh
            reached = max(reached, align(slot.end))
        return totals


def _place_in(slots: list[tuple[Range, int]], first: int) -> tuple[int, int]:
    """The slot of the range that an element of a group lies in, and its number there."""
    found, slot = next(pair for pair in slots if pair[0].first <= first < pair[0].first + pair[0].numel)
    return slot, first - found.first
