"""Runs what downloaded files say to run (tokenizers, chat templates, readers of data) in a process with bounds.

A regular expression of a tokenizer, an expression of a chat template or a compressed column of a few bytes may ask for
hours or for all memory, inside a library that no signal handler interrupts. The process is forked, so that it starts at
once; it answers calls in JSON and ends with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import mmap
import os
import resource
import select
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from flexengine.native.proc_files import keyed_number, read_text

ALLOWED_CPU_S = 6.0
"""CPU seconds between two signs of life, unless the work at hand is known to take longer (`report_alive`)."""
SILENT_S = 600.0
"""Longest time without a sign of life of a process that computes nothing: it waits for a pipe, a disk or the hub."""
MOST_BYTES = 5 * 2**28
"""Memory beyond what the parent had: 1.25 GiB, of which 8 million characters, the longest text, take two thirds."""
MOST_WORDS = 4000
"""Characters of an error that are told: a file decides what some of them say."""
LOOK_S = 0.1
PR_SET_PDEATHSIG = 1  # of linux/prctl.h


class _Signs:
    """Signs of life in a page that parent and child share: how many there were, and what the work is that goes on.

    Writing one takes no system call, so that there may be one for every record.
    """

    _FORM = struct.Struct(
        "<QdH"
    )  # number of signs, CPU seconds that are allowed until the next one, bytes of the place

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        self._count = 0

    def give(self, at: str, allowed_cpu_s: float) -> None:
        self._count += 1
        place = at.encode(errors="backslashreplace")[: mmap.PAGESIZE - self._FORM.size]
        self._page[self._FORM.size : self._FORM.size + len(place)] = place
        self._page[: self._FORM.size] = self._FORM.pack(self._count, allowed_cpu_s, len(place))

    def last(self) -> tuple[int, float, str]:
        """The number of signs so far, and what the last one said."""
        count, allowed_cpu_s, size = self._FORM.unpack(self._page[: self._FORM.size])
        place = self._page[self._FORM.size : self._FORM.size + size]
        return count, allowed_cpu_s, place.decode(errors="replace")


_signs: _Signs | None = None  # where this process is a bounded one


def report_alive(at: str = "", more_cpu_s: float = 0.0) -> None:
    """Tell the parent that work goes on, and at which place.

    more_cpu_s: what the next piece of work may take beyond ALLOWED_CPU_S. Cost: some microseconds. Without effect in
    other processes.
    """
    if _signs is not None:
        _signs.give(at, ALLOWED_CPU_S + more_cpu_s)


class BoundedProcess:
    """A forked process that carries out calls, one at a time, each within bounds of CPU seconds and memory.

    What it logs reaches the loggers of this process; what it prints is dropped. A call that breaks a bound ends the
    process, and later calls raise the same message.
    """

    def __init__(
        self, what: str, open_calls: Callable[[], Mapping[str, Callable[..., Any]]], most_bytes: int = MOST_BYTES, *,
        silent_s: float = SILENT_S, remedy: str = "fetch the files again, or leave out what asks for so much",
    ) -> None:  # fmt: skip
        """Fork. The process asks `open_calls`, within bounds, for its functions: of JSON values, to JSON values.

        what: the files that it works on, for messages. silent_s: longest time without a sign of life. remedy: what to
        do where a bound is broken. Order: before memory is page-locked, which a fork would copy.
        Raises: what `open_calls` raises, as `call` does.
        """
        self._what, self._most_bytes, self._ended = what, most_bytes, ""
        self._silent_s, self._remedy = silent_s, remedy
        self._signs, self._num_signs = _Signs(), 0
        to_child, from_child = os.pipe(), os.pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            _serve((to_child[0], from_child[1]), parent, self._signs, most_bytes, open_calls)
        os.close(to_child[0])
        os.close(from_child[1])
        self._requests, self._replies = os.fdopen(to_child[1], "wb"), from_child[0]
        self._received = b""
        try:
            self._finish()
        except BaseException:
            self.close()
            raise

    def call(self, name: str, *arguments: Any) -> Any:
        """Have a function called, and return what it returns.

        Raises: what it raises of ValueError, OSError and ModuleNotFoundError; ValueError where it took too long or too
        much memory; RuntimeError with the traceback of anything else, which is a bug.
        """
        if self._ended:
            raise ValueError(self._ended)
        with contextlib.suppress(BrokenPipeError):  # it has ended, and how is said below
            self._requests.write(json.dumps([name, *arguments]).encode() + b"\n")
            self._requests.flush()
        return self._finish()

    def close(self) -> None:
        """End the process. A second call does nothing."""
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._wait()
        self._ended = self._ended or f"{self._what}: the process that reads it has been closed"

    def __enter__(self) -> BoundedProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_received", None) is not None:
            self.close()

    # ---- what the process says ------------------------------------------------------------------------------------

    def _finish(self) -> Any:
        """Wait for the end of a call. An interrupt, as of Ctrl-C, ends the process: what it would say is of no use."""
        try:
            kind, *parts = self._reply()
        except BaseException as error:
            self._ended = self._ended or str(error)
            self.close()
            raise
        if kind == "value":
            return parts[0]
        if kind == "memory":
            self._break(f"it takes more than {self._most_bytes / 2**30:.1f} GiB of memory")
        _raise(kind, parts)

    def _reply(self) -> list[Any]:
        spent_s, heard_s, allowed_s = _cpu_seconds(self._pid), time.monotonic(), ALLOWED_CPU_S
        while True:
            if (message := self._receive()) is not None:
                if message[0] != "log":
                    return message
                _, name, level, text = message
                logging.getLogger(name).log(level, "%s", text)
            if self._signs.last()[0] != self._num_signs:
                self._num_signs, allowed_s, _ = self._signs.last()
                spent_s, heard_s = _cpu_seconds(self._pid), time.monotonic()
            elif _cpu_seconds(self._pid) - spent_s > allowed_s:
                self._break(f"it did not end within {allowed_s:.3g} CPU seconds")
            elif time.monotonic() - heard_s > self._silent_s:
                self._break(f"nothing was heard of it for {self._silent_s:.3g} s")

    def _receive(self) -> list[Any] | None:
        """Return the next message, or None after LOOK_S without one. Raises ValueError when the process has ended."""
        while b"\n" not in self._received:
            if not select.select([self._replies], [], [], LOOK_S)[0]:
                return None
            piece = os.read(self._replies, 2**20)
            if not piece:
                self._break(_way_of_ending(self._wait(), self._most_bytes))
            self._received += piece
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def _break(self, how: str) -> NoReturn:
        place = self._signs.last()[2] or self._what
        raise ValueError(f"{place}: {how}; {self._remedy}")

    def _wait(self) -> int:
        """Collect the process; returns its wait status."""
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        os.close(self._replies)
        return status


def _way_of_ending(status: int, most_bytes: int) -> str:
    if not os.WIFSIGNALED(status):
        return "it ended the process that reads it"
    name = signal.Signals(os.WTERMSIG(status)).name
    return f"it ended the process that reads it ({name}) and may take more than {most_bytes / 2**30:.1f} GiB of memory"


def _raise(kind: str, parts: list[Any]) -> NoReturn:
    """Raise in this process what a call raised in the other one."""
    if kind == "ValueError":
        raise ValueError(*parts)
    if kind == "OSError":
        raise OSError(*parts)
    if kind == "ModuleNotFoundError":
        raise ModuleNotFoundError(parts[0], name=parts[1])
    raise RuntimeError(parts[0])


def _cpu_seconds(pid: int) -> float:
    """CPU seconds that a process has used so far, 0 where the system does not say."""
    fields = read_text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK") if len(fields) > 12 else 0.0


# ---- the other process --------------------------------------------------------------------------------------------


class _Replies(logging.Handler):
    """What the process writes to its parent: a JSON list a line."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self._file = file

    def send(self, *message: Any) -> None:
        self._file.write(json.dumps(message).encode() + b"\n")
        self._file.flush()

    def emit(self, record: logging.LogRecord) -> None:
        self.send("log", record.name, record.levelno, record.getMessage())


