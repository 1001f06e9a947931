"""The optimizer step as a program: AdamW over all groups in forward order, on the GPU tile by tile."""

from __future__ import annotations

from typing import NamedTuple

from flexengine.ops.base import Work
from flexengine.schedule.commands import (
    Access,
    CopyRegion,
    Program,
    ProgramBuilder,
    Slot,
    Stream,
    TilePlane,
    UpdateTile,
    overlapping_slots,
)
from flexengine.schedule.layout import HOST_SCALARS, SCALAR_BYTES, Layout, Segment, element_bytes


class _Tile(NamedTuple):
    """Elements [start, start + count) of a group's segment."""

    group: int
    segment: Segment
    start: int
    count: int


def _tiles(layout: Layout) -> list[_Tile]:
    """Pieces of at most a tile; what the CPU updates in place needs no tiles and is one piece."""
    tiles = []
    for group, (stored, home) in enumerate(zip(layout.groups, layout.plan.groups, strict=True)):
        for segment in stored.segments:
            size = layout.plan.optimizer_tile if home.update == "gpu" else max(1, segment.numel)
            starts = range(0, segment.numel, size)
            tiles += [_Tile(group, segment, start, min(size, segment.numel - start)) for start in starts]
    return tiles


def lower_update(layout: Layout) -> Program:
    """Clip factor, then AdamW over all groups in forward order: on the GPU tile by tile, host planes streaming through
    tile slots; on the CPU in place.

    The slot table is the layout's plus one slot per tile of every plane, so that tiles of one plane do not wait for
    each other.
    """
    pieces: list[Slot] = []
    tiles = _tiles(layout)
    homes = [_tile_homes(layout, tile, pieces) for tile in tiles]
    slots = (*layout.slots, *pieces)
    builder = ProgramBuilder("update", slots, overlapping_slots(slots))
    norms = Access(layout.slot("norm_squares"), "norm squares")
    builder.holds(*norms)
    writes = [Access(layout.slot("scale"), "scale"), Access(layout.slot("grad_norm"), "grad norm")]
    builder.add("clip", "clip factor", Stream.COMPUTE, [norms], writes, Work(kernels=8))
    if layout.plan.updates_on_cpu:
        _lower_scalars(builder, layout)
    number = 0
    for tile, home in zip(tiles, homes, strict=True):
        if layout.plan.groups[tile.group].update == "cpu":
            _lower_in_place(builder, layout, tile, home)
        else:
            _lower_tile(builder, layout, tile, home, number)
            number += 1
    return builder.build()


def _tile_homes(layout: Layout, tile: _Tile, pieces: list[Slot]) -> dict[str, int]:
    """Give every plane of a tile a slot of its own inside the plane; returns slot indices by plane kind."""
    homes = {}
    for plane in tile.segment.planes:
        width, whole = element_bytes(plane.dtype), layout.slots[layout.plane_slot(plane.kind, tile.group)]
        offset = whole.offset + plane.start + tile.start * width
        homes[plane.kind] = len(layout.slots) + len(pieces)
        pieces.append(
            Slot(f"{whole.name}@{tile.segment.name}+{tile.start}", whole.memory, offset, tile.count * width, "tile")
        )
    return homes


def _lower_scalars(builder: ProgramBuilder, layout: Layout) -> None:
    """The factor on the gradients and their norm, for the host."""
    target = layout.slot("scalars.host")
    places = HOST_SCALARS.items()
    regions = [CopyRegion(layout.slot(name), 0, target, offset, SCALAR_BYTES) for name, offset in places]
    sources = [Access(layout.slot("scale"), "scale"), Access(layout.slot("grad_norm"), "grad norm")]
    writes = [Access(target, "scalars")]
    builder.add("copy", "scalars to the host", Stream.D2H, sources, writes, copies=tuple(regions))


def _lower_in_place(builder: ProgramBuilder, layout: Layout, tile: _Tile, homes: dict[str, int]) -> None:
    """AdamW by the CPU on what lives in host memory."""
    name = f"{layout.model.groups[tile.group].name} {tile.segment.name}"
    contents = {kind: Access(slot, f"{kind} of {name}") for kind, slot in homes.items()}
    for access in contents.values():
        builder.holds(*access)
    reads = [*contents.values(), Access(layout.slot("scalars.host"), "scalars")]
    writes = [access for kind, access in contents.items() if kind != "grad"]
    planes = {kind: TilePlane(slot, 0) for kind, slot in homes.items()}
    args = UpdateTile(tile.group, tile.segment.name, tile.start, tile.count, planes)
    work = Work(memory_bytes=_moved_bytes(builder, homes))
    builder.add("update", f"update {name}", Stream.CPU, reads, writes, work, args=args)


def _moved_bytes(builder: ProgramBuilder, homes: dict[str, int]) -> float:
    """Bytes of memory that an update reads and writes: all planes, the gradient only read."""
    return float(sum(builder.slots[slot].num_bytes * (1 if kind == "grad" else 2) for kind, slot in homes.items()))


def _lower_tile(builder: ProgramBuilder, layout: Layout, tile: _Tile, homes: dict[str, int], number: int) -> None:
    """Fetch what lives on the host, update, send back what changed (all but the gradient)."""
    name = f"{layout.model.groups[tile.group].name} {tile.segment.name}+{tile.start}"
    streamed = {kind: slot for kind, slot in homes.items() if builder.slots[slot].memory == "host"}
    resident = {kind: slot for kind, slot in homes.items() if kind not in streamed}
    for kind, slot in homes.items():
        builder.holds(slot, f"{kind} of {name}")
    planes = {kind: TilePlane(slot, 0) for kind, slot in resident.items()}
    reads = [Access(slot, f"{kind} of {name}") for kind, slot in resident.items()]
    writes = [Access(slot, f"{kind} of {name}") for kind, slot in resident.items() if kind != "grad"]
    if streamed:
        staging = layout.slot(f"tile[{number % layout.plan.optimizer_slots}]")
        planes.update({kind: TilePlane(staging, layout.tile_offsets[kind]) for kind in streamed})
        fetched = [
            CopyRegion(slot, 0, staging, layout.tile_offsets[kind], builder.slots[slot].num_bytes)
            for kind, slot in streamed.items()
        ]
        sources = [Access(slot, f"{kind} of {name}") for kind, slot in streamed.items()]
        tile_access = Access(staging, f"tile {name}")
        builder.add("copy", f"fetch tile {name}", Stream.H2D, sources, [tile_access], copies=tuple(fetched))
        reads.append(tile_access)
        writes.append(Access(staging, f"updated tile {name}"))
    reads.append(Access(layout.slot("scale"), "scale"))
    args = UpdateTile(tile.group, tile.segment.name, tile.start, tile.count, planes)
    work = Work(memory_bytes=_moved_bytes(builder, homes), kernels=1)
    builder.add("update", f"update {name}", Stream.COMPUTE, reads, writes, work, args=args)
    if streamed:
        returned = [
            CopyRegion(staging, layout.tile_offsets[kind], slot, 0, builder.slots[slot].num_bytes)
            for kind, slot in streamed.items()
            if kind != "grad"
        ]
        targets = [Access(slot, f"{kind} of {name}") for kind, slot in streamed.items() if kind != "grad"]
        if returned:
            source = [Access(staging, f"updated tile {name}")]
            builder.add("copy", f"return tile {name}", Stream.D2H, source, targets, copies=tuple(returned))
