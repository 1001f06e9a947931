"""Runs commands of the CPU, and copies from and to a drive, on threads of their own, while the host issues others."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial

import torch

from flexengine.native.drive import DriveError
from flexengine.runtime.execution.progress import IssueProgress
from flexengine.schedule.commands import DRIVE_STREAMS, Command, Program, Stream, cpu_priority


def nothing_else(command: Command) -> None:
    """Of commands that wait for others of their work alone."""


def nothing_awaited(command: Command) -> bool:
    """Of commands that await no other rank."""
    return True


class CpuWork:
    """Runs a program's commands of the CPU once it is started; `call` must need nothing that changes before `join`.

    A command may run when `ready`, which blocks until what it waits for has ended, has returned for it and for those
    before it; that is asked on a thread of its own, when the host has issued so far (`issued`). None: all may run,
    but for what waits for others of these commands. Of those of the CPU that may run the first by `cpu_priority` does;
    those of a drive's streams run in order, on a thread each. num_threads: of torch, in calls. before: work that ends
    first, but that a drive's copies for the GPU wait for those of its commands alone that `earlier` names. arrived:
    waits a moment for other ranks, and tells whether a command need wait no more; asked on that thread, too.
    """

    def __init__(
        self,
        program: Program,
        commands: list[Command],
        call: Callable[[Command], None],
        num_threads: int,
        ready: Callable[[Command], None] | None = None,
        before: CpuWork | None = None,
        earlier: Mapping[int, Collection[int]] | None = None,
        arrived: Callable[[Command], bool] = nothing_awaited,
    ) -> None:
        self.program = program
        self.spans: dict[int, tuple[float, float]] = {}
        self._commands = [command for command in commands if command.stream is Stream.CPU]
        copies = {s: [command for command in commands if command.stream is s] for s in DRIVE_STREAMS}
        self._all, self._ours, self._call, self._num_threads = commands, {c.index for c in commands}, call, num_threads
        all_issued = False
        if ready is None and (len(self._all) > len(self._commands) or any(c.awaits for c in self._commands)):
            ready, all_issued = nothing_else, True
        self._ready, self._arrived, self._before, self._earlier = ready, arrived, before, earlier or {}
        self._abandoned, self._dropped, self._failure = False, False, None
        self._lost: RuntimeError | None = None
        self._progress = {stream: IssueProgress() for stream in (Stream.CPU, *(s for s in copies if copies[s]))}
        if all_issued:
            self.issued(sys.maxsize)
        self._waiting: list[Command] = list(self._commands) if ready is None else []  # may run
        # two, so that no thread wakes up for nothing, which takes the interpreter from who issues
        self._lock = threading.Lock()
        self._able, self._ended = threading.Condition(self._lock), threading.Condition(self._lock)
        # no daemons: at the end of the process Python waits for them, before the arenas go
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), name="flexengine-cpu")
            for work in ((self._run,) if ready is None else (self._watch, self._run))
        ]
        self._threads += [
            threading.Thread(target=self._guarded, args=(partial(self._carry, commands),), name=f"flexengine-{stream}")
            for stream, commands in copies.items()
            if commands
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def issued(self, index: int) -> None:
        """Note that the host has issued all commands up to this one."""
        for progress in self._progress.values():
            progress.issued(index)

    def abandon(self) -> None:
        """End after the running command. Blocks until then; later waits raise a failure."""
        self._abandoned = True
        self._wake_all()
        self._end_threads()

    def drop(self) -> None:
        """End after the running command; what has not run counts as ended. Blocks until then.

        Raises RuntimeError from what made a command fail.
        """
        self._dropped = True
        self._wake_all()
        self.join()
        now = time.perf_counter()
        for command in self._all:
            self.spans.setdefault(command.index, (now, now))

    def wait(self, indices: Iterable[int]) -> None:
        """Block until those of our commands that have these indices have ended. Raises RuntimeError from what made one
        fail."""
        with self._ended:
            wanted = self._ours.intersection(indices)
            self._ended.wait_for(lambda: self._failure is not None or all(i in self.spans for i in wanted))
        self._raise_failure()

    def join(self) -> None:
        """Block until all have ended. Raises RuntimeError from what made a command fail."""
        self._end_threads()
        self._raise_failure()

    def _end_threads(self) -> None:
        for thread in self._threads:
            if thread.ident is not None:  # else something interrupted the start
                thread.join()

    def _wake_all(self) -> None:
        with self._lock:
            self._able.notify_all()
            self._ended.notify_all()
        for progress in self._progress.values():
            progress.wake()

    def _raise_failure(self) -> None:
        if isinstance(self._failure, DriveError):
            error = DriveError(self._failure.errno, self._failure.strerror)
            error.again, self._failure.again = self._failure.again, True
            raise error from self._failure
        if self._lost is not None and self._failure is self._lost:
            raise self._lost
        if self._failure is not None:
            raise RuntimeError(f"work of the CPU failed half-way: {self._failure}") from self._failure

    # -- on the threads ----------------------------------------------------------------------------------------------

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as failure:
            self._failure = self._failure or failure
            self._wake_all()

    def _watch(self) -> None:
        for command in self._commands:
            if not self._may_run(command):
                return
            with self._able:
                self._waiting.append(command)
                self._able.notify()

    def _may_run(self, command: Command) -> bool:
        """Block until a command may run; False where it shall not."""
        assert self._ready is not None
        others = [wait for wait in command.waits if wait not in self._ours]
        self._progress[command.stream].reaches(max(others, default=-1), self._over)
        if self._over():
            return False
        self._ready(command)
        try:
            while not self._over() and not self._arrived(command):
                pass
        except RuntimeError as lost:  # another rank, of which whoever waits for us is told as it is
            self._lost = lost
            raise
        with self._ended:
            ours = [wait for wait in command.waits if wait in self._ours]
            self._ended.wait_for(lambda: self._over() or all(wait in self.spans for wait in ours))
        return not self._over()

    def _carry(self, commands: list[Command]) -> None:
        """Run a drive's copies of one direction in order."""
        before, of_gpu = self._before, commands[0].stream in (Stream.DRIVE_FETCH, Stream.DRIVE_STORE)
        if before is not None and not of_gpu:
            before.join()
        for command in commands:
            if before is not None and of_gpu:
                before.wait(self._earlier.get(command.index, ()))
            if not self._may_run(command):
                if self._abandoned:
                    raise RuntimeError("it was interrupted")
                return
            self._call_timed(command)

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)  # of calls from this thread
        if self._before is not None:
            self._before.join()
            self._before = None
        for _ in self._commands:
            with self._able:
                self._able.wait_for(lambda: self._over() or self._waiting)
                if self._abandoned:
                    raise RuntimeError("it was interrupted")
                if self._failure is not None or self._dropped:
                    return
                command = min(self._waiting, key=cpu_priority)
                self._waiting.remove(command)
            self._call_timed(command)

    def _call_timed(self, command: Command) -> None:
        start = time.perf_counter()
        self._call(command)
        with self._ended:
            self.spans[command.index] = (start, time.perf_counter())
            self._ended.notify_all()

    def _over(self) -> bool:
        return self._abandoned or self._dropped or self._failure is not None
