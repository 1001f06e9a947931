"""What a run left in its folder, as values: its plan, the simulated and the measured step, and a line per step."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from flexengine.metrics import CardHealth
from flexengine.plan import Plan
from flexengine.schedule.trace_reader import Trace


class LoggedStep(NamedTuple):
    """One line of train_log.jsonl; a value that was not finite or not measured is None.

    disturbed: the first step, which warms up, and steps that were timed or profiled, which slows them.
    """

    step: int
    step_s: float
    num_tokens: int
    loss: float | None
    gpu_peak_bytes: int | None
    host_peak_bytes: int | None
    disturbed: bool
    grad_norm: float | None = None
    lr: float | None = None
    card: CardHealth | None = None

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the step over its wall time."""
        return self.num_tokens / self.step_s


class LoggedEvaluation(NamedTuple):
    """One line of eval_log.jsonl; a loss that was not finite is None."""

    step: int
    loss: float | None


class RunRecord(NamedTuple):
    """The files of a run folder; a missing file is None, a missing log is empty.

    num_damaged_lines: lines of the log that hold no step, as a full disk or a power loss leaves them.
    """

    folder: str
    plan: Plan | None
    simulated: Trace | None
    measured: Trace | None
    steps: Sequence[LoggedStep]
    num_damaged_lines: int = 0
    evaluations: Sequence[LoggedEvaluation] = ()

    @property
    def steady_steps(self) -> Sequence[LoggedStep]:
        """The steps whose speed counts: the undisturbed ones, else all but the first, else all."""
        # A run of one or two steps still deserves a figure, even if it has nothing but disturbed steps.
        return [step for step in self.steps if not step.disturbed] or self.steps[1:] or self.steps

    @property
    def step_s(self) -> float | None:
        """Median wall seconds of the steady steps."""
        return statistics.median(step.step_s for step in self.steady_steps) if self.steps else None

    @property
    def predicted_s(self) -> float | None:
        """Predicted seconds of a full step: the plan's, else those of the simulated step."""
        if self.plan is not None:
            return self.plan.predicted.step_s
        return self.simulated.total_s if self.simulated is not None else None
