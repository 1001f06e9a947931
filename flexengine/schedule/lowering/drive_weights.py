"""Weights that a drive holds: read into a slot of the host, from which the link takes them to the GPU.

A stream of its own reads them as early as slots of the host allow, in the order in which layers need them.
"""

from __future__ import annotations

from flexengine.schedule.commands import Access, CommandName, CopyRegion, DriveCopy, Stream
from flexengine.schedule.lowering.context import RoundContext


class DriveWeights:
    """Appends reads of weights."""

    def __init__(self, context: RoundContext) -> None:
        self._context, self._builder, self._layout = context, context.builder, context.layout
        self._begun = False

    def read(self, group: int, part: int, content: str) -> dict[int, int]:
        """Read a part into the slot that was written longest ago. Returns by number of run the slot that holds it, -1
        for a group in one part."""
        builder, layout = self._builder, self._layout
        ring = layout.staging_ring(group)
        number = min(range(len(ring)), key=lambda k: builder.last_writer(ring[k]))
        reads, writes, regions, found = [], [Access(ring[number], content)], [], dict[int, int]()
        for blocks, on_drive in layout.staged_part(group, part):
            staging, held = layout.staging_places(group, number, blocks)
            builder.holds(on_drive, content)
            reads.append(Access(on_drive, content))
            writes.append(Access(held, content))
            regions.append(CopyRegion(on_drive, 0, staging, blocks.staged, blocks.num_bytes))
            found[blocks.run] = held
        if not self._begun:  # a program before may still send what slots of the host hold, until its batch is replaced
            reads.append(Access(layout.slot("batch"), "batch"))
            self._begun = True
        name = CommandName("read", "weights", self._context.part_name(group, part))
        builder.add_copy(name, Stream.DRIVE_FETCH, reads, writes, tuple(regions), DriveCopy(group))
        return found
