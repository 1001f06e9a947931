"""Copies, event waits and event records, handed to the CUDA driver in one call without the interpreter lock.

`open_transfers` gives the engine of csrc/transfer.cpp, or the same on torch's streams where it is not built.
- `submit` hands a prepared batch over at once, in order; events mean what CUDA says. Programs are issued this way.
- `post` queues bulk copies outside a program. At most PIECES_IN_FLIGHT pieces of them are in the driver's hands, so
  that a submitted copy of the same direction waits for those only (csrc/transfer.cpp has the reasons).
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from flexengine.native import library

DRIVER_PATH = "libcuda.so.1"
PIECE_BYTES = 16 << 20  # 0.3 ms at 55 GB/s, some hundred times what issuing a piece takes
PIECES_IN_FLIGHT = 2  # one under way, one to follow without a gap


class StreamHandle(Protocol):
    """What names a CUDA stream: torch.cuda.Stream does."""

    @property
    def cuda_stream(self) -> int: ...


class PlainStream(NamedTuple):
    """A stream by its CUstream handle; torch.cuda.ExternalStream makes one for kernels of it."""

    cuda_stream: int


class Direction(IntEnum):
    """Of a posted copy."""

    TO_DEVICE = 0
    TO_HOST = 1


class Copy(NamedTuple):
    """`num_bytes` bytes from one uint8 tensor to another; offsets in bytes. Host memory should be page-locked."""

    stream: StreamHandle
    target: Tensor
    target_offset: int
    source: Tensor
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


Operation = Copy | Wait | Record


class Batch(NamedTuple):
    """Operations made ready by `prepare`; holds their tensors."""

    operations: Any
    num_operations: int
    tensors: tuple[Tensor, ...]


class Transfers(Protocol):
    """A transfer engine of one device. One thread at a time uses it, but for `synchronize`; calls block only where they
    say so."""

    def create_events(self, count: int, timing: bool = False) -> list[int]:
        """New events; `timing` makes them fit for elapsed_s."""
        ...

    def release_events(self, events: Sequence[int]) -> None:
        """Free events; no unfinished post, and nothing that is issued later, may name them."""
        ...

    def prepare(self, operations: Iterable[Operation]) -> Batch:
        """Check operations and lay them out for the driver, once for many submits.

        Raises: ValueError for tensors that are not contiguous uint8, or ranges outside of them.
        """
        ...

    def submit(self, batch: Batch, first: int = 0, last: int | None = None) -> None:
        """Hand over operations [first, last) of a batch (all by default), in order, each to its stream.

        Blocks only where an operation names an event that a post has still to record, until that is handed over.
        Raises: ValueError for a wait on an event that nothing has recorded; OSError with the driver's words, also for
        an earlier post that failed; what came before the failing operation has been issued.
        """
        ...

    def post(self, direction: Direction, operations: Iterable[Operation]) -> int:
        """Queue operations on the bulk stream of a direction (their own streams are ignored); returns a ticket.

        Source and target must not be touched before `wait`. Raises: as submit.
        """
        ...

    def wait(self, direction: Direction, ticket: int) -> None:
        """Block until a post has finished on the device.

        Raises: OSError if it, or one before it in its direction, failed; nothing of the direction runs then any more.
        """
        ...

    def synchronize(self, event: int) -> None:
        """Block until the last record of an event has been reached; at once if there is none.

        Another thread may call it beside the one that uses the engine, for an event whose record has been submitted
        and that is not recorded again meanwhile.

        Raises: OSError if the post that was to record it failed.
        """
        ...

    def elapsed_s(self, start: int, end: int) -> float:
        """Seconds between two reached events made with `timing`."""
        ...

    def urgent_stream(self, direction: Direction) -> StreamHandle:
        """A stream of the highest priority, for submitted copies that are to pass posted ones."""
        ...

    def close(self) -> None:
        """Finish what was posted and what urgent streams were given, and free everything; a second call does nothing.

        Events that are left are freed too. In a forked child, which has neither threads nor device, nothing is done.
        """
        ...


def open_transfers(device: torch.device) -> Transfers:
    """The transfer engine of a CUDA device: native where the library is built and the driver found, else torch's."""
    from flexengine.native.transfer_torch import TorchTransfers  # noqa: PLC0415 - it takes its types from here

    with torch.cuda.device(device):
        torch.cuda.synchronize()  # makes the device's context current on this thread
        try:
            return NativeTransfers()
        except (OSError, ValueError) as error:
            cost = "every copy and event is a call from Python; posted copies are not cut and urgent ones wait for them"
            library.fallback_notice("transfers", f"{cost} ({error})")
            return TorchTransfers(device)


