"""How many threads work on host memory: those of torch, unless the process was told otherwise."""

import os

import torch

VARIABLE = "OMP_NUM_THREADS"
FEW = 4
"""Fewer threads than the cores by more than this factor are told: they do not keep a host's memory busy."""
_count: int | None = None


def set_host_threads(count: int | None) -> None:
    """Have updates on the CPU and the touching of pages use `count` threads, or with None as many as torch has.

    What they write does not depend on it. torch's own threads, whose number sets the order of sums, stay as they are.
    """
    global _count  # noqa: PLW0603, a process has one number, as torch has
    if count is not None and count < 1:
        raise ValueError(f"{count} threads; expected at least 1")
    _count = count


def host_threads() -> int:
    """The number of threads that work on host memory."""
    return torch.get_num_threads() if _count is None else _count


def few_threads() -> str:
    """Say that OMP_NUM_THREADS leaves updates on the CPU few of this process's cores; empty where it does not.

    One rank of several has its share of the cores whatever torchrun sets, and is told nothing.
    """
    threads, cores = host_threads(), len(os.sched_getaffinity(0))
    alone = os.environ.get("LOCAL_WORLD_SIZE", "1") == "1"
    if VARIABLE not in os.environ or not alone or FEW * threads >= cores:
        return ""
    chosen = os.environ[VARIABLE]
    return f"{VARIABLE}={chosen} leaves updates on the CPU {threads} of {cores} cores: unset it for faster steps"
