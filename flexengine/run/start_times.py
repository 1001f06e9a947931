"""How long a run took from its command to the end of its first step, and what it did meanwhile."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

STARTED_AT = 19
"""Where the time of a process's start stands in /proc/self/stat, counted from behind its name, which may have blanks:
https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html."""

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class StartTimes:
    """Seconds of the parts of a start, by name, in the order in which they began."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._told = False

    def part(self, name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
        """Have a function's calls count as the part of this name."""

        def counted(function: Callable[P, T]) -> Callable[P, T]:
            @wraps(function)
            def call(*args: P.args, **keywords: P.kwargs) -> T:
                began_s = time.monotonic()
                try:
                    return function(*args, **keywords)
                finally:
                    self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began_s

            return call

        return counted

    def end_of_step(self, step_s: float) -> None:
        """Tell how long the start took when the first step of this process has ended."""
        if not self._told:
            self._told = True
            logger.info(self.describe(process_age_s(), step_s))

    def describe(self, total_s: float, step_s: float) -> str:
        """The seconds of the start and of its parts in one line."""
        parts = {**self.seconds, "first step": step_s}
        parts["all else"] = max(0.0, total_s - sum(parts.values()))
        told = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items())
        return f"from the command to the end of the first step: {total_s:.1f} s ({told})"


START = StartTimes()
"""Those of this process."""
_IMPORTED_S = time.monotonic()


def process_age_s() -> float:
    """Seconds since this process started; since this module was imported where the system does not say."""
    with suppress(OSError, ValueError, IndexError):
        values = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(values[STARTED_AT]) / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - _IMPORTED_S