class _Operation(ctypes.Structure):
    """`Operation` of csrc/transfer_engine.h."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("kind", "stream", "event", "target", "source", "num_bytes")]


_OPERATION_BYTES = ctypes.sizeof(_Operation)
_COPY, _WAIT, _RECORD = range(3)


class NativeTransfers:
    """`Transfers` over csrc/transfer.cpp, on the calling thread's CUDA context.

    driver_path: the driver's library. piece_bytes: submitted copies are cut into such pieces too, without being held
    back. Raises: OSError without native library or driver; ValueError for sizes below 1.
    """

    def __init__(
        self,
        driver_path: str = DRIVER_PATH,
        piece_bytes: int = PIECE_BYTES,
        pieces_in_flight: int = PIECES_IN_FLIGHT,
    ) -> None:
        if piece_bytes < 1 or pieces_in_flight < 1:
            raise ValueError(f"piece_bytes is {piece_bytes}, pieces_in_flight {pieces_in_flight}; expected at least 1")
        self._call = _functions()
        handle = ctypes.c_void_p()
        self._check(
            "open", self._call["open"](driver_path.encode(), piece_bytes, pieces_in_flight, ctypes.byref(handle))
        )
        assert handle.value is not None, "an engine that opened has an address"
        self._engine = handle.value
        self._posted: dict[tuple[Direction, int], Batch] = {}  # tensors that a post still reads or writes
        self._close = weakref.finalize(self, _close, self._call["close"], self._engine, os.getpid())

    def create_events(self, count: int, timing: bool = False) -> list[int]:
        events = (ctypes.c_uint64 * count)()
        self._check("create_events", self._call["create_events"](self._engine, count, timing, events))
        return list(events)

    def release_events(self, events: Sequence[int]) -> None:
        addresses = (ctypes.c_uint64 * len(events))(*events)
        self._check("release_events", self._call["release_events"](self._engine, len(events), addresses))

    def prepare(self, operations: Iterable[Operation]) -> Batch:
        listed = list(operations)
        tensors = {id(t): t for o in listed if isinstance(o, Copy) for t in (o.target, o.source)}
        addresses = {key: byte_address(tensor) for key, tensor in tensors.items()}
        rows = (_Operation * len(listed))(*[_row(operation, addresses) for operation in listed])
        return Batch(rows, len(listed), tuple(tensors.values()))

    def submit(self, batch: Batch, first: int = 0, last: int | None = None) -> None:
        last = batch.num_operations if last is None else last
        assert 0 <= first <= last <= batch.num_operations, (first, last, batch.num_operations)
        start = ctypes.addressof(batch.operations) + first * _OPERATION_BYTES
        self._check("submit", self._call["submit"](self._engine, start, last - first))

    def post(self, direction: Direction, operations: Iterable[Operation]) -> int:
        batch = self.prepare(operations)
        ticket = ctypes.c_uint64()
        rows, count = ctypes.addressof(batch.operations), batch.num_operations
        self._check("post", self._call["post"](self._engine, direction, rows, count, ctypes.byref(ticket)))
        self._posted[direction, ticket.value] = batch
        return ticket.value

    def wait(self, direction: Direction, ticket: int) -> None:
        self._check("wait", self._call["wait"](self._engine, direction, ticket))
        for finished in [key for key in self._posted if key[0] == direction and key[1] <= ticket]:
            del self._posted[finished]

    def synchronize(self, event: int) -> None:
        self._check("synchronize", self._call["synchronize"](self._engine, event))

    def elapsed_s(self, start: int, end: int) -> float:
        seconds = ctypes.c_double()
        self._check("elapsed", self._call["elapsed"](self._engine, start, end, ctypes.byref(seconds)))
        return seconds.value

    def urgent_stream(self, direction: Direction) -> PlainStream:
        stream = ctypes.c_uint64()
        self._check("urgent_stream", self._call["urgent_stream"](self._engine, direction, ctypes.byref(stream)))
        return PlainStream(stream.value)

    def close(self) -> None:
        self._close()

    @staticmethod
    def _check(what: str, status: int) -> None:
        if status != 0:
            library.check(status, f"transfers: {what}")


_POINTER = ctypes.c_void_p
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "open": (ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint32, _POINTER),
    "close": (_POINTER,),
    "create_events": (_POINTER, ctypes.c_uint64, ctypes.c_int, _POINTER),
    "release_events": (_POINTER, ctypes.c_uint64, _POINTER),
    "submit": (_POINTER, _POINTER, ctypes.c_uint64),
    "post": (_POINTER, ctypes.c_uint32, _POINTER, ctypes.c_uint64, _POINTER),
    "wait": (_POINTER, ctypes.c_uint32, ctypes.c_uint64),
    "synchronize": (_POINTER, ctypes.c_uint64),
    "elapsed": (_POINTER, ctypes.c_uint64, ctypes.c_uint64, _POINTER),
    "urgent_stream": (_POINTER, ctypes.c_uint32, _POINTER),
}


def _functions() -> dict[str, Callable[..., int]]:
    functions = {}
    for name, arguments in _ARGUMENTS.items():
        function = library.bind(f"flex_transfer_{name}", *arguments)
        if function is None:
            raise OSError("the native library is not built")
        functions[name] = function
    return functions


def _close(close: Callable[..., int], engine: int, process: int) -> None:
    """Free an engine; runs once, from close, when the object is collected, or when the interpreter ends."""
    if os.getpid() == process:
        close(engine)


def byte_address(tensor: Tensor) -> int:
    """Where a tensor's bytes begin. Raises: ValueError unless it is contiguous uint8."""
    if tensor.dtype != torch.uint8 or not tensor.is_contiguous():
        raise ValueError(
            f"copies are between contiguous uint8 tensors, got {tensor.dtype} of strides {tensor.stride()}"
        )
    return tensor.data_ptr()


def _row(operation: Operation, addresses: dict[int, int]) -> tuple[int, ...]:
    stream = operation.stream.cuda_stream
    if not isinstance(operation, Copy):
        return (_WAIT if isinstance(operation, Wait) else _RECORD, stream, operation.event, 0, 0, 0)
    check_ranges(operation)
    target = addresses[id(operation.target)] + operation.target_offset
    source = addresses[id(operation.source)] + operation.source_offset
    return (_COPY, stream, 0, target, source, operation.num_bytes)


def check_ranges(copy: Copy) -> None:
    """Raise ValueError unless both ranges of a copy lie inside their tensors."""
    for name, tensor, offset in (
        ("target", copy.target, copy.target_offset),
        ("source", copy.source, copy.source_offset),
    ):
        if offset < 0 or copy.num_bytes < 0 or offset + copy.num_bytes > tensor.numel():
            raise ValueError(
                f"a copy of {copy.num_bytes} bytes at byte {offset} does not fit its {name} of {tensor.numel()} bytes"
            )
