"""Moves from one layout to another in the same arenas: which stored plane goes where, and in which order.

Between steps only weights, masters and optimizer states live; everything else in the arenas is free. Nothing is
allocated, so a change of plan can exceed no budget. A plane moves when nothing alive lies where it goes; where planes
wait for each other in a circle, one of them steps aside into free space first.

Several ranks may begin or cease to divide states: then each copies its own part between the node's memory and its GPU.
States that are to be divided otherwise than now are whole in a free place of the node's memory in between.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flexengine.schedule.layout import Layout
from flexengine.schedule.shares import Division
from flexengine.schedule.slots import Memory, PlaneKind

OWN_MEMORIES: tuple[Memory, ...] = ("host", "gpu")
"""Those of a rank alone. What each rank has for itself may not step aside into the node's, where all have one place."""
SHARED_MEMORIES: tuple[Memory, ...] = ("drive", "node")
MEMORIES: tuple[Memory, ...] = (*OWN_MEMORIES, *SHARED_MEMORIES)
SAVE_AND_RESUME = "; save a checkpoint and resume from it with the other plan"


class ByteRange(NamedTuple):
    """`num_bytes` bytes from `offset` of a memory."""

    memory: Memory
    offset: int
    num_bytes: int

    def overlaps(self, other: ByteRange) -> bool:
        """Whether two ranges share a byte."""
        if self.memory != other.memory:
            return False
        return self.offset < other.offset + other.num_bytes and other.offset < self.offset + self.num_bytes

    def within(self, start: int, num_bytes: int) -> ByteRange:
        """The range of `num_bytes` bytes that begins `start` bytes after this one."""
        return ByteRange(self.memory, self.offset + start, num_bytes)


class Copy(NamedTuple):
    """The bytes of one range go to another of the same size; the two may overlap."""

    source: ByteRange
    target: ByteRange


class Move(NamedTuple):
    """A plane goes from one place to another.

    division: how ranks divide it before the move (`gathers`) or after it, if they do so on one side only; then the two
    places do not overlap. Otherwise it stays as it is, and both places have one size.
    """

    name: str
    source: ByteRange
    target: ByteRange
    division: Division = ()
    gathers: bool = False

    def copies(self, rank: int = 0) -> list[Copy]:
        """What a rank of the node copies. What is whole in the node's memory or on its drive the first rank writes."""
        if not self.division:
            return [] if rank and self.target.memory in SHARED_MEMORIES else [Copy(self.source, self.target)]
        whole, own = (self.target, self.source) if self.gathers else (self.source, self.target)
        found = list[Copy]()
        for start, whole_start, num_bytes in self.division[rank]:
            of_whole, of_own = whole.within(whole_start, num_bytes), own.within(start, num_bytes)
            if num_bytes:
                found.append(Copy(of_own, of_whole) if self.gathers else Copy(of_whole, of_own))
        return found


@dataclass
class _Plane:
    """A plane on its way. division: how ranks divide it now, and as it is to be; empty while all have it whole."""

    name: str
    now: ByteRange
    goal: ByteRange
    division: Division = ()
    goal_division: Division = ()
    whole_bytes: int = 0
    stepped_aside: bool = False

    @property
    def has_arrived(self) -> bool:
        return (self.now, self.division) == (self.goal, self.goal_division)

    @property
    def must_be_whole_first(self) -> bool:
        """Whether ranks divide it otherwise than they are to."""
        return bool(self.division and self.goal_division) and self.division != self.goal_division

    def move(self, target: ByteRange, division: Division) -> Move:
        """Go to another place, where ranks divide it as given."""
        changed = (self.division or division) if self.division != division else ()
        found = Move(self.name, self.now, target, changed, bool(changed and self.division))
        self.now, self.division = target, division
        return found


