"""`train --gpus N`: starts this command once for every GPU of this machine, and looks after these processes, the ranks.

Ranks meet in a file without a name, so nothing listens for them on any network and nothing of them stays on a disk.
Each is a session of its own. When one is killed, stopped or fails, all end; who was lost is told in one line.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType

from flexengine.parallel.hub import TOKEN_VARIABLE
from flexengine.parallel.parent import LAUNCHER_VARIABLE, LEFT, LOST, STATUS_VARIABLE, STORE_VARIABLE
from flexengine.parallel.processes import is_stopped

SHUTDOWN_S = 3600.0
"""How long ranks that are asked to stop may take to finish their step and save."""
END_S = 6.0
"""How long the other ranks may take to end by themselves after one was lost."""
ONE_REQUEST_S = 1.0
"""Signals within this time are one request to stop, as schedulers and terminals send several; every Ctrl-C counts."""
BEAT_S = 0.1
STOPPED_BEATS = 30  # 3 s; counted while this process runs, so that a job stopped and continued as a whole goes on
FAILED = 1
"""Exit status of a run that lost a rank."""
IMPATIENT = 3
"""Signals to stop after which ranks are killed: the first one lets them finish their step, the second one does not."""

_FORWARDED = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,
}


def is_rank(environment: Mapping[str, str] | None = None) -> bool:
    """Whether this process is one of several ranks already, as torchrun or `launch` starts them."""
    environment = os.environ if environment is None else environment
    return environment.get("WORLD_SIZE", "1").strip() not in ("", "1")


def launch(num_gpus: int, arguments: Sequence[str]) -> int:
    """Run Python with `arguments` as `num_gpus` ranks of this machine; returns the exit status of the run.

    A signal reaches all ranks, which save where they are if the run makes checkpoints; the third one kills them. When
    a rank fails, the others end, too. Order: in the main thread, whose end ends the ranks.
    """
    with ExitStack() as stack:
        run = _Run()
        stack.callback(run.close)
        stack.enter_context(_handling(run.asked))
        run.start(num_gpus, arguments)
        while not run.ended:
            time.sleep(BEAT_S)
            run.look()
        return run.status()


@contextmanager
def _handling(asked: list[signal.Signals]) -> Iterator[None]:
    """Note signals to stop in `asked`, but for those that this process was started to ignore, as nohup does."""
    last_s = -ONE_REQUEST_S

    def note(number: int, _: FrameType | None) -> None:
        nonlocal last_s
        before_s, last_s = last_s, time.monotonic()
        if number == signal.SIGINT or last_s > before_s + ONE_REQUEST_S:
            asked.append(_FORWARDED[signal.Signals(number)])

    before = {number: signal.getsignal(number) for number in _FORWARDED}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


class _Rank:
    """A process, and what it has told: that it left the others in order, that it ends in order."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.left = self.ends = False
        self.stopped_beats = 0

    @property
    def runs(self) -> bool:
        """Whether it has not been seen to end."""
        return self.process.returncode is None

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, and is still there to be waited for."""
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    @property
    def chose_its_end(self) -> bool:
        """Whether it has ended in order, and not because another one was lost."""
        return self.ends and self.process.returncode >= 0 and (self.left or self.process.returncode != LOST)

    def kill(self) -> None:
        """End it, and what it has started: it leads a group of processes."""
        with suppress(OSError):  # there is nothing of it any more
            os.killpg(self.process.pid, signal.SIGKILL)


class _Run:
    """The ranks of one run. asked: signals to stop as they arrive."""

    def __init__(self) -> None:
        self.asked: list[signal.Signals] = []
        self._ranks: list[_Rank] = []
        self._ended: list[_Rank] = []  # in the order in which they told it
        self._num_sent = 0
        self._failed = self._lost = False
        self._ends_s = float("inf")
        self._store = os.memfd_create("flexengine-store")
        self._told, self._pipe = os.pipe()
        os.set_blocking(self._told, False)

    def start(self, count: int, arguments: Sequence[str]) -> None:
        """Start the ranks. What asks them to stop meanwhile reaches those that were started."""
        token = secrets.token_hex(32)
        for rank in range(count):
            if self.asked:
                return
            numbers = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": count}
            told = {LAUNCHER_VARIABLE: os.getpid(), STATUS_VARIABLE: self._pipe, TOKEN_VARIABLE: token}
            told[STORE_VARIABLE] = f"/proc/self/fd/{self._store}"
            environment = {"OMP_NUM_THREADS": "1", **os.environ}  # as torchrun does; updates have their own number
            process = subprocess.Popen(
                [sys.executable, *arguments],
                env={**environment, **{name: str(value) for name, value in (numbers | told).items()}},
                stdin=subprocess.DEVNULL,
                pass_fds=(self._store, self._pipe),
                start_new_session=True,  # a terminal's Ctrl-C reaches ranks through this process alone
            )
            self._ranks.append(_Rank(process))

    @property
    def ended(self) -> bool:
        """Whether all ranks have ended."""
        return not any(rank.runs for rank in self._ranks)

    def look(self) -> None:
        """See who has ended or is stopped, pass on what was asked, and end ranks that had time to end by themselves."""
        for number, rank in enumerate(self._ranks):
            if rank.runs and rank.has_ended:
                self._see_end(number, rank)
        self._look_for_stopped()
        self._forward()
        if time.monotonic() > self._ends_s:
            self._kill()

    def status(self) -> int:
        """The exit status of the run: that of the first failing rank; FAILED where one was lost.

        Of a run that was asked to stop, that which rank 0 chose, else the signal's, which is told here.
        """
        if self.asked and not self._lost:
            if self._ranks and self._ranks[0].chose_its_end:
                return self._ranks[0].process.returncode
            _say(f"{self.asked[0].name} has ended the run")
            return 128 + self.asked[0]
        failed = [rank.process.returncode for rank in self._ended if rank.process.returncode]
        own = [status for status in failed if status != LOST]
        return FAILED if self._lost else (*own, *failed, 0)[0]

    def close(self) -> None:
        """Let nothing of the ranks remain."""
        self._kill()
        for rank in self._ranks:
            rank.process.wait()
        for descriptor in (self._store, self._told, self._pipe):
            os.close(descriptor)

    def _see_end(self, number: int, rank: _Rank) -> None:
        self._listen()
        rank.kill()  # what it has started; its own number means no other process yet
        code = rank.process.wait()
        if (code < 0 or not rank.ends) and -code not in self.asked:
            self._lose(f"rank {number} (process {rank.process.pid}) {_end_in_words(code)}")
        elif code != 0 and not rank.left:
            self._fail()

    def _listen(self) -> None:
        """Take in what ranks have told."""
        text = b""
        with suppress(BlockingIOError):
            while piece := os.read(self._told, 1 << 16):
                text += piece
        for line in text.decode().splitlines():
            number, word = line.split()
            rank = self._ranks[int(number)]
            if word == LEFT:
                rank.left = True
            else:
                rank.ends = True
                self._ended.append(rank)

    def _look_for_stopped(self) -> None:
        stopped = [rank.runs and is_stopped(rank.process.pid) for rank in self._ranks]
        for number, rank in enumerate(self._ranks):
            rank.stopped_beats = rank.stopped_beats + 1 if stopped[number] and not all(stopped) else 0
            if rank.stopped_beats >= STOPPED_BEATS:
                pid = rank.process.pid
                self._lose(f"rank {number} (process {pid}) was stopped by a signal, and the others cannot go on")
                rank.kill()  # it would not hear of SIGTERM

    def _lose(self, message: str) -> None:
        """Tell of a rank that was lost, unless it is because of one that failed before."""
        if not self._failed:
            _say(message)
            self._lost = True
        self._fail()

    def _fail(self) -> None:
        self._failed = True
        self._end_soon(END_S)

    def _forward(self) -> None:
        for number in self.asked[self._num_sent :]:
            self._num_sent += 1
            self._end_soon(SHUTDOWN_S)
            for rank in (rank for rank in self._ranks if rank.runs):
                os.kill(rank.process.pid, number)  # which is its number until it is seen to have ended
            if self._num_sent >= IMPATIENT:
                self._kill()

    def _end_soon(self, seconds: float) -> None:
        self._ends_s = min(self._ends_s, time.monotonic() + seconds)

    def _kill(self) -> None:
        self._failed = True  # whoever ends by this has not failed
        for rank in self._ranks:
            if rank.runs:
                rank.kill()


def _end_in_words(code: int) -> str:
    if code >= 0:
        return f"has ended with status {code} and no word of why"
    name = signal.Signals(-code).name if -code in {*signal.Signals} else f"signal {-code}"
    reason = ", as the system does when memory is exhausted" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{reason}"


def _say(message: str) -> None:
    with suppress(OSError, ValueError):  # nobody reads it
        print(f"flexengine: {message}", file=sys.stderr, flush=True)
