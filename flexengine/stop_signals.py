"""Signals that ask a run to stop: the step is finished first, so that a checkpoint can be saved.

Schedulers send SIGTERM before they kill, or what SBATCH_SIGNAL=USR1@300 names. A second Ctrl-C stops at once.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """Notes the first of STOP_SIGNALS in `received` while it is entered; a Ctrl-C after it raises KeyboardInterrupt.

    Where enabled is False, or outside of the main thread, which alone may handle signals, nothing changes. tells: say
    that the step is finished first; of several ranks, which all receive the signal, one does.
    """

    def __init__(self, enabled: bool = True, tells: bool = True) -> None:
        self.received: signal.Signals | None = None
        self._tells = tells
        self._enabled = enabled and threading.current_thread() is threading.main_thread()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in STOP_SIGNALS if self._enabled else ():
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before.clear()

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.received is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self.received = signal.Signals(number)
        if self._tells:  # not print: the handler may have interrupted one
            os.write(2, f"{self.received.name}: the step under way is finished first; Ctrl-C stops at once\n".encode())
