"""Processes of this machine: whether one has ended or is stopped, and its end."""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress
from pathlib import Path

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
        return bool(self._poll.poll(0)) or bool(int(_status(self.pid, _FLAGS) or 0) & _EXITING)

    @property
    def stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it."""
        return is_stopped(self.pid)

    def kill(self) -> None:
        """End it, even if it is stopped. One that has ended is left alone."""
        try:
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
        except ProcessLookupError:
            return

    def close(self) -> None:
        os.close(self._descriptor)


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped a process."""
    return _status(pid, _STATE) in _STOPPED


def _status(pid: int, field: int) -> str:
    """A field of /proc/PID/stat, empty where the system shows none."""
    fields = list[str]()
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return fields[field] if field < len(fields) else ""


def pid_namespace() -> int:
    """What tells processes apart that number others differently; 0 where the kernel does not say."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
