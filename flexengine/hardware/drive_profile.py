"""The part of a hardware profile that is about the drive which planes may lie on."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import ClassVar

from flexengine.hardware.parts import DRIVE_FIELDS, Part


@dataclass(frozen=True)
class DriveProfile(Part):
    """Bytes per second of the drive that planes may lie on, past the page cache in large requests: alone, and
    while it is read and written at once. 0 where nobody measured it.
    """

    KEYS: ClassVar[dict[str, str]] = {key.removeprefix("drive_"): key for key in DRIVE_FIELDS}

    read_bytes_per_s: float = 0.0
    write_bytes_per_s: float = 0.0
    read_beside_bytes_per_s: float = 0.0
    write_beside_bytes_per_s: float = 0.0

    @property
    def known(self) -> DriveProfile:
        """Itself, or an NVMe drive of PCIe 4 where nobody measured one."""
        return self if self.read_bytes_per_s and self.write_bytes_per_s else shared_drive(*ASSUMED_DRIVE)

    def among(self, ranks: int) -> DriveProfile:
        """The share of one of several ranks that use it at once."""
        return DriveProfile(*(rate / ranks for rate in astuple(self.known))) if ranks > 1 else self

    def seconds(self, num_bytes: float) -> float:
        """Seconds to read so many bytes and write them back, both at once as far as they last."""
        p = self.known
        both_s = num_bytes / max(p.read_beside_bytes_per_s, p.write_beside_bytes_per_s)
        rest_s = max(
            (num_bytes - both_s * p.read_beside_bytes_per_s) / p.read_bytes_per_s,
            (num_bytes - both_s * p.write_beside_bytes_per_s) / p.write_bytes_per_s,
        )
        return both_s + rest_s


ASSUMED_DRIVE = (7e9, 5e9)
"""Bytes per second that are read and written where no drive was measured: a good one of PCIe 4."""


def shared_drive(read_bytes_per_s: float, write_bytes_per_s: float) -> DriveProfile:
    """A drive whose rates alone are known: one that is read and written at once has half its time for each."""
    return DriveProfile(read_bytes_per_s, write_bytes_per_s, read_bytes_per_s / 2, write_bytes_per_s / 2)
