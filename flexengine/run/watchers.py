"""What stands around every step of a run: timing, review, health, evaluation, callbacks, checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from signal import Signals

from flexengine.data.batches import Batch
from flexengine.metrics import EvalMetrics, StepMetrics
from flexengine.parallel.team import Team
from flexengine.run.callbacks import Callbacks
from flexengine.run.card_health import StepCard
from flexengine.run.evaluation import Evaluator
from flexengine.run.feedback import Reviewer
from flexengine.run.health import RunHealth
from flexengine.run.recording import Recorder
from flexengine.run.saver import RunSaver
from flexengine.run.start_times import START
from flexengine.run.steps import Steps
from flexengine.runtime.outputs import StepOutput


@dataclass
class Watchers:
    """Those who stand around every step, called in a fixed order. evaluator: None without validation data.

    The saver comes last, so that a checkpoint knows all that the others found. team: several ranks, which agree after
    every step on whether the run goes on. steps: how the run's objective takes them. card: how the GPU runs.
    """

    recorder: Recorder
    reviewer: Reviewer
    health: RunHealth
    callbacks: Callbacks
    saver: RunSaver
    steps: Steps
    card: StepCard
    evaluator: Evaluator | None = None
    team: Team | None = None

    def before_step(self, step: int) -> None:
        """Called before step `step`, counted from 1."""
        self.recorder.before_step(step)

    def after_step(self, batch: Batch, metrics: StepMetrics, update: StepOutput) -> EvalMetrics | None:
        """Called when a step has ended; returns the evaluation, if there was one."""
        START.end_of_step(metrics.step_s)
        self.saver.count(metrics)
        self.recorder.after_step(metrics)
        self.reviewer.after_step(batch, metrics)
        self.health.after_step(batch, metrics, update)
        self.callbacks.on_step(metrics)
        evaluation = None
        if self.evaluator is not None and not self.health.must_end:
            evaluation = self.evaluator.after_step(metrics.step)
        if self.team is not None:
            self._agree(self.team)
        self.saver.after_step(metrics)
        return evaluation

    def _agree(self, team: Team) -> None:
        """Take up on all ranks what one has been told: a signal to stop, or by a callback that the run is to end."""
        told = team.control.gather((self.saver.signals.received, self.callbacks.must_end))
        self.saver.agreed_signal = next((Signals(number) for number, _ in told if number is not None), None)
        self.callbacks.must_end = any(must_end for _, must_end in told)

    @property
    def must_end(self) -> bool:
        """Whether no further step is to be taken."""
        by_loss = self.evaluator is not None and self.evaluator.must_end
        return self.health.must_end or self.callbacks.must_end or by_loss or self.saver.stopped

    def finish(self, last_step: int) -> EvalMetrics | None:
        """Called after the last step that is taken, unless an exception ended it."""
        evaluation = None
        if self.evaluator is not None and not self.health.must_end and not self.saver.stopped:
            evaluation = self.evaluator.finish(last_step)
        self.saver.finish(last_step)
        return evaluation

    def close(self) -> None:
        """Called when no further step comes, whatever the reason."""
        self.recorder.close()
        self.card.close()
        self.saver.wait()  # an error in a step leaves the checkpoint before it
