"""Does a fault of one rank end all of them within 10 seconds, with one message and nothing left? Counts, as JSON.

python -m bench.rank_faults --faults 30 --ranks 3 --json out.json
python -m bench.rank_faults --train --faults 30 --ranks 3 --json out.json

Ranks are processes of this machine that pass pieces of shared memory round as a step does, agree on a batch before each
step, and compute a little. One of them is killed, stopped, interrupted, raises, exits, or has another batch, at a
random moment; or it is killed while another one computes for long. With --train the ranks train a small model, as
`flexengine train` does, and one of them is killed, stopped, or raises in a random command.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from bench.environment import write_json
from flexengine.config import TrainConfig
from flexengine.parallel.control import Control
from flexengine.parallel.node_memory import NodeMemory
from flexengine.parallel.ranks import Ranks
from flexengine.parallel.signals import Signals
from flexengine.parallel.watch import Watch
from flexengine.runtime.command_handlers import CommandHandlers
from flexengine.runtime.update import UpdateSettings
from flexengine.schedule.commands import Command, Program
from flexengine.trainer import train as train_run

KINDS = ("killed", "stopped", "interrupted", "raises", "exits", "another batch", "killed while another computes")
KINDS_OF_TRAINING = ("killed in training", "stopped in training", "a command raises")
MESSAGE = re.compile(r"flexengine: |\w+(Error|Interrupt)\b")
"""How a line begins that says what was wrong; what torch's store logs of connections that ended is not counted."""
LIMIT_S = 10.0
DATA_BYTES = 4 << 20
NUM_ROUNDS = 6
GIVE_UP_S = 60.0


class Fault(NamedTuple):
    """What happens to which rank: in which step for what it does itself (in training, at which of its commands), after
    how long for what is done to it."""

    kind: str
    rank: int
    step: int
    after_s: float
    transport: str = "auto"


class Outcome(NamedTuple):
    """What came of a fault. seconds: from the fault to the end of the last rank. statuses: of exits, by rank."""

    kind: str
    rank: int
    seconds: float
    messages: list[str]
    left: list[str]
    statuses: list[int | None]

    @property
    def is_right(self) -> bool:
        ended = all(status in (1, 3, -signal.SIGKILL) for status in self.statuses)
        return self.seconds < LIMIT_S and len(self.messages) == 1 and not self.left and ended


# ---- a rank -----------------------------------------------------------------------------------------------------


def train(rank: int, fault: Fault, folder: str) -> None:
    """Take steps for ever: rounds in turn, each adding to what the one before it left."""
    ranks = Ranks.of_environment()
    control = Control.open(ranks, GIVE_UP_S)
    with Watch.open(ranks, control) as watch:
        memory = NodeMemory.open(ranks, control, Signals.num_bytes(ranks.local_size, 2) + DATA_BYTES)
        signals = Signals.over(memory.tensor, ranks.local_size, 2, ranks.local_rank)
        watch.follow(signals)
        data = memory.tensor[-DATA_BYTES:]
        Path(folder, f"begun{rank}").touch()
        for step in range(10**9):
            fail_in(fault, rank, step, folder)
            control.agree(b"other" if is_other_batch(fault, rank, step, folder) else b"same", "batch")
            for turn in range(step * NUM_ROUNDS + rank, (step + 1) * NUM_ROUNDS, ranks.size):
                if turn:
                    signals.wait(0, (turn - 1) % ranks.size, turn)
                data += 1
                signals.signal(0, turn + 1)


def fail_in(fault: Fault, rank: int, step: int, folder: str) -> None:
    """Do what the fault says that this rank does itself."""
    if fault.kind == KINDS[-1] and rank != fault.rank and step == 3:
        compute_for_long()
    if rank != fault.rank or step != fault.step or fault.kind not in ("raises", "exits"):
        return
    Path(folder, "fault").touch()
    if fault.kind == "raises":
        raise FloatingPointError("this rank fails")
    sys.exit(3)


def is_other_batch(fault: Fault, rank: int, step: int, folder: str) -> bool:
    other = (fault.kind, fault.rank, fault.step) == ("another batch", rank, step)
    if other:
        Path(folder, "fault").touch()
    return other


def compute_for_long() -> None:
    end_s = time.monotonic() + GIVE_UP_S
    while time.monotonic() < end_s:
        sum(range(1000))


