"""How many threads work on host memory: those of torch, unless the process was told otherwise."""

import torch

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
