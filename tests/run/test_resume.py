"""Runs that are stopped or killed and resumed: logs, weights and exports are those of the run that went through."""

import json
import os
import signal
from pathlib import Path
from pkgutil import resolve_name

import pytest

from flexengine import cli
from flexengine.checkpoint import state_writer
from flexengine.checkpoint.atomic import sha256_of
from flexengine.checkpoint.manifest import FileRecord, read_manifest, verify_manifest, write_manifest
from flexengine.checkpoint.run_checkpoints import (
    RunCheckpoint,
    checkpoint_folder,
    checkpoints_of,
    whole_checkpoints,
)
from flexengine.checkpoint.safetensors_format import CheckpointError
from flexengine.checkpoint.state_files import STATE_FILE, read_description
from flexengine.hardware.presets import preset
from flexengine.options.train_config import TrainConfig
from flexengine.plan import Request
from flexengine.run import saver as run_saver
from flexengine.run import trainer
from flexengine.run.resuming import ResumePoint, describe_resumption
from flexengine.run.state import DataPlace, RunState
from flexengine.runtime.engine import Engine
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

    def stopped(step, *numbers, folder="run", **options):
        take_step = trainer.take_step

        def taken(engine, batch, number, *more):
            if number == step:
                for signum in numbers:
                    os.kill(os.getpid(), signum)
            return take_step(engine, batch, number, *more)

        with monkeypatch.context() as patched:
            patched.setattr(trainer, "take_step", taken)
            return run(folder, **options)

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


@pytest.mark.parametrize(
    ("nodes", "exchange", "says"),
    [
        (2, "fp8", ""),
        (3, "fp8", "now 3 exchange fp8"),
        (2, None, "now 2 exchange bfloat16"),
        (1, None, "now one exchanges nothing"),
    ],
    ids=str,
)
def test_another_number_of_nodes_is_said_and_that_what_fp8_had_lost_is_dropped(nodes, exchange, says):
    run = RunState(3, 5, DataPlace(0, 3, 0, "batches"), 0.0, 0, {})
    engine = {"nodes": 2, "exchange": {"sent": "fp8", "nodes": 2, "weight": 64.0}}
    point = ResumePoint(RunCheckpoint(3, Path("step-3")), engine, run)
    config = TrainConfig(model="preset:demo", data_source="synthetic")
    text = describe_resumption(point, config, 5, Request(64, 64, 1, 1, nodes=nodes, exchange=exchange))
    assert ("dropped: what 2 nodes had lost of gradients to fp8 in the last step; " in text) is bool(says)
    assert says in text
    assert (f"gradients: 2 -> {nodes}, which changes last bits" in text) is (nodes != 2)


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


