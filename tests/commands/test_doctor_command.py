"""`flexengine doctor`: a line for everything that is looked at, and a remedy where something is missing."""

import sys
from pathlib import Path

import pytest
import torch

from flexengine import cli
from flexengine.hardware import doctor, drive
from flexengine.parallel.hub import TOKEN_VARIABLE

NAMES = [
    "versions",
    "bytecode",
    "GPU",
    "GPU clocks",
    "Triton",
    "native library",
    "cores",
    "host memory",
    "Slurm",
    "page locks",
    "huge pages",
    "disk",
]


def test_a_line_for_each(capsys):
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[2:].split("  ")[0].strip() for line in lines] == NAMES
    assert all(line[0] in "! " for line in lines)


def remedy_of(name, tmp_path):
    return next(finding.remedy for finding in doctor.findings(tmp_path) if finding.name == name)


@pytest.mark.parametrize(
    ("name", "target", "value", "remedy"),
    [
        ("native library", "load", lambda: None, "pip install -e . builds it"),
        ("versions", "LEAST_TORCH", (99, 1), "install torch 99.1 or newer"),
        ("disk", "LEAST_DISK_BYTES", 1 << 70, "an 8B model takes 16 GB"),
    ],
)
def test_remedies(name, target, value, remedy, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, target, value)
    assert remedy in remedy_of(name, tmp_path)


def test_huge_pages_that_are_off(tmp_path, monkeypatch):
    setting = tmp_path / "enabled"
    setting.write_text("always madvise [never]\n")
    monkeypatch.setattr(doctor, "HUGE_PAGES", setting)
    assert f"echo madvise > {setting}" in remedy_of("huge pages", tmp_path)
    setting.write_text("always [madvise] never\n")
    assert remedy_of("huge pages", tmp_path) == ""


def test_bytecode_that_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    for wanted, remedy in ((False, "set PYTHONPYCACHEPREFIX"), (True, "unset PYTHONDONTWRITEBYTECODE")):
        monkeypatch.setattr(sys, "dont_write_bytecode", wanted)
        assert remedy_of("bytecode", tmp_path).startswith(remedy)
    kept = tmp_path / Path(torch.__file__).relative_to("/").with_suffix(f".{sys.implementation.cache_tag}.pyc")
    kept.parent.mkdir(parents=True)
    kept.touch()
    assert remedy_of("bytecode", tmp_path) == ""


def test_the_drive_of_a_folder(tmp_path, monkeypatch, capsys):
    mounts = tmp_path / "mounts"
    monkeypatch.setattr(drive, "MOUNTS", mounts)
    for kind, remedy in (("ext4", ""), ("tmpfs", "tmpfs lies in memory")):
        mounts.write_text(f"root / overlay rw 0 0\ndisk {tmp_path} {kind} rw 0 0\nother {tmp_path}-2 xfs rw 0 0\n")
        assert cli.main(["doctor", "--offload-dir", str(tmp_path / "new")]) == 0
        line = capsys.readouterr().out.splitlines()[-1]
        assert f"GiB free in {tmp_path / 'new'}, {kind} at {tmp_path}, " in line
        assert "wear: " in line
        assert remedy in line
    (tmp_path / "file").touch()
    [*_, found] = doctor.findings(tmp_path, tmp_path / "file")
    assert "is a file; name a folder" in found.remedy


@pytest.mark.parametrize(
    ("reaches", "nvlink", "found", "remedy"),
    [
        (lambda *pair: True, lambda *pair: True, "NVLink between all pairs of 3", ""),
        (lambda *pair: True, lambda *pair: False, "peer access over PCIe between all pairs of 3", ""),
        (lambda *pair: 2 not in pair, lambda *pair: True,
         "NVLink between 0-1 of 3, the host alone between 0-2 1-2 of 3", "relay and stages need nothing between GPUs"),
        (lambda a, b: a < b, lambda *pair: True, "the host alone between all pairs of 3", "split goes through"),
    ],
)  # fmt: skip
def test_how_gpus_reach_each_other(reaches, nvlink, found, remedy, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", reaches)
    monkeypatch.setattr(doctor, "has_nvlink", nvlink)
    told = doctor.findings(tmp_path)[-1]
    assert told[:2] == ("between GPUs", found)
    assert remedy in told.remedy


def test_one_rank_of_a_node_tells(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert cli.main(["doctor"]) == 0
    told = capsys.readouterr().out
    assert "between GPUs    unknown: this process sees 0 of those of 2 ranks" in told
    assert f"! nodes           2 of 2 ranks; {TOKEN_VARIABLE} is not set; give all nodes the same random text" in told
    monkeypatch.setenv(TOKEN_VARIABLE, "a secret")
    assert doctor.findings(tmp_path)[-1] == ("nodes", f"2 of 2 ranks; {TOKEN_VARIABLE} is set", "")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out == ""
