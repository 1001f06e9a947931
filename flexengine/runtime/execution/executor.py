"""Carries a program out: commands in issue order, each on its stream after its waits.

On CUDA streams run beside each other and the host only issues. On the CPU their commands run one after the other,
by default in issue order; any order that respects streams and waits gives the same bits, which tests use. On both, work
of the CPU runs on a thread of its own, into the next program, whose commands wait for it where they must.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch

from flexengine.native.adamw import update_threads
from flexengine.native.transfer import open_transfers
from flexengine.native.transfer_operations import Record
from flexengine.runtime.arena import Arenas
from flexengine.runtime.execution.bound_program import NO_FENCE, BoundProgram, Call, HostFence, WordsOf, holding
from flexengine.runtime.execution.cpu_work import CpuWork, nothing_awaited
from flexengine.runtime.execution.drive_copies import move_blocks, with_drive
from flexengine.runtime.execution.in_order import InOrder
from flexengine.runtime.execution.notifier import CompletionNotifier
from flexengine.runtime.execution.row_copies import Rows
from flexengine.schedule.commands import (
    DIRECTIONS,
    HOST_STREAMS,
    THREAD_STREAMS,
    Command,
    Program,
    Stream,
    streams_of,
)
from flexengine.schedule.following import WaitsBetween

CommandOrder = Callable[[Program], Iterable[int]]
Timings = list[tuple[float, float]]
RangeOf = Callable[[str], AbstractContextManager[object]]
"""Opens a named range around what is issued inside it, as torch.cuda.nvtx.range does."""
Handler = Call
"""Launches a command that is no copy on the current stream."""


class CommandHooks(NamedTuple):
    """What is called before each command starts, and after it has ended, in one run of a program.

    words: the host's words, and their values, that stand for a signal. Where streams can await and write these, the
    host calls nothing, but for signals of the CPU's commands. None: it always does. arrived: waits a moment for what
    one of the CPU's commands awaits, and tells whether that has come.
    """

    before: Call
    after: Call
    words: WordsOf | None = None
    arrived: Callable[[Command], bool] = nothing_awaited


def _then(*calls: Call) -> Call:
    """One call after the other."""

    def all_of_them(command: Command) -> None:
        for call in calls:
            call(command)

    return all_of_them


def _in_range(handler: Call, range_of: RangeOf | None) -> Call:
    """The handler; in a profile, each call inside the range of its command."""
    if range_of is None:
        return handler

    def call(command: Command) -> None:
        with range_of(command.label):
            handler(command)

    return call


STREAM_SIGNALS_VARIABLE = "FLEXENGINE_STREAM_SIGNALS"
"""With "0" in the environment the host waits for other ranks, and tells them, also where streams of the GPU could."""


NO_HOOKS = CommandHooks(lambda command: None, lambda command: None)


class Executor:
    """Runs programs over a pair of arenas. One starts when the one before has ended, but for work of the CPU.

    range_of: while it is set, every command of a program is issued on CUDA inside its own range, named by its label.
    """

    def __init__(self, device: torch.device, arenas: Arenas, order: CommandOrder | None = None) -> None:
        self.device, self.arenas, self.order = device, arenas, order
        self.on_cuda = device.type == "cuda"
        self._in_order = InOrder(arenas)
        self._bound: dict[tuple[Program, bool], BoundProgram] = {}  # by program, and whether it is timed
        self._last_bound: dict[Program, BoundProgram] = {}
        self._timings: Callable[[], Timings] | None = None
        self._began_s: Callable[[], float] | None = None
        self._timed_program: Program | None = None
        self.range_of: RangeOf | None = None
        if self.on_cuda:
            self.streams = {
                Stream.COMPUTE: torch.cuda.current_stream(device),
                **{stream: torch.cuda.Stream(device) for stream in DIRECTIONS},
                # first: a GPU whose collective waits behind long products keeps those of all others waiting
                Stream.COMM: torch.cuda.Stream(device, priority=-1),
            }
            self._transfers = open_transfers(device)
            [self._zero] = self._transfers.create_events(1, timing=True)
        self._zero_s: float | None = None
        self._cpu_work: CpuWork | None = None
        self._notifier: CompletionNotifier | None = None
        self._by_streams: bool | None = None  # whether streams signal to other ranks; not known yet
        self._cpu_threads = update_threads()
        self._cpu_waits = WaitsBetween()

    def run(
        self, program: Program, handler: Handler, timed: bool = False, hooks: CommandHooks | None = None,
        rows: Rows = (),
    ) -> None:  # fmt: skip
        """Issue all commands of a program; on CUDA returns before they have run.

        Commands of the CPU run on a thread of their own, until `synchronize` or a later program needs what they leave.
        Order: `handler` is called by that thread, too, for commands of the CPU; what it looks at then must not change
        before `finish_cpu_work`.
        timed: note when every command starts and ends, for `timings`; costs two events per command on CUDA.
        hooks: of one of several ranks, what commands await and signal. rows: of chunks, which copies move; none: all.
        """
        if timed:
            self._timings = self._began_s = None  # a run that is interrupted leaves no times
            self._timed_program = program
        fence = self._fence(program)
        run = self._run_streams if self.on_cuda else self._run_in_order
        run(program, handler, timed, fence, hooks, rows)
        if timed:
            self.finish_cpu_work()

    @contextmanager
    def on_compute_stream(self) -> Iterator[None]:
        """Make torch's calls inside follow earlier programs, whichever stream the caller is on."""
        if not self.on_cuda:
            yield
            return
        with torch.cuda.stream(self.streams[Stream.COMPUTE]):
            yield

    def finish_cpu_work(self) -> None:
        """Block until the CPU's commands have ended. Raises what made one fail, at every call."""
        if self._cpu_work is not None:
            self._cpu_work.join()
            self._cpu_work = None

    def drop_cpu_work(self) -> None:
        """Give up the CPU's commands that have not begun, as nobody wants what they leave. Raises as above."""
        if self._cpu_work is not None:
            self._cpu_work.drop()
            self._cpu_work = None

    def _start(self, work: CpuWork) -> CpuWork:
        self._cpu_work = work  # before it starts, so that whatever interrupts this, somebody waits for it
        work.start()
        return work

    def _fence(self, program: Program) -> HostFence:
        """What the host waits at before commands of a program: the CPU may still work for the program before."""
        if (work := self._cpu_work) is None:
            return NO_FENCE
        waits = self._cpu_waits.of(work.program, program)
        return HostFence(lambda command: work.wait(waits[command.index]), waits)

    def timings(self) -> Timings:
        """(start, end) of every command of the last timed run, by index, in seconds since it began.

        A command starts when it has done its waits and those before it on its stream. Blocks until the run has ended.
        Raises: ValueError if there was no timed run, or it was interrupted, or its program is forgotten.
        """
        if self._timings is None:
            raise ValueError("no timings: run a program with timed=True to its end first")
        self.synchronize()
        return self._timings()

    def start_clock(self) -> None:
        """Set the time that `began_s` counts from; on CUDA it is when the compute stream gets here."""
        self._zero_s = time.perf_counter()
        if self.on_cuda:
            zero = Record(self.streams[Stream.COMPUTE], self._zero)
            self._transfers.submit(self._transfers.prepare([zero]))

    def began_s(self) -> float:
        """Seconds from `start_clock` to the beginning of the last timed run. Blocks until that run has ended.

        Raises: ValueError as `timings`, and if no clock was started.
        """
        if self._began_s is None or self._zero_s is None:
            raise ValueError("no beginning: call start_clock(), then run a program with timed=True to its end")
        self.synchronize()
        return self._began_s()

    def forget(self, program: Program) -> None:
        """Drop what is bound to a program that will not run again. Order: its last run must have finished."""
        self._in_order.forget(program)
        self._last_bound.pop(program, None)
        self._cpu_waits.forget(program)
        if program is self._timed_program:
            self._timings = self._began_s = self._timed_program = None
        for timed in (False, True):
            bound = self._bound.pop((program, timed), None)
            if bound is not None:
                bound.close()

    def wait_for(self, program: Program, index: int) -> None:
        """Block the host until a command of the program's last run has finished. On the CPU it has."""
        bound = self._last_bound.get(program)
        if bound is not None:
            bound.wait_for(index)

    def synchronize(self) -> None:
        """Wait until everything issued has finished."""
        try:
            self.finish_cpu_work()
        finally:
            self.synchronize_device()
            self._finish_telling()

    def _finish_telling(self) -> None:
        """Block until other ranks know what has ended of the last program. Raises what went wrong."""
        if self._notifier is not None:
            self._notifier.join()
            self._notifier = None

    def synchronize_device(self) -> None:
        """Wait until everything issued to the device has finished; work of the CPU goes on."""
        if self.on_cuda:
            torch.cuda.synchronize(self.device)

    # -- on CUDA -----------------------------------------------------------------------------------------------------

    def _run_streams(
        self, program: Program, handler: Handler, timed: bool, fence: HostFence, hooks: CommandHooks | None, rows: Rows
    ) -> None:
        self._finish_telling()
        words = None if hooks is None else self._words_of(program, hooks)
        bound = self._last_bound[program] = self._bind(program, timed, words)
        bound.set_rows(rows)
        if words is not None:
            bound.set_words(words)

        def call(command: Command) -> None:
            aside = command.stream is not Stream.COMPUTE and command.stream in self.streams
            with torch.cuda.stream(self.streams[command.stream]) if aside else nullcontext():
                handler(command)

        before, work = self._cpu_work, None
        told = hooks or NO_HOOKS
        by_cpu = _in_range(_then(told.before, with_drive(program, self.arenas, handler), told.after), self.range_of)
        if hooks is not None and words is None:
            fence = HostFence(_then(fence.hold, hooks.before))
        if bound.host_commands:
            earlier = {} if before is None else self._cpu_waits.of(before.program, program)
            work = bound.cpu_work(by_cpu, self._cpu_threads, before, earlier, told.arrived)
            fence = holding(program, fence, work)
        try:
            if hooks is not None and words is None:
                self._notifier = bound.notifier(hooks.after)
                self._notifier.start()
            if work is not None:
                self._start(work)
            with self.on_compute_stream():
                if self.range_of is None:
                    bound.run(call, fence)
                else:
                    bound.run_in_ranges(call, self.range_of, fence)
        except BaseException:
            if self._notifier is not None:
                self._notifier.abandon()
            if work is not None:
                work.abandon()
                self._cpu_work = before
            raise
        if work is not None and before is not None:
            before.join()
        if timed:
            self._timings, self._began_s = bound.timings, lambda: bound.began_s(self._zero)

    def _bind(self, program: Program, timed: bool, words: WordsOf | None) -> BoundProgram:
        key = (program, timed)
        if key not in self._bound:
            streams = {stream: self.streams[stream] for stream in streams_of(program) if stream not in THREAD_STREAMS}
            self._bound[key] = BoundProgram(program, self.arenas, streams, self._transfers, timed, words)
        return self._bound[key]

    def _words_of(self, program: Program, hooks: CommandHooks) -> WordsOf | None:
        """The words of signals, where streams can await and write them; asked once, as all lie in one memory."""
        signals = (signal for command in program.commands for signal in (*command.awaits, *command.signals))
        first = next(signals, None)
        if first is None or hooks.words is None:
            return None
        if self._by_streams is None:
            wanted = os.environ.get(STREAM_SIGNALS_VARIABLE, "1") != "0"
            self._by_streams = wanted and self._transfers.word_address(hooks.words(first)[0].address) is not None
        return hooks.words if self._by_streams else None

    # -- on the CPU --------------------------------------------------------------------------------------------------

    def _run_in_order(
        self, program: Program, handler: Handler, timed: bool, fence: HostFence, hooks: CommandHooks | None, rows: Rows
    ) -> None:
        copies, later, hooks = self._in_order.bind(program, rows), list[Command](), hooks or NO_HOOKS
        indices = range(len(program.commands)) if self.order is None else self.order(program)
        clock = [(0.0, 0.0)] * len(program.commands)
        begin = time.perf_counter()
        for command in (program.commands[index] for index in indices):
            if command.stream in HOST_STREAMS:
                later.append(command)
                continue
            fence.hold(command)
            hooks.before(command)
            start = time.perf_counter()
            if command.stream in THREAD_STREAMS:
                move_blocks(command, program, self.arenas)
            else:
                self._in_order.execute(command, handler, copies)
            hooks.after(command)
            clock[command.index] = (start - begin, time.perf_counter() - begin)
        spans: dict[int, tuple[float, float]] = {}
        if later:
            self.finish_cpu_work()
            by_cpu = _then(hooks.before, with_drive(program, self.arenas, handler), hooks.after)
            spans = self._start(CpuWork(program, later, by_cpu, self._cpu_threads, arrived=hooks.arrived)).spans
        if timed:
            self._began_s = lambda: begin - (self._zero_s or 0.0)
            self._timings = lambda: [
                (spans[i][0] - begin, spans[i][1] - begin) if i in spans else span for i, span in enumerate(clock)
            ]
