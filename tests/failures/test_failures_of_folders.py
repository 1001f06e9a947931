"""Places that cannot be written to: known before training where that is possible, and never half a file otherwise."""

import errno
import resource
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from provoke import Case, arguments, cases, check_error, check_message, fingerprint, half_written

from flexengine import from_pretrained
from flexengine.checkpoint import staged_folder, writer
from flexengine.checkpoint.atomic import atomic_file
from flexengine.checkpoint.writer import TensorSource, write_checkpoint
from flexengine.run import folder as run_folder
from flexengine.run import trainer

pytestmark = pytest.mark.usefixtures("known_machine")


def a_file(folder):
    (folder / "taken").write_text("mine")
    return {"output_dir": "taken"}


def under_a_file(folder):
    (folder / "taken").write_text("mine")
    return {"output_dir": "taken/run"}


def plan_under_a_file(folder):
    (folder / "taken").write_text("mine")
    return {"plan_json": "taken/plan.json"}


def somebody_elses(folder):
    (folder / "thesis").mkdir()
    (folder / "thesis" / "chapter.tex").write_text("mine")
    return {"output_dir": "thesis"}


def another_run(folder):
    (folder / "run" / "final").mkdir(parents=True)
    (folder / "run" / "final" / "config.json").write_text("{}")
    (folder / "run" / "final" / "model.safetensors").write_text("weights")
    (folder / "run" / "config.yaml").write_text("model: another\n")
    return {}


def a_log(folder):
    (folder / "run").mkdir()
    (folder / "run" / "config.yaml").write_text("model: another\n")
    (folder / "run" / "train_log.jsonl").write_text('{"step": 1}\n')
    return {}


def overwrite_and_resume(folder):
    return {"overwrite": True, "resume": "auto"}


PLACES = (
    Case("output_is_a_file", a_file, ("--output-dir taken is a file, not a folder",)),
    Case("output_is_under_a_file", under_a_file, ("taken/run cannot be made: .*taken is a file.*choose another",)),
    Case("plan_is_under_a_file", plan_under_a_file, ("--plan-json .*taken is a file.*choose another",)),
    Case("output_holds_other_files", somebody_elses, ("holds files that are not of a run; choose a new or empty",)),
    Case("output_of_another_run", another_run, ("run/final is the model of another run; choose another --output-dir",)),
    Case("log_of_another_run", a_log, ("run/train_log.jsonl is of an earlier run; choose another.*--overwrite",)),
    Case("replaced_and_continued", overwrite_and_resume, ("--overwrite and --resume auto contradict each other",)),
)


@cases(*PLACES)
def test_places(case, model, command, tmp_path):
    options = {"model": model, "output_dir": "run", "save": True, **case.provoke(tmp_path)}
    outcome = command("train", *arguments(**options))
    assert outcome.status == case.status
    check_message(outcome.err, case.says)


