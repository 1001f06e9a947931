"""Files that commands write: links and FIFOs stay what they are, and what cannot be written is known at once."""

import errno
import os
import tempfile
import threading
from pathlib import Path

import pytest

from flexengine.commands.files import check_target, write_whole


def write(path: Path) -> None:
    path.write_text("new", encoding="utf-8")


def test_a_link_keeps_pointing_to_its_file(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "page.html", tmp_path / "link.html"
    target.write_text("old")
    link.symlink_to(target)
    check_target("--html", link)
    write_whole("--html", link, write)
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert sorted(tmp_path.rglob("*.html")) == [target, link]


def test_a_link_to_no_file_yet_makes_that_file(tmp_path):
    link = tmp_path / "link.html"
    link.symlink_to(tmp_path / "page.html")
    check_target("--html", link)
    write_whole("--html", link, write)
    assert link.is_symlink()
    assert (tmp_path / "page.html").read_text() == "new"


def test_a_link_to_itself_is_replaced(tmp_path):
    link = tmp_path / "link.html"
    link.symlink_to(link)
    check_target("--html", link)
    write_whole("--html", link, write)
    assert link.read_text() == "new"


def test_a_folder_that_went_away_names_the_flag(tmp_path):
    with pytest.raises(ValueError, match=r"x\.html: no such file or folder. Check the path of --html\."):
        write_whole("--html", tmp_path / "gone" / "x.html", write)


def test_a_fifo_is_written_to_and_stays(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    check_target("--timeline", fifo)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(fifo.read_text()), daemon=True)
    reader.start()
    write_whole("--timeline", fifo, write)
    assert fifo.is_fifo()
    reader.join(timeout=10)
    assert read == ["new"]
    assert list(tmp_path.iterdir()) == [fifo]


def test_a_folder_that_takes_no_files_is_named_before_anything_is_written(tmp_path, monkeypatch):
    def refused(**keywords):
        raise OSError(errno.ENOENT, "No such file or directory", str(keywords["dir"]))

    monkeypatch.setattr(tempfile, "mkstemp", refused)  # as in /proc
    with pytest.raises(ValueError, match=r"^--html .*x\.html: no file can be made in .* \(No such file"):
        check_target("--html", tmp_path / "x.html")


def test_trying_leaves_nothing(tmp_path):
    check_target("--html", tmp_path / "x.html")
    check_target("--html", None)
    assert list(tmp_path.iterdir()) == []
