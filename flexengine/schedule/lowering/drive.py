"""Commands of a drive: what it holds passes through slots of the host on its way, and what it takes as well."""

from __future__ import annotations

from typing import NamedTuple

from flexengine.schedule.commands import Access, CommandName, CopyRegion, DriveCopy, SlotOffset, Stream, Subject
from flexengine.schedule.drive import PartBlocks, drive_kinds, drive_planes
from flexengine.schedule.group_storage import Segment
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering.context import RoundContext
from flexengine.schedule.program_builder import ProgramBuilder
from flexengine.schedule.shares import ALONE, Share
from flexengine.schedule.slots import PlaneKind

NO_GROUP = -1


class StagedKept(NamedTuple):
    """A slot of the host, and the one within it of what is kept."""

    staging: int
    place: int


class DriveKept:
    """Appends writes and reads of what layers keep from forward to backward, chunk by chunk.

    It is written as soon as it has left the GPU, and read as early as slots of the host allow.
    """

    def __init__(self, context: RoundContext) -> None:
        self._builder, self._layout = context.builder, context.layout

    def place(self, num_bytes: int) -> StagedKept:
        """The slot that was written longest ago, for so many bytes."""
        staging = min(self._layout.ring("staged_kept", memory="host"), key=self._builder.last_writer)
        return StagedKept(staging, self._layout.place_within(staging, (0, num_bytes)))

    def write(self, name: CommandName, content: str, at: StagedKept, home: int) -> None:
        """Have the drive take what a slot of the host holds."""
        region = CopyRegion(at.staging, 0, home, 0, self._builder.slots[home].num_bytes)
        reads, writes = [Access(at.staging, content)], [Access(home, content)]
        self._builder.add_copy(name, Stream.DRIVE_STORE, reads, writes, (region,), DriveCopy(NO_GROUP))

    def read(self, name: CommandName, content: str, home: int, num_bytes: int) -> int:
        """Read it again; returns the slot of the host where it is found."""
        at = self.place(num_bytes)
        region = CopyRegion(home, 0, at.staging, 0, self._builder.slots[home].num_bytes)
        writes = [Access(at.staging, content), Access(at.place, content)]
        reads = [Access(home, content)]
        self._builder.add_copy(name, Stream.DRIVE_FETCH, reads, writes, (region,), DriveCopy(NO_GROUP))
        return at.place


class _OnHost(NamedTuple):
    """A slot of the host, and for each of a part's blocks their slot on the drive, and the one of what they hold."""

    staging: int
    blocks: list[tuple[PartBlocks, int, int]]


class DriveParts:
    """Appends reads and writes of weights and gradients, part by part on their way to the GPU and from it.

    A stream of its own reads them as early as slots of the host allow, in the order in which layers need them; another
    one writes what gradients become. share: of weights, what this one of several ranks reads.
    """

    def __init__(self, context: RoundContext, share: Share = ALONE) -> None:
        self._context, self._builder, self._layout = context, context.builder, context.layout
        self._share = share
        self._begun = False

    def read_weights(self, group: int, part: int, content: str, slot: int) -> list[CopyRegion]:
        """Read a part's weights, or a share; returns what copies that from there to a slot of the GPU."""
        found = self._place("weights", "staged_weights", group, part)
        self._read("weights", group, part, content, found)
        return [CopyRegion(held, 0, slot, blocks.target, blocks.held) for blocks, _, held in found.blocks]

    def read_grad(self, group: int, content: str, slot: int) -> list[CopyRegion]:
        """Read what earlier rounds left of a gradient; returns what copies it from there to a slot of the GPU."""
        found = self._place("grad", "staged_grads", group, 0)
        self._read("grad", group, 0, content, found)
        return [CopyRegion(held, 0, slot, blocks.target, blocks.held) for blocks, _, held in found.blocks]

    def write_grad(self, group: int, content: str, slot: int) -> None:
        """Have the host take a gradient from a slot of the GPU, and the drive from there."""
        staging, places = self._place("grad", "staged_grads", group, 0)
        name = self._context.part_name(group, 0)
        regions = tuple(CopyRegion(slot, blocks.target, held, 0, blocks.held) for blocks, _, held in places)
        left = [Access(staging, content), *(Access(held, content) for _, _, held in places)]
        label = CommandName("offload", "grad", name)
        self._builder.add_copy(label, Stream.D2H, [Access(slot, content)], left, regions)
        regions = tuple(CopyRegion(staging, b.staged, on_drive, 0, b.num_bytes) for b, on_drive, _ in places)
        tiles = self._layout.tiles_on_drive("grad", group)
        writes = [Access(on_drive, content) for on_drive in (*(place for _, place, _ in places), *tiles)]
        label, args = CommandName("write", "grad", name), DriveCopy(group)
        self._builder.add_copy(label, Stream.DRIVE_STORE, [Access(staging, content)], writes, regions, args)

    def _place(self, kind: str, role: str, group: int, part: int) -> _OnHost:
        """The slot that was written longest ago."""
        layout = self._layout
        staging = min(layout.staging_ring(role, group), key=self._builder.last_writer)
        found = layout.staged_part(kind, group, part, self._share if kind == "weights" else ALONE)
        return _OnHost(staging, [(blocks, place, layout.staging_place(staging, blocks)) for blocks, place in found])

    def _read(self, kind: Subject, group: int, part: int, content: str, to: _OnHost) -> None:
        builder = self._builder
        for _, on_drive, _ in to.blocks:
            builder.holds(on_drive, content)
        reads = [Access(on_drive, content) for _, on_drive, _ in to.blocks]
        writes = [Access(to.staging, content), *(Access(held, content) for _, _, held in to.blocks)]
        regions = (CopyRegion(on_drive, 0, to.staging, b.staged, b.num_bytes) for b, on_drive, _ in to.blocks)
        if not self._begun:  # a program before may still send what slots of the host hold, until its batch is replaced
            reads.append(Access(self._layout.slot("batch"), "batch"))
            self._begun = True
        name = CommandName("read", kind, self._context.part_name(group, part))
        builder.add_copy(name, Stream.DRIVE_FETCH, reads, writes, tuple(regions), DriveCopy(group))


class StagedTile(NamedTuple):
    """Planes of a tile on the host: what the update finds and leaves there, and where each of them begins."""

    name: str
    read: Access
    updated: Access
    planes: dict[PlaneKind, SlotOffset]


class DriveTiles:
    """Appends reads and writes of a group's tiles, in which the CPU updates all planes but the gradient.

    The slots are taken in turn, so that later tiles are read and earlier ones are written while one is updated.
    left: for prices, the share of them that remains to be moved.
    """

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
