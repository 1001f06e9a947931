"""A fault of one of several ranks ends all, with one message and nothing left, also where nobody looks after them.

Ranks are processes that pass pieces of shared memory round as a step does, agree on a batch before each step, and
compute a little. bench/rank_faults.py brings faults to ranks that train, from their first line to their last.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from ranks_helper import environment_of, free_port

from flexengine.parallel import watch
from flexengine.parallel.control import Control
from flexengine.parallel.node_memory import NodeMemory
from flexengine.parallel.parent import STORE_VARIABLE
from flexengine.parallel.ranks import Ranks
from flexengine.parallel.signals import Signals
from flexengine.parallel.watch import Watch

KINDS = ("killed", "stopped", "interrupted", "raises", "exits", "another batch", "killed while another computes")
DONE_TO_IT = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "interrupted": signal.SIGINT}
MESSAGE = re.compile(r"flexengine: |\w+(Error|Interrupt)\b")
"""How a line begins that says what was wrong."""
SIZE, FAULTY, STEP, NUM_ROUNDS, DATA_BYTES = 3, 1, 20, 6, 4 << 20
GIVE_UP_S = 60.0


class Outcome(NamedTuple):
    """What came of a fault: seconds until the last rank has ended, messages, and statuses by rank."""

    seconds: float
    messages: list[str]
    statuses: list[int | None]


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    """The same with fewer beats before a stopped rank is given up, and less time for those that compute."""
    monkeypatch.setattr(watch, "STOPPED_BEATS", 3)
    monkeypatch.setattr(watch, "GRACE_S", 1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_of_one_rank_ends_all(kind, tmp_path):
    outcome = run_fault(kind, tmp_path)
    assert outcome.seconds < 15, outcome  # as docs promise
    assert len(outcome.messages) == 1, outcome
    assert all(status in (1, 3, -signal.SIGKILL) for status in outcome.statuses), outcome


def train(rank: int, kind: str, folder: Path) -> None:
    """Take steps for ever: rounds in turn, each adding to what the one before it left."""
    ranks = Ranks.of_environment()
    control = Control.open(ranks, GIVE_UP_S)
    with Watch.open(ranks, control) as watched:
        memory = NodeMemory.open(ranks, control, Signals.num_bytes(ranks.local_size, 2) + DATA_BYTES)
        signals = Signals.over(memory.tensor, ranks.local_size, 2, ranks.local_rank)
        watched.follow(signals)
        data = memory.tensor[-DATA_BYTES:]
        (folder / f"begun{rank}").touch()
        for step in range(10**9):
            faulty = rank == FAULTY and step == STEP and kind in ("raises", "exits", "another batch")
            if faulty:
                (folder / "fault").touch()
            if faulty and kind == "raises":
                raise FloatingPointError("this rank fails")
            if faulty and kind == "exits":
                sys.exit(3)
            if kind == KINDS[-1] and rank != FAULTY and step == 3:
                compute_for_long()
            control.agree(b"other" if faulty else b"same", "batch")
            for turn in range(step * NUM_ROUNDS + rank, (step + 1) * NUM_ROUNDS, ranks.size):
                if turn:
                    signals.wait(0, (turn - 1) % ranks.size, turn)
                data += 1
                signals.signal(0, turn + 1)


def compute_for_long() -> None:
    end_s = time.monotonic() + GIVE_UP_S
    while time.monotonic() < end_s:
        sum(range(1000))


def run_rank(environment: dict[str, str], kind: str, folder: Path) -> None:
    """A process's main function: what it writes to stderr is kept, and its end is that of a script."""
    os.environ.update(environment)
    rank, status = int(environment["RANK"]), 1
    os.dup2(os.open(folder / f"stderr{rank}", os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115, as long as the process
    try:
        train(rank, kind, folder)
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    sys.stderr.flush()
    os._exit(status)


def run_fault(kind: str, folder: Path) -> Outcome:
    """Start the ranks, let the fault come, and see what came of it; nothing of them is left in the end."""
    store, context, port = os.memfd_create("ranks"), multiprocessing.get_context("fork"), free_port()
    processes: list[Any] = []
    for rank in range(SIZE):
        environment = environment_of(rank, SIZE, port) | {STORE_VARIABLE: f"/proc/self/fd/{store}"}
        processes.append(context.Process(target=run_rank, args=(environment, kind, folder)))
        processes[-1].start()
    try:
        await_files(folder, [f"begun{rank}" for rank in range(SIZE)])
        number = DONE_TO_IT.get(kind.split(maxsplit=1)[0])
        if number is None:
            await_files(folder, ["fault"])
        else:
            time.sleep(0.1)
            os.kill(processes[FAULTY].pid, number)
        begin_s = time.monotonic()
        for process in processes:
            process.join(max(0.0, begin_s + GIVE_UP_S / 2 - time.monotonic()))
        seconds = time.monotonic() - begin_s
        lines = [line for rank in range(SIZE) for line in (folder / f"stderr{rank}").read_text().splitlines()]
        messages = [line for line in lines if MESSAGE.match(line)]
        return Outcome(seconds, messages, [process.exitcode for process in processes])
    finally:
        os.close(store)
        for process in processes:
            process.kill()
            process.join()


def await_files(folder: Path, names: list[str]) -> None:
    end_s = time.monotonic() + GIVE_UP_S
    while not all((folder / name).exists() for name in names):
        assert time.monotonic() < end_s, f"the ranks did not come to {names}"
        time.sleep(0.005)
