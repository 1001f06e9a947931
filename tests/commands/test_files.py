"""Files that commands write: rights as the umask has them, contents on the disk before the name."""

import os
import stat

import pytest

from flexengine.commands import files
from flexengine.commands.files import write_whole


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_rights_follow_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        write_whole("--json", tmp_path / "plan.json", lambda path: path.write_text("{}"))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "plan.json").stat().st_mode) == 0o666 & ~umask
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_contents_reach_the_disk_before_the_name(tmp_path, monkeypatch):
    done = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(descriptor):
        done.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else os.fstat(descriptor).st_size)
        fsync(descriptor)

    def record_replace(*arguments):
        done.append("rename")
        replace(*arguments)

    monkeypatch.setattr(files.os, "fsync", record_fsync)
    monkeypatch.setattr(files.os, "replace", record_replace)
    write_whole("--json", tmp_path / "plan.json", lambda path: path.write_text("{}"))
    assert done == [2, "rename", "folder"]


def test_failed_write_leaves_the_old_file_and_nothing_beside_it(tmp_path):
    (tmp_path / "plan.json").write_text("old")

    def half(path):
        path.write_text("ha")
        raise OSError(28, "No space left on device")

    with pytest.raises(ValueError, match=r"plan\.json: no space left .* another --json"):
        write_whole("--json", tmp_path / "plan.json", half)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("plan.json", "old")]
