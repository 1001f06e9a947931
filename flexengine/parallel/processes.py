"""Processes of this machine: whether one has ended or is stopped, and its end."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

from flexengine.native.proc_files import read_text

_STOPPED = "Tt"  # by a signal, or by a debugger


class Process:
    """A process, held by a descriptor that never comes to mean another one."""

    def __init__(self, pid: int) -> None:
        """Raises: ProcessLookupError where it has ended already."""
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)

    @property
    def ended(self) -> bool:
        """Whether it has ended, also as a zombie."""
        return bool(self._poll.poll(0))

    @property
    def stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it."""
        status = read_text(Path(f"/proc/{self.pid}/stat"))
        return status.rpartition(")")[2].strip()[:1] in tuple(_STOPPED)

    def kill(self) -> None:
        """End it, even if it is stopped. One that has ended is left alone."""
        try:
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
        except ProcessLookupError:
            return

    def close(self) -> None:
        os.close(self._descriptor)


def pid_namespace() -> int:
    """What tells processes apart that number others differently; 0 where the kernel does not say."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