def test_folder_of_a_run_that_goes_on(model, command, tmp_path):
    """The lock goes with the process that holds it, so nothing of a run that was killed blocks the next."""
    (tmp_path / "run").mkdir()
    holder = "import sys; from flexengine.run.folder import held; from pathlib import Path\nwith held(Path('run')): "
    with subprocess.Popen(
        [sys.executable, "-c", f"{holder}print('held', flush=True), sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=tmp_path,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        outcome = command("train", *arguments(model=model, output_dir="run"))
        assert outcome.status == 2
        check_message(outcome.err, ("--output-dir run is in use by another run; wait for its end, or choose another",))
        assert list((tmp_path / "run").iterdir()) == []
        other.kill()
    assert command("train", *arguments(model=model, output_dir="run")).status == 0


def test_no_permission(model, command, monkeypatch):
    monkeypatch.setattr(run_folder.os, "access", lambda path, mode: False)
    outcome = command("train", *arguments(model=model, output_dir="run"))
    assert outcome.status == 2
    check_message(outcome.err, ("--output-dir run cannot be written: no permission in .*choose another path",))


def test_disk_full_before_training(model, command, monkeypatch, tmp_path):
    monkeypatch.setattr(run_folder.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    outcome = command("train", *arguments(model=model, output_dir="run", save=True))
    assert outcome.status == 2
    check_message(
        outcome.err, ("--save needs up to \\d+\\.?\\d* \\S+ in run, the disk has 1000 bytes free", "free some")
    )
    assert not (tmp_path / "run").exists()


def full_after(num_tensors, monkeypatch):
    """Writing fails like on a full disk once so many tensors are written."""
    written = []
    bytes_of = writer._bytes_of

    def fail_later(source):
        if len(written) == num_tensors:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(source.name)
        return bytes_of(source)

    monkeypatch.setattr(writer, "_bytes_of", fail_later)


@pytest.mark.parametrize("num_tensors", [0, 3, 15])
def test_disk_full_in_the_middle_of_an_export(num_tensors, model, command, monkeypatch, tmp_path):
    """The log stays, and there is no final/ that could pass for a model."""
    full_after(num_tensors, monkeypatch)
    outcome = command("train", *arguments(model=model, output_dir="run", save=True))
    assert outcome.status == 2
    check_message(
        outcome.err,
        ("run/final: no space left on the disk \\(.*MiB free\\). Free some or choose another --output-dir",),
    )
    assert not (tmp_path / "run" / "final").exists()
    assert len((tmp_path / "run" / "train_log.jsonl").read_text().splitlines()) == 2


def test_disk_full_while_an_earlier_export_is_replaced(model, command, monkeypatch, tmp_path):
    flags = arguments(model=model, output_dir="run", save=True)
    assert command("train", *flags).status == 0
    full_after(15, monkeypatch)
    outcome = command("train", *flags, "--overwrite", untouched=tmp_path / "run" / "final")
    assert outcome.status == 2
    check_message(outcome.err, ("run/final: no space left on the disk",))


def test_disk_full_while_the_run_folder_is_begun(model, command, monkeypatch, tmp_path):
    def full(text):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(trainer.TrainConfig, "to_yaml", full)
    outcome = command("train", *arguments(model=model, output_dir="run"))
    assert outcome.status == 2
    check_message(outcome.err, ("no space left on the disk.*Free some or choose another --output-dir",))


def test_a_place_that_takes_no_model_is_known_before_the_first_step(model, command, monkeypatch, tmp_path):
    """A small file is written where the trained model is to go."""

    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(staged_folder, "sync_file", full)
    outcome = command("train", *arguments(model=model, output_dir="run", save=True))
    assert outcome.status == 2
    check_message(outcome.err, ("run/.*no space left on the disk.*Free some or choose another --output-dir",))
    assert not (tmp_path / "run" / "train_log.jsonl").exists()
    assert half_written(tmp_path / "run") == []
    assert command("train", *arguments(model=model, output_dir="run")).status == 0  # without --save nothing is tried


def test_file_size_limit_in_the_middle_of_a_file(tmp_path):
    """The kernel refuses a write half-way, as a full disk does."""
    tensors = [TensorSource(f"t{i}", torch.float32, (4096,), lambda: torch.ones(4096)) for i in range(4)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))
    try:
        check_error(lambda: write_checkpoint(tmp_path / "out", tensors), ("File too large: .*out",), OSError)
        with pytest.raises(OSError, match=r"File too large: .*log"), atomic_file(tmp_path / "log") as file:
            file.write(bytes(50_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_python_face(model, tmp_path, monkeypatch):
    engine = from_pretrained(
        model, max_seq_len=16, max_global_batch_tokens=32, device="cpu", dtype="float32", hardware="cpu-test"
    )
    (tmp_path / "taken").write_text("mine")
    before = fingerprint(tmp_path)
    check_error(lambda: engine.save_pretrained(tmp_path / "taken"), ("taken",), OSError)
    check_error(lambda: engine.save_pretrained(tmp_path / "taken" / "below"), ("taken",), OSError)
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    says = ("out: the checkpoint needs \\d+ bytes, the disk has 1000 bytes free", "another folder")
    check_error(lambda: engine.save_pretrained(tmp_path / "out"), says)
    assert fingerprint(tmp_path) == before
    assert not half_written(tmp_path)
    engine.close()
