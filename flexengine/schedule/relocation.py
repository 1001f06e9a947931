"""Moves from one layout to another in the same arenas: which stored plane goes where, and in which order.

Between steps only weights, masters and optimizer states live; everything else in the arenas is free. Nothing is
allocated, so a change of plan can exceed no budget. A plane moves when nothing alive lies where it goes; where planes
wait for each other in a circle, one of them steps aside into free space first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from flexengine.schedule.layout import Layout
from flexengine.schedule.slots import Memory, PlaneKind

OWN_MEMORIES: tuple[Memory, ...] = ("host", "gpu")
"""Those of a rank alone. What each rank has for itself may not step aside into the node's, where all have one place."""
MEMORIES: tuple[Memory, ...] = (*OWN_MEMORIES, "node")


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


class Move(NamedTuple):
    """A plane's bytes go from one place to another of the same size; the two may overlap."""

    name: str
    source: ByteRange
    target: ByteRange


@dataclass
class _Plane:
    name: str
    now: ByteRange
    goal: ByteRange
    dealt: bool = False
    stepped_aside: bool = False


def relocation(old: Layout, new: Layout, capacity: Mapping[Memory, int]) -> tuple[Move, ...]:
    """Moves, in order, that turn arenas laid out by `old` into the same arenas laid out by `new`, gradients left out.

    capacity: bytes of each arena; that of the node, which ranks share, only where there is one. Both layouts are of one
    model and numerics. Raises: ValueError if `new` is larger than the arenas, if ranks would divide states in another
    way, or if planes are in each other's way and no free space is large enough for one of them.
    """
    needs: dict[Memory, int] = {"gpu": new.gpu_bytes, "host": new.host_bytes, "node": new.node_bytes}
    for memory, needed in needs.items():
        has = capacity.get(memory, 0)
        if needed > has:
            raise ValueError(f"the new plan needs {needed} bytes of the {memory} arena, which has {has}")
    planes = _planes(old, new)
    moves: list[Move] = []
    while pending := [p for p in planes if p.now != p.goal]:
        plane = next((p for p in pending if _is_free(p.goal, planes, p)), None)
        target = plane.goal if plane is not None else None
        if plane is None:
            plane, target = _step_aside(pending, planes, capacity)
        assert target is not None
        moves.append(Move(plane.name, plane.now, target))
        plane.now = target
    return tuple(moves)


def _planes(old: Layout, new: Layout) -> list[_Plane]:
    found = []
    for group, layout in enumerate(old.groups):
        for kind, num_bytes in layout.plane_bytes.items():
            if kind != "grad" and num_bytes:
                name = f"{kind} of {old.model.groups[group].name}"
                found.append(_Plane(name, _place_of(old, kind, group), _place_of(new, kind, group)))
                found[-1].dealt = _check_dealing(old, new, kind, group)
    return found


def _check_dealing(old: Layout, new: Layout, kind: PlaneKind, group: int) -> bool:
    """Whether ranks divide a plane. Raises: ValueError where they would divide it otherwise than before."""
    dealt = old.is_dealt(kind, group)
    starts = [(p.is_dealt(kind, group), p.dealt_shares(group) if dealt else ()) for p in (old, new)]
    if starts[0] != starts[1]:
        raise ValueError(
            f"{kind} of {old.model.groups[group].name} would lie on other GPUs than now, and a run keeps how its GPUs"
            " divide states; save a checkpoint and resume from it with the other plan"
        )
    return dealt


def _place_of(layout: Layout, kind: PlaneKind, group: int) -> ByteRange:
    slot = layout.slots[layout.plane_slot(kind, group)]
    return ByteRange(slot.memory, slot.offset, slot.num_bytes)


def _is_free(place: ByteRange, planes: list[_Plane], mover: _Plane) -> bool:
    return not any(p is not mover and p.now.overlaps(place) for p in planes)


def _step_aside(
    pending: list[_Plane], planes: list[_Plane], capacity: Mapping[Memory, int]
) -> tuple[_Plane, ByteRange]:
    """Pick a plane of a circle, each at most once, and free space for it, away from where others go if possible."""
    waiting = sorted((p for p in pending if not p.stepped_aside), key=lambda p: p.now.num_bytes)
    for avoid_goals in (True, False):
        for plane in waiting:
            taken = [p.now for p in planes] + ([p.goal for p in pending] if avoid_goals else [])
            for memory in OWN_MEMORIES if plane.dealt else MEMORIES:
                gap = _gap(plane.now.num_bytes, memory, taken, capacity.get(memory, 0))
                if gap is not None:
                    plane.stepped_aside = True
                    return plane, gap
    smallest = min(p.now.num_bytes for p in pending)
    raise ValueError(f"planes are in each other's way, and no arena has {smallest} bytes free in one piece")


def _gap(num_bytes: int, memory: Memory, taken: list[ByteRange], capacity: int) -> ByteRange | None:
    """The first free place of `num_bytes` bytes; None where there is none."""
    start = 0
    for place in sorted((s for s in taken if s.memory == memory), key=lambda s: s.offset):
        if place.offset - start >= num_bytes:
            break
        start = max(start, place.offset + place.num_bytes)
    return ByteRange(memory, start, num_bytes) if capacity - start >= num_bytes else None
