"""Checkpoints that are written while their tensors are about to change, or while the writer is killed."""

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from flexengine.checkpoint import run_checkpoints, snapshot, state_writer
from flexengine.checkpoint.manifest import verify_manifest
from flexengine.checkpoint.reader import CheckpointReader
from flexengine.checkpoint.run_checkpoints import checkpoint_folder, checkpoints_of, clean_up, keep_newest
from flexengine.checkpoint.snapshot import SaveAbandonedError, Snapshot, StoredTensor
from flexengine.checkpoint.state_files import STATE_INDEX_FILE
from flexengine.checkpoint.state_writer import StateSave

COUNT, ELEMENTS = 6, 1000


def tensors(value: float = 0.0) -> list[StoredTensor]:
    dtypes = (torch.float32, torch.bfloat16, torch.int16)
    return [
        StoredTensor(f"plane/{i}", (10, ELEMENTS // 10), torch.full((ELEMENTS,), value + i, dtype=dtypes[i % 3]))
        for i in range(COUNT)
    ]


def check(folder: Path, value: float = 0.0) -> None:
    """The folder is whole, and holds what `tensors` gave."""
    verify_manifest(folder)
    with CheckpointReader.open(folder, STATE_INDEX_FILE) as reader:
        for name, shape, data in tensors(value):
            found = torch.empty_like(data)
            reader.read_into(name, found)
            assert torch.equal(found, data), name
            assert reader.tensors[name].shape == shape


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A disk that takes nothing after the first write until the event is set; pieces are small."""
    may_go_on, written, calls = threading.Event(), state_writer._write_all, []

    def waits(descriptor: int, data: memoryview) -> None:
        calls.append(len(data))
        if len(calls) > 2:
            assert may_go_on.wait(60)
        written(descriptor, data)

    monkeypatch.setattr(state_writer, "_write_all", waits)
    monkeypatch.setattr(snapshot, "PIECE_BYTES", 256)
    return may_go_on


def test_what_is_copied_may_change_at_once(tmp_path: Path, slow_disk: threading.Event):
    stored = tensors()
    save = StateSave(tmp_path / "step-1", stored, {})
    threading.Timer(0.2, slow_disk.set).start()  # what is being written cannot be copied any more
    save.release(1 << 30)
    for tensor in stored:
        tensor.data.fill_(-1)
    save.wait()
    check(tmp_path / "step-1")


def test_threads_copy_no_more_than_the_window(monkeypatch: pytest.MonkeyPatch):
    """Each piece is copied once, by whichever thread; what does not fit is waited for."""
    monkeypatch.setattr(snapshot, "PIECE_BYTES", 8)
    data = torch.arange(800, dtype=torch.uint8)
    pieces = snapshot.pieces_of(StoredTensor("plane", (800,), data))
    taken = Snapshot(pieces)
    released = threading.Thread(target=taken.release, args=(401,))
    released.start()
    released.join(1)
    assert released.is_alive()
    own = [data.data_ptr() <= piece.data.data_ptr() < data.data_ptr() + 800 for piece in pieces]
    assert own == [True] * 50 + [False] * 50  # the writer comes to the copied ones last
    parts = []
    for piece in pieces:
        with taken.reading(piece) as found:
            parts.append(torch.tensor(list(found), dtype=torch.uint8))
    released.join(60)
    assert not released.is_alive()
    assert torch.equal(torch.cat(parts), data)


def test_without_a_window_the_writer_is_waited_for(tmp_path: Path, slow_disk: threading.Event):
    stored = tensors()
    save = StateSave(tmp_path / "step-1", stored, {})
    released = threading.Thread(target=save.release, args=(0,))
    released.start()
    released.join(0.1)
    assert released.is_alive()
    slow_disk.set()
    released.join(60)
    for tensor in stored:
        tensor.data.fill_(-1)
    save.wait()
    check(tmp_path / "step-1")


def test_a_save_that_is_given_up_leaves_the_one_before(tmp_path: Path, slow_disk: threading.Event):
    slow_disk.set()
    StateSave(tmp_path / "step-1", tensors(), {}).wait()
    slow_disk.clear()
    save = StateSave(tmp_path / "step-1", tensors(5), {})
    threading.Timer(0.1, slow_disk.set).start()
    save.abandon()
    save.release(0)  # nobody reads any more
    with pytest.raises(SaveAbandonedError):
        save.wait()
    check(tmp_path / "step-1")
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_killed_at_random_moments(tmp_path: Path):
    """Each checkpoint that has its name is whole, and one that was whole stays until a newer one is."""
    rng, newest = random.Random(0), 0
    for _ in range(12):
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                for step in range(newest + 1, newest + 10**6):
                    folder = checkpoint_folder(tmp_path, step)
                    StateSave(folder, tensors(step), {}, lambda step=step: keep_newest(tmp_path, step, 2)).wait()
            os._exit(1)
        time.sleep(rng.uniform(0.0, 0.1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = checkpoints_of(tmp_path)
        for step, folder in found:
            check(folder, step)
        last = max((step for step, _ in found), default=0)
        assert last >= newest
        newest = last
    assert newest > 0
    clean_up(tmp_path)
    assert all(path.name.startswith("step-") for path in (tmp_path / "checkpoints").iterdir())


def test_a_removal_that_is_cut_short_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for step in (1, 2):
        StateSave(checkpoint_folder(tmp_path, step), tensors(step), {}).wait()
    with monkeypatch.context() as killed:
        killed.setattr(run_checkpoints.shutil, "rmtree", lambda *_, **__: None)
        keep_newest(tmp_path, 2, 1)
    assert [found.step for found in checkpoints_of(tmp_path)] == [2]
    clean_up(tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-2"]
