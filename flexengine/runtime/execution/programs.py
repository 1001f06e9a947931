"""Caches the programs of an engine: one for every structure of a round, and the update's."""

from __future__ import annotations

from typing import Literal, NamedTuple

from flexengine.runtime.execution.executor import Executor
from flexengine.schedule.checker import check_program
from flexengine.schedule.commands import Program
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering import RoundShape, lower_evaluation, lower_round, lower_update
from flexengine.schedule.lowering.stages import lower_wave
from flexengine.schedule.lowering.update import late_groups
from flexengine.schedule.ranks.shares import ALONE, Share
from flexengine.schedule.ranks.stage_layout import StageLayout
from flexengine.schedule.ranks.waves import Wave

CpuPart = Literal["all", "rest", "nothing"]
"""Which of its groups the CPU updates in an optimizer step's own program."""
_Update = tuple[int, CpuPart, bool, bool]  # side of the layout, and what `of_update` is given
MAX_ROUNDS = 64
"""Most programs of rounds that are held at once. A batch of packed sequences needs two or three."""


class RoundKind(NamedTuple):
    """What a round does beside forward.

    train: it has a backward pass. first: no gradients are stored yet. updates: the CPU updates inside it. together: how
    many rounds ranks run together under a split plan; 0 = each its own. speculates: the CPU updates inside it, before
    it is known whether that counts. last_before: in stages, the rank that ran the last round of the wave before.
    """

    train: bool
    first: bool
    updates: bool
    together: int = 0
    speculates: bool = False
    last_before: int = 0


class Programs:
    """Lowers and proves each program of one layout once. The executor forgets a program that is not held any more.

    share: what this one of several ranks updates. Where second planes have taken the place of first ones, the same
    commands run over the slots of the swapped layout, as programs of their own.
    """

    def __init__(self, layout: Layout, executor: Executor, share: Share = ALONE) -> None:
        self.layout, self.executor, self.share = layout, executor, share
        self._other: Layout | None = None
        self._rounds: dict[tuple[int, RoundShape, RoundKind], Program] = {}  # by side of the layout
        self._updates: dict[_Update, Program] = {}

    def swap(self) -> Layout:
        """Exchange first and second planes; returns the layout of later programs."""
        other = self.layout.swapped() if self._other is None else self._other
        self.layout, self._other = other, self.layout
        return other

    def of_round(self, shape: RoundShape, kind: RoundKind) -> Program:
        """The program of a round."""
        side = self.layout.side
        if (side, shape, kind) not in self._rounds:
            self._forget_oldest_round()
            program = self._on_this_side(self._rounds.get((1 - side, shape, kind)))
            self._rounds[side, shape, kind] = self._checked(program or self._lower_round(shape, kind))
        return self._rounds[side, shape, kind]

    def _lower_round(self, shape: RoundShape, kind: RoundKind) -> Program:
        if not kind.train:
            return lower_evaluation(self.layout, shape)
        if isinstance(self.layout, StageLayout):
            return lower_wave(self.layout, shape, kind.first, kind.last_before, kind.speculates)
        wave = Wave(*self.share, kind.together) if kind.together else None
        return lower_round(self.layout, shape, kind.first, kind.updates, wave, kind.speculates)

    def of_update(self, by_cpu: CpuPart = "all", last: bool = True, speculated: bool = False) -> Program:
        """The program of an optimizer step.

        by_cpu: what the CPU updates in it: all that it ever does, the rest after a speculation that held, or nothing,
        as the last round did it. last: this rank, of several, ran that round. speculated: it did so speculatively.
        """
        side = self.layout.side
        here: _Update = side, by_cpu, last, speculated
        there: _Update = 1 - side, by_cpu, last, speculated
        if here not in self._updates:
            program = self._on_this_side(self._updates.get(there))
            self._updates[here] = self._checked(program or self._lower_update(by_cpu, last, speculated))
        return self._updates[here]

    def _lower_update(self, by_cpu: CpuPart, last: bool, speculated: bool) -> Program:
        groups = {"all": None, "rest": late_groups(self.layout), "nothing": {}}[by_cpu]
        return lower_update(self.layout, groups, self.share, last, told=speculated, holds=by_cpu == "rest")

    def _on_this_side(self, program: Program | None) -> Program | None:
        """The same commands over this side's slots; what a program has beside the layout's slots is not swapped."""
        if program is None:
            return None
        slots = self.layout.slots
        return Program(program.name, (*slots, *program.slots[len(slots) :]), program.commands, program.initial)

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
