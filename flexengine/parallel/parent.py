"""What started this rank: the rank ends soon after that process, from its first line on, and tells it that it ends.

Imports nothing that takes time, as this is the first thing that a rank does.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import select
import signal
import threading
import time
from contextlib import suppress
from typing import NoReturn

LAUNCHER_VARIABLE = "FLEXENGINE_LAUNCHER"
"""Environment variable of a rank that `launch` started: the number of that process. Gone after the first line."""
STATUS_VARIABLE = "FLEXENGINE_STATUS_PIPE"
"""Environment variable: the descriptor of the pipe that `tell` writes to. Gone after the first line."""
STORE_VARIABLE = "FLEXENGINE_STORE"
"""Environment variable: the file that the ranks of one `launch` meet in, which has no name on any disk."""
AGENT_VARIABLE = "TORCHELASTIC_RUN_ID"
"""Set where torchrun's agent started this process."""
LEFT, ENDS = "left", "ends"
"""What a rank tells: it makes no more calls to the others, and no error ended it; it ends in order, whatever the
status, and has said why where it has to."""
LOST = 1
"""Exit status of a process that is ended because another one was lost."""

PARENT_ENDED = "the process that started this rank has ended"

_PR_SET_PDEATHSIG = 1  # include/uapi/linux/prctl.h
_WATCH_S = 8.0  # for a watch to end the run in order, with words


class Parent:
    """The process that started this one, held by a descriptor that never comes to mean another one."""

    def __init__(self, pid: int, is_launcher: bool) -> None:
        """Follow it. Raises: ProcessLookupError where it has ended already."""
        self.is_launcher = is_launcher
        """Whether it is `launch`, which looks after all ranks and tells which one was lost."""
        self.ended = False
        self.watched = False
        """Whether a watch ends this rank in order when the parent ends."""
        self._descriptor = os.pidfd_open(pid)
        if os.getppid() != pid:  # it ended before, and its number means another process
            raise ProcessLookupError
        threading.Thread(target=self._end_with_it, name="flexengine parent", daemon=True).start()

    def _end_with_it(self) -> None:
        select.select([self._descriptor], [], [])
        self.ended = True
        if self.watched:
            time.sleep(_WATCH_S)
        _end_alone()


class _Known:
    parent: Parent | None = None
    pipe: int | None = None


def follow_parent() -> Parent | None:
    """Have this process end soon after the one that started it as a rank; None where nobody did. A second call is free.

    Order: the first line of a rank. Until it has joined the others, a Ctrl-C ends one that `launch` started without a
    word, as `launch` tells of it.
    """
    launcher, pipe = os.environ.pop(LAUNCHER_VARIABLE, None), os.environ.pop(STATUS_VARIABLE, None)
    if _Known.parent is not None or (launcher is None and AGENT_VARIABLE not in os.environ):
        return _Known.parent
    if launcher is not None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if pipe is not None:
        _Known.pipe = int(pipe)
        os.set_inheritable(_Known.pipe, False)
        atexit.register(tell, ENDS)  # which an end by a signal or os._exit passes over
    # The thread of Parent cannot run in a process that is stopped: the kernel lets it go on then.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    try:
        _Known.parent = Parent(os.getppid() if launcher is None else int(launcher), launcher is not None)
    except ProcessLookupError:
        _end_alone()
    return _Known.parent


def tell(word: str) -> None:
    """Tell `launch`, if it started this process, LEFT or ENDS."""
    if _Known.pipe is not None:
        with suppress(OSError):  # it has ended
            os.write(_Known.pipe, f"{os.environ.get('RANK')} {word}\n".encode())


def _end_alone() -> NoReturn:
    if os.environ.get("LOCAL_RANK") == "0":
        os.write(2, f"flexengine: {PARENT_ENDED}\n".encode())
    os._exit(LOST)
