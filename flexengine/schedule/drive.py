"""Where planes lie on a drive, and the pieces in which they cross to the host and back.

A plane on a drive has a region of a file for its home; whatever uses it finds a piece of it in a slot of the host. A
drive reads and writes blocks past the page cache, so what moves at once begins and ends at a block's border, in the
file as in memory. Segments of what is trained therefore begin at a border, and tiles have so many elements that those
of every plane do. Frozen weights, which are only read, lie as they do in memory. What goes to the GPU and comes from it
are the blocks that hold a part's elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from flexengine.plan import GroupPlan, Plan
from flexengine.schedule.group_storage import GroupStorage, Plane, Segment, element_bytes
from flexengine.schedule.parts import Part
from flexengine.schedule.ranks.waves import own_ranges
from flexengine.schedule.region import RUN
from flexengine.schedule.shares import ALONE, Share
from flexengine.schedule.slots import PlaneKind, Slot, SlotKey

BLOCK_BYTES = 4096
"""The largest logical block of drives, and a page of memory."""


def in_blocks(num_bytes: int) -> int:
    """Round up to whole blocks."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


Kinds = tuple[PlaneKind, ...]
"""The planes of a group that a drive holds."""


def drive_kinds(stored: GroupStorage, home: GroupPlan) -> Kinds:
    """The planes of a trained group that a drive holds; none of a frozen one, whose weights lie otherwise."""
    return tuple(k for k, size in stored.plane_bytes.items() if size and home.trained and home.home_of(k) == "drive")


def drive_planes(segment: Segment, kinds: Kinds) -> list[Plane]:
    """The planes of a segment that a drive holds."""
    return [plane for plane in segment.planes if plane.kind in kinds]


def drive_start(stored: GroupStorage, segment: Segment, kind: PlaneKind) -> int:
    """The byte of a group's plane on a drive where a segment begins."""
    start = 0
    for other in stored.segments:
        if other.name == segment.name:
            break
        start += sum(in_blocks(p.num_bytes(other.numel)) for p in other.planes if p.kind == kind)
    return start


def drive_plane_bytes(stored: GroupStorage, kind: PlaneKind) -> int:
    """Bytes of a trained group's plane on a drive."""
    planes = ((plane, segment) for segment in stored.segments for plane in drive_planes(segment, (kind,)))
    return sum(in_blocks(plane.num_bytes(segment.numel)) for plane, segment in planes)


def drive_bytes(stored: GroupStorage, kinds: Kinds) -> int:
    """Bytes of planes of a group on a drive."""
    return sum(drive_plane_bytes(stored, kind) for kind in kinds)


