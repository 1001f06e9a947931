"""What layers keep on a drive from forward to backward, chunk by chunk through slots of the host.

It is written as soon as it has left the GPU, and read as early as slots of the host allow.
"""

from __future__ import annotations

from typing import NamedTuple

from flexengine.schedule.commands import Access, CommandName, CopyRegion, DriveCopy, Stream
from flexengine.schedule.lowering.context import RoundContext

NO_GROUP = -1


class StagedKept(NamedTuple):
    """A slot of the host, and the one within it of what is kept."""

    staging: int
    place: int


class DriveKept:
    """Appends writes and reads of what is kept."""

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
