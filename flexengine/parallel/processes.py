"""Processes of this machine: whether one has ended or is stopped, and its end."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

from flexengine.native.proc_files import read_text

_STOPPED = ("T", "t")  # by a signal, or by a debugger
_STATE, _FLAGS = 0, 6  # fields of /proc/PID/stat after the command's name
_EXITING = 0x4  # PF_EXITING of include/linux/sched.h


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
        """Whether it runs no more code: it has ended, also as a zombie, or the system takes its memory back.

        The latter takes seconds where much of it is page-locked or on a GPU.
        """
        return bool(self._poll.poll(0)) or bool(int(self._status(_FLAGS) or 0) & _EXITING)

    @property
    def stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it."""
        return self._status(_STATE) in _STOPPED

    def _status(self, field: int) -> str:
        """A field of /proc/PID/stat, empty where the system shows none."""
        fields = read_text(Path(f"/proc/{self.pid}/stat")).rpartition(")")[2].split()
        return fields[field] if field < len(fields) else ""

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
