"""Compiles kernels in processes beside each other before they are timed, so that Triton's cache has their code."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from typing import TypeVar

T = TypeVar("T")

MOST_PROCESSES = 14


def compile_all(compile_some: Callable[[Sequence[T]], object], trials: Sequence[T]) -> None:
    """Have processes launch a share of the trials each; one that dies takes only its share's head start with it."""
    processes = max(1, min(MOST_PROCESSES, (os.cpu_count() or 1) - 1))
    context = get_context("spawn")
    workers = [context.Process(target=compile_some, args=(trials[i::processes],)) for i in range(processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
