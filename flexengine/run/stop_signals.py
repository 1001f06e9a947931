"""Signals that ask a run to stop: the step is finished first, so that a checkpoint can be saved.

Schedulers send SIGTERM before they kill, or what SBATCH_SIGNAL=USR1@300 names; SIGHUP is SIGTERM from a terminal that
goes away. A second signal stops at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
ONE_REQUEST_S = 1.0
"""Signals within this time are one request to stop: a shell sends a SIGHUP of its own beside the terminal's, `timeout`
its signal to the process and to the group, systemd SIGHUP after SIGTERM. A person's second Ctrl-C counts at once."""


class StopSignals:
    """Notes the first of STOP_SIGNALS in `received` while it is entered; one after it raises KeyboardInterrupt.

    Where enabled is False, or outside of the main thread, which alone may handle signals, nothing changes. A SIGHUP
    that is ignored stays so: nohup has the run outlive its terminal. SIGUSR1 announces a SIGTERM, which is then the
    first. tells: say
    that the step is finished first; of several ranks, which all receive the signal, one does.
    """

    def __init__(self, enabled: bool = True, tells: bool = True) -> None:
        self.received: signal.Signals | None = None
        self._received_s = 0.0
        self._tells = tells
        self._enabled = enabled and threading.current_thread() is threading.main_thread()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in STOP_SIGNALS if self._enabled else ():
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before.clear()

    def _note(self, number: int, _: FrameType | None) -> None:
        before, now_s = self.received, time.monotonic()
        if before is not None and (before, number) != (signal.SIGUSR1, signal.SIGTERM):
            if number == signal.SIGINT or now_s > self._received_s + ONE_REQUEST_S:
                raise KeyboardInterrupt
            return
        self.received, self._received_s = signal.Signals(number), now_s
        if self._tells:  # not print: the handler may have interrupted one
            text = f"{self.received.name}: the step under way is finished first; a second signal stops at once\n"
            with suppress(OSError):  # the terminal may be gone
                os.write(2, text.encode())