def drive_tiles(segment: Segment, kinds: Kinds, most: int, share: Share = ALONE) -> list[tuple[int, int]]:
    """Cut a segment into (start, elements) of about `most` elements, whose planes begin at borders of blocks.

    share: of one of several ranks, which cut the segment at such borders, too.
    """
    units = [BLOCK_BYTES // element_bytes(plane.dtype) * plane.block for plane in drive_planes(segment, kinds)]
    unit = math.lcm(*units)
    size, count = -(-most // unit) * unit, -(-segment.numel // unit)
    first, end = (min(segment.numel, unit * (count * rank // share.size)) for rank in (share.rank, share.rank + 1))
    return [(start, min(size, end - start)) for start in range(first, end, size)]


def tiles_of_ranks(segment: Segment, kinds: Kinds, most: int, ranks: int) -> list[tuple[int, int]]:
    """The tiles of all ranks of a node."""
    return [tile for rank in range(ranks) for tile in drive_tiles(segment, kinds, most, Share(rank, ranks))]


def staged_offsets(groups: Iterable[tuple[GroupStorage, Kinds]], most: int) -> dict[PlaneKind, int]:
    """Where each plane of any tile begins in a slot of the host, and its `end`."""
    needed: dict[PlaneKind, int] = {}
    for stored, kinds in groups:
        for segment in stored.segments:
            elements = max(count for _, count in drive_tiles(segment, kinds, most))
            for plane in drive_planes(segment, kinds):
                needed[plane.kind] = max(needed.get(plane.kind, 0), in_blocks(plane.num_bytes(elements)))
    offsets, end = dict[PlaneKind, int](), 0
    for kind, num_bytes in needed.items():
        offsets[kind] = end
        end += num_bytes
    return {**offsets, "end": end}


def drive_slots(
    owner: str, stored: GroupStorage, kinds: Kinds, start: int, plan: Plan, *, index: int = -1
) -> Iterator[Slot]:
    """The slots of a trained group's planes on a drive from a byte on, each with those of its tiles behind it, and of
    the blocks of its parts. index: of their keys."""
    for kind in kinds:
        num_bytes = drive_plane_bytes(stored, kind)
        whole = Slot(SlotKey(kind, owner, index, "drive"), start, num_bytes, _CATEGORIES.get(kind, "optimizer states"))
        yield whole
        for segment in stored.segments:
            for plane in drive_planes(segment, (kind,)):
                begin = drive_start(stored, segment, kind)
                for first, count in tiles_of_ranks(segment, kinds, plan.drive_tile, plan.request.ranks):
                    place = begin + plane.num_bytes(first), in_blocks(plane.num_bytes(count))
                    yield whole.subslot((segment.name, first), *place, RUN)
        if kind in _CATEGORIES:
            yield from _slots_of_blocks(whole, stored, plan, trained=True)
        start += num_bytes


_CATEGORIES = {"weights": "weights", "grad": "gradients"}

# -- parts on their way to and from the GPU ----------------------------------------------------------------------------


class PartBlocks(NamedTuple):
    """Blocks of a plane on a drive that are moved at once, and where they lie in a slot of the host.

    key: which they are among those of the plane. start, num_bytes: of the plane. staged: where they begin in the slot
    of the host. place, held: where in it begin the bytes that are wanted, and how many. target: where these begin in a
    slot of the GPU.
    """

    key: tuple[int, ...]
    start: int
    num_bytes: int
    staged: int
    place: int
    held: int
    target: int


_Span = tuple[tuple[int, ...], int, int, int]
"""(key, first byte of a plane, bytes, first byte in a slot of the GPU)."""


def part_blocks(
    stored: GroupStorage, part: Part, kind: PlaneKind, *, trained: bool, share: Share = ALONE
) -> list[PartBlocks]:
    """The blocks of a part of a group's weights or gradient, one behind the other in the slot of the host.

    share: of ranks that move a share each of what all need in a slot of the GPU.
    """
    rows = _spans(stored, part, kind) if trained else _frozen_spans(stored, part)
    spans: list[_Span] = [((number,), start, held, target) for number, start, held, target in rows]
    found, staged = list[PartBlocks](), 0
    for key, start, held, target in spans if share.size == 1 else _in_share(spans, share):
        first = start // BLOCK_BYTES * BLOCK_BYTES
        num_bytes = in_blocks(start + held) - first
        found.append(PartBlocks(key, first, num_bytes, staged, staged + start - first, held, target))
        staged += num_bytes
    return found


def _in_share(spans: list[_Span], share: Share) -> Iterator[_Span]:
    end = max(target + held for _, _, held, target in spans)
    for begin, stop in own_ranges(end, share.rank, share.size):
        for key, start, held, target in spans:
            first, last = max(begin, target), min(stop, target + held)
            if first < last:
                yield (*key, share.rank, first), start + first - target, last - first, first


def _frozen_spans(stored: GroupStorage, part: Part) -> Iterator[tuple[int, int, int, int]]:
    """(number, first byte of the plane, bytes, first byte in a slot of the GPU) of frozen weights, run by run; those of
    a group in one part are its plane."""
    if len(stored.parts) == 1:
        yield -1, 0, stored.plane_bytes["weights"], 0
        return
    for run in part.runs:
        start, target, held = stored.run_bytes("weights", run)
        yield run.number, start, held, target


def _spans(stored: GroupStorage, part: Part, kind: PlaneKind) -> Iterator[tuple[int, int, int, int]]:
    """The same of what is trained: of each run, or of a group in one part, what lies in each segment."""
    width, whole = stored.element_bytes(kind), len(stored.parts) == 1
    for first, place, numel in [(0, 0, stored.numel)] if whole else [run[:3] for run in part.runs]:
        for segment in stored.segments:
            begin = max(first, segment.first_element)
            count = min(first + numel, segment.first_element + segment.numel) - begin
            if count > 0:
                start = drive_start(stored, segment, kind) + (begin - segment.first_element) * width
                yield begin, start, count * width, (place + begin - first) * width


def reading_shares(plan: Plan, kind: PlaneKind) -> list[Share]:
    """In which shares a plane's parts cross between a drive and the host: whole, and of ranks that split weights, as in
    training, in those of all ranks."""
    split = kind == "weights" and plan.transport == "split"
    return [ALONE, *(Share(rank, plan.request.ranks) for rank in range(plan.request.ranks if split else 0))]


def all_blocks(
    stored: GroupStorage, kind: PlaneKind, *, trained: bool, shares: Iterable[Share] = (ALONE,)
) -> Iterator[list[PartBlocks]]:
    """The blocks of every part of a group's weights or gradient, in every share."""
    for share in shares:
        for part in stored.parts:
            yield part_blocks(stored, part, kind, trained=trained, share=share)


def staged_part_bytes(
    stored: GroupStorage, kind: PlaneKind, *, trained: bool, shares: Iterable[Share] = (ALONE,)
) -> int:
    """Bytes of a slot of the host for any part of a group's weights or gradient."""
    parts = all_blocks(stored, kind, trained=trained, shares=shares)
    return max(sum(blocks.num_bytes for blocks in part) for part in parts)


def _slots_of_blocks(whole: Slot, stored: GroupStorage, plan: Plan, *, trained: bool) -> Iterator[Slot]:
    kind = whole.key.role
    for part in all_blocks(stored, kind, trained=trained, shares=reading_shares(plan, kind)):
        for blocks in part:
            yield whole.subslot(("blocks", *blocks.key), blocks.start, blocks.num_bytes, RUN)


def frozen_on_drive(owner: str, stored: GroupStorage, start: int, plan: Plan) -> Iterator[Slot]:
    """The slots of a frozen group's weights on a drive from a byte on, each with those of its blocks behind it."""
    num_bytes = in_blocks(stored.plane_bytes["weights"])
    whole = Slot(SlotKey("weights", owner, memory="drive"), start, num_bytes, "weights")
    yield whole
    yield from _slots_of_blocks(whole, stored, plan, trained=False)
