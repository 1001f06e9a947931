"""What a run prints is worth less than what it trains: outputs that fail in every way, and commands that only print."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flexengine import cli, output
from flexengine.hardware.presets import preset
from flexengine.models.registry import ASSETS
from flexengine.options.train_config import TrainConfig
from flexengine.output import Output
from flexengine.run.callbacks import Callback
from flexengine.run.trackers import WandbTracker
from flexengine.run.trainer import train
from tests.conftest import heed_interrupts
from tests.failures.provoke import arguments, write_model

ROOT = Path(__file__).resolve().parents[1]
RECORDS = [{"question": "naïve 🧮 数字?", "answer": "四 ∑"}] * 8
STEPS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small model with the bundled tokenizer."""
    folder = write_model(tmp_path_factory.mktemp("source") / "model", vocab_size=2944)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ASSETS / "demo" / name, folder)
    return folder


@pytest.fixture
def heeds_sighup():
    """As in a process that nohup did not start."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def options(model, tmp_path, monkeypatch):
    """Options of a run that evaluates, answers a prompt, saves and prints on the way; its known machine."""
    monkeypatch.setattr("flexengine.api.probe", lambda *_, **__: preset("cpu-test"))
    monkeypatch.chdir(tmp_path)
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in RECORDS), encoding="utf-8")
    return {
        "model": str(model), "data_source": "json_sft", "dataset": "data.jsonl", "val_fraction": 0.3, "eval_steps": 2,
        "sample_prompts": "What is 数字?", "steps": STEPS, "output_dir": "🧮", "data_cache": "cache", "save": True,
        "max_seq_len": 32, "max_global_batch_tokens": 64, "verbose": True,
    }  # fmt: skip


def run(options):
    """Train by the command line, whose output is sys.stdout; returns the exit status."""
    return cli.main(["train", *arguments(**options)])


def is_whole(folder="🧮"):
    """Whether the run left its model and its log."""
    lines = Path(folder, "train_log.jsonl").read_text().splitlines()
    return len(lines) == STEPS and Path(folder, "final", "config.json").is_file()


class Failing(io.StringIO):
    """A stream that fails from the moment a text is written, with an error."""

    def __init__(self, marker, error):
        super().__init__()
        self.marker, self.error, self.failed = marker, error, False

    def write(self, text):
        self.failed = self.failed or self.marker in text
        if self.failed:
            raise self.error
        return super().write(text)


ERRORS = {
    "a full disk": OSError(28, "No space left on device"),
    "a reader that went away": BrokenPipeError(32, "Broken pipe"),
    "a terminal that is gone": OSError(5, "Input/output error"),
    "a closed stream": ValueError("I/O operation on closed file."),
    "what a notebook raises": RuntimeError("no kernel"),
}
MARKERS = {"training": "step 2/", "evaluation": "validation after", "answers": "sample:", "saving": "model: "}


@pytest.mark.parametrize(("what", "marker"), [*zip(ERRORS, [*MARKERS, "training"], strict=True)])
def test_an_output_that_fails_ends_no_run_and_is_told_once(what, marker, options, monkeypatch, capsys):
    broken = Failing(MARKERS[marker], ERRORS[what])
    monkeypatch.setattr(sys, "stdout", broken)
    assert run(options) == 0
    assert broken.failed
    assert is_whole()
    assert capsys.readouterr().err.count("the output cannot be written, and the run goes on without it") == 1


@pytest.mark.parametrize("name", ["stderr", "both"])
def test_messages_that_nobody_reads(name, options, heeds_sighup, monkeypatch, capsys):
    """With a stop on the way, which says so on stderr."""
    broken = Failing("", OSError(28, "No space left on device"))
    monkeypatch.setattr(sys, "stderr", broken)
    if name == "both":
        monkeypatch.setattr(sys, "stdout", broken)
    ends = type("Ends", (Callback,), {"on_step": lambda self, metrics: os.kill(os.getpid(), signal.SIGHUP)})
    options |= {"sample_prompts": ("a",), "max_gpu_mem_gib": 0.5, "max_host_mem_gib": 4.0, "device": "cpu"}
    config = TrainConfig(**options, dtype="float32")
    assert train(config, callbacks=[ends()]) == 75
    assert Path("🧮/checkpoints/step-1").is_dir()
    told = "the output of messages cannot be written, and the run goes on"
    assert capsys.readouterr().out.count(told) == (name != "both")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_characters_that_the_output_lacks_are_escaped(encoding, options, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding, write_through=True))
    assert run(options) == 0
    assert is_whole()
    text = written.getvalue().decode(encoding)
    assert "\\u6570\\u5b57" in text
    assert ("naïve" in text) is (encoding != "ascii")
    assert cli.main(["data", "preview", "--model", options["model"], "--dataset", "data.jsonl"]) == 0


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_stream_that_is_not_there(name, options, monkeypatch):
    """As in Python, which does not begin as a process of the command line does."""
    monkeypatch.setattr(sys, name, None)
    assert run({**options, "steps": 1}) == 0
    assert Path("🧮/final").is_dir()


@pytest.mark.parametrize(
    ("moment", "error"),
    [("start", SystemExit(3)), ("send", RuntimeError("no network 🧮")), ("finish", OSError(28, "no space"))],
)
def test_a_tracker_that_fails_ends_no_run(moment, error, options, monkeypatch, capsys):
    def fails(self, *_):
        raise error

    for name in ("start", "send", "finish"):
        monkeypatch.setattr(WandbTracker, name, fails if name == moment else lambda self, *_: None)
    monkeypatch.setattr("flexengine.run.trainer.open_trackers", lambda names: [WandbTracker()])
    assert run({**options, "report_to": "wandb"}) == 0
    assert is_whole()
    assert capsys.readouterr().err.count("--report-to wandb failed, and the run goes on without it") == 1


@pytest.mark.parametrize(("method", "step"), [("on_step", 1), ("on_eval", 2), ("on_end", 3)])
def test_an_error_of_a_callback_ends_the_run_and_loses_nothing(method, step, options, monkeypatch, capsys):
    """The others hear of the end, and it is the first error that is raised."""
    ended = []

    def fails(self, *_):
        raise ZeroDivisionError(method)

    own = type("Own", (Callback,), {method: fails, "on_end": fails})()
    other = type("Other", (Callback,), {"on_end": lambda self, status: ended.append(status)})()
    config = TrainConfig(
        **{**options, "sample_prompts": (), "device": "cpu", "dtype": "float32", "max_gpu_mem_gib": 0.5}
    )
    with pytest.raises(ZeroDivisionError, match=method):
        train(config, callbacks=[own, other])
    assert ended == [0 if method == "on_end" else None]
    saved = sorted(path.name for path in Path("🧮").glob("*/step-*"))
    assert saved == ([f"step-{step}"] if step in (1, 2) else [])
    assert Path("🧮/final").is_dir() is (method == "on_end")


# ---- commands that only print -------------------------------------------------------------------------------------


def flexengine(*arguments, **keywords):
    """A process of the command line."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "flexengine", *arguments]
    return subprocess.run(command, env=environment, check=False, timeout=120, **keywords)


