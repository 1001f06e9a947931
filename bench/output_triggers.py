"""Does a run survive whatever happens to its output? Thirteen kinds of triggers, each in four moments; writes JSON.

    python -m bench.output_triggers --json out.json

A small run with `--save`, validation data and answers to a prompt meets each trigger at its beginning (when the data
are previewed), in a step, in an evaluation, and when the model is saved. A run is lost unless its model is there with
every step in the log, or where it was ended, a checkpoint of the last step of its log. An exception of a callback ends
a run on purpose. Trackers meet four kinds of errors instead of moments, in their start, their log or their end.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MOMENTS = ("preview", "training", "evaluation", "saving")
ERRORS = (RuntimeError("no network"), SystemExit(3), OSError(28, "No space left on device"), ImportError("broken 🧮"))
"""What trackers raise, one in place of each moment."""
TRIGGERS = (
    *("latin-1", "ascii", "cp1252", "full disk", "closed pipe", "closed stdin", "closed descriptors"),
    *("tracker start", "tracker log", "tracker finish", "callback", "SIGHUP", "terminal gone"),
)
MARKER = "\N{ABACUS} 数字"
STEPS, TIMEOUT_S = 4, 300.0
CHILD = """
import sys
from flexengine.output import open_standard_streams
open_standard_streams()  # as `python -m flexengine` begins
import flexengine.api
from flexengine.hardware.presets import preset
flexengine.api.probe = lambda *_, **__: preset("cpu-test")
from bench.output_triggers import arm
arm()
from flexengine.cli import main
sys.exit(main(sys.argv[1:]))
"""


class Result(NamedTuple):
    """What came of a run. kept: final, or the newest checkpoint."""

    trigger: str
    moment: str
    status: int
    steps_logged: int
    kept: str
    lost: bool


# ---- in the process of the run ----------------------------------------------------------------------------------


def arm() -> None:
    """Have the run of this process meet the trigger that the environment names."""
    from flexengine.run import trackers, trainer  # noqa: PLC0415, the parent stays small

    trigger, moment = os.environ["TRIGGER"], os.environ["MOMENT"]
    if trigger.startswith("tracker"):
        trainer.open_trackers = lambda names: [_tracker(trigger.split()[1], moment)]  # pyright: ignore
        return
    made = type("Met", (trackers.Callback,), {name: _meets(trigger, name, moment) for name in ("on_step", "on_eval")})
    made.on_save = _meets(trigger, "on_save", moment)  # pyright: ignore
    made.on_start = _meets(trigger, "on_start", moment)  # pyright: ignore
    trainer.open_trackers = lambda names: [made()]  # pyright: ignore


def _meets(trigger: str, method: str, moment: str) -> Callable[..., None]:
    """A callback's method that meets the trigger if this is its moment."""
    mine = {"on_start": "preview", "on_step": "training", "on_eval": "evaluation", "on_save": "saving"}[
        method
    ] == moment

    def called(self: object, *args: Any) -> None:
        step = getattr(args[0], "step", 2) if method != "on_save" else args[1]
        final = method != "on_save" or args[0].name == "final"
        if mine and step >= 2 and final and not vars(self).setdefault("met", False):
            vars(self)["met"] = True
            _happens(trigger)

    return called


def _happens(trigger: str) -> None:
    if trigger == "full disk":
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, 1)
        os.dup2(full, 2)
    elif trigger == "closed stdin":
        os.close(0)
    elif trigger == "closed descriptors":
        os.close(1)
        os.close(2)
    elif trigger == "callback":
        raise ZeroDivisionError("of a callback")
    elif trigger == "SIGHUP":
        os.kill(os.getpid(), signal.SIGHUP)
    elif trigger in ("closed pipe", "terminal gone"):
        Path("ready").touch()
        while not Path("go").exists():  # the other end is still there
            time.sleep(0.01)
    print(MARKER, flush=True)
    print(MARKER, file=sys.stderr, flush=True)


def _tracker(method: str, moment: str) -> object:
    from flexengine.run.trackers import Tracker  # noqa: PLC0415

    error = ERRORS[MOMENTS.index(moment)]

    def fails(*_: object) -> None:
        raise error

    own = {name: lambda *_: None for name in ("start", "send", "finish")}
    return type("Broken", (Tracker,), {**own, {"log": "send"}.get(method, method): fails, "name": "wandb"})()


# ---- the run from outside ---------------------------------------------------------------------------------------


def prepare(folder: Path) -> None:
    """Write a small model with the bundled tokenizer, and records with characters that some encodings lack."""
    from flexengine.models.registry import ASSETS  # noqa: PLC0415
    from tests.failures.provoke import write_model  # noqa: PLC0415

    write_model(folder / "model", vocab_size=2944)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ASSETS / "demo" / name, folder / "model")
    row = json.dumps({"question": f"naïve {MARKER}?", "answer": "四 ∑"}, ensure_ascii=False)
    (folder / "data.jsonl").write_text(f"{row}\n" * 8, encoding="utf-8")


