"""Tracing and profiling single steps: which ones, what is written, and that other steps are left alone."""

import errno
import json
from types import SimpleNamespace

import pytest
import torch

from flexengine import cli
from flexengine.checkpoint.atomic import atomic_file
from flexengine.hardware.presets import preset
from flexengine.options.train_config import TrainConfig
from flexengine.run.recording import Recorder, check_recording, reviewed_step, traced_step
from flexengine.runtime.profiling import ProfiledSteps
from flexengine.schedule.timeline import MEASURED, SIMULATED
from flexengine.schedule.trace_reader import read_trace
from tests.failures.provoke import write_model


def config(**changes):
    return TrainConfig(**{"model": "preset:demo", "data_source": "synthetic", "device": "cpu", **changes})


# ---- which step --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "num_steps", "step"),
    [
        ({}, 9, None),
        ({"trace": True}, 9, 2),
        ({"trace": "x.json"}, 2, 2),
        ({"trace": True}, 1, 1),
        ({"trace": True, "trace_step": 7}, 9, 7),
        ({"trace": True, "replan": True}, 9, 4),
        ({"trace": True, "replan": True}, 3, 2),
        ({"trace": True, "profile_start_step": 2}, 9, 4),
        ({"trace": True, "profile_start_step": 2, "profile_stop_step": 5}, 9, 6),
        ({"trace": True, "profile_start_step": 1, "profile_stop_step": 2}, 9, 4),
        ({"trace": True, "profile_start_step": 4, "profile_stop_step": 6, "replan": True}, 9, 7),
        ({"trace": True, "profile_start_step": 4, "profile_stop_step": 6}, 9, 2),
        ({"trace": True, "profile_start_step": 1, "profile_stop_step": 9}, 9, 2),
    ],
    ids=str,
)
def test_the_traced_step(options, num_steps, step):
    assert traced_step(config(**options), num_steps) == step


def test_where_the_cpu_updates_the_step_after_a_timed_one_says_little():
    """The timed step waits for its updates; the next one begins with none of them left."""
    for by_cpu, reviewed, disturbed in ((False, 3, [2]), (True, 4, [2, 3])):
        prepared = SimpleNamespace(plan=SimpleNamespace(updates_on_cpu=by_cpu))
        recorder = Recorder(config(), prepared, SimpleNamespace(executor=None), 9)
        assert reviewed_step(prepared.plan) == reviewed
        assert [step for step in range(2, 9) if recorder.disturbed(step)] == disturbed
        assert traced_step(config(trace=True, replan=True), 9, reviewed) == reviewed + 1


def test_profiled_steps_are_inclusive():
    assert list(config().profiled_steps) == []
    assert list(config(profile_start_step=3).profiled_steps) == [3]
    assert list(config(profile_start_step=3, profile_stop_step=5).profiled_steps) == [3, 4, 5]


def test_steps_that_never_come_are_refused():
    with pytest.raises(ValueError, match=r"--trace-step 4: the run has 3 steps"):
        check_recording(config(trace=True, trace_step=4), 3)
    with pytest.raises(ValueError, match=r"--profile-start-step 4: the run has 3 steps"):
        check_recording(config(profile_start_step=4), 3)
    with pytest.raises(ValueError, match=r"on the CPU \(--device cpu\)"):
        check_recording(config(profile_start_step=2), 3)
    check_recording(config(trace=True, trace_step=3), 3)


# ---- flags -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "trace"),
    [
        ([], False),
        (["--trace"], True),
        (["--trace", "x.json"], "x.json"),
        (["--trace=y"], "y"),
        (["--no-trace"], False),
    ],
    ids=str,
)
def test_trace_is_a_switch_that_may_name_a_file(flags, trace, tmp_path):
    base = ["--model", "preset:demo", "--data-source", "synthetic"]
    parsed = cli.parse_config("test", [*flags, *base])
    assert parsed.trace == trace
    assert TrainConfig.from_yaml(parsed.to_yaml()) == parsed
    path = tmp_path / "run.yaml"
    path.write_text(config(trace=True).to_yaml())
    from_file = cli.parse_config("test", ["--config", str(path), *flags])
    assert from_file.trace == (trace if flags else True)


