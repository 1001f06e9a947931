"""The one seam through which commands print: what happens where an output takes nothing more is decided here.

A command that only prints ends with a message. A run goes on: what it prints is worth less than what it trains.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from typing import Any, cast

from flexengine.wording import OUTPUT, explain_os_error

INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 + SIGINT, as shells report it."""


class Output:
    """A text stream that writes to another one as long as that takes it, and nowhere afterwards.

    Characters that the other's encoding lacks are written as backslash escapes. lost: called once, with what the other
    stream raised; the write or flush raises what it raises. Everything else is the other stream's.
    """

    def __init__(self, stream: Any, lost: Callable[[Exception], None]) -> None:
        self.under, self._lost, self._takes = stream, lost, stream is not None

    def write(self, text: str) -> int:
        """Write a text; returns its length."""

        def to(stream: Any) -> None:
            try:
                stream.write(text)
            except UnicodeEncodeError as error:
                stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))

        self._attempt(to)
        return len(text)

    def flush(self) -> None:
        """Bring what was written to the other stream's end."""
        self._attempt(lambda stream: stream.flush())

    def isatty(self) -> bool:
        """Whether a terminal shows this."""
        try:
            return self._takes and bool(self.under.isatty())
        except (OSError, ValueError):
            return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.under, name)

    def _attempt(self, call: Callable[[Any], None]) -> None:
        if not self._takes:
            return
        try:
            call(self.under)
        except Exception as error:  # a stream of a notebook or a tracker raises what it likes
            self._takes = False
            _silence(self.under)
            self._lost(error)


def _silence(stream: Any) -> None:
    """Have the process's own descriptors lead nowhere: what is left in a buffer would fail again at the exit."""
    with suppress(Exception):
        if stream.fileno() in (1, 2):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


@contextlib.contextmanager
def command_output() -> Iterator[None]:
    """Print for a command. Raises BrokenPipeError where the reader went away, ValueError where the disk is full.

    Both are raised at the first print that shows it, or at the end.
    """

    def refuse(error: Exception) -> None:
        if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
            raise ValueError(explain_os_error(error, OUTPUT)) from error
        raise error

    out = Output(sys.stdout, refuse)
    with redirect_stdout(cast(Any, out)):
        try:
            yield
        except SystemExit:  # after --help
            out.flush()
            raise
        except BaseException:
            with suppress(Exception):  # the first error is the one to tell
                out.flush()
            raise
        out.flush()


@contextlib.contextmanager
def steady_messages() -> Iterator[None]:
    """Drop what is printed on stderr where nobody reads it: a message that is lost changes no exit status."""
    with redirect_stderr(cast(Any, Output(sys.stderr, lambda error: None))):
        yield


@contextlib.contextmanager
def run_output() -> Iterator[None]:
    """Print for a run that goes on without an output that takes nothing more: the other one tells so once."""
    streams: dict[str, Output] = {}

    def losing(name: str, other: str) -> Callable[[Exception], None]:
        def warn(error: Exception) -> None:
            reason = explain_os_error(error, OUTPUT) if isinstance(error, OSError) else str(error)
            streams[other].write(f"{name} cannot be written, and the run goes on without it ({reason})\n")
            streams[other].flush()

        return warn

    streams["out"] = Output(sys.stdout, losing("the output", "err"))
    messages = getattr(sys.stderr, "under", sys.stderr)  # one that drops them would not tell so
    streams["err"] = Output(messages, losing("the output of messages", "out"))
    with redirect_stdout(cast(Any, streams["out"])), redirect_stderr(cast(Any, streams["err"])):
        try:
            yield
        finally:
            streams["out"].flush()
            streams["err"].flush()


def open_standard_streams() -> None:
    """Open what this process was started without: files that it opens must not become its output.

    Order: before anything else opens a file.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115, for as long as all runs


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Load modules so that Ctrl-C ends the process with one line and status 130.

    Raised inside of an import, an interrupt could be lost, or end in a message of the import instead.
    """
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not heeded or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(*_: object) -> None:
    with suppress(OSError):
        os.write(2, b"flexengine: interrupted\n")
    os._exit(INTERRUPTED)
