"""Caches the programs of an engine: one for every structure of a round, and the update's."""

from __future__ import annotations

from collections.abc import Sequence

from flexengine.runtime.execution.executor import Executor
from flexengine.schedule.checker import check_program
from flexengine.schedule.commands import Program
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering import RoundShape
from flexengine.schedule.lowering.kinds import RoundKind, UpdateKind
from flexengine.schedule.lowering.update import lower_norm
from flexengine.schedule.ranks.transports import transport_of

MAX_ROUNDS = 64
"""Most programs of rounds that are held at once. A batch of packed sequences needs two or three."""


class Programs:
    """Lowers and proves each program of one layout once. The executor forgets a program that is not held any more.

    Where second planes have taken the place of first ones, the same commands run over the slots of the swapped layout,
    as programs of their own.
    """

    def __init__(self, layout: Layout, executor: Executor) -> None:
        self.layout, self.executor, self._transport = layout, executor, transport_of(layout.plan)
        self._other: Layout | None = None
        self._rounds: dict[tuple[int, RoundShape, RoundKind], Program] = {}  # by side of the layout
        self._updates: dict[tuple[int, UpdateKind], Program] = {}
        self._norm: Program | None = None

    def swap(self) -> Layout:
        """Exchange first and second planes; returns the layout of later programs."""
        other = self.layout.swapped() if self._other is None else self._other
        self.layout, self._other = other, self.layout
        return other

    def of_rounds(self, shapes: Sequence[RoundShape], kind: RoundKind) -> Program:
        """The program of a round, or of rounds that it runs together."""
        shape = self._transport.shape(shapes) if kind.train else shapes[0]
        side = self.layout.side
        if (side, shape, kind) not in self._rounds:
            self._forget_oldest_round()
            program = self._on_this_side(self._rounds.get((1 - side, shape, kind)))
            program = program or self._transport.lower_round(self.layout, shape, kind)
            self._rounds[side, shape, kind] = self._checked(program)
        return self._rounds[side, shape, kind]

    def of_update(self, kind: UpdateKind) -> Program:
        """The program of an optimizer step."""
        side = self.layout.side
        if (side, kind) not in self._updates:
            program = self._on_this_side(self._updates.get((1 - side, kind)))
            self._updates[side, kind] = self._checked(program or self._transport.lower_update(self.layout, kind))
        return self._updates[side, kind]

    def of_norm(self) -> Program:
        """The program by which the host is told the norm of sums of squares; it touches no planes."""
        if self._norm is None:
            self._norm = self._checked(lower_norm(self.layout))
        return self._norm

    def _on_this_side(self, program: Program | None) -> Program | None:
        """The same commands over this side's slots; what a program has beside the layout's slots is not swapped."""
        if program is None:
            return None
        slots = self.layout.slots
        return Program(program.name, (*slots, *program.slots[len(slots) :]), program.commands, program.initial)

    def forget(self) -> None:
        """Drop all programs. Order: none of them may be running."""
        for program in (*self._rounds.values(), *self._updates.values(), *([self._norm] if self._norm else [])):
            self.executor.forget(program)
        self._norm = None
        self._rounds.clear()
        self._updates.clear()

    def _forget_oldest_round(self) -> None:
        """Drop the oldest of MAX_ROUNDS programs, so that ever new round structures do not fill host memory."""
        if len(self._rounds) >= MAX_ROUNDS:
            self.executor.synchronize()
            self.executor.forget(self._rounds.pop(next(iter(self._rounds))))

    def _checked(self, program: Program) -> Program:
        """Prove a program before it runs; that takes milliseconds."""
        sizes = self.layout
        check_program(program, sizes.gpu_bytes, sizes.host_bytes, sizes.node_bytes, sizes.drive_bytes)
        return program
