"""Commands of the CPU on a thread of their own, while the host goes on issuing others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from flexengine.schedule.commands import Command, Program


class CpuWork:
    """Runs commands one after another once it is started; `call` must not need anything that changes before `join`.

    num_threads: of torch, in calls from that thread. ready: blocks until a command may run, called right before it.
    """

    def __init__(
        self,
        program: Program,
        commands: list[Command],
        call: Callable[[Command], None],
        num_threads: int,
        ready: Callable[[Command], None] = lambda command: None,
    ) -> None:
        self.program = program
        self.spans: dict[int, tuple[float, float]] = {}
        self._place = {command.index: place for place, command in enumerate(commands)}
        self._ended, self._failure = 0, None
        self._changed = threading.Condition()
        arguments = (commands, call, num_threads, ready)
        # no daemon: at the end of the process Python waits for it, before the arenas go
        self._thread = threading.Thread(target=self._run, args=arguments, name="flexengine-cpu")

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def wait(self, index: int) -> None:
        """Block until the command with that index has ended. Raises RuntimeError from what made a command fail."""
        place = self._place[index]
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or self._ended > place)
        self._raise_failure()

    def join(self) -> None:
        """Block until all have ended. Raises RuntimeError from what made a command fail."""
        if self._thread.ident is not None:  # else something interrupted the start
            self._thread.join()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"work of the CPU failed half-way: {self._failure}") from self._failure

    def _run(
        self,
        commands: list[Command],
        call: Callable[[Command], None],
        num_threads: int,
        ready: Callable[[Command], None],
    ) -> None:
        torch.set_num_threads(num_threads)  # of calls from this thread
        try:
            for command in commands:
                ready(command)
                start = time.perf_counter()
                call(command)
                self.spans[command.index] = (start, time.perf_counter())
                with self._changed:
                    self._ended += 1
                    self._changed.notify_all()
        except BaseException as failure:
            with self._changed:
                self._failure = failure
                self._changed.notify_all()
