"""Does a fault at any moment of `train --gpus N` end all of it within 15 seconds, in a true line, with nothing left?

    python -m bench.rank_faults --faults 60 --json out.json

A small model is trained on CPUs by 2 to 4 ranks over relays, split and in stages, with a checkpoint every few steps.
One of them is killed, stopped, fails in a random command or ends in it without a word, or the launcher is killed or
asked to stop: while ranks start, while they train, or after the last step. Counted is what stays: processes, shared
memory, temporary files, sockets. Then `--resume auto` goes on with one rank, to the weights and losses of a run without
a fault.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any, NamedTuple

from bench.end_to_end import lines
from bench.environment import write_json
from bench.kill_runs import outcome
from bench.plan_accuracy import write_config
from flexengine.options.train_config import TrainConfig
from flexengine.run.trainer import train

LIMIT_S, GIVE_UP_S = 15.0, 120.0
STEPS, SAVE_STEPS, COMMANDS = 12, 3, 400  # commands of a run that may fail
TRANSPORTS, PHASES = ("relay", "split", "stages"), ("start", "training", "end")
MARK = "RANK_FAULTS_RUN"
"""Environment variable of all processes of a run."""
MODEL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 16, "vocab_size": 256, "tie_word_embeddings": False}  # fmt: skip
OPTIONS: dict[str, Any] = {
    "data_source": "synthetic", "init": "random", "steps": STEPS, "max_seq_len": 32, "max_global_batch_tokens": 384,
    "chunk_tokens": 32, "round_tokens": 32, "round_multiple": 12, "dtype": "float32", "device": "cpu",
    "max_gpu_mem_gib": 0.5, "max_host_mem_gib": 8.0, "save": True, "save_steps": SAVE_STEPS, "lr": 1e-3,
}  # fmt: skip
LAUNCH = "import sys; from flexengine.run.launch import launch; sys.exit(launch(int(sys.argv[1]), sys.argv[2:]))"
MESSAGE = re.compile(r"flexengine( \w+)?: |\w+(Error|Interrupt)\b|SIG[A-Z0-9]+: ")
"""How a line begins that says what was wrong."""


class Kind(NamedTuple):
    """A fault: the signal, if any, to the launcher or a rank; the only line that is true of it; statuses of the run."""

    number: signal.Signals | None
    to_launcher: bool
    line: str
    statuses: tuple[int, ...]


ASKED = r"flexengine( train)?: ({0} has ended the run|interrupted)|{0}: the step under way is finished first"
KINDS = {
    "killed": Kind(signal.SIGKILL, False, r"flexengine: rank {rank} \(process {pid}\) was killed by SIGKILL", (1,)),
    "stopped": Kind(signal.SIGSTOP, False, r"flexengine: rank {rank} \(process {pid}\) was stopped by", (1,)),
    "raises": Kind(None, False, "FloatingPointError: .* fails", (1,)),
    "exits": Kind(None, False, r"flexengine: rank {rank} \(process \d+\) has ended with status 5 and no word", (1,)),
    "launcher killed": Kind(signal.SIGKILL, True, "flexengine: the process that started this rank has ended", (-9,)),
    "interrupted": Kind(signal.SIGINT, True, ASKED.format("SIGINT"), (130,)),
    "asked to stop": Kind(signal.SIGTERM, True, ASKED.format("SIGTERM"), (75, 143)),
    "terminal closed": Kind(signal.SIGHUP, True, ASKED.format("SIGTERM"), (75, 143)),
}


class Fault(NamedTuple):
    """What happens to which rank of how many, and when: in which phase, and how far in it (in a command that fails)."""

    kind: str
    transport: str
    ranks: int
    rank: int
    phase: str
    share: float


class Outcome(NamedTuple):
    """What came of a fault. seconds: until the last process has ended. late: the run had reached its end before."""

    fault: Fault
    seconds: float
    status: int
    messages: list[str]
    left: list[str]
    late: bool
    resumes_equal: bool
    is_right: bool


class Known(NamedTuple):
    """What faults are measured against: the outcome of a run without any, seconds to its first step and after the last
    one, by number of ranks."""

    wanted: dict[str, object]
    start_s: dict[int, float]
    end_s: dict[int, float]


# ---- runs -------------------------------------------------------------------------------------------------------


def command(model: Path, folder: Path, transport: str, ranks: int) -> list[str]:
    """The arguments of `flexengine` for a run of several ranks."""
    given = {**OPTIONS, "model": model, "output_dir": folder / "run", "transport": transport, "gpus": ranks}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not True]
    return ["train", "--save", "--deterministic", *flags]


def start(fault: Fault, model: Path, folder: Path, mark: str) -> subprocess.Popen[bytes]:
    """Start a run whose processes have a mark; what ranks say goes to a file."""
    arguments = command(model, folder, fault.transport, fault.ranks)
    if KINDS[fault.kind].number is None:
        failing = [str(fault.rank), str(1 + int(fault.share * COMMANDS)), fault.kind, str(folder / "fault")]
        program = ["-c", LAUNCH, str(fault.ranks), "-m", "bench.faulty_rank", *failing, *arguments]
    else:
        program = ["-m", "flexengine", *arguments]
    temporary = folder / "tmp"
    temporary.mkdir(parents=True)
    environment = {**os.environ, MARK: mark, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(folder.parent / "inductor")  # which torch makes, and keeps on purpose
    with (folder / "stderr").open("wb") as said:
        return subprocess.Popen(
            [sys.executable, *program], env=environment, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True
        )


def resume(model: Path, folder: Path) -> dict[str, object]:
    """Go on with one rank where a run was left, in a process of its own; returns what it came to."""
    config = {**OPTIONS, "model": str(model), "output_dir": str(folder / "run"), "resume": "auto"}

    def go_on() -> None:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            os._exit(train(TrainConfig(**config, deterministic=True, logging="warning")))

    process = multiprocessing.get_context("fork").Process(target=go_on)  # torch is loaded
    process.start()
    process.join()
    return outcome(folder / "run") if process.exitcode == 0 else {}


def steps_of(folder: Path) -> int:
    with suppress(OSError, ValueError):
        return len(lines(folder / "run"))
    return 0


def known(model: Path, scratch: Path) -> Known:
    """Run without faults: with one rank, and with each number of ranks to see how long they take to start and end."""
    wanted, start_s, end_s = resume(model, scratch / "one"), {}, {}
    for ranks in (2, 3, 4):
        folder, begin_s = scratch / f"whole{ranks}", time.monotonic()
        process = start(Fault("killed", "relay", ranks, 0, "end", 0.0), model, folder, uuid.uuid4().hex)
        await_that(lambda folder=folder: steps_of(folder) > 0)
        start_s[ranks] = time.monotonic() - begin_s
        await_that(lambda folder=folder: steps_of(folder) == STEPS)
        begin_s = time.monotonic()
        process.wait()
        end_s[ranks] = time.monotonic() - begin_s
        assert outcome(folder / "run") == wanted, f"{ranks} ranks differ from one"
    return Known(wanted, start_s, end_s)


# ---- faults -----------------------------------------------------------------------------------------------------


def run_fault(fault: Fault, model: Path, folder: Path, about: Known) -> Outcome:
    """Let a fault come, wait for the end, and see what is left and whether the run goes on; nothing is left then."""
    kind, shared, mark = KINDS[fault.kind], shared_names(), uuid.uuid4().hex
    process = start(fault, model, folder, mark)
    try:
        begin_s, pid = bring(fault, process, mark, folder, about)
        await_that(lambda: process.poll() is not None and not running(mark) and not exiting(process.pid), LIMIT_S * 2)
        seconds = time.monotonic() - begin_s
    finally:
        left = [f"process {pid}" for pid in running(mark)]
        for found in running(mark):
            os.kill(found, signal.SIGKILL)
        status = process.wait()
    left += [f"/dev/shm/{name}" for name in sorted(shared_names() - shared)]
    left += [str(path.relative_to(folder)) for path in (folder / "tmp").rglob("*")]
    said = (folder / "stderr").read_text(errors="replace").splitlines()
    messages = [line for line in said if MESSAGE.match(line)]
    late = status == 0 and not messages and (folder / "run" / "final").is_dir()
    equal = resume(model, folder) == about.wanted
    line = kind.line.format(rank=fault.rank, pid=pid)
    told = [re.match(line, message) is not None for message in messages] == [True]
    right = seconds < LIMIT_S and not left and equal and (late or (told and status in kind.statuses))
    return Outcome(fault, seconds, status, messages, left, late, equal, right)


def bring(fault: Fault, process: subprocess.Popen[bytes], mark: str, folder: Path, about: Known) -> tuple[float, int]:
    """Bring the fault about, or wait for it; returns when it came, and the process that it came to."""
    kind = KINDS[fault.kind]
    if kind.number is None:
        await_that(lambda: (folder / "fault").exists() or process.poll() is not None)
        return time.monotonic(), process.pid
    if fault.phase == "start":
        time.sleep(fault.share * about.start_s[fault.ranks])
    else:
        wanted = STEPS if fault.phase == "end" else 1 + int(fault.share * (STEPS - 2))
        await_that(lambda: steps_of(folder) >= wanted or process.poll() is not None)
        time.sleep(fault.share * about.end_s[fault.ranks] if fault.phase == "end" else 0.05 * fault.share)
    pid = process.pid if kind.to_launcher else rank_of(process, mark, fault.rank)
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(pid, kind.number)
    return time.monotonic(), pid


def rank_of(process: subprocess.Popen[bytes], mark: str, rank: int) -> int:
    """The process of a rank, once there is one; that of the launcher where all have ended."""
    found: list[int] = []

    def is_there() -> bool:
        found[:] = [pid for pid in running(mark) if f"RANK={rank}" in environment_of(pid)]
        return bool(found) or process.poll() is not None

    await_that(is_there)
    return found[0] if found else process.pid


def environment_of(pid: int) -> list[str]:
    """The environment of a process: empty where it has ended, or has not begun its program yet."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return []


