"""Copies, event waits and event records, handed to the CUDA driver in one call without the interpreter lock.

`open_transfers` gives the engine of csrc/transfer.cpp, or the same on torch's streams where it is not built. A prepared
batch is submitted at once, in order; events mean what CUDA says.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from flexengine.native import library
from flexengine.native.transfer_operations import (
    Await,
    Copy,
    Operation,
    PreparedOperations,
    Raise,
    Transfers,
    Wait,
    WordValue,
    byte_address,
    check_ranges,
)
from flexengine.native.transfer_torch import TorchTransfers

DRIVER_PATH = "libcuda.so.1"
PIECE_BYTES = 16 << 20  # 0.3 ms at 55 GB/s, some hundred times what issuing a piece takes


def open_transfers(device: torch.device) -> Transfers:
    """The transfer engine of a CUDA device: native where the library is built and the driver found, else torch's."""
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # makes the device's context current on this thread
        try:
            return NativeTransfers()
        except (OSError, ValueError) as error:
            cost = "every copy and event is a call from Python, so that steps may take several times what is predicted"
            library.fallback_notice("transfers", f"{cost} ({error})")
            return TorchTransfers(device)


class _Operation(ctypes.Structure):
    """`Operation` of csrc/transfer.cpp."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("kind", "stream", "event", "target", "source", "num_bytes")]


_OPERATION_BYTES = ctypes.sizeof(_Operation)
_COPY, _WAIT, _RECORD, _AWAIT, _RAISE = range(5)


class NativeTransfers:
    """`Transfers` over csrc/transfer.cpp, on the calling thread's CUDA context.

    driver_path: the driver's library. piece_bytes: copies are cut into such pieces.
    Raises: OSError without native library or driver; ValueError for a size below 1.
    """

    def __init__(self, driver_path: str = DRIVER_PATH, piece_bytes: int = PIECE_BYTES) -> None:
        if piece_bytes < 1:
            raise ValueError(f"piece_bytes is {piece_bytes}; expected at least 1")
        self._call = _functions()
        handle = ctypes.c_void_p()
        self._check("open", self._call["open"](driver_path.encode(), piece_bytes, ctypes.byref(handle)))
        assert handle.value is not None, "an engine that opened has an address"
        self._engine = handle.value
        self._close = weakref.finalize(self, _close, self._call["close"], self._engine, os.getpid())

    def create_events(self, count: int, timing: bool = False, blocking: bool = False) -> list[int]:
        events = (ctypes.c_uint64 * count)()
        self._check("create_events", self._call["create_events"](self._engine, count, timing, blocking, events))
        return list(events)

    def release_events(self, events: Sequence[int]) -> None:
        addresses = (ctypes.c_uint64 * len(events))(*events)
        self._check("release_events", self._call["release_events"](self._engine, len(events), addresses))

    def prepare(self, operations: Iterable[Operation]) -> PreparedOperations:
        listed = list(operations)
        ends = {id(t): t for o in listed if isinstance(o, Copy) for t in (o.target, o.source)}
        addresses = {key: byte_address(end) for key, end in ends.items()}
        rows = (_Operation * len(listed))(*[_row(operation, addresses) for operation in listed])
        return PreparedOperations(rows, len(listed), tuple(t for t in ends.values() if isinstance(t, torch.Tensor)))

    def word_address(self, host_address: int) -> int | None:
        function = library.bind("flex_transfer_word_address", _POINTER, ctypes.c_uint64, _POINTER)
        if function is None:
            return None
        found = ctypes.c_uint64()
        self._check("word_address", function(self._engine, host_address, ctypes.byref(found)))
        return found.value or None

    def set_words(self, prepared: PreparedOperations, words: Iterable[tuple[int, WordValue]]) -> None:
        for index, (address, value) in words:
            row = prepared.operations[index]
            row.target, row.source = address, value

    def set_copies(self, prepared: PreparedOperations, copies: Iterable[tuple[int, Copy]]) -> None:
        addresses = {id(tensor): byte_address(tensor) for tensor in prepared.tensors}
        for index, copy in copies:
            prepared.operations[index] = _row(copy, addresses)

    def submit(self, prepared: PreparedOperations, first: int = 0, last: int | None = None) -> None:
        last = prepared.num_operations if last is None else last
        assert 0 <= first <= last <= prepared.num_operations, (first, last, prepared.num_operations)
        start = ctypes.addressof(prepared.operations) + first * _OPERATION_BYTES
        self._check("submit", self._call["submit"](self._engine, start, last - first))

    def synchronize(self, event: int) -> None:
        self._check("synchronize", self._call["synchronize"](self._engine, event))

    def elapsed_s(self, start: int, end: int) -> float:
        seconds = ctypes.c_double()
        self._check("elapsed", self._call["elapsed"](self._engine, start, end, ctypes.byref(seconds)))
        return seconds.value

    def close(self) -> None:
        self._close()

    @staticmethod
    def _check(what: str, status: int) -> None:
        if status != 0:
            library.check(status, f"transfers: {what}")


_POINTER = ctypes.c_void_p
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "open": (ctypes.c_char_p, ctypes.c_uint64, _POINTER),
    "close": (_POINTER,),
    "create_events": (_POINTER, ctypes.c_uint64, ctypes.c_int, ctypes.c_int, _POINTER),
    "release_events": (_POINTER, ctypes.c_uint64, _POINTER),
    "submit": (_POINTER, _POINTER, ctypes.c_uint64),
    "synchronize": (_POINTER, ctypes.c_uint64),
    "elapsed": (_POINTER, ctypes.c_uint64, ctypes.c_uint64, _POINTER),
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


def _row(operation: Operation, addresses: dict[int, int]) -> tuple[int, ...]:
    stream = operation.stream.cuda_stream
    if isinstance(operation, (Await, Raise)):
        return (_AWAIT if isinstance(operation, Await) else _RAISE, stream, 0, 0, 0, 0)
    if not isinstance(operation, Copy):
        return (_WAIT if isinstance(operation, Wait) else _RECORD, stream, operation.event, 0, 0, 0)
    check_ranges(operation)
    target = addresses[id(operation.target)] + operation.target_offset
    source = addresses[id(operation.source)] + operation.source_offset
    return (_COPY, stream, 0, target, source, operation.num_bytes)
