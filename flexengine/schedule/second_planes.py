"""Second planes: where the CPU puts what it updates before it is known whether gradients are clipped.

A group that is updated speculatively has its weights, remainder and states twice on the host, or on a drive. Inside
the last backward pass the CPU updates from the first planes into the second ones. When the norm is known and nothing is
clipped, they change places: what were second planes are the first from then on. Else the update runs again, from the
first planes, which nothing has touched. One norm decides for all groups, so that all change places together.
"""

from __future__ import annotations

from flexengine.plan import GroupPlan
from flexengine.schedule.drive import drive_bytes
from flexengine.schedule.group_storage import GroupStorage
from flexengine.schedule.layer_program import align
from flexengine.schedule.slots import HOST_SIDE, PlaneKind, Slot, SlotKey

SECOND = 1
"""Index of a second plane in its slot's key; the first has -1."""


def may_speculate(stored: GroupStorage, home: GroupPlan) -> bool:
    """Whether a group can be updated speculatively: by the CPU, element by element, all of it stored as it is."""
    rules = [segment.rule for segment in stored.segments]
    able = all(rule is not None and rule.native is not None for rule in rules)
    together = home.states == "host" or home.weights == home.states == "drive"
    return home.update == "cpu" and together and able and stored.stored is None


def second_kinds(stored: GroupStorage) -> list[PlaneKind]:
    """The planes of a group that an update writes, and that there are twice."""
    return [kind for kind, num_bytes in stored.plane_bytes.items() if num_bytes and kind != "grad"]


def second_plane_bytes(stored: GroupStorage, home: GroupPlan) -> int:
    """Host bytes of a group's second planes, as slots; 0 where it cannot be updated speculatively."""
    if not may_speculate(stored, home) or home.states == "drive":
        return 0
    return sum(align(stored.plane_bytes[kind]) for kind in second_kinds(stored))


def second_drive_bytes(stored: GroupStorage, home: GroupPlan) -> int:
    """The same on a drive."""
    if not may_speculate(stored, home) or home.states != "drive":
        return 0
    return drive_bytes(stored, tuple(second_kinds(stored)))


def second_key(first: SlotKey) -> SlotKey:
    """The key of the second plane of a whole first one."""
    return first._replace(index=SECOND)


def swapped_slots(slots: tuple[Slot, ...]) -> tuple[Slot, ...]:
    """The slots with first and second planes, and what lies within these, in each other's place."""
    offsets = {slot.key: slot.offset for slot in slots}
    moves: dict[SlotKey, int] = {}
    for key, offset in offsets.items():
        there = offsets.get(second_key(key)) if _may_be_first(key) else None
        if there is not None:
            moves[key], moves[second_key(key)] = there - offset, offset - there
    return tuple(slot._replace(offset=slot.offset + moves.get(slot.key._replace(within=()), 0)) for slot in slots)


def _may_be_first(key: SlotKey) -> bool:
    """Whether a slot may be a whole first plane: rings of the GPU have slots 1, too."""
    return key.memory in (*HOST_SIDE, "drive") and key.index == -1 and not key.within
