"""The optimizer step as a program: AdamW over all groups in forward order, on the GPU tile by tile.

What the CPU updates may also be updated inside a round: `lower_cpu_update`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flexengine.ops.base import Work
from flexengine.schedule.commands import (
    Access,
    CopyRegion,
    Program,
    ProgramBuilder,
    Stream,
    TilePlane,
    UpdateTile,
)
from flexengine.schedule.fixed_slots import HOST_GRAD_NORM, HOST_SCALES, SCALAR_BYTES, SCALE_BYTES
from flexengine.schedule.group_layout import PLANE_KINDS, Segment, element_bytes
from flexengine.schedule.layout import Layout
from flexengine.schedule.slots import Slot, overlapping_slots


class _Tile(NamedTuple):
    """Elements [start, start + count) of a group's segment."""

    group: int
    segment: Segment
    start: int
    count: int


def lower_update(layout: Layout, by_cpu: Mapping[int, float] | None = None) -> Program:
    """Clip factor, then AdamW over all groups in forward order: on the GPU tile by tile, host planes streaming through
    tile slots; on the CPU in place.

    by_cpu: of the groups that the CPU updates, those that it does here, each with the part of its work that is left
    (to be priced; what runs is whole); None = all. The slot table is the layout's plus one slot per tile of every
    plane, so that tiles of one plane do not wait for each other.
    """
    groups = layout.plan.groups
    left = dict.fromkeys(cpu_groups(layout), 1.0) if by_cpu is None else by_cpu
    pieces: list[Slot] = []
    tiles = {
        group: [(tile, _tile_homes(layout, tile, pieces)) for tile in _tiles(layout, group)]
        for group, home in enumerate(groups)
        if home.update == "gpu"
    }
    slots = (*layout.slots, *pieces)
    builder = ProgramBuilder("update", slots, overlapping_slots(slots))
    norms = Access(layout.slot("norm_squares"), "norm squares")
    builder.holds(*norms)
    writes = [Access(layout.slot("scales"), "scales"), Access(layout.slot("grad_norm"), "grad norm")]
    builder.add("clip", "clip factor", Stream.COMPUTE, [norms], writes, Work(kernels=8))
    if left:
        _lower_scalars(builder, layout)
    number = 0
    for group in range(len(groups)):
        if group in left:
            scales = Access(layout.slot("scalars", memory="host"), "scalars")
            lower_cpu_update(builder, layout, group, scales, left[group])
        for tile, homes in tiles.get(group, []):
            _lower_tile(builder, layout, tile, homes, number)
            number += 1
    return builder.build()


def cpu_groups(layout: Layout) -> list[int]:
    """Groups that the CPU updates."""
    return [g for g, home in enumerate(layout.plan.groups) if home.update == "cpu"]


def _tiles(layout: Layout, group: int) -> list[_Tile]:
    """A group in pieces of at most a tile."""
    size = layout.plan.optimizer_tile
    return [
        _Tile(group, segment, start, min(size, segment.numel - start))
        for segment in layout.groups[group].segments
        for start in range(0, segment.numel, size)
    ]


def _tile_homes(layout: Layout, tile: _Tile, pieces: list[Slot]) -> dict[str, int]:
    """Give every plane of a tile a slot of its own inside the plane; returns slot indices by plane kind."""
    homes = {}
    for plane in tile.segment.planes:
        width, whole = element_bytes(plane.dtype), layout.slots[layout.plane_slot(plane.kind, tile.group)]
        homes[plane.kind] = len(layout.slots) + len(pieces)
        within, start = (tile.segment.name, tile.start), plane.start + tile.start * width
        pieces.append(whole.piece(within, start, tile.count * width, "tile"))
    return homes


def _lower_scalars(builder: ProgramBuilder, layout: Layout) -> None:
    """The factors on the gradients and their norm, for the host."""
    target, scales, norm = layout.slot("scalars", memory="host"), layout.slot("scales"), layout.slot("grad_norm")
    regions = (
        CopyRegion(norm, 0, target, HOST_GRAD_NORM, SCALAR_BYTES),
        CopyRegion(scales, 0, target, HOST_SCALES, SCALE_BYTES * len(layout.groups)),
    )
    sources, writes = [Access(scales, "scales"), Access(norm, "grad norm")], [Access(target, "scalars")]
    builder.add("copy", "scalars to the host", Stream.D2H, sources, writes, copies=regions)


def lower_cpu_update(
    builder: ProgramBuilder, layout: Layout, group: int, scale: Access, left: float = 1.0,
    grads: Sequence[Access] | None = None,
) -> None:  # fmt: skip
    """AdamW by the CPU on a group's planes where they are, matrices and vectors each in one piece.

    scale: where the host finds the factor on the gradient. left: the part of the work that remains, for its price.
    grads: what an earlier command left of the gradient, where that is not the whole plane.
    """
    name, planes = layout.model.groups[group].name, layout.groups[group].plane_bytes
    contents = {kind: "weights" if kind == "weights" else f"{kind} of" for kind in PLANE_KINDS}
    held = {k: Access(layout.plane_slot(k, group), f"{contents[k]} {name}") for k in PLANE_KINDS if planes[k]}
    grads = [held["grad"]] if grads is None else grads
    for access in (*grads, *(access for kind, access in held.items() if kind != "grad")):
        if builder.last_writer(access.slot) < 0:
            builder.holds(*access)
    writes = [Access(slot, f"updated {content}") for kind, (slot, content) in held.items() if kind != "grad"]
    for segment in layout.groups[group].segments:
        args = UpdateTile(
            group,
            segment.name,
            0,
            segment.numel,
            {p.kind: TilePlane(held[p.kind].slot, p.start) for p in segment.planes},
        )
        touched = sum(segment.numel * element_bytes(p.dtype) * (1 if p.kind == "grad" else 2) for p in segment.planes)
        work, label = Work(memory_bytes=touched * left), f"update {name} {segment.name}"
        reads = [*(access for kind, access in held.items() if kind != "grad"), *grads, scale]
        builder.add("update", label, Stream.CPU, reads, writes, work, args=args)
        held.update({kind: Access(slot, f"updated {text}") for kind, (slot, text) in held.items() if kind != "grad"})


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
        staging = layout.slot("tile", index=number % layout.plan.optimizer_slots)
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
    reads.append(Access(layout.slot("scales"), "scales"))
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
