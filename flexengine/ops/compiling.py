"""Has kernels that will be launched compile at once, in processes of their own (`kernels/ahead.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from flexengine.ops.cards import multiplies_in_kernels
from flexengine.ops.ready_compiler import READY

if TYPE_CHECKING:
    from flexengine.kernels.ahead import Compilation


def begin_compiling(
    device: torch.device, work: Callable[..., object], *arguments: object, room_bytes: int | None = None
) -> Compilation | None:
    """Begin to compile what a call will launch on a device, which another process makes; None where no such card is.

    work: a function of a module, which launches kernels inside `without_memory`; arguments: values for JSON.
    room_bytes: host memory that this may take; None: no bound.
    """
    if not compiles(device):
        return None
    from flexengine.kernels import ahead  # noqa: PLC0415 (Triton is imported when first used)

    card, ready = ahead.card_of(device), READY.process
    return ahead.Compilation(card, work, *arguments, room_bytes=room_bytes, compiler=ready)


def compiles(device: torch.device) -> bool:
    """Whether kernels are compiled ahead for a device."""
    return device.type == "cuda" and multiplies_in_kernels(device)


@contextmanager
def without_memory() -> Iterator[None]:
    """Have all tensors that are made inside take no memory, and hold nothing; products leave given results alone."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415 (it takes a second and 70 MiB)

    with FakeTensorMode(allow_non_fake_inputs=True), ExitStack() as products:
        for name in ("mm", "addmm", "_scaled_mm"):
            products.enter_context(patch.object(torch, name, _leaving_results(getattr(torch, name))))
        yield


def _leaving_results(product: Callable[..., Any]) -> Callable[..., Any]:
    """A product that leaves its result as it is, where that is given.

    torch takes products of tensors without memory apart, and up to 2.11 fails at those that sum in a wider type.
    """

    def call(*operands: Any, out: Any = None, **options: Any) -> Any:
        return product(*operands, **options) if out is None else out

    return call
