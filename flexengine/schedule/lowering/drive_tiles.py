"""Planes that a drive holds: brought into a slot of the host for an update by the CPU, tile by tile, and written back.

All but the gradient are. The slots are taken in turn, so that later tiles are read and earlier ones are written while
one is updated.
"""

from __future__ import annotations

from typing import NamedTuple

from flexengine.schedule.commands import Access, CommandName, CopyRegion, DriveCopy, SlotOffset, Stream
from flexengine.schedule.drive import drive_kinds, drive_planes
from flexengine.schedule.group_storage import Segment
from flexengine.schedule.layout import Layout
from flexengine.schedule.program_builder import ProgramBuilder
from flexengine.schedule.slots import PlaneKind


class StagedTile(NamedTuple):
    """Planes of a tile on the host: what the update finds and leaves there, and where each of them begins."""

    name: str
    read: Access
    updated: Access
    planes: dict[PlaneKind, SlotOffset]


class DriveTiles:
    """Appends reads and writes of a group's tiles. left: for prices, the share of them that remains to be moved."""

    def __init__(self, builder: ProgramBuilder, layout: Layout, group: int, left: float = 1.0) -> None:
        self._builder, self._layout, self._group = builder, layout, group
        self.kinds = drive_kinds(layout.groups[group], layout.plan.groups[group])
        self._args, self._tiles = DriveCopy(group, left), dict[str, tuple[CopyRegion, ...]]()

    def fetch(self, segment: Segment, start: int) -> StagedTile:
        """Read a tile into the slot that was written longest ago."""
        builder, layout, group = self._builder, self._layout, self._layout.model.groups[self._group].name
        name = f"{group} {segment.name}+{start}"
        staging = min((layout.slot("staged", index=k, memory="host") for k in range(layout.plan.drive_slots)),
                      key=builder.last_writer)  # fmt: skip
        kinds = [plane.kind for plane in drive_planes(segment, self.kinds)]
        homes = {kind: layout.drive_slot(kind, self._group, segment.name, start) for kind in kinds}
        contents = {kind: f"{kind} of {group if kind == 'grad' else name}" for kind in kinds}
        for kind, slot in homes.items():
            builder.holds(slot, contents[kind])
        offsets = layout.staged_offsets
        regions = self._tiles[name] = tuple(
            CopyRegion(slot, 0, staging, offsets[kind], builder.slots[slot].num_bytes) for kind, slot in homes.items()
        )
        reads = [Access(slot, contents[kind]) for kind, slot in homes.items()]
        read, updated = Access(staging, f"states of {name}"), Access(staging, f"updated states of {name}")
        label = CommandName("read", "tile", name)
        builder.add_copy(label, Stream.DRIVE_IN, reads, [read], regions, self._args)
        return StagedTile(name, read, updated, {kind: SlotOffset(staging, offsets[kind]) for kind in kinds})

    def write_back(self, tile: StagedTile, *, to_second: bool = False) -> None:
        """Write an updated tile to where it was read, or to the same places of second planes."""
        regions, slots = self._tiles[tile.name], self._builder.slots
        back = tuple(region.reversed for region in regions if slots[region.source].key.role != "grad")
        if to_second:
            back = tuple(region._replace(target=self._layout.second_tile(region.target)) for region in back)
        writes = [Access(region.target, f"updated states of {tile.name}") for region in back]
        label = CommandName("write", "tile", tile.name)
        self._builder.add_copy(label, Stream.DRIVE_OUT, [tile.updated], writes, back, self._args)