def command(folder: Path) -> list[str]:
    """The command line of the run."""
    flags = {
        "model": folder / "model", "dataset": folder / "data.jsonl", "data-cache": folder / "cache", "steps": STEPS,
        "val-fraction": 0.3, "eval-steps": 2, "sample-prompts": MARKER, "max-seq-len": 32, "output-dir": "run",
        "max-global-batch-tokens": 64, "device": "cpu", "dtype": "float32", "max-gpu-mem-gib": 0.5,
        "max-host-mem-gib": 4, "report-to": "wandb",
    }  # fmt: skip
    return [sys.executable, "-c", CHILD, "train", "--save", *(f"--{name}={value}" for name, value in flags.items())]


def run(trigger: str, moment: str, scratch: Path) -> Result:
    """Run once in a folder of its own, with the trigger at the moment."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    environment = {
        **os.environ, "TRIGGER": trigger, "MOMENT": moment, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)
    }  # fmt: skip
    if trigger in ("latin-1", "ascii", "cp1252"):
        environment["PYTHONIOENCODING"] = trigger
    status = _ended(trigger, moment == "preview", command(scratch), folder, environment)
    found = _result(trigger, moment, status, folder / "run")
    shutil.rmtree(folder)
    return found


def _ended(trigger: str, at_once: bool, words: list[str], folder: Path, environment: Mapping[str, str]) -> int:
    """Run to the end; returns the exit status. at_once: the trigger is there before the process is."""
    mine, other = pty.openpty() if trigger == "terminal gone" else os.pipe()
    in_terminal = trigger == "terminal gone"

    def begin() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup may have started this script
        if in_terminal:
            fcntl.ioctl(1, termios.TIOCSCTTY, 0)
        if at_once and trigger.startswith("closed") and trigger != "closed pipe":
            for descriptor in (0,) if trigger == "closed stdin" else (1, 2):
                os.close(descriptor)

    if at_once and trigger == "full disk":
        os.close(other)
        other = os.open("/dev/full", os.O_WRONLY)
    if at_once and trigger == "closed pipe":
        os.close(mine)
    process = subprocess.Popen(
        words, cwd=folder, env=environment, stdout=other, stderr=other, preexec_fn=begin,  # noqa: PLW1509 (closes descriptors)
        stdin=other if in_terminal else None, start_new_session=in_terminal,
    )  # fmt: skip
    os.close(other)
    if not (at_once and trigger == "closed pipe"):
        threading.Thread(target=_read, args=(mine,), daemon=True).start()
    if trigger in ("closed pipe", "terminal gone"):
        _close_when_ready(mine, at_once, folder, process, trigger)
    try:
        return process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _close_when_ready(mine: int, at_once: bool, folder: Path, process: subprocess.Popen[bytes], trigger: str) -> None:
    while not at_once and not (folder / "ready").exists() and process.poll() is None:
        time.sleep(0.01)
    if not (at_once and trigger == "closed pipe"):
        nowhere = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nowhere, mine)  # closes this end while the reader is in a call
        os.close(nowhere)
    (folder / "go").touch()


def _read(descriptor: int) -> None:
    """Read until the end, as a terminal or `| cat` would."""
    try:
        while os.read(descriptor, 4096):
            pass
    except OSError:
        pass


def _result(trigger: str, moment: str, status: int, folder: Path) -> Result:
    log = folder / "train_log.jsonl"
    steps = len(log.read_text().splitlines()) if log.is_file() else 0
    saved = [int(path.name.partition("-")[2]) for path in folder.glob("checkpoints/step-*")]
    if (folder / "final" / "config.json").is_file():
        kept, lost = "final", steps < STEPS
    else:
        kept, lost = f"step-{max(saved)}" if saved else "", steps > max(saved, default=0)
    ends = {"callback": (1,), "SIGHUP": (0, 75, -signal.SIGHUP), "terminal gone": (0, 75, -signal.SIGHUP)}
    return Result(trigger, moment, status, steps, kept, lost or status not in ends.get(trigger, (0,)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triggers", nargs="+", choices=TRIGGERS, default=TRIGGERS, metavar="NAME")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time")
    parser.add_argument("--json", default=None, help="write the figures to this file")
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        prepare(Path(scratch))
        with ThreadPoolExecutor(args.jobs) as pool:
            for found in pool.map(lambda pair: run(*pair, Path(scratch)), product(args.triggers, MOMENTS)):
                results.append(found)
                print(*found, flush=True)
    num_lost = sum(result.lost for result in results)
    print(f"{num_lost} of {len(results)} runs lost")
    from bench.environment import write_json  # noqa: PLC0415, loads torch

    write_json(args.json, {"runs": len(results), "lost": num_lost, "results": [found._asdict() for found in results]})


if __name__ == "__main__":
    main()
