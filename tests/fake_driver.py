"""csrc/tests/fake_cuda.cpp from Python: a CUDA driver without a GPU, whose streams tests hold, fail and read back."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

from flexengine.native import library
from flexengine.native.transfer import NativeTransfers

SOURCE = Path(__file__).resolve().parents[1] / "csrc" / "tests" / "fake_cuda.cpp"
TIMEOUT_S = 60.0  # of waits that a broken engine would never end


class LoggedCopy(NamedTuple):
    """A copy that has run: the handle of its stream, addresses, bytes."""

    stream: int
    target: int
    source: int
    num_bytes: int


class PlainStream(NamedTuple):
    """A stream by its CUstream handle."""

    cuda_stream: int


class FakeDriver:
    """Controls and log of the one fake device of this process; its functions are explained in fake_cuda.cpp."""

    def __init__(self, folder: tempfile.TemporaryDirectory) -> None:
        self._folder = folder  # holds the file as long as engines may open it
        self.path = str(Path(folder.name) / "libfake_cuda.so")
        command = [_compiler(), "-std=c++17", "-O1", "-shared", "-fPIC", "-pthread", str(SOURCE), "-o", self.path]
        subprocess.run(command, check=True, capture_output=True, text=True)
        self.library = ctypes.CDLL(self.path)
        for name in ("fake_stream", "fake_log_size"):
            getattr(self.library, name).restype = ctypes.c_uint64
        for name in ("fake_await_blocked", "fake_await_calls"):
            getattr(self.library, name).restype = ctypes.c_int

    def reset(self) -> None:
        self.library.fake_reset()

    def open(self, **sizes: int) -> NativeTransfers:
        return NativeTransfers(self.path, **sizes)

    def stream(self) -> PlainStream:
        return PlainStream(self.library.fake_stream())

    def memcpy_async(self, target: int, source: int, num_bytes: int, stream: PlainStream) -> int:
        """The driver's own call, for work that does not come from the engine; returns its status."""
        numbers = (target, source, num_bytes, stream.cuda_stream)
        return self.library.cuMemcpyAsync(*map(ctypes.c_uint64, numbers))

    def hold(self, stream: PlainStream) -> None:
        self.library.fake_hold(ctypes.c_uint64(stream.cuda_stream), 1)

    def release(self, stream: PlainStream) -> None:
        self.library.fake_hold(ctypes.c_uint64(stream.cuda_stream), 0)

    def lag(self, stream: PlainStream, lagging: bool) -> None:
        self.library.fake_lag(ctypes.c_uint64(stream.cuda_stream), int(lagging))

    def memory_operations(self, supported: bool) -> None:
        self.library.fake_memory_operations(int(supported))

    def pause(self, paused: bool) -> None:
        self.library.fake_pause(int(paused))

    def settle(self) -> None:
        self.library.fake_settle()

    def block(self, blocking: bool) -> None:
        self.library.fake_block(int(blocking))

    def await_blocked(self) -> bool:
        return bool(self.library.fake_await_blocked(ctypes.c_double(TIMEOUT_S)))

    def await_calls(self, name: str, count: int) -> bool:
        return bool(self.library.fake_await_calls(name.encode(), count, ctypes.c_double(TIMEOUT_S)))

    def fail(self, name: str, code: int, calls_before: int = 0) -> None:
        self.library.fake_fail(name.encode(), calls_before, code)

    def calls(self, name: str) -> int:
        return self.library.fake_calls(name.encode())

    def set_context(self, context: int | None) -> None:
        self.library.fake_set_context(ctypes.c_void_p(context))

    def log(self) -> list[LoggedCopy]:
        """Copies in the order in which they ran."""
        entry = (ctypes.c_uint64 * 4)()
        copies = []
        for index in range(self.library.fake_log_size()):
            self.library.fake_log_entry(ctypes.c_uint64(index), entry)
            copies.append(LoggedCopy(*entry))
        return copies


def _compiler() -> str:
    found = shutil.which("g++") or shutil.which("c++")
    if found is None or library.load() is None:
        pytest.skip("needs a C++ compiler and the native library")
    return found


@functools.cache
def _driver() -> FakeDriver:
    return FakeDriver(tempfile.TemporaryDirectory(prefix="fake_cuda"))


def fake_driver() -> FakeDriver:
    """The driver, compiled once per process and reset; skips the test without a compiler or the native library."""
    driver = _driver()
    driver.reset()
    return driver
