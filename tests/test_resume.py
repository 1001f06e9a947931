"""Runs that are stopped or killed and resumed: logs, weights and exports are those of the run that went through."""

import json
import os
import signal
from pathlib import Path

import pytest

from flexengine import cli, run_saver, trainer
from flexengine.checkpoint import state_writer
from flexengine.checkpoint.manifest import verify_manifest
from flexengine.checkpoint.run_checkpoints import checkpoint_folder, checkpoints_of, whole_checkpoints
from flexengine.config import TrainConfig
from flexengine.hardware.presets import preset
from flexengine.resuming import ResumePoint
from tests.failures.provoke import arguments, fingerprint, half_written, write_model

STEPS = 7
SIZES = {"chunk_tokens": 64, "round_tokens": 64, "round_multiple": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("source") / "model")


def train(model, folder, **options):
    """Exit status of `train` into a folder."""
    defaults = {"model": model, "steps": STEPS, "dtype": "bfloat16", "lr": 1e-2, "save": True}
    return cli.main(["train", *arguments(**{**defaults, "output_dir": folder, **options})])


@pytest.fixture
def run(model, tmp_path, monkeypatch):
    """Runs `train` in tmp_path; returns the exit status."""
    monkeypatch.setattr("flexengine.api.probe", lambda *_, **__: preset("cpu-test"))
    monkeypatch.chdir(tmp_path)
    return lambda folder="run", **options: train(model, folder, **options)


@pytest.fixture
def stopped(monkeypatch, run):
    """Runs `train`, which receives signals in a step; returns the exit status."""

    def stopped(step, *numbers, **options):
        take_step = trainer.take_step

        def taken(engine, batch, number, *more):
            if number == step:
                for signum in numbers:
                    os.kill(os.getpid(), signum)
            return take_step(engine, batch, number, *more)

        with monkeypatch.context() as patched:
            patched.setattr(trainer, "take_step", taken)
            return run(**options)

    return stopped


@pytest.mark.parametrize(
    ("saved", "options", "grad"),
    [
        ("bfloat16", {}, "bfloat16"),  # as before there was another default for many rounds
        ("float32", {"round_tokens": 128}, "float32"),
        ("bfloat16", {"grad_dtype": "float32"}, "float32"),
        ("bfloat16", {"dtype": "float32"}, "float32"),
    ],
    ids=str,
)
def test_a_checkpoint_pins_what_gradients_are_stored_in(saved, options, grad):
    point = ResumePoint(None, {**SIZES, "numerics": {"compute": "bfloat16", "grad": saved}}, {})  # type: ignore[arg-type]
    many = {"max_seq_len": 64, "max_global_batch_tokens": 65 * 64}
    config = TrainConfig(model="preset:demo", data_source="synthetic", **many, **options)
    assert point.pinned(config).numerics.grad == grad


def logged(folder):
    """What the log says of every step, but for times and memory."""
    kept = ("step", "loss", "grad_norm", "lr", "num_tokens")
    lines = (Path(folder) / "train_log.jsonl").read_text().splitlines()
    return [{name: json.loads(line)[name] for name in kept} for line in lines]


def weights_of(folder):
    return {name: digest for name, digest in fingerprint(Path(folder)).items() if name.endswith(".safetensors")}


@pytest.fixture(scope="module")
def whole_run(model, tmp_path_factory):
    """The folder of a run that went through."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("flexengine.api.probe", lambda *_, **__: preset("cpu-test"))
        assert train(model, folder) == 0
    return folder


@pytest.fixture
def whole(whole_run):
    """The log of a run that went through, and the files of its model."""
    return logged(whole_run), weights_of(whole_run / "final")


BUDGETS = {
    "the same budgets": {},
    "a smaller GPU budget": {"max_gpu_mem_gib": 0.00006},
    "smaller budgets of both": {"max_gpu_mem_gib": 0.0001, "max_host_mem_gib": 1.07},
}


def plan_of(folder):
    """What a run's plan decides of its groups."""
    return json.loads((Path(folder) / "plan.json").read_text())["groups"]


@pytest.mark.parametrize("budgets", BUDGETS.values(), ids=BUDGETS)
def test_resumed_bit_by_bit(run, stopped, whole, whole_run, capsys, budgets):
    assert stopped(5, signal.SIGTERM, save_steps=2) == run_saver.STOPPED
    assert [found.step for found in whole_checkpoints(Path("run"))] == [5, 4]
    assert "interrupted after step 5 of 7; the log is in run" in capsys.readouterr().err
    assert not Path("run/final").exists()
    assert run(save_steps=2, resume="auto", **budgets) == 0
    assert "resumed after step 5 of 7" in capsys.readouterr().out
    assert (plan_of("run") == plan_of(whole_run)) is not bool(budgets)
    assert (logged("run"), weights_of("run/final")) == whole
    assert [found.step for found in checkpoints_of(Path("run"))] == [7, 6]
    for found in checkpoints_of(Path("run")):
        verify_manifest(found.folder)
    assert not half_written(Path("run"))


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGUSR1, run_saver.STOPPED), (signal.SIGINT, 130)])
def test_a_run_that_saves_has_its_last_checkpoint(run, stopped, whole, signum, status):
    """--save alone: there are no checkpoints but the one of the step that a signal came in."""
    assert stopped(3, signum) == status
    assert [found.step for found in whole_checkpoints(Path("run"))] == [3]
    assert run(resume="auto") == 0
    assert (logged("run"), weights_of("run/final")) == whole


