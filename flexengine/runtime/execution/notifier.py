"""Tells other ranks what has ended on this rank's GPU: a thread waits for events, so that the host goes on issuing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from flexengine.runtime.execution.progress import IssueProgress
from flexengine.schedule.commands import Command


class CompletionNotifier:
    """Calls `tell` for commands, in order, when each has ended.

    ended: blocks until a command that has been issued has ended on the GPU. Order: join before the same events are
    recorded again, so before the program is issued anew.
    """

    def __init__(
        self, commands: Iterable[Command], ended: Callable[[int], None], tell: Callable[[Command], None]
    ) -> None:
        self._commands, self._ended, self._tell = list(commands), ended, tell
        self._progress, self._abandoned, self._failure = IssueProgress(), False, None
        # no daemon: at the end of the process Python waits for it, before the arenas go
        self._thread = threading.Thread(target=self._run, name="flexengine-notifier")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def issued(self, index: int) -> None:
        """Note that the host has issued all commands up to this one."""
        self._progress.issued(index)

    def abandon(self) -> None:
        """End without what has not been issued. Blocks until then."""
        self._abandoned = True
        self._progress.wake()
        self._end()

    def join(self) -> None:
        """Block until all is told. Raises RuntimeError from what went wrong."""
        self._end()
        if self._failure is not None:
            raise RuntimeError(f"other ranks could not be told what has ended here: {self._failure}") from self._failure

    def _end(self) -> None:
        if self._thread.ident is not None:  # else something interrupted the start
            self._thread.join()

    def _run(self) -> None:
        try:
            for command in self._commands:
                if not self._progress.reaches(command.index, lambda: self._abandoned):
                    return
                self._ended(command.index)
                self._tell(command)
        except BaseException as failure:
            self._failure = failure
