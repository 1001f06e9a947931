"""Carries a program out: commands in issue order, each on its stream after its waits.

On CUDA the three streams run beside each other and the host only issues; nothing synchronises. On the CPU commands
run one after the other, by default in issue order; any order that respects streams and waits gives the same bits,
which tests use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from flexengine.runtime.arena import Arenas
from flexengine.schedule.commands import Command, Program, Stream

CommandOrder = Callable[[Program], Iterable[int]]


class Handler(Protocol):
    """Runs compute commands of the kinds it knows on the current stream."""

    def __call__(self, command: Command) -> None: ...


class Executor:
    """Runs programs over a pair of arenas. Programs follow each other: one starts when the one before has ended."""

    def __init__(self, device: torch.device, arenas: Arenas, order: CommandOrder | None = None) -> None:
        self.device, self.arenas, self.order = device, arenas, order
        self.on_cuda = device.type == "cuda"
        self._copies: dict[Program, dict[int, list[tuple[Tensor, Tensor]]]] = {}
        self._signals: dict[Program, dict[int, torch.cuda.Event]] = {}
        if self.on_cuda:
            self.streams = {
                Stream.COMPUTE: torch.cuda.current_stream(device),
                Stream.H2D: torch.cuda.Stream(device),
                Stream.D2H: torch.cuda.Stream(device),
            }

    def run(self, program: Program, handler: Handler) -> None:
        """Issue all commands of a program; on CUDA returns before they have run."""
        copies = self._bind_copies(program)
        if self.on_cuda:
            self._run_streams(program, handler, copies)
            return
        indices = range(len(program.commands)) if self.order is None else self.order(program)
        for index in indices:
            self._execute(program.commands[index], handler, copies)

    def forget(self, program: Program) -> None:
        """Drop what is bound to a program that will not run again. Order: its last run must have finished."""
        self._copies.pop(program, None)
        self._signals.pop(program, None)

    def wait_for(self, program: Program, index: int) -> None:
        """Block the host until a command of the program's last run, one that others wait for, has finished."""
        event = self._signals.get(program, {}).get(index)
        if event is not None:
            event.synchronize()

    def synchronize(self) -> None:
        """Wait until everything issued has finished."""
        if self.on_cuda:
            torch.cuda.synchronize(self.device)

    def _bind_copies(self, program: Program) -> dict[int, list[tuple[Tensor, Tensor]]]:
        """(target, source) byte views of every copy command, made once per program."""
        if program not in self._copies:
            self._copies[program] = {
                c.index: [(self._bytes(program, r.target, r.target_offset, r.num_bytes),
                           self._bytes(program, r.source, r.source_offset, r.num_bytes)) for r in c.copies]
                for c in program.commands
                if c.copies
            }  # fmt: skip
        return self._copies[program]

    def _bytes(self, program: Program, slot: int, offset: int, num_bytes: int) -> Tensor:
        place = program.slots[slot]
        return self.arenas.bytes_view(place.memory, place.offset + offset, num_bytes)

    def _execute(self, command: Command, handler: Handler, copies: dict[int, list[tuple[Tensor, Tensor]]]) -> None:
        if command.copies:
            for target, source in copies[command.index]:
                target.copy_(source, non_blocking=True)
        else:
            handler(command)

    def _run_streams(self, program: Program, handler: Handler, copies: dict[int, list[tuple[Tensor, Tensor]]]) -> None:
        if program not in self._signals:
            awaited = {w for c in program.commands for w in c.waits}
            self._signals[program] = {i: torch.cuda.Event() for i in awaited}
        events = self._signals[program]
        self._join_streams()
        try:
            for command in program.commands:
                stream = self.streams[command.stream]
                torch.cuda.set_stream(stream)
                for wait in command.waits:
                    stream.wait_event(events[wait])
                self._execute(command, handler, copies)
                if command.index in events:
                    events[command.index].record(stream)
        finally:
            torch.cuda.set_stream(self.streams[Stream.COMPUTE])
        self._join_streams()

    def _join_streams(self) -> None:
        """Every stream waits for what all others have been given so far."""
        marks = []
        for stream in self.streams.values():
            event = torch.cuda.Event()
            event.record(stream)
            marks.append((stream, event))
        for stream in self.streams.values():
            for other, event in marks:
                if other is not stream:
                    stream.wait_event(event)
