"""Failures that need a process of their own: the scripts as people call them, Ctrl-C, limits of the process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from provoke import arguments, check_message, fingerprint, half_written

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 240.0
"""For machines under load; every case ends in a few seconds."""
ON_KNOWN_MACHINE = """
import sys
import flexengine.api
from flexengine.hardware.presets import preset
flexengine.api.probe = lambda *_, **__: preset("cpu-test")
{before}
from flexengine.cli import main
sys.exit(main(sys.argv[1:]))
"""
HEEDS_CTRL_C = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
"""
LESS_ADDRESS_SPACE = """
import os, resource
mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + 2**28, mapped + 2**28))
"""


def environment(**changes):
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "100", **changes}


def finished(command, folder, **changes):
    """The process, ended, with its output as text."""
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment(**changes), capture_output=True, text=True,
        timeout=DEADLINE_S, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


MISSPELT = ["--max-gpu-mem", "24"], ("unknown flag --max-gpu-mem; did you mean --max-gpu-mem-gib",)
NO_MODEL = ["--model", "llama-3.1-8b", "--data-source", "synthetic"], ("did you mean preset:llama-3.1-8b",)
SCRIPTS = {
    "module": (["-m", "flexengine", "train"], *MISSPELT),
    "train_py": ([str(ROOT / "train.py")], *NO_MODEL),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts(name, tmp_path):
    script, flags, says = SCRIPTS[name]
    run = finished([*script, *flags], tmp_path)
    assert (run.returncode, run.stdout) == (2, "")
    check_message(run.stderr, says)
    assert list(tmp_path.iterdir()) == []


def test_download_script(tmp_path):
    run = finished([str(ROOT / "download.py"), "model", "org/name", "--target", "x"], tmp_path, HF_HUB_OFFLINE="1")
    assert (run.returncode, run.stdout) == (1, "")
    check_message(run.stderr, ("org/name", "HF_HUB_OFFLINE", "unset it"))
    assert list(tmp_path.iterdir()) == []


def test_address_space_too_small_for_the_arena(tmp_path):
    """RLIMIT_AS leaves 256 MiB; the plan is for 0.8 GB."""
    flags = arguments(model="preset:tiny-llama3-50m", output_dir="run", max_gpu_mem_gib=2, max_host_mem_gib=8)
    run = finished(["-c", ON_KNOWN_MACHINE.format(before=LESS_ADDRESS_SPACE), "train", *flags], tmp_path)
    assert run.returncode == 2, run.stderr
    check_message(run.stderr, ("cannot map \\d+ bytes \\(0.\\d+ GiB\\)|memory ran out", "ulimit -v"))
    assert not half_written(tmp_path)


def test_ctrl_c(tmp_path, model):
    """Status 130, one message, and a log of every step that was taken."""
    flags = arguments(model=model, output_dir="run", save=True, steps=1_000_000)
    command = [sys.executable, "-c", ON_KNOWN_MACHINE.format(before=HEEDS_CTRL_C), "train", *flags]
    before = fingerprint(model)
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        log = tmp_path / "run" / "train_log.jsonl"
        deadline = time.monotonic() + DEADLINE_S
        while not (log.is_file() and log.read_text().count("\n") >= 3):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "no step was taken"
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    steps = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert process.returncode == 130
    check_message(err, (f"interrupted after step {len(steps)} of 1000000; the log is in run",))
    assert steps == list(range(1, len(steps) + 1))
    assert not (tmp_path / "run" / "final").exists()
    assert fingerprint(model) == before
    assert not half_written(tmp_path)


def test_reader_that_goes_away(tmp_path):
    """`flexengine --help | head -1`: no traceback about the pipe."""
    run = subprocess.run(
        f"{sys.executable} -m flexengine train --help | head -1", shell=True, cwd=tmp_path, env=environment(),
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert "Traceback" not in run.stderr
    assert run.stdout.startswith("usage")
