"""Weights and gradients that a drive holds, part by part on their way to the GPU and from it through slots of the host.

A stream of its own reads them as early as slots of the host allow, in the order in which layers need them; another one
writes what gradients become.
"""

from __future__ import annotations

from typing import NamedTuple

from flexengine.schedule.commands import Access, CommandName, CopyRegion, DriveCopy, Stream, Subject
from flexengine.schedule.drive import PartBlocks
from flexengine.schedule.lowering.context import RoundContext
from flexengine.schedule.shares import ALONE, Share


class _OnHost(NamedTuple):
    """A slot of the host, and for each of a part's blocks their slot on the drive, and the one of what they hold."""

    staging: int
    blocks: list[tuple[PartBlocks, int, int]]


class DriveParts:
    """Appends reads and writes of parts. share: of weights, what this one of several ranks reads."""

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
