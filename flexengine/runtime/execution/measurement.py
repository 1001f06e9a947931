"""Times every command of a step when asked to."""

from __future__ import annotations

import time

from flexengine.models.spec import ModelSpec
from flexengine.runtime.execution.executor import Executor
from flexengine.runtime.execution.row_copies import Rows
from flexengine.schedule.command_totals import CommandClass, CommandTotal, add_totals
from flexengine.schedule.commands import Program
from flexengine.schedule.timeline import TimedRun


class StepMeasurement:
    """Collects the times of one step's commands.

    active: from `request` to the end of the step. totals: seconds by class of command. began_at_s: when the measured
    part of the step began, by the system's clock, which all ranks can compare. What ran is kept run by run if that was
    requested.
    """

    def __init__(self, executor: Executor, model: ModelSpec) -> None:
        self._executor, self._model = executor, model
        self.active = self._keeps_runs = False
        self.totals: dict[CommandClass, CommandTotal] = {}
        self.began_at_s = 0.0
        self._runs: list[TimedRun] = []

    def request(self, keep_runs: bool, under_way: bool) -> None:
        """Measure the next step, or what is left of one that is under way."""
        self.active, self._keeps_runs, self.totals, self._runs = True, keep_runs, {}, []
        if under_way:
            self._start_clock()

    def start_step(self) -> None:
        """Begin the step's clock, if it is measured."""
        if self.active:
            self._runs = []
            self._start_clock()

    def _start_clock(self) -> None:
        self.began_at_s = time.time()
        self._executor.start_clock()

    def add(self, program: Program, rows: Rows = ()) -> None:
        """Add the times of a program that ran timed, with so many rows. Blocks until it has ended."""
        times_s = self._executor.timings()
        add_totals(self.totals, program, times_s, self._model, rows)
        if self._keeps_runs:
            self._runs.append(TimedRun(program, self._executor.began_s(), times_s))

    def take_runs(self) -> list[TimedRun]:
        """The kept runs in order; they are then forgotten."""
        runs, self._runs = self._runs, []
        return runs
