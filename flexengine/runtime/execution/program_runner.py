"""Runs programs one after the other: issues them, and has those of a measured step timed."""

from __future__ import annotations

from flexengine.runtime.execution.executor import Executor
from flexengine.runtime.execution.handlers import CommandHandlers
from flexengine.runtime.execution.measurement import StepMeasurement
from flexengine.runtime.execution.row_copies import Rows
from flexengine.runtime.ranks.context import RankContext
from flexengine.runtime.update import UpdateSettings
from flexengine.schedule.commands import Program


class ProgramRunner:
    """Issues the programs of one layout. last_program: the one that was issued last."""

    def __init__(
        self, executor: Executor, handlers: CommandHandlers, measurement: StepMeasurement, context: RankContext
    ) -> None:
        self.executor, self.handlers, self.measurement, self._context = executor, handlers, measurement, context
        self.last_program: Program | None = None

    def run(
        self, program: Program, settings: UpdateSettings | None = None, measured: bool = True, rows: Rows = ()
    ) -> None:
        """Issue a program; on CUDA it may still run on return.

        settings: what its updates depend on; None where it has none. measured: whether it belongs to the step, so that
        a measured step counts it. rows: tokens of the round's chunks.
        """
        timed = measured and self.measurement.active
        self.last_program = program
        handler = self.handlers.of_program(program, settings)
        self.executor.run(program, handler, timed, self._context.hooks(), rows)
        if timed:
            self.measurement.add(program, rows)

    def wait_for_batch(self) -> None:
        """Block until the last program has copied its batch, so that the host's copy may be written again."""
        if self.last_program is not None:
            self.executor.wait_for(self.last_program, 0)
