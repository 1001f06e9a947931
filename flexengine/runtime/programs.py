"""The programs of an engine: one for every structure of a round, and the update's, each lowered and proven once."""

from __future__ import annotations

from typing import NamedTuple

from flexengine.runtime.executor import Executor
from flexengine.schedule.checker import check_program
from flexengine.schedule.commands import Program
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering import RoundShape, lower_evaluation, lower_round, lower_update

MAX_ROUNDS = 64
"""Programs of rounds held at once; a batch of packed sequences needs two or three."""


class RoundKind(NamedTuple):
    """What a round does beside going forward: a backward pass, one that finds no gradients stored yet, one in which the
    CPU updates."""

    train: bool
    first: bool
    updates: bool


class Programs:
    """Of one layout. `executor` runs them, and forgets those that are not held any more."""

    def __init__(self, layout: Layout, executor: Executor) -> None:
        self.layout, self.executor = layout, executor
        self._rounds: dict[tuple[RoundShape, RoundKind], Program] = {}
        self._updates: dict[bool, Program] = {}  # by whether the CPU has updated already

    def of_round(self, shape: RoundShape, kind: RoundKind) -> Program:
        """That of a round."""
        if (shape, kind) not in self._rounds:
            self._forget_oldest_round()
            if kind.train:
                program = lower_round(self.layout, shape, kind.first, kind.updates)
            else:
                program = lower_evaluation(self.layout, shape)
            self._rounds[shape, kind] = self._checked(program)
        return self._rounds[shape, kind]

    def of_update(self, cpu_has_updated: bool) -> Program:
        """That of an optimizer step; cpu_has_updated: the last round did what the CPU updates."""
        if cpu_has_updated not in self._updates:
            program = lower_update(self.layout, by_cpu={} if cpu_has_updated else None)
            self._updates[cpu_has_updated] = self._checked(program)
        return self._updates[cpu_has_updated]

    def forget(self) -> None:
        """Drop all. Order: nothing of them may be running."""
        for program in (*self._rounds.values(), *self._updates.values()):
            self.executor.forget(program)
        self._rounds.clear()
        self._updates.clear()

    def _forget_oldest_round(self) -> None:
        """Hold MAX_ROUNDS programs at the most, so that ever new round structures do not fill host memory."""
        if len(self._rounds) >= MAX_ROUNDS:
            self.executor.synchronize()
            self.executor.forget(self._rounds.pop(next(iter(self._rounds))))

    def _checked(self, program: Program) -> Program:
        """Every program is proven before it runs; it takes milliseconds."""
        check_program(program, self.layout.gpu_bytes, self.layout.host_bytes)
        return program
