"""A save that is killed at any moment leaves a folder that loads as exactly one model: the old one or the new one."""

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from thorough import cases

from flexengine.checkpoint import staged_folder
from flexengine.checkpoint.atomic import temporary_name
from flexengine.checkpoint.manifest import FOLDER_MANIFEST, verify_manifest
from flexengine.checkpoint.reader import CheckpointError, CheckpointReader
from flexengine.checkpoint.writer import TensorSource, write_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

NUM_TENSORS, NUM_RANDOM_KILLS = 4, 15
WATCHED = ("os.", "shutil.", "open", "test.")  # audit events of what may change files


def save(folder: Path, model: int, alike: bool = False) -> None:
    """Model 0 lies in two shards, model 1 in four, some of the same names, or in the same two (`alike`); every number
    says which model it is."""
    sources = [
        TensorSource(f"t{i}", torch.float32, (50,), lambda: torch.full((50,), float(model))) for i in range(NUM_TENSORS)
    ]
    shards = {f"t{i}": f"model-{i if model and not alike else i // 2}.safetensors" for i in range(NUM_TENSORS)}
    write_checkpoint(folder, sources, shards, beside={"config.json": json.dumps({"model": model})}, with_manifest=True)


def loaded(folder: Path) -> int:
    """Which model the folder holds, whole."""
    with CheckpointReader.open(folder) as reader, reader.verifying():
        values = torch.empty(len(reader.tensors), 50)
        for index, name in enumerate(reader.tensors):
            reader.read_into(name, values[index])
    found = {int(value) for value in values.unique()} | {json.loads((folder / "config.json").read_text())["model"]}
    assert values.shape[0] == NUM_TENSORS
    assert len(found) == 1, f"mixed: {found}"
    return found.pop()


def in_child(action: Callable[[], None]) -> int:
    """Run `action` in a forked process; returns its process number."""
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            action()
            status = 0
        os._exit(status)
    return child


def killed_at(moment: int, action: Callable[[], None]) -> bool:
    """Run `action` in a child that is killed before its given change of a file; false if it makes fewer."""
    passed = 0

    def watch(event: str, arguments: object) -> None:
        nonlocal passed
        if event.startswith(WATCHED):
            passed += 1
            if passed == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    def watched() -> None:
        exchange = staged_folder._exchange

        def noticed(one: Path, other: Path) -> bool:
            sys.audit("test.exchange")
            done = exchange(one, other)
            sys.audit("test.exchanged")
            return done

        staged_folder._exchange = noticed
        sys.addaudithook(watch)
        action()

    status = os.waitpid(in_child(watched), 0)[1]
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
    return os.WIFSIGNALED(status)


def save_again_leaves_nothing(folder: Path, model: int) -> None:
    save(folder, model)
    assert loaded(folder) == model
    verify_manifest(folder)
    assert list(folder.parent.iterdir()) == [folder]
    shards = {f"model-{i}.safetensors" for i in range(4 if model else 2)}
    files = {"config.json", "model.safetensors.index.json", FOLDER_MANIFEST, *shards}
    assert {path.name for path in folder.iterdir()} == files


@pytest.mark.parametrize("stride", cases([1, 3], [3]))
def test_killed_at_every_change_of_a_file(tmp_path: Path, stride: int):
    """With `make thorough` at every one, else at every third."""
    folder, found, moment = tmp_path / "final", set(), 1
    save(folder, 0)
    while killed_at(moment, lambda: save(folder, 1)):
        found.add(loaded(folder))
        save_again_leaves_nothing(folder, 0)
        moment += stride
    assert found == {0, 1}
    assert loaded(folder) == 1


def test_first_save_killed_at_changes_of_a_file(tmp_path: Path):
    """The folder does not exist, or is whole; every third change is tried."""
    folder, moment = tmp_path / "final", 1
    while killed_at(moment, lambda: save(folder, 1)):
        if folder.exists():
            assert loaded(folder) == 1
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()
        moment += 3
    save_again_leaves_nothing(folder, 1)


