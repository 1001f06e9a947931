"""Where planes lie on a drive, and the pieces in which they cross to the host and back.

A plane on a drive has a region of a file for its home; whatever uses it finds a piece of it in a slot of the host. A
drive reads and writes blocks past the page cache, so what moves at once begins and ends at a block's border, in the
file as in memory. Segments of states therefore begin at a border, and tiles have so many elements that those of every
plane do. Weights, which are only read, lie as they do in memory; what is read are the blocks that hold a part's runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from flexengine.schedule.group_storage import GroupStorage, Plane, Segment, element_bytes
from flexengine.schedule.parts import Part
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


# -- weights -----------------------------------------------------------------------------------------------------------


class WeightBlocks(NamedTuple):
    """Blocks of a plane of weights on a drive that are read at once, and where they go in a slot of the host.

    run: the number of the run of elements that they hold; -1 for all of a group. start, num_bytes: of the plane.
    staged: where they begin in the slot. place, held: where in the slot begin the bytes that are wanted, and how many.
    """

    run: int
    start: int
    num_bytes: int
    staged: int
    place: int
    held: int


def weight_blocks(stored: GroupStorage, part: Part) -> list[WeightBlocks]:
    """The blocks of a part of a group, one behind the other in the slot; those of a group in one part are its plane."""
    if len(stored.parts) == 1:
        held = stored.plane_bytes["weights"]
        return [WeightBlocks(-1, 0, in_blocks(held), 0, 0, held)]
    found, staged = list[WeightBlocks](), 0
    for run in part.runs:
        start, _, held = stored.run_bytes("weights", run)
        first = start // BLOCK_BYTES * BLOCK_BYTES
        num_bytes = in_blocks(start + held) - first
        found.append(WeightBlocks(run.number, first, num_bytes, staged, staged + start - first, held))
        staged += num_bytes
    return found


def staged_weight_bytes(stored: GroupStorage) -> int:
    """Bytes of a slot of the host for any part of a group's weights."""
    return max(sum(blocks.num_bytes for blocks in weight_blocks(stored, part)) for part in stored.parts)


def weights_on_drive(owner: str, stored: GroupStorage, start: int) -> Iterator[Slot]:
    """The slots of a group's weights on a drive from a byte on, each with those of its blocks behind it."""
    num_bytes = in_blocks(stored.plane_bytes["weights"])
    whole = Slot(SlotKey("weights", owner, memory="drive"), start, num_bytes, "weights")
    yield whole
    for part in stored.parts:
        for blocks in weight_blocks(stored, part):
            yield whole.subslot(("blocks", blocks.run), blocks.start, blocks.num_bytes, RUN)