def relocation(
    old: Layout, new: Layout, capacity: Mapping[Memory, int], cuts: Collection[int] = ()
) -> tuple[Move, ...]:
    """Moves, in order, that turn arenas laid out by `old` into the same arenas laid out by `new`, gradients left out.

    capacity: bytes of each arena; that of the node, which ranks share, only where there is one. cuts: offsets in the
    node's that no copy may cross. Both layouts are of one model and numerics. Every rank ends a move before any begins
    the next. Raises: ValueError if `new` is larger than the arenas, or if planes are in each other's way and no free
    space is large enough for one of them.
    """
    needs: dict[Memory, int] = {
        "gpu": new.gpu_bytes,
        "host": new.host_bytes,
        "node": new.node_bytes,
        "drive": new.drive_bytes,
    }
    for memory, needed in needs.items():
        has = capacity.get(memory, 0)
        if needed > has:
            raise ValueError(f"the new plan needs {needed} bytes of the {memory} arena, which has {has}")
    if {i: states.placed for i, states in old.node_states.items()} != {
        i: states.placed for i, states in new.node_states.items()
    }:
        raise ValueError(f"nodes would divide the optimizer states otherwise than now{SAVE_AND_RESUME}")
    planes, room = _planes(old, new), _Room(capacity, cuts)
    for plane in planes:
        if "drive" in (plane.now.memory, plane.goal.memory) and plane.now.memory != plane.goal.memory:
            raise ValueError(
                f"{plane.name} would change between memory and a drive, where it lies in blocks{SAVE_AND_RESUME}"
            )
    moves: list[Move] = []
    while pending := [p for p in planes if not p.has_arrived]:
        plane = next((p for p in pending if not p.must_be_whole_first and _is_free(p.goal, planes, p)), None)
        if plane is not None:
            moves.append(plane.move(plane.goal, plane.goal_division))
        else:
            plane, place = _step_aside(pending, planes, room)
            moves.append(plane.move(place, () if plane.must_be_whole_first else plane.division))
    return tuple(moves)


def _planes(old: Layout, new: Layout) -> list[_Plane]:
    found = []
    for group, layout in enumerate(old.groups):
        for kind, num_bytes in layout.plane_bytes.items():
            if kind != "grad" and num_bytes:
                name = f"{kind} of {old.model.groups[group].name}"
                now, goal = (_place_of(one, kind, group) for one in (old, new))
                divided, to_divide = (one.division(kind, group) for one in (old, new))
                found.append(_Plane(name, now, goal, divided, to_divide, num_bytes))
    return found


def _place_of(layout: Layout, kind: PlaneKind, group: int) -> ByteRange:
    slot = layout.slots[layout.stored_slot(kind, group)]
    return ByteRange(slot.memory, slot.offset, slot.num_bytes)


def _is_free(place: ByteRange, planes: list[_Plane], mover: _Plane) -> bool:
    in_one_form = mover.division == mover.goal_division  # then it may shift by less than its size
    return not any(p.now.overlaps(place) for p in planes if not (p is mover and in_one_form))


class _Room(NamedTuple):
    """The arenas: their bytes, and offsets in the node's that no copy may cross."""

    capacity: Mapping[Memory, int]
    cuts: Collection[int] = ()

    def gap(self, num_bytes: int, memory: Memory, taken: Sequence[ByteRange]) -> ByteRange | None:
        """The first free place of `num_bytes` bytes; None where there is none."""
        borders = [ByteRange("node", cut, 0) for cut in self.cuts]
        start = 0
        for place in sorted((s for s in (*taken, *borders) if s.memory == memory), key=lambda s: s.offset):
            if place.offset - start >= num_bytes:
                break
            start = max(start, place.offset + place.num_bytes)
        return ByteRange(memory, start, num_bytes) if self.capacity.get(memory, 0) - start >= num_bytes else None


def _step_aside(pending: list[_Plane], planes: list[_Plane], room: _Room) -> tuple[_Plane, ByteRange]:
    """Pick a plane of a circle, each at most once, and free space for it, away from where others go if possible."""
    waiting = sorted((p for p in pending if not p.stepped_aside), key=lambda p: p.now.num_bytes)
    for avoid_goals in (True, False):
        for plane in waiting:
            taken = [p.now for p in planes] + ([p.goal for p in pending] if avoid_goals else [])
            num_bytes = plane.whole_bytes if plane.must_be_whole_first else plane.now.num_bytes
            for memory in _memories_for(plane):
                place = room.gap(num_bytes, memory, taken)
                if place is not None:
                    plane.stepped_aside = True
                    return plane, place
    raise ValueError(_no_room(pending))


def _memories_for(plane: _Plane) -> tuple[Memory, ...]:
    """Where a plane may step aside to."""
    if plane.must_be_whole_first:
        return ("node",)
    return OWN_MEMORIES if plane.division else MEMORIES


def _no_room(pending: list[_Plane]) -> str:
    divided = [p for p in pending if p.must_be_whole_first]
    if not divided:
        smallest = min(p.now.num_bytes for p in pending)
        return f"planes are in each other's way, and no arena has {smallest} bytes free in one piece{SAVE_AND_RESUME}"
    plane = min(divided, key=lambda p: p.whole_bytes)
    return (
        f"GPUs would divide {plane.name} otherwise than now, but the memory that ranks share has not"
        f" {plane.whole_bytes} bytes free in one piece{SAVE_AND_RESUME}"
    )
