"""Words of shared memory by which processes signal each other, in the memory order that C++ promises.

Without the library the plain loads and stores of numpy take its place on x86-64, whose memory order suffices.
"""

import ctypes
import platform
import time
from typing import Literal, Protocol

import torch
from torch import Tensor

from flexengine.native import library

Result = Literal["reached", "aborted", "late"]
_RESULTS: tuple[Result, ...] = ("reached", "aborted", "late")  # as numbered in csrc/signals.cpp
_NAP_S = 50e-6
_SPINS = 200


class Words(Protocol):
    """Words of a table uint32 [rows, columns]."""

    def store(self, row: int, column: int, value: int) -> None:
        """Write a word after everything that this thread wrote or read before."""
        ...

    def load(self, row: int, column: int) -> int:
        """Read a word before everything that this thread does afterwards."""
        ...

    def wait(self, column: int, rows: range, value: int, abort_column: int, seconds: float) -> Result:
        """Wait until a column has reached `value` in `rows`, or the abort column is not 0 in any row."""
        ...


def open_words(table: Tensor) -> Words:
    """The words of a contiguous uint32 table, native where the library is built.

    Raises: ValueError for another kind of tensor; RuntimeError without the library where plain stores may be seen out
    of order.
    """
    if table.dtype != torch.uint32 or table.dim() != 2 or not table.is_contiguous():
        raise ValueError(f"a table of signals is contiguous uint32 [rows, columns], got {table.dtype} {table.shape}")
    if library.bind("flex_signal_store", ctypes.c_void_p, ctypes.c_uint32) is not None:
        return _NativeWords(table)
    if platform.machine() not in ("x86_64", "AMD64"):
        raise RuntimeError(
            f"signals between processes need the native library on {platform.machine()}; install a C++ compiler and"
            " flexengine again"
        )
    return _PlainWords(table)


class _NativeWords:
    def __init__(self, table: Tensor) -> None:
        self._table = table  # holds the memory
        self._num_rows, self._columns = table.shape
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        store = library.bind("flex_signal_store", pointer, ctypes.c_uint32)
        load = library.bind("flex_signal_load", pointer, pointer)
        wait = library.bind(
            "flex_signal_wait", pointer, count, count, ctypes.c_uint32, pointer, count, count, ctypes.c_double, pointer
        )
        assert store is not None, "csrc/signals.cpp exports all three"
        assert load is not None, "csrc/signals.cpp exports all three"
        assert wait is not None, "csrc/signals.cpp exports all three"
        self._store, self._load, self._wait = store, load, wait

    def store(self, row: int, column: int, value: int) -> None:
        library.check(self._store(self._address(row, column), value), "signal")

    def load(self, row: int, column: int) -> int:
        value = ctypes.c_uint32()
        library.check(self._load(self._address(row, column), ctypes.addressof(value)), "signal")
        return value.value

    def wait(self, column: int, rows: range, value: int, abort_column: int, seconds: float) -> Result:
        words, aborts, result = self._address(rows.start, column), self._address(0, abort_column), ctypes.c_int()
        stride, place = self._columns, ctypes.addressof(result)
        status = self._wait(words, stride, len(rows), value, aborts, stride, self._num_rows, seconds, place)
        library.check(status, "signal")
        return _RESULTS[result.value]

    def _address(self, row: int, column: int) -> int:
        return self._table.data_ptr() + 4 * (row * self._columns + column)


class _PlainWords:
    def __init__(self, table: Tensor) -> None:
        self._words = table.numpy()

    def store(self, row: int, column: int, value: int) -> None:
        self._words[row, column] = value

    def load(self, row: int, column: int) -> int:
        return int(self._words[row, column])

    def wait(self, column: int, rows: range, value: int, abort_column: int, seconds: float) -> Result:
        end_s, tries = time.monotonic() + seconds, 0
        while True:
            reached = (self._words[rows.start : rows.stop, column] >= value).all()
            if self._words[:, abort_column].any():  # read last: who aborts sets it first, then raises all semaphores
                return "aborted"
            if reached:
                return "reached"
            if time.monotonic() >= end_s:
                return "late"
            tries += 1
            time.sleep(_NAP_S if tries > _SPINS else 0)
