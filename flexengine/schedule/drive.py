"""Where optimizer states lie on a drive, and the tiles in which they cross to the host and back.

A drive reads and writes blocks past the page cache, so what moves at once begins and ends at a block's border, in the
file as in memory. Segments therefore begin at a border, and tiles have so many elements that those of every plane do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from flexengine.schedule.group_storage import GroupStorage, Plane, Segment, element_bytes
from flexengine.schedule.region import RUN
from flexengine.schedule.slots import PlaneKind, Slot, SlotKey

BLOCK_BYTES = 4096
"""The largest logical block of drives, and a page of memory."""


def in_blocks(num_bytes: int) -> int:
    """Round up to whole blocks."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def drive_planes(stored: GroupStorage, segment: Segment) -> list[Plane]:
    """The planes of a segment that a drive holds: all that only the update reads and writes."""
    return [plane for plane in segment.planes if plane.kind in stored.state_kinds]


def drive_start(stored: GroupStorage, segment: Segment, kind: PlaneKind) -> int:
    """The byte of a group's plane on a drive where a segment begins."""
    start = 0
    for other in stored.segments:
        if other.name == segment.name:
            break
        start += sum(in_blocks(p.num_bytes(other.numel)) for p in other.planes if p.kind == kind)
    return start


def drive_plane_bytes(stored: GroupStorage, kind: PlaneKind) -> int:
    """Bytes of a group's plane on a drive."""
    planes = ((plane, segment) for segment in stored.segments for plane in drive_planes(stored, segment))
    return sum(in_blocks(plane.num_bytes(segment.numel)) for plane, segment in planes if plane.kind == kind)


def drive_bytes(stored: GroupStorage) -> int:
    """Bytes of a group's states on a drive."""
    return sum(drive_plane_bytes(stored, kind) for kind in stored.state_kinds)


def drive_tiles(stored: GroupStorage, segment: Segment, most: int) -> list[tuple[int, int]]:
    """Cut a segment into (start, elements) of about `most` elements, whose states begin at borders of blocks."""
    units = [BLOCK_BYTES // element_bytes(plane.dtype) * plane.block for plane in drive_planes(stored, segment)]
    unit = math.lcm(*units)
    size = -(-most // unit) * unit
    return [(start, min(size, segment.numel - start)) for start in range(0, segment.numel, size)]


def staged_offsets(groups: Iterable[GroupStorage], most: int) -> dict[PlaneKind, int]:
    """Where each plane of any tile begins in a slot of the host, and its `end`."""
    needed: dict[PlaneKind, int] = {}
    for stored in groups:
        for segment in stored.segments:
            elements = max(count for _, count in drive_tiles(stored, segment, most))
            for plane in drive_planes(stored, segment):
                needed[plane.kind] = max(needed.get(plane.kind, 0), in_blocks(plane.num_bytes(elements)))
    offsets, end = dict[PlaneKind, int](), 0
    for kind, num_bytes in needed.items():
        offsets[kind] = end
        end += num_bytes
    return {**offsets, "end": end}


def drive_slots(owner: str, stored: GroupStorage, start: int, most: int) -> Iterator[Slot]:
    """The slots of a group's planes on a drive from a byte on, each with those of its tiles behind it."""
    for kind in stored.state_kinds:
        num_bytes = drive_plane_bytes(stored, kind)
        whole = Slot(SlotKey(kind, owner, memory="drive"), start, num_bytes, "optimizer states")
        yield whole
        for segment in stored.segments:
            for plane in (plane for plane in drive_planes(stored, segment) if plane.kind == kind):
                begin = drive_start(stored, segment, kind)
                for first, count in drive_tiles(stored, segment, most):
                    place = begin + plane.num_bytes(first), in_blocks(plane.num_bytes(count))
                    yield whole.subslot((segment.name, first), *place, RUN)
        start += num_bytes
