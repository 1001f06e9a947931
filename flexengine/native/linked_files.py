"""Bytes of a drive that lie in files which others have written: they are read there, and no copy is made.

These files are only read, and lie as they do: what is wanted begins at no border of blocks there, so the library reads
the blocks around it (csrc/drive.cpp).
"""

from __future__ import annotations

import contextlib
import mmap
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from flexengine.native.drive import BLOCK_BYTES, BlockFile, DriveError, DrivePiece


class ReadFile(BlockFile):
    """A file that is there, opened to read. Raises: DriveError where it cannot be opened."""

    request_bytes = 1 << 18
    """What a buffer of csrc/drive.cpp holds, of which there are 16: 4 MiB in all, for which budgets have room."""

    def __init__(self, path: Path) -> None:
        self.path, self._descriptor = path, -1
        try:
            direct = self._open_direct()
            if not direct:
                self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._seen = self._state()
            super().__init__(self._descriptor, self._seen[0], direct, mmap.ACCESS_READ)
        except OSError as error:
            self._close_descriptor()
            raise DriveError(error.errno, f"{path} cannot be read: {os.strerror(error.errno or 0)}") from error

    def _open_direct(self) -> bool:
        """Open it past the page cache and try a block; False where the file system wants none of that."""
        flag = getattr(os, "O_DIRECT", 0)
        if flag:
            with contextlib.suppress(OSError):
                self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | flag)
                os.preadv(self._descriptor, [mmap.mmap(-1, BLOCK_BYTES)], 0)
                return True
        self._close_descriptor()
        return False

    def _state(self) -> tuple[int, int]:
        found = os.fstat(self._descriptor)
        return found.st_size, found.st_mtime_ns

    def check(self) -> None:
        """Raise DriveError where somebody has changed the file since it was opened."""
        if self._state() != self._seen:
            raise self._failure(0, 0, writes=False)

    def read(self, pieces: Sequence[DrivePiece]) -> None:
        super().read(pieces)
        self.check()

    def _failure(self, offset_bytes: int, error_number: int, *, writes: bool) -> DriveError:
        del writes
        why = f"could not be read at byte {offset_bytes}: {os.strerror(error_number)}"
        if not error_number and self._state() != self._seen:
            why = "was changed since the run began"
        elif not error_number:
            why = f"ends at byte {offset_bytes}, before what it held"
        return DriveError(
            error_number,
            f"{self.path}, of whose frozen weights a run with --offload-dir has no copy, {why}. The step is lost; put"
            " the file back, leave it alone while a run goes on, and resume from the last checkpoint",
        )


Holes = Sequence[tuple[int, int]]
"""Ranges of a drive that hold nothing: (first byte, bytes) in order."""


class Link(NamedTuple):
    """`num_bytes` of a drive from `offset_bytes` on, which lie in a file from `start` on."""

    offset_bytes: int
    num_bytes: int
    file: Path
    start: int

    @property
    def end(self) -> int:
        return self.offset_bytes + self.num_bytes


class Region(NamedTuple):
    """A plane on `num_bytes` of a drive from `offset_bytes` on, of which nobody wants more than is in `links`, in
    order."""

    offset_bytes: int
    num_bytes: int
    links: tuple[Link, ...]

    def at(self, offset_bytes: int) -> Region:
        """The same plane elsewhere on the drive."""
        moved = offset_bytes - self.offset_bytes
        links = (link._replace(offset_bytes=link.offset_bytes + moved) for link in self.links)
        return Region(offset_bytes, self.num_bytes, tuple(links))


def holes_of(regions: Sequence[Region]) -> Holes:
    """What of the drive other files hold."""
    return [region[:2] for region in sorted(regions)]


class LinkedFiles:
    """Finds what lies in other files, and reads it. Close gives them back."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._files: dict[Path, ReadFile] = {}
        self.place(regions)
        try:
            for path in dict.fromkeys(link.file for link in self._links):
                self._files[path] = ReadFile(path)
        except DriveError:
            self.close()
            raise

    def place(self, regions: Sequence[Region]) -> None:
        """Have bytes of the same files at these places of the drive."""
        self.regions = sorted(regions)
        self._links = [link for region in self.regions for link in region.links]

    @property
    def num_bytes(self) -> int:
        """Bytes that are read in other files."""
        return sum(link.num_bytes for link in self._links)

    def holds(self, offset_bytes: int) -> bool:
        """Whether a byte of the drive lies elsewhere."""
        at = bisect_right(self.regions, offset_bytes, key=lambda region: region.offset_bytes) - 1
        region = self.regions[max(0, at)]
        return 0 <= offset_bytes - region.offset_bytes < region.num_bytes

    def view(self, offset_bytes: int, num_bytes: int) -> Tensor | None:
        """The mapped bytes of one file, uint8, to be read only; None where they are the drive's own."""
        if not self.holds(offset_bytes):
            return None
        at = bisect_right(self._links, offset_bytes, key=lambda link: link.offset_bytes) - 1
        link = self._links[max(0, at)]
        assert link.offset_bytes <= offset_bytes, "what no file holds"
        assert offset_bytes + num_bytes <= link.end, "what lies in several tensors of a checkpoint"
        file = self._files[link.file]
        file.check()
        file.touched()
        return file.tensor.narrow(0, link.start + offset_bytes - link.offset_bytes, num_bytes)

    def read(self, pieces: Sequence[DrivePiece]) -> list[DrivePiece]:
        """Read what lies in other files; returns the pieces that are the drive's own. Raises: DriveError."""
        own, found = list[DrivePiece](), dict[Path, list[DrivePiece]]()
        for piece in pieces:
            if not self.holds(piece.offset_bytes):
                own.append(piece)
                continue
            for path, part in self._parts(piece):
                found.setdefault(path, []).append(part)
        for path, parts in found.items():
            self._files[path].read(parts)
        return own

    def _parts(self, piece: DrivePiece) -> Iterator[tuple[Path, DrivePiece]]:
        begin, end = piece.offset_bytes, piece.offset_bytes + piece.memory.numel()
        at = max(0, bisect_right(self._links, begin, key=lambda link: link.offset_bytes) - 1)
        for link in self._links[at:]:
            if link.offset_bytes >= end:
                break
            first, last = max(begin, link.offset_bytes), min(end, link.end)
            if first < last:
                memory = piece.memory[first - begin : last - begin]
                yield link.file, DrivePiece(link.start + first - link.offset_bytes, memory)

    def settle(self) -> None:
        """Have memory hold nothing of the files."""
        for file in self._files.values():
            file.settle()

    def close(self) -> None:
        """Close the files; no view may be used afterwards."""
        for file in self._files.values():
            file.close()
        self._files.clear()
