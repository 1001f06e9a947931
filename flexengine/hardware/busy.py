"""Tells whether other work holds a machine's cores, so that what is measured now would be remembered too slow."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

SAMPLES, SAMPLE_ROUNDS = 60, 20_000
"""Some 60 ms of the same work, longer than the slices that a scheduler gives to processes in turn."""
MOST_LOAD = 1.0
"""Processes that want to run, a core, averaged over the last minute: with more, ours waits for some of them."""
MOST_SPREAD = 1.3
"""Mean over least seconds of the same work: about 1.05 on an idle machine, 2 where one other process shares a core."""


def busy_signs(load: float | None = None, samples: Sequence[float] | None = None) -> str:
    """Say what shows that others hold the cores; empty where nothing does.

    load: of the last minute, a core; samples: seconds of equal pieces of work. Both are read where they are not given.
    """
    load = os.getloadavg()[0] / (os.cpu_count() or 1) if load is None else load
    samples = samples or _equal_work()
    spread = sum(samples) / len(samples) / min(samples)
    signs = [f"{load:.1f} processes want each core"] if load > MOST_LOAD else []
    signs += [f"the same work took {spread:.1f} times its least"] if spread > MOST_SPREAD else []
    return " and ".join(signs)


def _equal_work() -> list[float]:
    """Seconds of equal pieces of work of one core."""
    seconds = []
    for _ in range(SAMPLES):
        start_s = time.perf_counter()
        for _ in range(SAMPLE_ROUNDS):
            pass
        seconds.append(time.perf_counter() - start_s)
    return seconds