def test_killed_at_random_moments(tmp_path: Path):
    folder, rng = tmp_path / "final", random.Random(0)
    save(folder, 0)

    def save_for_ever() -> None:
        for model in range(10**6):
            save(folder, model % 2)

    for _ in range(NUM_RANDOM_KILLS):
        child = in_child(save_for_ever)
        time.sleep(rng.uniform(0.0, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        loaded(folder)
    for model in (0, 1):
        save_again_leaves_nothing(folder, model)


def test_where_folders_cannot_be_exchanged_a_mixture_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(staged_folder, "_exchange", lambda one, other: False)
    folder, found, refusals, moment = tmp_path / "final", set(), [], 1
    save(folder, 0)
    while killed_at(moment, lambda: save(folder, 1, alike=True)):
        try:
            found.add(loaded(folder))
        except CheckpointError as error:
            refusals.append(str(error))
        save_again_leaves_nothing(folder, 0)
        moment += 2
    assert found == {0, 1}
    assert len(refusals) > 0
    assert all(f"differ from {FOLDER_MANIFEST}" in refusal for refusal in refusals)


def test_a_working_directory_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "final"
    save(folder, 0)
    monkeypatch.chdir(folder)
    inode = os.stat(".").st_ino
    save(Path(), 1)
    assert loaded(Path()) == 1
    assert os.stat(".").st_ino == os.stat(folder).st_ino == inode


def test_what_else_the_folder_holds_stays(tmp_path: Path):
    folder = tmp_path / "final"
    save(folder, 0)
    folder.chmod(0o750)
    (folder / "notes.md").write_text("mine")
    (folder / "plots" / "old").mkdir(parents=True)
    (folder / "plots" / "old" / "loss.svg").write_text("<svg/>")
    (folder / "link").symlink_to("notes.md")
    (tmp_path / "named").symlink_to(folder)
    with open(folder / "notes.md", "a") as file:
        save(tmp_path / "named", 1)
        file.write(", still")  # a file that is open meanwhile is the same file
    assert loaded(folder) == 1
    assert (tmp_path / "named").is_symlink()
    assert (folder / "link").readlink() == Path("notes.md")
    assert (folder / "notes.md").read_text() == "mine, still"
    assert (folder / "plots" / "old" / "loss.svg").read_text() == "<svg/>"
    assert folder.stat().st_mode & 0o777 == 0o750


def test_a_save_that_lives_keeps_its_files(tmp_path: Path):
    """The next one takes for leftovers only what no process holds."""
    folder, other = tmp_path / "final", temporary_name(tmp_path / "other")
    other.mkdir()
    with staged_folder.staged_folder(folder) as staged:
        path = staged.stage("a")
        path.write_text("first")
        save(folder, 1)
        assert path.exists()
    assert (folder / "a").read_text() == "first"
    assert loaded(folder) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([other.name, "final"])


@pytest.mark.parametrize("name", ["model-1.safetensors", "model.safetensors.index.json"])
def test_files_that_changed_since_the_export_are_named(tmp_path: Path, name: str):
    folder = tmp_path / "final"
    save(folder, 1)
    with CheckpointReader.open(folder) as reader:
        data = bytearray((folder / name).read_bytes())
        data[-3] ^= 1
        (folder / name).write_bytes(data)
        with pytest.raises(CheckpointError, match=f"1 files differ .*\n  {name}: SHA-256"), reader.verifying():
            pass
        (folder / FOLDER_MANIFEST).unlink()
        with reader.verifying():
            pass


def test_a_damaged_manifest_is_refused(tmp_path: Path):
    save(tmp_path / "final", 1)
    (tmp_path / "final" / FOLDER_MANIFEST).write_text("{}")
    with pytest.raises(CheckpointError, match="not a manifest"):
        loaded(tmp_path / "final")
