"""Saves checkpoints of a run: every --save-steps steps, after the last one, and where a signal or an error ends it."""

from __future__ import annotations

import logging
import math
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from flexengine.checkpoint.run_checkpoints import checkpoint_folder, keep_newest
from flexengine.checkpoint.state_writer import StateSave
from flexengine.data import GlobalBatches, SyntheticBatches
from flexengine.data.batches import Batch
from flexengine.metrics import StepMetrics
from flexengine.options.train_config import TrainConfig
from flexengine.parallel.team import Team, is_first
from flexengine.run.resuming import ResumePoint, options_as_flags
from flexengine.run.state import DataPlace, RunState, record_logs
from flexengine.run.stop_signals import StopSignals
from flexengine.runtime.engine import Engine
from flexengine.wording import explain_os_error

logger = logging.getLogger(__name__)

STOPPED = 75
"""Exit status of a run that a signal but Ctrl-C stopped with a checkpoint: EX_TEMPFAIL of sysexits.h, "try again"."""


class Resumable(Protocol):
    """A follower of a run whose findings belong into a checkpoint."""

    def state(self) -> dict[str, Any]:
        """Its findings, as JSON values."""
        ...

    def restore(self, state: Mapping[str, Any], batch_of: Callable[[int], Batch]) -> None:
        """Go on from the `state` of a run that is resumed. batch_of: the batch of a step."""
        ...


class RunSaver:
    """Is called after every step of a run. A save that fails is said, and training goes on.

    parts: followers of the run whose findings are saved, by name. tell: called with the folder and the step of every
    checkpoint that is whole. team: several ranks, of which all call the same and the first one writes.
    """

    def __init__(
        self, config: TrainConfig, engine: Engine, batches: GlobalBatches | SyntheticBatches, num_steps: int,
        team: Team | None = None,
    ) -> None:  # fmt: skip
        self.config, self.engine, self.batches, self.num_steps = config, engine, batches, num_steps
        self.signals, self.team = StopSignals(config.makes_checkpoints, tells=is_first(team)), team
        self.agreed_signal: signal.Signals | None = None
        self.parts: dict[str, Resumable] = {}
        self.tell: Callable[[Path, int], None] = lambda folder, step: None
        self.saved_step: int | None = None
        self._save: StateSave | None = None
        self._saving_step = self._last_started = self._last_step = 0
        self._num_updates = engine.step_count
        self._loss_sum, self._num_tokens = 0.0, 0
        self._fingerprint = batches.fingerprint() if config.makes_checkpoints else ""

    def restore(self, point: ResumePoint) -> None:
        """Go on with the sums and findings of a checkpoint."""
        self.saved_step = self._last_started = point.step
        self._loss_sum, self._num_tokens = point.run.loss_sum, point.run.num_tokens
        for name, part in self.parts.items():
            if name in point.run.parts:
                part.restore(point.run.parts[name], lambda step: next(self.batches.batches(step, step - 1)))

    @property
    def stop_signal(self) -> signal.Signals | None:
        """The signal that asked the run to stop, if one did. Several ranks have the one that they agreed on."""
        return self.signals.received if self.team is None else self.agreed_signal

    @property
    def stopped(self) -> bool:
        """Whether the run was asked to stop."""
        return self.stop_signal is not None

    def count(self, metrics: StepMetrics) -> None:
        """Called when a step has ended, before anyone else is."""
        self._last_step, self._num_updates = metrics.step, self.engine.step_count
        self._loss_sum += metrics.loss if math.isfinite(metrics.loss) else 0.0
        self._num_tokens += metrics.num_tokens

    def after_step(self, metrics: StepMetrics) -> None:
        """Called when a step has ended and its health is known."""
        if self._save is not None and self._save.ended:
            self.wait()
        every = self.config.save_steps
        due = every is not None and (metrics.step % every == 0 or metrics.step == self.num_steps)
        if due or (self.stopped and self.config.makes_checkpoints):
            self._start(metrics.step)

    def finish(self, last_step: int) -> None:
        """Wait until the last checkpoint is whole. With --save-steps a run that ended early saves its last step.

        All ranks wait, and learn what was saved, so that they end with the same status and none ends too early.
        """
        if self.config.save_steps is not None and last_step > self._last_started:
            self._start(last_step)
        self.wait()
        if self.team is not None:
            self.saved_step = self.team.control.broadcast(self.saved_step)

    @contextmanager
    def saving_first(self) -> Iterator[None]:
        """Save the last step where an error ends the run. Callbacks are not told, as one of them may have raised it.

        Several ranks save nothing then: an error of one does not tell where the others are.
        """
        try:
            yield
        except (Exception, SystemExit):
            sound = self.engine.step_count == self._num_updates  # else the error came after an update that none saw
            if self.config.makes_checkpoints and self.team is None and sound and self._last_step > self._last_started:
                self.tell = lambda folder, step: None
                try:
                    self._start(self._last_step)
                    self.wait()
                except Exception as error:  # an engine that is not sound says so; the first error is the one to raise
                    self._warn(error)
            if self.saved_step:
                print(self.describe_stop(self._last_step), file=sys.stderr)
            raise

    def wait(self) -> None:
        """Wait for the checkpoint that is being written; says what is wrong where it cannot be."""
        save, self._save = self._save, None
        if save is None:
            return
        try:
            save.wait()
        except (OSError, ValueError) as error:
            self._warn(error)
        else:
            self.saved_step = self._saving_step
            self.tell(save.folder, self._saving_step)

    def abandon(self) -> None:
        """Give up the checkpoint that is being written."""
        if self._save is not None:
            self._save.abandon()
            self._save = None

    def describe_stop(self, step: int) -> str:
        """Say after which step the run was stopped, and how to continue."""
        text = f"interrupted after step {step} of {self.num_steps}; the log is in {self.config.run_folder}"
        if self.saved_step is None:
            return text
        folder = checkpoint_folder(self.config.run_folder, self.saved_step)
        return f"{text}\n  checkpoint: {folder}; run the same command with --resume auto to continue"

    def _start(self, step: int) -> None:
        self.wait()
        folder = self.config.run_folder
        self._saving_step = self._last_started = step

        def after() -> None:
            keep_newest(folder, step, self.config.most_checkpoints)

        try:
            self._save = self.engine.start_checkpoint(
                checkpoint_folder(folder, step), self._run_state(step).to_json(), after
            )
        except (OSError, ValueError) as error:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        text = explain_os_error(error) if isinstance(error, OSError) else str(error)
        last = "there is none yet" if self.saved_step is None else f"the last one is of step {self.saved_step}"
        with tqdm.external_write_mode(file=sys.stderr):
            logger.warning("the checkpoint of step %d was not saved (%s): %s", self._saving_step, last, text)

    def _run_state(self, step: int) -> RunState:
        epoch, position = self.batches.cursor(step)
        return RunState(
            step=step,
            num_steps=self.num_steps,
            data=DataPlace(epoch, position, self.config.seed, self._fingerprint),
            loss_sum=self._loss_sum,
            num_tokens=self._num_tokens,
            options=options_as_flags(self.config),
            logs=record_logs(self.config.run_folder),
            parts={name: part.state() for name, part in self.parts.items()},
        )
