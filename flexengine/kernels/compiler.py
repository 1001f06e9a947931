"""A process that compiles kernels for this one, and what it may take; imports nothing that takes time."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from contextlib import suppress
from time import monotonic

MOST_PROCESSES, SPARED_CORES = 12, 2
"""A step has some twenty kernels, of which a few take most of the time. Spared: the process that waits reads weights,
or measures the card, at the same time."""
PROCESS_BYTES = 3 * 2**28
"""What a process that compiles may take of host memory, beside what the one that it was forked from has."""
PROGRAM = "flexengine.kernels.ahead"
"""What the process runs: it reads what is asked, a line each, and answers each with a line."""


class Compiler:
    """A process that imports what compiling takes, and then compiles what it is asked for, one call after the other.

    modules: of this package, that the calls are in. It yields to what else wants the cores, and ends with this process.
    """

    def __init__(self, *modules: str) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        with suppress(OSError):  # launches compile as ever
            self._process = subprocess.Popen(
                [sys.executable, "-m", PROGRAM, *modules],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},  # a context of the card would take its memory
                start_new_session=True,
            )

    @property
    def pid(self) -> int | None:
        """Its number; None where there is no process."""
        return None if self._process is None else self._process.pid

    def ask(self, asked: object) -> None:
        """Have it compile: what `ahead.compile_all` takes, as values for JSON. Order: the last call was waited for."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):  # it may have been killed
                self._process.stdin.write(json.dumps(asked, default=str).encode() + b"\n")
                self._process.stdin.flush()

    def wait(self, longest_s: float) -> int | None:
        """Wait for how many kernels of the last call failed; None where it ended, or takes longer."""
        if self._process is None or self._process.stdout is None:
            return None
        answer, end_s = b"", monotonic() + longest_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not answer.endswith(b"\n"):
                if not selector.select(max(0.0, end_s - monotonic())):
                    return None
                read = os.read(self._process.stdout.fileno(), 64)
                if not read:
                    return None
                answer += read
        return int(answer)

    def close(self) -> None:
        """End it, and what it has begun. May be called again."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, 9)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()


def spare_processes(room_bytes: int | None = None) -> int:
    """How many processes may compile at once: as many as there are cores and memory to spare, and none of fewer than
    two."""
    spare = min(MOST_PROCESSES, len(os.sched_getaffinity(0)) - SPARED_CORES)
    if room_bytes is not None:
        spare = min(spare, room_bytes // PROCESS_BYTES - 1)  # one notes the launches
    return spare if spare >= 2 else 0
