"""Caches the programs of an engine: one for every structure of a round, and the update's."""

from __future__ import annotations

from typing import NamedTuple

from flexengine.runtime.executor import Executor
from flexengine.schedule.checker import check_program
from flexengine.schedule.commands import Program
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering import RoundShape, lower_evaluation, lower_round, lower_update
from flexengine.schedule.shares import ALONE, Share
from flexengine.schedule.waves import Wave

MAX_ROUNDS = 64
"""Most programs of rounds that are held at once. A batch of packed sequences needs two or three."""


class RoundKind(NamedTuple):
    """What a round does beside forward.

    train: it has a backward pass. first: no gradients are stored yet. updates: the CPU updates inside it. together: how
    many rounds ranks run together under a split plan; 0 = each its own.
    """

    train: bool
    first: bool
    updates: bool
    together: int = 0


class Programs:
    """Lowers and proves each program of one layout once. The executor forgets a program that is not held any more.

    share: what this one of several ranks updates.
    """

    def __init__(self, layout: Layout, executor: Executor, share: Share = ALONE) -> None:
        self.layout, self.executor, self.share = layout, executor, share
        self._rounds: dict[tuple[RoundShape, RoundKind], Program] = {}
        self._updates: dict[tuple[bool, bool], Program] = {}  # by whether the CPU has updated already, and `last`

    def of_round(self, shape: RoundShape, kind: RoundKind) -> Program:
        """The program of a round."""
        if (shape, kind) not in self._rounds:
            self._forget_oldest_round()
            if kind.train:
                wave = Wave(*self.share, kind.together) if kind.together else None
                program = lower_round(self.layout, shape, kind.first, kind.updates, wave)
            else:
                program = lower_evaluation(self.layout, shape)
            self._rounds[shape, kind] = self._checked(program)
        return self._rounds[shape, kind]

    def of_update(self, cpu_has_updated: bool, last: bool = True) -> Program:
        """The program of an optimizer step.

        cpu_has_updated: the last round did the CPU's updates. last: this rank, of several, ran that round.
        """
        if (cpu_has_updated, last) not in self._updates:
            program = lower_update(self.layout, {} if cpu_has_updated else None, self.share, last)
            self._updates[cpu_has_updated, last] = self._checked(program)
        return self._updates[cpu_has_updated, last]

    def forget(self) -> None:
        """Drop all programs. Order: none of them may be running."""
        for program in (*self._rounds.values(), *self._updates.values()):
            self.executor.forget(program)
        self._rounds.clear()
        self._updates.clear()

    def _forget_oldest_round(self) -> None:
        """Drop the oldest of MAX_ROUNDS programs, so that ever new round structures do not fill host memory."""
        if len(self._rounds) >= MAX_ROUNDS:
            self.executor.synchronize()
            self.executor.forget(self._rounds.pop(next(iter(self._rounds))))

    def _checked(self, program: Program) -> Program:
        """Prove a program before it runs; that takes milliseconds."""
        check_program(program, self.layout.gpu_bytes, self.layout.host_bytes, self.layout.node_bytes)
        return program
