"""One file on the drive of a node, which all of its ranks read and write."""

from __future__ import annotations

import os

from flexengine.native.drive import DriveFile
from flexengine.native.linked_files import Holes
from flexengine.parallel.node_memory import open_on_node
from flexengine.runtime.ranks.context import RankGroup


def open_drive(group: RankGroup | None, folder: str | None, num_bytes: int, holes: Holes = ()) -> DriveFile:
    """The file on a folder's drive; the first rank of a node makes it. All ranks make this call together.
    holes: what of it nobody writes.

    Raises: on all ranks, what fails on one: DriveError where the drive has not so many bytes; ValueError without a
    folder.
    """

    def made() -> DriveFile:
        if folder is None:
            raise ValueError("the plan keeps planes on a drive, but no folder is given; give offload_dir")
        return DriveFile(folder, num_bytes, holes=holes)

    if group is None or group.ranks.size == 1:
        return made()

    def descriptor() -> int:
        file = made()
        try:
            return os.dup(file.descriptor)
        finally:
            file.close()

    opened = open_on_node(group.ranks, group.control, descriptor)
    return DriveFile(folder or "", num_bytes, opened)
