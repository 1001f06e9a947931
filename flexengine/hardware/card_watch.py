"""Watches a GPU's clock, power and temperature while it works, in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from threading import Event, Lock, Thread
from typing import Self

import torch

from flexengine.hardware.nvml import IDLE, Clocks, gpu_clocks

EVERY_S = 1.0
"""Seconds from one reading to the next: a driver answers in about a millisecond, while kernels are launched."""


class CardWatch:
    """Reads a GPU once in `every_s` seconds until it is closed, beside whatever the caller does.

    On the CPU, and where the driver tells nothing, there is no thread and no reading.
    """

    def __init__(
        self, device: torch.device, every_s: float = EVERY_S, read: Callable[[int], Clocks | None] = gpu_clocks
    ) -> None:
        self._index, self._every_s, self._read = device.index or 0, every_s, read
        self._found: list[Clocks] = []
        self._lock, self._closed = Lock(), Event()
        self._thread = Thread(target=self._watch, name="card-watch", daemon=True)
        if device.type == "cuda" and read(self._index) is not None:
            self._thread.start()

    def take(self) -> list[Clocks]:
        """Give what was read since the last call.

        Moments in which the card waited for work are left out, unless there are no others: its clock is low then
        because nothing needs it.
        """
        with self._lock:
            found, self._found = self._found, []
        return [clocks for clocks in found if IDLE not in clocks.slowed_by] or found

    def close(self) -> None:
        """Read no more. May be called again."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _watch(self) -> None:
        while not self._closed.wait(self._every_s):
            clocks = self._read(self._index)
            if clocks is not None:
                with self._lock:
                    self._found.append(clocks)


def mean_mhz(found: Sequence[Clocks]) -> float:
    """Average the clock of the multiprocessors; 0 where nothing was read."""
    return fmean(clocks.sm_mhz for clocks in found) if found else 0.0