def _serve(
    pipes: tuple[int, int],
    parent: int,
    signs: _Signs,
    most_bytes: int,
    open_calls: Callable[[], Mapping[str, Callable[..., Any]]],
) -> NoReturn:
    """Carry out calls until the parent closes its end or ends. Nothing of the parent's is left open or cleaned up.

    pipes: where requests come from, and where replies go.
    """
    global _signs  # noqa: PLW0603 (what a process is)
    status = 1
    try:
        _leave_parent(pipes, parent, most_bytes)
        _signs = signs
        with os.fdopen(pipes[0], "rb") as incoming, os.fdopen(pipes[1], "wb") as outgoing:
            replies = _Replies(outgoing)
            _send_logging_to(replies)
            calls = dict[str, Callable[..., Any]]()
            _answer(replies, lambda: calls.update(open_calls()))
            for line in incoming:
                name, *arguments = json.loads(line)
                _answer(replies, lambda name=name, arguments=arguments: calls[name](*arguments))
        status = 0
    finally:
        os._exit(status)


def _leave_parent(pipes: tuple[int, int], parent: int, most_bytes: int) -> None:
    """Give up the parent's files, signals and priority, and accept bounds."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before it would have been noticed
        os._exit(1)
    os.setsid()  # what a terminal, a shell or a scheduler says to its group is for the parent
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):  # of a real-time library
            signal.signal(number, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    sys.stdout = sys.stderr = open(1, "w", closefd=False)  # noqa: SIM115 (whoever replaced them has closed files)
    first, second = sorted(pipes)
    os.closerange(3, first)
    os.closerange(first + 1, second)
    os.closerange(second + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    had = (keyed_number(Path("/proc/self/status"), "VmData:") or 0) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (had + most_bytes, had + most_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _send_logging_to(replies: _Replies) -> None:
    root = logging.getLogger()
    for logger in (root, *(found for found in root.manager.loggerDict.values() if isinstance(found, logging.Logger))):
        logger.handlers.clear()
    root.addHandler(replies)


def _answer(replies: _Replies, call: Callable[[], Any]) -> None:
    """Carry out one call and say how it ended. What kills the process is seen by the parent."""
    try:
        value = call()
        replies.send("value", value)
    except MemoryError:
        replies.send("memory")
    except ModuleNotFoundError as error:
        replies.send("ModuleNotFoundError", _words(error), error.name)
    except OSError as error:
        replies.send("OSError", *(error.args if error.filename is None else (*error.args, str(error.filename))))
    except ValueError as error:
        replies.send("ValueError", _words(error))
    except Exception:
        replies.send("bug", traceback.format_exc()[-MOST_WORDS:])


def _words(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= MOST_WORDS else f"{text[: MOST_WORDS // 2]} ... {text[-MOST_WORDS // 2 :]}"
