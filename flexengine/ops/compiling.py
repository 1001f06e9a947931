"""Has kernels that will be launched compile at once, in processes of their own (`kernels/ahead.py`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from flexengine.ops.cards import multiplies_in_kernels

if TYPE_CHECKING:
    from flexengine.kernels.ahead import Compilation, Compiler


def begin_compiling(
    device: torch.device, work: Callable[..., object], *arguments: object, room_bytes: int | None = None,
    compiler: Compiler | None = None,
) -> Compilation | None:  # fmt: skip
    """Begin to compile what a call will launch on a device, which another process makes; None where no such card is.

    work: a function of a module, which launches kernels inside `without_memory`; arguments: values for JSON.
    room_bytes: host memory that this may take; None: no bound. compiler: of `ready_compiler`.
    """
    if not _compiles(device):
        return None
    from flexengine.kernels import ahead  # noqa: PLC0415 (Triton is imported when first used)

    return ahead.Compilation(ahead.card_of(device), work, *arguments, room_bytes=room_bytes, compiler=compiler)


def ready_compiler(device: torch.device, work: Callable[..., object]) -> Compiler | None:
    """Have a process import what compiling takes, and wait for a `begin_compiling` with it; None where none would
    compile."""
    if not _compiles(device):
        return None
    from flexengine.kernels import ahead  # noqa: PLC0415 (as above)

    return ahead.Compiler(work.__module__) if ahead.spare_processes() else None


def _compiles(device: torch.device) -> bool:
    return device.type == "cuda" and multiplies_in_kernels(device)


def without_memory() -> AbstractContextManager[object]:
    """Have all tensors that are made inside take no memory, and hold nothing."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415 (it takes a second and 70 MiB)

    return FakeTensorMode(allow_non_fake_inputs=True)