def run_rank(rank: int, size: int, port: int, fault: Fault, folder: str) -> None:
    """A process's main function: what it writes to stderr is kept, and its end is that of a script."""
    numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"})
    os.dup2(os.open(Path(folder, f"stderr{rank}"), os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115, as long as the process
    status = 1
    try:
        (train_model if fault.kind in KINDS_OF_TRAINING else train)(rank, fault, folder)
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    sys.stderr.flush()
    os._exit(status)


def train_model(rank: int, fault: Fault, folder: str) -> None:
    """Train a small model without end; a file says when the first commands run."""
    options: dict[str, Any] = {
        "model": "preset:demo", "data_source": "synthetic", "steps": 10**6, "max_seq_len": 64, "dtype": "float32",
        "max_global_batch_tokens": 512, "device": "cpu", "chunk_tokens": 64, "round_tokens": 64, "logging": "warning",
        "max_gpu_mem_gib": 0.3, "max_host_mem_gib": 8.0, "output_dir": str(Path(folder, "run")),
        "transport": fault.transport,
    }  # fmt: skip
    run, count = CommandHandlers.run, 0

    def counted(self: CommandHandlers, program: Program, settings: UpdateSettings | None, command: Command) -> None:
        nonlocal count
        count += 1
        if count == 50:  # in the first round
            Path(folder, f"begun{rank}").touch()
        if count == 50 + fault.step and (fault.kind, fault.rank) == (KINDS_OF_TRAINING[2], rank):
            Path(folder, "fault").touch()
            raise FloatingPointError(f"{command.label} fails")
        run(self, program, settings, command)

    CommandHandlers.run = counted
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        sys.exit(train_run(TrainConfig(**options)))


# ---- a fault ----------------------------------------------------------------------------------------------------


def run_fault(fault: Fault, size: int) -> Outcome:
    """Start the ranks, let the fault come, and see what is left; nothing is, in the end."""
    named, opened = shared_names(), open_files()
    with tempfile.TemporaryDirectory(prefix="rank_faults") as folder, ranks_of(fault, size, folder) as processes:
        await_files(folder, [f"begun{rank}" for rank in range(size)])
        inodes = set().union(*(mapped(process.pid) for process in processes))
        begin_s = bring(fault, processes[fault.rank].pid, folder)
        for process in processes:
            process.join(max(0.0, begin_s + GIVE_UP_S / 2 - time.monotonic()))
        seconds = time.monotonic() - begin_s
        left = [f"process of rank {rank}" for rank, process in enumerate(processes) if process.is_alive()]
        left += [f"memory {inode} in process {pid}" for inode, pid in still_mapped(inodes)]
        texts = [Path(folder, f"stderr{rank}").read_text().strip() for rank in range(size)]
        messages = [line for text in texts for line in text.splitlines() if MESSAGE.match(line)]
        statuses = [process.exitcode for process in processes]
    left += [f"/dev/shm/{name}" for name in sorted(shared_names() - named)]
    left += [f"descriptor {number}" for number in sorted(open_files() - opened)]
    return Outcome(fault.kind, fault.rank, seconds, messages, left, statuses)


def shared_names() -> set[str]:
    """The files of /dev/shm that are ours."""
    names = [name for name in os.listdir("/dev/shm") if Path("/dev/shm", name).exists()]
    return {name for name in names if Path("/dev/shm", name).stat().st_uid == os.getuid()}


def open_files() -> set[str]:
    """Descriptors of this process, which starts the ranks; pipes and events of processes that have ended are gone."""
    return {name for name in os.listdir("/proc/self/fd") if Path("/proc/self/fd", name).exists()}


@contextmanager
def ranks_of(fault: Fault, size: int, folder: str) -> Iterator[list[Any]]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    context = multiprocessing.get_context("fork")  # torch is loaded
    processes = [context.Process(target=run_rank, args=(rank, size, port, fault, folder)) for rank in range(size)]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()


def bring(fault: Fault, pid: int, folder: str) -> float:
    """Bring the fault about, or wait for it; returns when it came."""
    if fault.kind in ("raises", "exits", "another batch", KINDS_OF_TRAINING[2]):
        await_files(folder, ["fault"])
    else:
        time.sleep(fault.after_s)
        number = {"stopped": signal.SIGSTOP, "interrupted": signal.SIGINT}.get(fault.kind.split()[0], signal.SIGKILL)
        os.kill(pid, number)
    return time.monotonic()


def await_files(folder: str, names: list[str]) -> None:
    end_s = time.monotonic() + GIVE_UP_S
    while not all(Path(folder, name).exists() for name in names):
        if time.monotonic() > end_s:
            raise TimeoutError(f"the ranks did not come to {names}")
        time.sleep(0.005)


def mapped(pid: int | str) -> set[str]:
    """The files of memory of ranks that a process maps, by inode."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {line.split()[4] for line in lines if "/memfd:flexengine" in line}


def still_mapped(inodes: set[str]) -> list[tuple[str, str]]:
    pids = [name for name in os.listdir("/proc") if name.isdecimal()]
    return [(inode, pid) for pid in pids for inode in mapped(pid) & inodes]


def random_fault(dice: random.Random, kind: str, size: int) -> Fault:
    most = 2000 if kind in KINDS_OF_TRAINING else 100
    return Fault(kind, dice.randrange(size), dice.randrange(5, most), dice.uniform(0.05, 0.6))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", action="store_true", help="faults of ranks that train a small model")
    parser.add_argument("--transport", default="auto", help="how ranks that train share weights and gradients")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kinds = KINDS_OF_TRAINING if options.train else KINDS
    dice, outcomes = random.Random(options.seed), []
    for number in range(options.faults):
        fault = random_fault(dice, kinds[number % len(kinds)], options.ranks)._replace(transport=options.transport)
        outcomes.append(run_fault(fault, options.ranks))
        last = outcomes[-1]
        print(
            f"{'right' if last.is_right else 'WRONG'}: {last.kind}, {last.seconds:.1f} s, {last.messages},"
            f" statuses {last.statuses}, left {last.left}",
            flush=True,
        )
    if options.json is not None:
        found = {
            "faults": len(outcomes),
            "ranks": options.ranks,
            "seed": options.seed,
            "right": sum(outcome.is_right for outcome in outcomes),
            "longest_s": round(max(outcome.seconds for outcome in outcomes), 2),
            "outcomes": [outcome._asdict() for outcome in outcomes],
        }
        write_json(options.json, found)
    sys.exit(not all(outcome.is_right for outcome in outcomes))


if __name__ == "__main__":
    main()