def test_a_second_ctrl_c_stops_at_once(stopped):
    assert stopped(4, signal.SIGINT, signal.SIGINT, save_steps=1) == 130
    steps = [found.step for found in whole_checkpoints(Path("run"))]
    assert steps in ([3, 2], [2, 1])  # the last one may have been given up
    assert [line["step"] for line in logged("run")] == [1, 2, 3]
    assert not half_written(Path("run"))


def test_checkpoints_are_not_overwritten_silently(run, stopped, capsys):
    stopped(2, signal.SIGTERM)
    assert run() == 2
    assert "checkpoints/step-2 is of an earlier run; give --resume auto to continue it" in capsys.readouterr().err
    assert [found.step for found in checkpoints_of(Path("run"))] == [2]


def test_damaged_and_half_written_checkpoints_are_passed_over(run, stopped, whole, capsys):
    stopped(6, signal.SIGTERM, save_steps=2, save_total_limit=0)
    assert [found.step for found in checkpoints_of(Path("run"))] == [6, 4, 2]
    for step, damage in ((6, lambda path: path.unlink()), (4, flip_a_bit)):
        damage(sorted(checkpoint_folder(Path("run"), step).glob("*.safetensors"))[0])
    left = Path("run/checkpoints/.step-9.0123456789abcdef.flexengine.tmp")
    left.mkdir()
    assert run(resume="auto", save_steps=2) == 0
    said = capsys.readouterr().err
    assert "step-6 is not whole" in said
    assert "step-4: 1 files differ" in said
    assert "going on with an older checkpoint" in said
    assert (logged("run"), weights_of("run/final")) == whole
    assert not left.exists()
    assert [found.step for found in whole_checkpoints(Path("run"))] == [7, 6]


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_gone_back_on_in_another_folder(run, stopped, whole):
    """A checkpoint that is named is read; the run that made it stays as it is."""
    stopped(5, signal.SIGTERM, save_steps=2)
    before = fingerprint(Path("run"))
    assert run("other", resume="run/checkpoints/step-4") == 0
    assert logged("other") == whole[0][4:]
    assert weights_of("other/final") == whole[1]
    assert run("third", resume="run") == 0
    assert logged("third") == whole[0][5:]
    assert fingerprint(Path("run")) == before


def test_without_a_checkpoint_auto_begins(run, whole, capsys):
    assert run(resume="auto") == 0
    assert "run has no checkpoint, so the run starts from the beginning" in capsys.readouterr().out
    assert (logged("run"), weights_of("run/final")) == whole
    assert run(resume="auto", max_gpu_mem_gib=0.4) == 0  # the same options but for budgets give the same model


REFUSED = {
    "resume_seed": ({"seed": 1}, "seed was 0, is 1"),
    "resume_data": ({"max_seq_len": 8}, "was saved on other data"),
    "resume_dtype": ({"dtype": "float32"}, "numerics was"),
    "resume_optimizer": ({"weight_decay": 0.1}, "optimizer was"),
    "resume_steps": ({"steps": 2}, "was saved after 3 steps, the run has 2"),
    "resume_folder": ({"resume": "nowhere"}, "nowhere: there is no such folder"),
    "resume_no_checkpoint": ({"resume": "run/checkpoints"}, "holds no whole checkpoint"),
}


@pytest.mark.parametrize(("options", "says"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_resumed_is_refused(run, stopped, capsys, options, says):
    stopped(3, signal.SIGTERM)
    before = fingerprint(Path("run"))
    assert run(**{"resume": "auto", **options}) == 2
    assert says in capsys.readouterr().err
    assert fingerprint(Path("run")) == before


def test_other_schedules_are_named(run, stopped, capsys):
    stopped(3, signal.SIGTERM)
    assert run(resume="auto", lr=1e-3, steps=5) == 0
    assert "other options than before: steps 7 -> 5, lr 0.01 -> 0.001" in " ".join(
        capsys.readouterr().out.replace("--", "").split()
    )


def test_a_disk_that_takes_no_checkpoint_does_not_end_the_run(run, whole, monkeypatch, capsys):
    written = state_writer._write_all

    def fills_up(descriptor, data):
        if Path("run/checkpoints/step-2").exists():
            raise OSError(28, "No space left on device")
        written(descriptor, data)

    monkeypatch.setattr(state_writer, "_write_all", fills_up)
    assert run(save_steps=2) == 0
    said = capsys.readouterr().err
    assert "the checkpoint of step 4 was not saved (the last one is of step 2): " in said
    assert "no space left on the disk" in said
    assert (logged("run"), weights_of("run/final")) == whole
    assert [found.step for found in checkpoints_of(Path("run"))] == [2]
    assert not half_written(Path("run"))


def test_a_stopped_run_is_exported(run, stopped, whole, capsys):
    """The model of the last checkpoint is that which a run of as many steps, at the same rates, would have saved."""
    stopped(7, signal.SIGTERM)
    Path("run/final").rename("saved")
    assert cli.main(["export", "--run", "run", "--max-gpu-mem-gib", "0.00006"]) == 0
    assert "model after step 7: run/final" in capsys.readouterr().out
    assert weights_of("run/final") == weights_of("saved") == whole[1]
    assert cli.main(["export", "--run", "run"]) == 2
    assert cli.main(["export", "--run", "nowhere"]) == 2
    assert "is no run folder" in capsys.readouterr().err
