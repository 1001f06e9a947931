"""What disks tell of their wear: found beneath partitions and mappings, and nothing where the system shows nothing."""

import os
import struct

import pytest

from flexengine.hardware import drive_wear
from flexengine.hardware.drive_wear import Wear, wear_in_log, wear_of, wear_text


def test_the_log_of_an_nvme_drive():
    log = bytearray(512)
    log[3:6] = 100, 10, 7
    log[48:64] = struct.pack("<QQ", 90_000_000, 0)
    assert str(wear_in_log("nvme0n1", bytes(log))) == "nvme0n1 7% used, 46.1 TB written"
    assert drive_wear._COMMAND.size == 72


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A mapping over a partition of an eMMC, on which the folder's file system lies."""
    disk = tmp_path / "devices" / "mmcblk0"
    (disk / "mmcblk0p1").mkdir(parents=True)
    (disk / "mmcblk0p1" / "partition").write_text("1")
    (disk / "device").mkdir()
    (tmp_path / "devices" / "dm-0" / "slaves").mkdir(parents=True)
    (tmp_path / "devices" / "dm-0" / "slaves" / "mmcblk0p1").symlink_to(disk / "mmcblk0p1")
    number = os.stat(tmp_path).st_dev
    (tmp_path / "dev" / "block").mkdir(parents=True)
    (tmp_path / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}").symlink_to(tmp_path / "devices" / "dm-0")
    monkeypatch.setattr(drive_wear, "SYSFS", tmp_path)
    return tmp_path, disk


def test_wear_beneath_a_mapping(system):
    folder, disk = system
    assert wear_text(folder / "later") == "not shown"
    (disk / "device" / "life_time").write_text("0x02 0x05\n")
    assert list(wear_of(folder / "later")) == [Wear("mmcblk0", 50)]
    assert wear_text(folder) == "mmcblk0 50% used"


def test_a_drive_that_refuses_its_log_shows_nothing(system, monkeypatch):
    folder, disk = system
    disk.rename(disk.parent / "nvme3n1")
    (folder / "devices" / "dm-0" / "slaves" / "mmcblk0p1").unlink()
    (folder / "devices" / "dm-0" / "slaves" / "nvme3n1").symlink_to(disk.parent / "nvme3n1")
    monkeypatch.setattr(drive_wear, "DEVICES", folder)
    (folder / "nvme3").write_bytes(b"")  # no device: it has no log
    assert wear_text(folder) == "not shown"
