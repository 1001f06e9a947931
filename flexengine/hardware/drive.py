"""What a folder's drive offers: free bytes, and rates past the page cache, measured."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from flexengine.hardware.drive_profile import DriveProfile
from flexengine.hardware.profile import HardwareProfile
from flexengine.native import allocate_host
from flexengine.native.drive import BLOCK_BYTES, DriveFile, DrivePiece

MOUNTS = Path("/proc/mounts")
MEASURED_BYTES = 512 << 20
"""Of each direction: long enough for a drive's queue, and short beside its cache."""
MOVED_AT_ONCE = 128 << 20
FREE_SHARE = 15 / 16
"""Of a drive's free bytes, what states may take where nobody says how many: file systems slow down as they fill."""


def free_bytes(folder: str | Path) -> int:
    """Bytes of a folder's file system that this user may take; of the nearest folder that is there.

    Raises: ValueError where a file stands in its place.
    """
    place = Path(folder).absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise ValueError(f"{folder}: {place} is a file; name a folder")
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize


class Place(NamedTuple):
    """The file system of a folder: its kind, where it is mounted, free bytes, and whether it is read past the page
    cache."""

    kind: str
    mounted: str
    free_bytes: int
    direct: bool


def place_of(folder: str | Path) -> Place:
    """Look at the drive of a folder, with a file of one block that has no name.

    Raises: ValueError where a file stands in its place; DriveError where no file can be made there.
    """
    free = free_bytes(folder)
    file = DriveFile(folder, BLOCK_BYTES)
    try:
        return Place(*_mounted_at(Path(folder).resolve()), free, file.direct)
    finally:
        file.close()


def _mounted_at(folder: Path) -> tuple[str, str]:
    """Kind and mount point of a folder's file system, as the kernel lists them: the last mount nearest to it."""
    found = ("unknown", "/")
    with suppress(OSError):
        for line in MOUNTS.read_text().splitlines():
            _, point, kind, *_ = line.split()
            point = point.replace("\\040", " ")
            if folder.is_relative_to(point) and len(point) >= len(found[1]):
                found = kind, point
    return found


def drive_budget(folder: str | None, gib: float | None) -> int:
    """Bytes that planes may take on a drive: as many GiB as are given, or a share of a folder's free bytes."""
    if folder is None and gib is None:
        return 0
    if folder is None or gib is not None:
        return int((gib or 0) * 2**30)
    return int(free_bytes(folder) * FREE_SHARE)


def with_drive(profile: HardwareProfile, folder: str | Path | None) -> HardwareProfile:
    """A profile with the rates of a folder's drive, where one is given: MEASURED_BYTES are written and read."""
    return profile if folder is None else profile.changed(**measure_drive(folder).values())


def measure_drive(folder: str | Path) -> DriveProfile:
    """Measure a drive in requests like those of training. Raises: DriveError where it refuses the bytes."""
    file = DriveFile(folder, 2 * MEASURED_BYTES)
    try:
        with allocate_host(2 * MOVED_AT_ONCE, page_locked=False) as buffer, ThreadPoolExecutor(1) as beside:
            out, back = buffer.tensor.view(2, MOVED_AT_ONCE)
            out.random_(0, 256)  # drives and file systems may store zeros faster

            def written(first: int) -> float:
                return _rate(lambda start: file.write([DrivePiece(first + start, out)]))

            def read(first: int) -> float:
                return _rate(lambda start: file.read([DrivePiece(first + start, back)]))

            written(0)  # blocks that were never written take longer
            alone = written(MEASURED_BYTES), read(0)
            writing = beside.submit(written, MEASURED_BYTES)
            both = read(0), writing.result()
    finally:
        file.close()
    write, read_alone = alone
    return DriveProfile(read_alone, write, min(read_alone, both[0]), min(write, both[1]))


def _rate(move: Callable[[int], None]) -> float:
    """Bytes per second of moving MEASURED_BYTES."""
    begin = time.perf_counter()
    for start in range(0, MEASURED_BYTES, MOVED_AT_ONCE):
        move(start)
    return MEASURED_BYTES / (time.perf_counter() - begin)
