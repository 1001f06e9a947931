"""A scratch file on a drive, with the library and without, past the page cache and through it."""

import gc
import mmap
import os
import time
from pathlib import Path

import pytest
import torch

from flexengine.native import allocate_host, drive
from flexengine.native.drive import BLOCK_BYTES, DriveError, DriveFile, DrivePiece

SIZE = 64 * BLOCK_BYTES


@pytest.fixture(params=["native", "python"])
def library(request, monkeypatch):
    monkeypatch.setenv("FLEXENGINE_NATIVE", "1" if request.param == "native" else "0")
    monkeypatch.setattr(drive, "REQUEST_BYTES", 3 * BLOCK_BYTES)  # several requests a piece, the last one shorter
    return request.param


@pytest.fixture(params=["direct", "cached"])
def file(request, tmp_path, monkeypatch):
    if request.param == "cached":
        monkeypatch.setattr(os, "O_DIRECT", 0)
    with_blocks = DriveFile(tmp_path, SIZE)
    assert request.param == "direct" or not with_blocks.direct
    yield with_blocks
    with_blocks.close()


def random_memory() -> torch.Tensor:
    return allocate_host(SIZE, page_locked=False).tensor.random_(0, 256)


def test_what_was_written_is_read_and_mapped(library, file):
    memory = random_memory()
    at = [(5, 20, 0), (40, 1, 30), (41, 7, 21)]  # blocks: place in the file, number, place in memory
    pieces = [
        DrivePiece(place * BLOCK_BYTES, memory[start * BLOCK_BYTES :][: count * BLOCK_BYTES])
        for place, count, start in at
    ]
    file.write(pieces)
    expected = torch.zeros(SIZE, dtype=torch.uint8)
    for offset, piece in pieces:
        expected[offset : offset + piece.numel()] = piece
    assert torch.equal(file.tensor, expected)
    file.touched()
    file.tensor[9 * BLOCK_BYTES + 5 : 11 * BLOCK_BYTES] = 7
    expected[9 * BLOCK_BYTES + 5 : 11 * BLOCK_BYTES] = 7
    found = random_memory()
    file.read([DrivePiece(0, found)])
    assert torch.equal(found, expected)
    file.read([DrivePiece(SIZE - 90_007, found[3:90_010])])  # between borders, up to the end
    assert torch.equal(found[3:90_010], expected[SIZE - 90_007 :])
    assert torch.equal(found[90_010:], expected[90_010:])
    file.zero(8 * BLOCK_BYTES, 2 * BLOCK_BYTES)
    file.read([DrivePiece(8 * BLOCK_BYTES, found[: 3 * BLOCK_BYTES])])
    assert not found[: 2 * BLOCK_BYTES].any()
    assert (found[2 * BLOCK_BYTES : 3 * BLOCK_BYTES] == 7).all()


def resident_of_files_bytes():
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(status.split("RssFile:")[1].split()[0])


def test_memory_holds_little_of_a_mapping_that_is_in_use(tmp_path):
    """What a load writes through views goes to the drive while it is at work, and nothing of it is lost."""
    file, size = DriveFile(tmp_path, 64 << 20), 64 << 20
    before, expected = resident_of_files_bytes(), torch.arange(size // 8)
    file.touched()
    values = file.tensor.view(torch.int64)
    values.copy_(expected)
    ends_s = time.monotonic() + 30
    while resident_of_files_bytes() - before > size // 2:
        assert time.monotonic() < ends_s, "the mapping stays in memory"
        time.sleep(0.01)
    values[::1000] += 1
    file.settle()
    assert resident_of_files_bytes() - before < size // 8
    found = allocate_host(size, page_locked=False).tensor
    file.read([DrivePiece(0, found)])
    expected[::1000] += 1
    assert torch.equal(found.view(torch.int64), expected)
    file.touched()
    file.close()


def test_a_file_that_nobody_closed_leaves_other_memory_alone(tmp_path):
    """What comes to lie where its mapping lay keeps its bytes."""
    file = DriveFile(tmp_path, 4 << 20)
    file.touched()
    ended = file._trim._threads
    del file
    gc.collect()
    others = [mmap.mmap(-1, 4 << 20) for _ in range(8)]
    for other in others:
        other.write(b"\1" * (4 << 20))
    for thread in ended:
        thread.join()
    assert all(other[:] == b"\1" * (4 << 20) for other in others)


def test_a_folder_is_empty_while_the_file_is_there(tmp_path):
    file = DriveFile(tmp_path / "new", SIZE)
    assert list((tmp_path / "new").iterdir()) == []
    file.close()
    file.close()
    with pytest.raises(ValueError, match="closed"):
        _ = file.tensor


def test_too_many_bytes_are_refused_before_they_are_written(tmp_path):
    with pytest.raises(DriveError, match=r"has no .*GiB.* for what --offload-dir is to hold.*free.*--offload-dir"):
        DriveFile(tmp_path, 1 << 55)


def test_a_drive_that_fails_says_where_and_what_is_lost(library, file):
    """A read beyond the end stands for a drive that gives too little; a closed descriptor for one that is gone."""
    with pytest.raises(DriveError, match=rf"could not be read at byte {SIZE}: the file ends there.*last checkpoint"):
        file.read([DrivePiece(SIZE - BLOCK_BYTES, random_memory()[: 2 * BLOCK_BYTES])])
    os.close(file._descriptor)
    with pytest.raises(DriveError, match="could not be written at byte 0: Bad file descriptor"):
        file._move_by_python([DrivePiece(0, random_memory())], writes=True) if library == "python" else file.write(
            [DrivePiece(0, random_memory())]
        )
    file._descriptor = -1