def test_a_command_whose_reader_went_away_has_the_status_of_a_broken_pipe():
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write) as pipe:
        ended = flexengine("--help", stdout=pipe, stderr=subprocess.PIPE)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_a_command_on_a_full_disk_is_one_message():
    with Path("/dev/full").open("w") as full:
        ended = flexengine("train", "--help", stdout=full, stderr=subprocess.PIPE)
    assert ended.returncode == 2
    assert ended.stderr.decode().startswith(
        "flexengine train: the output: no space left on the disk. Free some or choose"
    )
    with Path("/dev/full").open("w") as full:
        assert flexengine("no-such-command", stdout=full, stderr=full).returncode == 2


def test_descriptors_that_were_closed_are_not_those_of_files():
    """Otherwise the first files that a command opens would be its output."""
    code = (
        "import os; [os.close(n) for n in range(3)]; from flexengine.output import open_standard_streams as opened;"
        "opened(); files = [os.readlink(f'/proc/self/fd/{n}') for n in range(3)]; os._exit(files != ['/dev/null'] * 3)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_ctrl_c_while_modules_load_is_one_line():
    code = (
        "import os, signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from flexengine.output import loading\n"
        "with loading():\n    os.kill(os.getpid(), signal.SIGINT)\n    raise SystemExit(1)"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, stderr=subprocess.PIPE)
    assert (ended.returncode, ended.stderr) == (output.INTERRUPTED, b"flexengine: interrupted\n")
    before = signal.getsignal(signal.SIGINT)
    with output.loading():
        pass
    assert signal.getsignal(signal.SIGINT) is before


def test_an_output_is_its_stream_in_everything_else():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    shown = Output(stream, pytest.fail)
    assert (shown.encoding, shown.isatty(), shown.write("a🧮\ud800")) == ("latin-1", False, 3)
    shown.flush()
    assert shown.buffer.getvalue() == b"a\\U0001f9ee\\ud800"


def test_children_of_tests_heed_interrupts_also_under_nohup():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        heed_interrupts()
        child = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
        said = subprocess.run([sys.executable, "-c", child], check=True, capture_output=True, text=True).stdout
    finally:
        signal.signal(signal.SIGINT, before)
    assert said == "True\n"
