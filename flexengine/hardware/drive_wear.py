"""How far the disks under a folder are worn, where the system shows it: drives endure a number of bytes written.

NVMe drives tell it in a log page, which the kernel hands to those who may open the controller (mostly root); eMMC has
it in /sys. Source: NVM Express Base Specification, "SMART / Health Information Log Page"; linux/nvme_ioctl.h; the
kernel's Documentation/mmc/mmc-dev-attrs.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from fcntl import ioctl
from pathlib import Path
from typing import NamedTuple

SYSFS, DEVICES = Path("/sys"), Path("/dev")
_ADMIN_COMMAND = 0xC0484E41  # _IOWR('N', 0x41, struct nvme_passthru_cmd)
_COMMAND = struct.Struct("=BBHIIIQQII6III")
_LOG_BYTES, _GET_LOG_PAGE, _HEALTH = 512, 0x02, 0x02
_ALL_NAMESPACES = 0xFFFFFFFF
_UNIT_BYTES = 512_000
"""Bytes of a data unit of the log."""


class Wear(NamedTuple):
    """What a disk tells: the share of its life that is used, in percent, and what was written in all; None: unknown."""

    disk: str
    used_percent: int
    written_bytes: int | None = None

    def __str__(self) -> str:
        """In words."""
        written = "" if self.written_bytes is None else f", {self.written_bytes / 1e12:.1f} TB written"
        return f"{self.disk} {self.used_percent}% used{written}"


def wear_text(folder: str | Path) -> str:
    """What the disks under a folder tell, in words."""
    found = list(wear_of(folder))
    return "; ".join(map(str, found)) if found else "not shown"


def wear_of(folder: str | Path) -> Iterator[Wear]:
    """What the disks under a folder tell; nothing where the system shows nothing. Raises nothing."""
    with suppress(OSError, ValueError, struct.error):
        for disk in _disks(folder):
            with suppress(OSError, ValueError, struct.error):
                yield _wear_of_nvme(disk) if disk.name.startswith("nvme") else _wear_of_card(disk)


def _disks(folder: str | Path) -> list[Path]:
    """The disks, as folders of /sys, that a folder's device lies on."""
    device = Path(folder).absolute()
    while not device.exists():
        device = device.parent
    number = os.stat(device).st_dev
    return _beneath(SYSFS / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}")


def _beneath(device: Path) -> list[Path]:
    device = device.resolve(strict=True)
    if (device / "partition").exists():
        device = device.parent
    parts = sorted((device / "slaves").iterdir()) if (device / "slaves").is_dir() else []
    return [disk for part in parts for disk in _beneath(part)] or [device]


def _wear_of_card(disk: Path) -> Wear:
    """Wear of an eMMC: two kinds of cells, each in steps of a tenth."""
    steps = [int(each, 16) for each in (disk / "device" / "life_time").read_text().split()]
    return Wear(disk.name, 10 * max(steps))


def _wear_of_nvme(disk: Path) -> Wear:
    """Wear by a drive's log of its health."""
    log = ctypes.create_string_buffer(_LOG_BYTES)
    page = (_LOG_BYTES // 4 - 1) << 16 | _HEALTH
    of_log = (0, 0, 0, ctypes.addressof(log), 0, _LOG_BYTES, page, *[0] * 5, 0, 0)
    command = _COMMAND.pack(_GET_LOG_PAGE, 0, 0, _ALL_NAMESPACES, *of_log)
    descriptor = os.open(DEVICES / _controller(disk), os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ioctl(descriptor, _ADMIN_COMMAND, bytearray(command)):
            raise OSError("the drive refuses its log")
    finally:
        os.close(descriptor)
    return wear_in_log(disk.name, log.raw)


def _controller(disk: Path) -> str:
    """The controller of a namespace: nvme0 of nvme0n1."""
    return disk.name[: disk.name.index("n", 1)]


def wear_in_log(disk: str, log: bytes) -> Wear:
    """Read the log page: a byte with the percentage used, and 16 bytes with data units written."""
    return Wear(disk, log[5], int.from_bytes(log[48:64], "little") * _UNIT_BYTES)