def test_trace_is_no_number():
    with pytest.raises(ValueError, match="--trace must be true, false or a file name, got 3"):
        config(trace=3)


# ---- profiles ----------------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    """What is asked of CUDA's profiler and of NVTX, in order."""
    said = []
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: said.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: said.append("stop"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", said.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: said.append("pop"))
    return said


def test_a_profile_is_of_its_steps_alone(calls):
    executor = SimpleNamespace(range_of=None, synchronize=lambda: None)
    profile, ranged = ProfiledSteps(executor, range(2, 4)), []
    for step in range(1, 6):
        profile.before_step(step)
        ranged.append(executor.range_of is not None)
        profile.after_step(step)
    profile.stop()
    assert calls == ["start", "step 2", "pop", "step 3", "pop", "stop"]
    assert ranged == [False, True, True, False, False]


def test_a_profile_that_is_interrupted_ends(calls):
    executor = SimpleNamespace(range_of=None, synchronize=lambda: None)
    profile = ProfiledSteps(executor, range(2, 9))
    profile.before_step(1)
    profile.stop()
    assert calls == []
    profile.before_step(2)
    profile.stop()
    profile.stop()
    assert calls == ["start", "step 2", "stop"]
    assert executor.range_of is None


# ---- from the flag to the page -----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _one_thread():
    """Steps of 64 tokens: a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


FLAGS = (
    "--data-source synthetic --max-seq-len 16 --max-global-batch-tokens 64 --round-tokens 16 --dtype float32"
    " --device cpu --max-gpu-mem-gib 0.09 --max-host-mem-gib 4"
)


@pytest.fixture
def train(monkeypatch, tmp_path):
    """Trains a small model (or `model`) in tmp_path/run with more flags; returns the run folder."""
    monkeypatch.setattr("flexengine.api.probe", lambda *_, **__: preset("cpu-test"))

    def train(*flags, model=None):
        folder = tmp_path / "run"
        argv = [
            "train",
            "--model",
            str(model or write_model(tmp_path / "model")),
            *FLAGS.split(),
            "--output-dir",
            str(folder),
            *flags,
        ]
        assert cli.main(argv) == 0
        return folder

    return train


def trace_in(path, timeline):
    return read_trace(json.loads(path.read_text()), path, timeline)


def test_a_traced_run_is_drawn(train, tmp_path, capsys):
    copy = tmp_path / "copies" / "trace.json"
    folder = train("--steps", "3", "--trace", str(copy), model="preset:demo")
    measured, simulated = trace_in(folder / "trace.json", MEASURED), trace_in(folder / "timeline.json", SIMULATED)
    assert copy.read_text() == (folder / "trace.json").read_text()
    log = [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]
    assert [part.name for part in measured.parts] == ["round 1", "round 2", "round 3", "round 4", "update"]
    assert [part.repeats for part in simulated.parts] == [1, 3, 1]
    assert (measured.about["step"], measured.about["tokens"], measured.about["device"]) == (2, 64, "cpu")
    assert measured.about["step_s"] == log[1]["step_s"]
    assert measured.about["plan"] == simulated.about["plan"]
    end_s = 0.0
    for part in measured.parts:
        assert part.start_s >= end_s
        end_s = part.start_s + part.seconds
        assert part.commands[0].start_s >= part.start_s - 1e-9
        assert part.commands[-1].end_s == pytest.approx(end_s)
    assert end_s <= log[1]["step_s"]
    expected = [command.label for part in simulated.parts for command in part.commands * part.repeats]
    assert [command.label for part in measured.parts for command in part.commands] == expected
    assert f"`flexengine report {folder}` draws it" in capsys.readouterr().out
    assert cli.main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"wrote {folder / 'report.html'}\n"
    text = (folder / "report.html").read_text()
    assert "step 2 of the run" in text
    assert "--trace" not in text


def test_a_run_without_a_trace_is_drawn_and_says_how_to_get_one(train, tmp_path, capsys):
    folder = train("--steps", "1", "--trace", "--trace-step", "1")
    assert trace_in(folder / "trace.json", MEASURED).about["step"] == 1
    train("--steps", "1", "--overwrite")
    assert not (folder / "trace.json").exists()  # it was of the run before
    capsys.readouterr()
    page = tmp_path / "page.html"
    assert cli.main(["report", str(folder), "--html", str(page)]) == 0
    assert "no step was measured: run flexengine train with --trace" in capsys.readouterr().out
    assert "run flexengine train with --trace" in page.read_text()
    assert not (folder / "report.html").exists()
    for name in ("plan.json", "timeline.json", "config.yaml", "train_log.jsonl"):
        (folder / name).unlink()
        left = [path.name for path in folder.iterdir()]
        assert cli.main(["report", str(folder), "--html", str(page)]) == (0 if left else cli.BAD_INPUT)


def test_a_trace_of_the_plan_that_a_run_changed_to(train):
    """With --replan the traced step comes after the change, so that both timelines are of one plan."""
    folder = train("--steps", "4", "--trace", "--replan")
    measured, simulated = trace_in(folder / "trace.json", MEASURED), trace_in(folder / "timeline.json", SIMULATED)
    assert measured.about["step"] == 4
    assert measured.about["plan"] == simulated.about["plan"]


def test_a_trace_that_cannot_be_written_does_not_end_the_run(train, tmp_path, monkeypatch, capsys):
    """The run folder takes none; the file that was named is written all the same."""

    def full_below_the_run_folder(path, *arguments, **keywords):
        if path.parent.name == "run":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return atomic_file(path, *arguments, **keywords)

    monkeypatch.setattr("flexengine.run.recording.atomic_file", full_below_the_run_folder)
    named = tmp_path / "named.json"
    folder = train("--steps", "3", "--trace", str(named))
    assert len((folder / "train_log.jsonl").read_text().splitlines()) == 3
    assert trace_in(named, MEASURED).about["step"] == 2
    assert not (folder / "trace.json").exists()
    output = capsys.readouterr()
    assert "the trace is not written, and the run goes on without it" in output.err
    assert "traced" not in output.out


def test_replanning_waits_for_ten_steps(train, capsys):
    """Commands are timed once more, and the trace is of the plan that the run goes on with."""
    folder = train("--steps", "14", "--trace", "--replan")
    printed = capsys.readouterr().out
    first, again, replanned = (printed.index(words) for words in ("step 3: measured", "steps 3 to 12", "the plan "))
    assert first < again < replanned
    assert trace_in(folder / "trace.json", MEASURED).about["step"] == 13


def test_a_plan_that_cannot_be_written_does_not_end_the_run(train, monkeypatch, capsys):
    def full(config, planned):
        raise OSError(errno.ENOSPC, "No space left on device", "plan.json")

    monkeypatch.setattr("flexengine.run.feedback.write_plan", full)
    folder = train("--steps", "4", "--replan")
    assert len((folder / "train_log.jsonl").read_text().splitlines()) == 4
    assert "the plan that the run changed to is not written" in capsys.readouterr().err


@pytest.mark.gpu
def test_gpu_profile_ranges_name_steps_and_commands(monkeypatch, tmp_path):
    said = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", said.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: None)
    lengths = "--max-seq-len 16 --max-global-batch-tokens 64 --round-tokens 16"
    flags = f"--data-source synthetic --device cuda --max-gpu-mem-gib 2 --max-host-mem-gib 16 {lengths}".split()
    argv = ["train", "--model", "preset:demo", *flags, "--steps", "4", "--output-dir", str(tmp_path / "run")]
    assert cli.main([*argv, "--profile-start-step", "3", "--profile-stop-step", "4"]) == 0
    steps = [label for label in said if label.startswith("step ")]
    assert steps == ["step 3", "step 4"]
    assert {"forward block.0 chunk 0", "backward head chunk 0"} <= set(said)
