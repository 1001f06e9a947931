"""The operations of a transfer engine, and what both engines (native and torch's) offer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class StreamHandle(Protocol):
    """What names a CUDA stream: torch.cuda.Stream does."""

    @property
    def cuda_stream(self) -> int: ...


class RawMemory(NamedTuple):
    """Memory that no tensor of this process describes, as of another GPU: its address here, and its bytes."""

    address: int
    num_bytes: int


class Copy(NamedTuple):
    """`num_bytes` bytes from one uint8 tensor to another; offsets in bytes. Host memory should be page-locked.

    Only the native engine takes raw memory.
    """

    stream: StreamHandle
    target: Tensor | RawMemory
    target_offset: int
    source: Tensor | RawMemory
    source_offset: int
    num_bytes: int


class Wait(NamedTuple):
    """The stream goes on when the last record of `event` before this has been reached."""

    stream: StreamHandle
    event: int


class Record(NamedTuple):
    """The event is reached when all before it on the stream has finished."""

    stream: StreamHandle
    event: int


class Await(NamedTuple):
    """The stream goes on when a word of memory has reached a value, which `set_words` gives, as it gives the word."""

    stream: StreamHandle


class Raise(NamedTuple):
    """A word of memory gets a value when all before it on the stream has finished; `set_words` gives both."""

    stream: StreamHandle


Operation = Copy | Wait | Record | Await | Raise


class WordValue(NamedTuple):
    """A word of memory, by its address, and the value that an operation awaits (it or a larger one) or writes."""

    address: int
    value: int


class PreparedOperations(NamedTuple):
    """Operations made ready by `prepare`; holds their tensors."""

    operations: Any
    num_operations: int
    tensors: tuple[Tensor, ...]


class Transfers(Protocol):
    """A transfer engine of one device. One thread at a time uses it, but for `synchronize`, which alone blocks."""

    def create_events(self, count: int, timing: bool = False, blocking: bool = False) -> list[int]:
        """New events; `timing` makes them fit for elapsed_s.

        blocking: `synchronize` sleeps and leaves its core to others; else it looks again and again, and goes on sooner.
        """
        ...

    def release_events(self, events: Sequence[int]) -> None:
        """Free events; nothing that is issued later may name them."""
        ...

    def prepare(self, operations: Iterable[Operation]) -> PreparedOperations:
        """Check operations and lay them out for the driver, once for many submits.

        Raises: ValueError for tensors that are not contiguous uint8, or ranges outside of them.
        """
        ...

    def word_address(self, host_address: int) -> int | None:
        """The device's address of a word of page-locked host memory; None where streams cannot wait for words."""
        ...

    def set_words(self, prepared: PreparedOperations, words: Iterable[tuple[int, WordValue]]) -> None:
        """Say what prepared operations `Await` and `Raise` mean, by their numbers, from the next submit on."""
        ...

    def set_copies(self, prepared: PreparedOperations, copies: Iterable[tuple[int, Copy]]) -> None:
        """Put copies in the place of others among prepared operations, by their numbers, from the next submit on.

        They are between tensors that `prepare` got. Raises: ValueError as it does.
        """
        ...

    def submit(self, prepared: PreparedOperations, first: int = 0, last: int | None = None) -> None:
        """Submit operations [first, last) of those prepared (all by default), in order, each to its stream.

        Raises: ValueError for a wait on an event that nothing has recorded; OSError with the driver's words. What came
        before the failing operation has been issued.
        """
        ...

    def synchronize(self, event: int) -> None:
        """Block until the last record of an event has been reached; at once if there is none.

        Another thread may call it beside the one that uses the engine, for an event whose record has been submitted
        and that is not recorded again meanwhile.
        """
        ...

    def elapsed_s(self, start: int, end: int) -> float:
        """Seconds between two reached events made with `timing`."""
        ...

    def close(self) -> None:
        """Free the engine and its events; a second call does nothing. What was submitted still runs to its end.

        In a forked child, which has no device, nothing is done.
        """
        ...


def byte_address(tensor: Tensor | RawMemory) -> int:
    """Where a tensor's bytes begin. Raises: ValueError unless it is contiguous uint8."""
    if isinstance(tensor, RawMemory):
        return tensor.address
    if tensor.dtype != torch.uint8 or not tensor.is_contiguous():
        raise ValueError(
            f"copies are between contiguous uint8 tensors, got {tensor.dtype} of strides {tensor.stride()}"
        )
    return tensor.data_ptr()


def check_ranges(copy: Copy) -> None:
    """Raise ValueError unless both ranges of a copy lie inside their tensors."""
    for name, tensor, offset in (
        ("target", copy.target, copy.target_offset),
        ("source", copy.source, copy.source_offset),
    ):
        size = tensor.num_bytes if isinstance(tensor, RawMemory) else tensor.numel()
        if offset < 0 or copy.num_bytes < 0 or offset + copy.num_bytes > size:
            raise ValueError(
                f"a copy of {copy.num_bytes} bytes at byte {offset} does not fit its {name} of {size} bytes"
            )