def test_a_second_signal_stops_at_once_but_its_echo_does_not(run, stopped, monkeypatch, request):
    """A shell and a terminal send a SIGHUP each; what comes later means that the run is to end now."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup may have started this process
    request.addfinalizer(lambda: signal.signal(signal.SIGHUP, before))
    assert stopped(4, signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, save_steps=3) == run_saver.STOPPED
    assert [found.step for found in whole_checkpoints(Path("run"))] == [4, 3]
    assert run(resume="auto", save_steps=3) == 0
    monkeypatch.setattr("flexengine.run.stop_signals.ONE_REQUEST_S", -1.0)
    assert stopped(4, signal.SIGTERM, signal.SIGTERM, folder="other", save_steps=3) == 128 + signal.SIGTERM
    assert [line["step"] for line in logged("other")] == [1, 2, 3]


def test_sigterm_after_its_announcement_is_the_first_signal(stopped, monkeypatch):
    monkeypatch.setattr("flexengine.run.stop_signals.ONE_REQUEST_S", -1.0)
    assert stopped(4, signal.SIGUSR1, signal.SIGTERM) == run_saver.STOPPED
    assert [found.step for found in whole_checkpoints(Path("run"))] == [4]


def test_a_run_under_nohup_outlives_its_terminal(stopped, monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert stopped(4, signal.SIGHUP) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("place", "options", "last"),
    [
        ("flexengine.run.trainer.take_step", {}, 3),
        ("flexengine.run.health.RunHealth.after_step", {}, 4),
        ("flexengine.run.saver.RunSaver.after_step", {"save": False, "save_steps": 3}, 4),
        ("flexengine.run.trainer.export", {}, 7),
    ],
)
def test_an_error_saves_the_last_step_first(run, whole, monkeypatch, capsys, place, options, last):
    """Raised in step 4, before its update or after it, or at the end; the run goes on with the bits that it had."""
    with monkeypatch.context() as patched:
        calls, wrapped = [], resolve_name(place)

        def fails(*args, **keywords):
            calls.append(1)
            if len(calls) == (4 if last < 7 else 1):
                raise RuntimeError("a bug")
            return wrapped(*args, **keywords)

        patched.setattr(place, fails)
        with pytest.raises(RuntimeError, match="a bug"):
            run(**options)
    assert whole_checkpoints(Path("run"))[0].step == last
    assert f"checkpoints/step-{last}; run the same command with --resume auto" in capsys.readouterr().err
    assert run(resume="auto") == 0
    assert (logged("run"), weights_of("run/final")) == whole


def test_an_engine_that_broke_in_an_update_saves_nothing(run, monkeypatch):
    """The weights are those of no step, so the checkpoint before stays the last one."""

    def breaks(engine, *args, **keywords):
        if engine.step_count == 3:
            engine.state.unusable = "broken"
            raise RuntimeError("in an update")
        return train_step(engine, *args, **keywords)

    train_step = Engine.train_step
    monkeypatch.setattr(Engine, "train_step", breaks)
    with pytest.raises(RuntimeError, match="in an update"):
        run(save_steps=2)
    assert [found.step for found in whole_checkpoints(Path("run"))] == [2]
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


def rewritten(folder, change, sealed):
    """Change checkpoint.json; sealed: the manifest is made to fit, as by somebody who writes checkpoints himself."""
    path = folder / STATE_FILE
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found, indent=1))
    if sealed:
        files = {name: FileRecord(*one.values()) for name, one in read_manifest(folder)["files"].items()}
        files[STATE_FILE] = FileRecord(path.stat().st_size, sha256_of(path))
        write_manifest(folder, files, {"source": "checkpoint"})


def put(value, *keys):
    """A change of one value deep in a description."""

    def change(found):
        for key in keys[:-1]:
            found = found[key]
        found[keys[-1]] = value

    return change


CHANGES = {
    "updates of the engine": put(3, "engine", "step_count"),
    "sum of the losses": put(1.5, "run", "loss_sum"),
    "bad steps": put([9], "run", "health", "bad_steps"),
    "options": put({}, "run", "options"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_description_that_changed_is_not_used(run, stopped, whole, capsys, change):
    """Valid values, of the same size or another: without a checksum the run would go on as another one."""
    stopped(4, signal.SIGTERM, save_steps=2)
    folder = checkpoint_folder(Path("run"), 4)
    rewritten(folder, change, sealed=False)
    assert run("other", resume=str(folder)) == 2
    assert "checkpoint.json" in capsys.readouterr().err
    assert not Path("other").exists()
    assert run(resume="auto", save_steps=2) == 0
    assert "passed over" in capsys.readouterr().err
    assert (logged("run"), weights_of("run/final")) == whole


CANNOT_BE = {
    "another step than the data": (put(5, "run", "step"), "batch 4 of the data, where step 5 of this data"),
    "more updates than steps": (put(9, "engine", "step_count"), "step is 4, but its engine has made 9 updates"),
    "a place elsewhere in the data": (put(1, "run", "data", "position"), "stands at epoch 0, batch 1 of the data"),
    "beyond the end": (put(3, "run", "num_steps"), "step is 4 of 3"),
    "losses that are no number": (put(float("nan"), "run", "loss_sum"), "loss_sum is nan, expected a finite number"),
    "a count that is a text": (put("4", "run", "health", "in_a_row"), "in_a_row is '4', expected a whole number"),
    "a chunk of nothing": (put(0, "engine", "chunk_tokens"), "chunk_tokens is 0, expected a whole number from 1"),
    "an optimizer without a name": (put({}, "engine", "optimizer"), "name is missing, expected a text"),
    "another format": (put(7, "format_version"), "has format 7"),
}


def test_a_description_that_cannot_be_is_refused(run, stopped, capsys):
    """Also where checksums fit: each field is of its type, and those that tell the same agree."""
    stopped(4, signal.SIGTERM)
    folder = checkpoint_folder(Path("run"), 4)
    saved = {path: path.read_bytes() for path in folder.glob("*.json")}
    for name, (change, says) in CANNOT_BE.items():
        rewritten(folder, change, sealed=True)
        assert run("other", resume=str(folder)) == 2, name
        assert says in capsys.readouterr().err
        for path, data in saved.items():
            path.write_bytes(data)


def test_every_field_of_a_state_is_asked_for(run, stopped):
    """None may be missing or of another type, and none ends in another error than CheckpointError."""
    stopped(2, signal.SIGTERM)
    found = json.loads((checkpoint_folder(Path("run"), 2) / STATE_FILE).read_text())["run"]
    assert RunState.from_json(found, "x").to_json() == found
    for name in found.keys() - {"logs", "health"}:
        for value in (None, [], "", -1, True, {"a": 1}):
            if (name, value) not in (("options", {"a": 1}), ("loss_sum", -1)):
                with pytest.raises(CheckpointError, match=name):
                    RunState.from_json({**found, name: value}, "x")


def test_a_log_that_changed_is_said(run, stopped, whole, capsys):
    """Nothing is computed from it; a digit, a line and a byte that is no text are noticed all the same."""
    stopped(5, signal.SIGTERM)
    log = Path("run/train_log.jsonl")
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([lines[0], b"\xff" + lines[1], *lines[2:]]))
    assert run(resume="auto") == 0
    assert "train_log.jsonl is not what the run had written up to step 5" in capsys.readouterr().err
    assert [line["step"] for line in logged("run")] == [1, 3, 4, 5, 6, 7]
    assert weights_of("run/final") == whole[1]


def test_a_checkpoint_without_a_manifest_is_refused(run, stopped, capsys):
    stopped(3, signal.SIGTERM)
    folder = checkpoint_folder(Path("run"), 3)
    (folder / "flexengine_manifest.json").unlink()
    assert run("other", resume=str(folder)) == 2
    assert "holds no whole checkpoint (no flexengine_manifest.json" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="so its files cannot be checked"):
        read_description(folder)


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


def test_a_finished_run_is_made_longer(run, capsys):
    """With a model and a trace of the shorter run in its folder; the result is that of a run of the full length."""
    options = {"lr_schedule": "constant", "save_steps": 2, **SIZES}
    assert run(steps=4, trace=True, **options) == 0
    trace = Path("run/trace.json").read_bytes()
    assert run(steps=STEPS, resume="auto", **options) == 0
    assert "other options than before: --steps 4 -> 7" in capsys.readouterr().out
    assert run("whole", steps=STEPS, **options) == 0
    assert logged(Path("run")) == logged(Path("whole"))
    assert weights_of(Path("run/final")) == weights_of(Path("whole/final"))
    assert json.loads(Path("run/final/flexengine_run.json").read_text())["steps"] == STEPS
    assert Path("run/trace.json").read_bytes() == trace


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
    assert run(resume="auto", lr=None, steps=5) == 0
    told = " ".join(capsys.readouterr().out.replace("--", "").split())
    assert "other options than before: steps 7 -> 5, lr 0.01 -> not given" in told


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