def running(mark: str) -> list[int]:
    """The processes of a run that have not ended, by the mark that they were started with."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return [pid for pid in pids if f"{MARK}={mark}" in environment_of(pid)]


def exiting(session: int) -> bool:
    """Whether processes of a session hold files yet: they let go of memory, and so of their environment, before."""
    states = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, own = path.read_text(errors="replace").rpartition(")")[2].split()[:4]
            states += [state] if int(own) == session else []
    return any(state not in "ZX" for state in states)


def shared_names() -> set[str]:
    """The files of /dev/shm."""
    return set(os.listdir("/dev/shm"))


def await_that(condition: Callable[[], bool], give_up_s: float = GIVE_UP_S) -> None:
    end_s = time.monotonic() + give_up_s
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.02)


def faults_of(dice: random.Random, count: int) -> list[Fault]:
    """Random faults; kinds, transports and phases take turns, so that all of them meet."""
    kinds, found = list(KINDS), []
    for number in range(count):
        ranks = dice.randrange(2, 5)
        transport, phase = TRANSPORTS[number % 3], PHASES[(number // 3 + number // 24) % 3]
        found.append(Fault(kinds[number % len(kinds)], transport, ranks, dice.randrange(ranks), phase, dice.random()))
    return found


def summary(outcomes: list[Outcome], first: int, seed: int) -> dict[str, Any]:
    """Counts, and what came of each fault; first: the number of the first one."""
    return {
        "faults": len(outcomes),
        "right": sum(outcome.is_right for outcome in outcomes),
        "late": sum(outcome.late for outcome in outcomes),
        "longest_s": round(max(outcome.seconds for outcome in outcomes), 2),
        "seed": seed,
        "outcomes": [
            {"number": number, **outcome._asdict(), "fault": outcome.fault._asdict()}
            for number, outcome in enumerate(outcomes, first)
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--first", type=int, default=0, help="the number of the first of them that is brought about")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scratch", default=None, help="where runs are written; default: the temporary folder")
    parser.add_argument("--json", type=Path, help="written after every fault")
    args = parser.parse_args()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(dir=args.scratch, prefix="rank_faults") as name:
        scratch = Path(name)
        (scratch / "model").mkdir()
        write_config("llama-3.2-1b", 4, scratch / "model", MODEL)
        about = known(scratch / "model", scratch)
        for number, fault in enumerate(faults_of(random.Random(args.seed), args.faults)):
            if number >= args.first:
                outcomes.append(run_fault(fault, scratch / "model", scratch / f"fault{number}", about))
                print("right" if outcomes[-1].is_right else "WRONG", json.dumps(outcomes[-1]), flush=True)
                if args.json is not None:
                    write_json(args.json, summary(outcomes, args.first, args.seed))
    sys.exit(not all(outcome.is_right for outcome in outcomes))


if __name__ == "__main__":
    main()
