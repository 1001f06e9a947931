"""Restricts torch to deterministic kernels."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def deterministic_kernels(enabled: bool) -> Iterator[None]:
    """Allow only kernels that torch knows to be deterministic, where `enabled`."""
    if not enabled:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic with it only
    try:
        torch.use_deterministic_algorithms(True)
        # by default it also fills every torch.empty, which costs a kernel for each temporary
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
