"""Updates by the CPU, where planes lie: in an update's own program, inside a round, and speculatively.

What lies on a drive passes through slots of the host (`drive.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flexengine.ops.base import Work
from flexengine.schedule.commands import Access, CommandName, SlotOffset, Stream, UpdateTile
from flexengine.schedule.drive import drive_kinds, drive_tiles
from flexengine.schedule.group_storage import Plane, Segment
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering.drive import DriveTiles
from flexengine.schedule.program_builder import ProgramBuilder
from flexengine.schedule.second_planes import second_kinds
from flexengine.schedule.shares import ALONE, Share


class OwnRange(NamedTuple):
    """Elements [first, first + numel) of a group whose gradients a rank has stored, from an element of a slot on."""

    first: int
    numel: int
    slot: int
    slot_first: int


def cpu_groups(layout: Layout) -> list[int]:
    """Groups that the CPU updates."""
    return [g for g, home in enumerate(layout.homes) if home.update == "cpu"]


def cpu_lanes(layout: Layout) -> int:
    """Groups that a program tells apart on the CPU: with a drive, whose streams wait for it."""
    return len(layout.groups) if layout.plan.uses_drive else 0


def late_groups(layout: Layout) -> dict[int, float]:
    """Groups that the CPU updates once the norm is known, whole, also where a speculation holds."""
    return {g: 1.0 for g in cpu_groups(layout) if not layout.plan.groups[g].speculative}


def lower_cpu_update(
    builder: ProgramBuilder, layout: Layout, group: int, scale: Access, left: float = 1.0,
    grads: Sequence[Access] | None = None, share: Share = ALONE, urgent: bool = False,
) -> int:  # fmt: skip
    """Update a group's planes by the CPU where they are, each segment in one call, or with planes on a drive by tiles.

    Returns the index of the command at whose end the GPUs may read the weights: the last update, or where the weights
    lie on a drive the last write; of what has neither here, of the last command before.

    scale: where the host finds the factor on the gradient. left: the share of the work that remains, for its price.
    grads: what an earlier command left of the gradient, where that is not the whole plane. share: what this one of
    several ranks updates. urgent: as of `UpdateTile`.
    """
    name, planes = layout.model.groups[group].name, layout.groups[group].plane_bytes
    contents = {kind: "weights" if kind == "weights" else f"{kind} of" for kind in planes}
    on_drive = DriveTiles(builder, layout, group, left) if layout.plan.groups[group].uses_drive else None
    here = [kind for kind in planes if planes[kind] and (on_drive is None or kind not in on_drive.kinds)]
    held = {kind: Access(layout.plane_slot(kind, group), f"{contents[kind]} {name}") for kind in here}
    grads = [held["grad"]] if grads is None and "grad" in held else grads or []
    for access in (*grads, *(access for kind, access in held.items() if kind != "grad")):
        if builder.last_writer(access.slot) < 0:
            builder.holds(*access)
    updated = {kind: Access(slot, f"updated {content}") for kind, (slot, content) in held.items() if kind != "grad"}
    writes, end = [*updated.values()], len(builder.commands) - 1
    for segment, start, count, place in _pieces(layout, group, share):
        places = {kind: access.slot for kind, access in held.items()}
        tile = {p.kind: SlotOffset(places[p.kind], _offset(layout, group, segment, p, start, place))
                for p in segment.planes if p.kind in places}  # fmt: skip
        label = f"{name} {segment.name}"
        reads, staged = [*(access for kind, access in held.items() if kind != "grad"), *grads, scale], None
        if on_drive is not None:
            staged = on_drive.fetch(segment, start)
            tile, reads, label = {**tile, **staged.planes}, [*reads, staged.read], staged.name
        args = UpdateTile(group, segment.name, start, count, tile, urgent=urgent)
        work, left_there = Work(memory_bytes=_touched_bytes(segment, count) * left), [staged.updated] if staged else []
        label = CommandName("update", owner=label)
        builder.add("update", label, Stream.CPU, reads, [*writes, *left_there], work, args=args)
        end = len(builder.commands) - 1
        if on_drive is not None and staged is not None:
            on_drive.write_back(staged)
            end += "weights" in on_drive.kinds
        held |= updated
    return end


def _pieces(layout: Layout, group: int, share: Share) -> Iterator[tuple[Segment, int, int, int | None]]:
    """(segment, start, elements) of what is updated in one call, and where nodes divide states the place of its own."""
    stored = layout.groups[group]
    on_drive = drive_kinds(stored, layout.plan.groups[group])
    for segment in stored.segments:
        if on_drive:
            for start, count in drive_tiles(segment, on_drive, layout.plan.drive_tile, share):
                yield segment, start, count, None
            continue
        if group in layout.node_states:
            for span in layout.node_states[group].spans(segment, share):
                yield segment, span.start, span.count, span.place
            continue
        start, count = share.of(segment)
        if count:
            yield segment, start, count, None


def _offset(layout: Layout, group: int, segment: Segment, plane: Plane, start: int, place: int | None) -> int:
    """Where an element lies in the slot of a plane; place: of its states where nodes divide them."""
    if place is not None and plane.kind in layout.groups[group].state_kinds:
        return layout.node_states[group].offset(segment, plane, place)
    return plane.start + plane.num_bytes(start)


def lower_speculative_update(
    builder: ProgramBuilder, layout: Layout, group: int, grads: Sequence[Access], own: Sequence[OwnRange] | None = None
) -> int:
    """Update a group by the CPU into its second planes, with the factor that holds where nothing is clipped.

    grads: what earlier commands of the program left of the gradient. own: the elements of the group whose gradients
    this one of several ranks has stored, which it updates; None = all. Returns the index of the last command, -1 where
    there is none.
    """
    if layout.plan.groups[group].states == "drive":
        return _speculate_by_tiles(builder, layout, group, grads)
    name, kinds = layout.model.groups[group].name, second_kinds(layout.groups[group])
    first = {kind: layout.plane_slot(kind, group) for kind in kinds}
    second = {kind: layout.second_slot(kind, group) for kind in kinds}
    contents = {kind: "weights" if kind == "weights" else f"{kind} of" for kind in kinds}
    held = {kind: Access(slot, f"{contents[kind]} {name}") for kind, slot in first.items()}
    for access in held.values():
        if builder.last_writer(access.slot) < 0:
            builder.holds(*access)
    grad, last = layout.plane_slot("grad", group), -1
    for segment in layout.groups[group].segments:
        for start, count, stored in _within(segment, own):
            planes = {p.kind: SlotOffset(first.get(p.kind, grad), p.start + p.num_bytes(start)) for p in segment.planes}
            if stored is not None:
                planes["grad"] = stored
            targets = {kind: SlotOffset(second[kind], place.offset) for kind, place in planes.items() if kind != "grad"}
            args = UpdateTile(group, segment.name, start, count, planes, targets)
            work, label = Work(memory_bytes=_touched_bytes(segment, count)), f"{name} {segment.name}"
            writes = [Access(slot, f"speculated {kind} of {name}") for kind, slot in second.items()]
            reads = [*held.values(), *grads]
            builder.add("update", CommandName("speculate", owner=label), Stream.CPU, reads, writes, work, args=args)
            last = len(builder.commands) - 1
    return last


def _speculate_by_tiles(builder: ProgramBuilder, layout: Layout, group: int, grads: Sequence[Access]) -> int:
    """The same of a group that a drive holds: tiles are read from its first planes, updated in their slots of the host,
    and written to its second ones."""
    on_drive, home = DriveTiles(builder, layout, group), layout.plan.groups[group]
    for segment, start, count, _ in _pieces(layout, group, ALONE):
        staged = on_drive.fetch(segment, start)
        planes = dict(staged.planes)
        if home.grads == "host":
            [grad] = [plane for plane in segment.planes if plane.kind == "grad"]
            planes["grad"] = SlotOffset(layout.plane_slot("grad", group), grad.start + grad.num_bytes(start))
        args = UpdateTile(group, segment.name, start, count, planes, targets={})
        work, label = Work(memory_bytes=_touched_bytes(segment, count)), CommandName("speculate", owner=staged.name)
        builder.add("update", label, Stream.CPU, [*grads, staged.read], [staged.updated], work, args=args)
        on_drive.write_back(staged, to_second=True)
    return len(builder.commands) - 1


def _within(segment: Segment, own: Sequence[OwnRange] | None) -> Iterator[tuple[int, int, SlotOffset | None]]:
    """(start, elements) of a segment that are among those of its group, and where their gradients lie by themselves."""
    if own is None:
        yield 0, segment.numel, None
        return
    [plane] = [plane for plane in segment.planes if plane.kind == "grad"]
    first, last = segment.first_element, segment.first_element + segment.numel
    for each in own:
        start, end = max(first, each.first), min(last, each.first + each.numel)
        if start < end:
            offset = plane.num_bytes(each.slot_first + start - each.first)
            yield start - first, end - start, SlotOffset(each.slot, offset)


def _touched_bytes(segment: Segment, count: int) -> int:
    """Bytes of memory that an update of so many elements touches: it writes all planes but the gradient."""
    return sum(p.num_bytes(count) * (1 if p.kind == "grad" else 2) for p in segment.planes)
