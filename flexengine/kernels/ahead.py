"""Compiles Triton's kernels before they are launched, several at a time, in processes of their own.

A launch compiles what it needs where Triton's cache on disk has none of it, one kernel after the other. Here a process
without a card calls what will launch them on tensors without memory, notes the launches, and has others compile these
into that cache. Nothing else changes: a launch that was not noted, or that failed there, is compiled as ever.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Self, cast
from unittest.mock import patch

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from flexengine.kernels import attention_tilings
from flexengine.kernels.compiler import Compiler, spare_processes

OWN_PACKAGE = "flexengine"
LONGEST_S = 120.0
"""After so long nobody waits any more for a process that hangs."""
YIELDING = 5
"""How nice the process is that compiles: rates of the host's cores are measured beside it."""

logger = logging.getLogger(__name__)


class Card(NamedTuple):
    """What launchers ask of a card."""

    capability: tuple[int, int]
    multi_processor_count: int
    shared_memory_per_block_optin: int

    @property
    def target(self) -> GPUTarget:
        """What Triton compiles for."""
        return GPUTarget("cuda", 10 * self.capability[0] + self.capability[1], 32)


def card_of(device: torch.device) -> Card:
    """Ask a CUDA device."""
    found = torch.cuda.get_device_properties(device)
    return Card((found.major, found.minor), found.multi_processor_count, found.shared_memory_per_block_optin)


class Launch(NamedTuple):
    """A kernel, by the module and name of its function, as one launch needs it: what Triton's own `preload` takes."""

    module: str
    name: str
    specialization: str


class CompilingDriver:
    """What Triton asks a driver before it compiles for a target; it launches nothing."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return -1 - int(self._target.arch)  # no card's: Triton keeps what it compiled by device

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


@contextmanager
def recording(card: Card, each: Callable[[Launch], object] = lambda _: None) -> Iterator[dict[Launch, None]]:
    """Have launches only noted, in order, each once, and tensors without memory be as if on this card.

    each: called with every launch when it is noted.
    Order: for a process that uses no card, and no other thread.
    """
    found: dict[Launch, None] = {}
    run = JITFunction.run

    def only_compiles(self: JITFunction, *args: Any, **options: Any) -> Any:
        return run(self, *args, **{**options, "grid": (1,), "warmup": True})

    def noted(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        launch = Launch(fn.module, fn.name, compile["specialization_data"])
        if launch not in found:
            found[launch] = None
            _ = fn.jit_function.cache_key  # depends on which kernels had theirs before: here the order is a step's
            each(launch)
        return True  # Triton then compiles nothing

    properties = SimpleNamespace(**card._asdict())
    with (
        driver_for(card.target),
        patch.object(JITFunction, "run", only_compiles),
        patch.object(knobs.runtime, "jit_cache_hook", noted),
        patch.object(FakeTensor, "is_cuda", property(lambda self: True), create=True),
        # what tensors of an aligned arena would say
        patch.object(FakeTensor, "data_ptr", lambda x: x.storage_offset() * x.element_size(), create=True),
        patch.object(attention_tilings, "HOPPER_BYTES", card.shared_memory_per_block_optin),
        patch.object(torch.cuda, "get_device_properties", lambda *_: properties),
        patch.object(torch.cuda, "get_device_capability", lambda *_: card.capability),
    ):
        yield found


@contextmanager
def driver_for(target: GPUTarget) -> Iterator[None]:
    """Have Triton compile for a target, whatever card is there."""
    before = driver._active  # pyright: ignore[reportPrivateUsage]
    driver.set_active(cast("Any", CompilingDriver(target)))
    try:
        yield
    finally:
        driver._active = before  # pyright: ignore[reportPrivateUsage]


def state_of_compiler() -> tuple[object, ...]:
    """What decides whether Triton's cache on disk has what an earlier process compiled: place, versions, sources."""
    sources = ((path.name, path.stat()) for path in sorted(Path(__file__).parent.glob("*.py")))
    return knobs.cache.dir, triton.__version__, *((name, state.st_size, state.st_mtime_ns) for name, state in sources)


