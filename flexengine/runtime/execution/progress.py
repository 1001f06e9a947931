"""Tells a thread how far the host has issued a program, without taking the interpreter from the host for nothing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable


class IssueProgress:
    """The last command that the host has issued, for one thread that waits for some of them.

    A thread that wakes up takes the interpreter from the host, which costs it more than to issue a command does. So the
    thread is woken for the command that it waits for, not for those before.
    """

    def __init__(self) -> None:
        self._issued, self._awaited = -1, sys.maxsize
        self._changed = threading.Condition()

    def issued(self, index: int) -> None:
        """Note that the host has issued all commands up to this one."""
        self._issued = index
        if index >= self._awaited:
            self.wake()

    def wake(self) -> None:
        """Have the thread look again at what else ends its wait."""
        with self._changed:
            self._changed.notify()

    def reaches(self, index: int, over: Callable[[], bool]) -> bool:
        """Block until the host has issued a command, or `over`; returns whether it has issued it.

        Order: whoever changes what `over` returns calls `wake` afterwards.
        """
        with self._changed:
            self._awaited = index  # before it looks at what is issued, as the host sets that before it looks at this
            self._changed.wait_for(lambda: over() or self._issued >= index)
            self._awaited = sys.maxsize
        return self._issued >= index