class Compilation:
    """Compiles all that a call launches, in a process that has others do it, until `wait` or `close`.

    work, arguments: a function of a module of this package, and values for JSON, with which it is called. What it
    launches takes tensors without memory (`ops/compiling.py`).
    room_bytes: host memory that nothing else needs meanwhile; None: no bound. processes: how many compile at once;
    None: `spare_processes`. compiler: a process that waits to be asked, and that others ask later, unless this one
    closes it, as where it is not waited for; None: one of its own.
    """

    def __init__(
        self, card: Card, work: Callable[..., object], *arguments: object, room_bytes: int | None = None,
        processes: int | None = None, compiler: Compiler | None = None,
    ) -> None:  # fmt: skip
        self._began_s, self._is_shared = time.monotonic(), compiler is not None
        self._compiler = compiler
        processes = spare_processes(room_bytes) if processes is None else processes
        if not processes:
            self.close()
        else:
            self._compiler = compiler or Compiler(work.__module__)
            self._compiler.ask((card, (work.__module__, work.__qualname__), arguments, processes))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self) -> bool:
        """Wait until all is compiled that can be; gives up after LONGEST_S, and returns False."""
        if self._compiler is None:
            return False
        failed = self._compiler.wait(LONGEST_S)
        if self._is_shared and failed is not None:
            self._compiler = None
        self.close()
        took_s = time.monotonic() - self._began_s
        logger.info("kernels were compiled within %.1f s%s", took_s, ", but not all of them" if failed != 0 else "")
        return failed is not None

    def close(self) -> None:
        """End what still compiles. May be called again."""
        if self._compiler is not None:
            self._compiler.close()
            self._compiler = None


def compile_all(card: Card, place: tuple[str, str], arguments: Sequence[object], processes: int) -> int:
    """Compile what a call launches, in processes forked from this one; returns how many failed, 1 for the call.

    place: module of this package and name of the function that is called.
    """
    (module, name), forks = place, Forks(processes)
    with recording(card, forks.begin):
        try:
            assert module.startswith(f"{OWN_PACKAGE}."), module
            getattr(importlib.import_module(module), name)(*arguments)
        except Exception as error:
            print(f"{module}.{name}: {error!r}", file=sys.stderr)
            forks.failed += 1
    forks.wait()
    return forks.failed


class Forks:
    """Compiles launches while others are noted, each in a process forked from this one, so many at a time."""

    def __init__(self, most: int) -> None:
        self.failed = 0
        self._most, self._running = most, deque[int]()

    def begin(self, launch: Launch) -> None:
        """Begin with one. Order: inside `recording`, as a launch is noted."""
        if len(self._running) == self._most:
            self._end_first()
        process = os.fork()
        if process == 0:
            status = 1
            try:
                with patch.object(knobs.runtime, "jit_cache_hook", None):  # which is what notes
                    status = int(_failed(launch))
            finally:
                os._exit(status)
        self._running.append(process)

    def wait(self) -> None:
        """Wait for all."""
        while self._running:
            self._end_first()

    def _end_first(self) -> None:
        _, status = os.waitpid(self._running.popleft(), 0)
        self.failed += status != 0


def _failed(launch: Launch) -> bool:
    """Compile a launch, and what calls the kernel; whether the first failed."""
    try:
        kernel = getattr(importlib.import_module(launch.module), launch.name).preload(launch.specialization)
    except Exception as error:
        print(f"{launch.module}.{launch.name}: {error!r}", file=sys.stderr)
        return True
    with suppress(Exception):  # built at the first launch, as ever
        build_launcher(kernel)
    return False


def build_launcher(kernel: Any) -> None:
    """Have Triton's cache hold what calls a compiled kernel.

    Up to Triton 3.6 that is a module in C for each signature: a compiler's 0.3 s each, one after the other.
    Raises: what Triton does without a driver, as of later releases, which need none of it.
    """
    from triton.backends.nvidia.driver import CudaLauncher  # noqa: PLC0415 (only this backend's processes come here)

    CudaLauncher(kernel.src, kernel.metadata)


def serve(modules: Sequence[str]) -> None:
    """Answer what a `Compiler` asks until it asks no more: a line of JSON each, by a line that says how many failed."""
    os.nice(YIELDING)
    answers = os.dup(1)
    os.dup2(2, 1)  # nothing else that is printed is an answer
    with FakeTensorMode():  # what it imports takes as long as all else does
        for module in modules:
            importlib.import_module(module)
    for line in sys.stdin.buffer:
        (capability, *sizes), *asked = json.loads(line)
        failed = compile_all(Card(tuple(capability), *sizes), *asked)
        os.write(answers, f"{failed}\n".encode())


if __name__ == "__main__":
    serve(sys.argv[1:])
