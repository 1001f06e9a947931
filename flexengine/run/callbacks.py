"""What may be told of a run while it goes on: a class to derive from, and the list that the trainer calls."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flexengine.metrics import EvalMetrics, StepMetrics

logger = logging.getLogger(__name__)


class Callback:
    """Is told what happens in a run; derive from it and give `flexengine.train` an instance.

    Each method does nothing here. `on_step` and `on_eval` may return True, and the run ends after this step as after
    its last. An exception of a callback ends the run, which saves its last step first with --save or --save-steps.
    """

    def on_start(self, options: dict[str, Any], num_steps: int, folder: Path) -> None:
        """The weights are loaded and the first step is next. options: those of the run, as config.yaml has them."""

    def on_step(self, metrics: StepMetrics) -> bool | None:
        """A step has ended."""

    def on_eval(self, metrics: EvalMetrics) -> bool | None:
        """The validation data have been evaluated."""

    def on_save(self, folder: Path, step: int) -> None:
        """A folder has been written: the best or the final model, or a checkpoint of the run after `step`."""

    def on_end(self, exit_status: int | None) -> None:
        """The run is over. exit_status: None when an exception ended it."""


class Callbacks:
    """Calls several callbacks in order. As a context it tells them of the end, also where an exception ends the run."""

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self._callbacks = tuple(callbacks)
        self._exit_status: int | None = None
        self.must_end = False

    def __enter__(self) -> Callbacks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        failed: Exception | None = None
        for callback in self._callbacks:
            try:
                callback.on_end(self._exit_status)
            except Exception as error:  # the others are to hear of the end, and an earlier error is the one to raise
                logger.warning("on_end of %s failed: %s", type(callback).__name__, error)
                failed = failed or error
        if failed is not None and kind is None:
            raise failed

    def ending_with(self, exit_status: int) -> int:
        """Keep the exit status of the run for its end; returns it."""
        self._exit_status = exit_status
        return exit_status

    def on_start(self, options: dict[str, Any], num_steps: int, folder: Path) -> None:
        """Tell all that the first step is next."""
        for callback in self._callbacks:
            callback.on_start(options, num_steps, folder)

    def on_step(self, metrics: StepMetrics) -> None:
        """Tell all of a step; `must_end` is set when one wants the run to end."""
        self._end_if([callback.on_step(metrics) for callback in self._callbacks])

    def on_eval(self, metrics: EvalMetrics) -> None:
        """Tell all of an evaluation; `must_end` is set when one wants the run to end."""
        self._end_if([callback.on_eval(metrics) for callback in self._callbacks])

    def on_save(self, folder: Path, step: int) -> None:
        """Tell all of a folder that was written."""
        for callback in self._callbacks:
            callback.on_save(folder, step)

    def _end_if(self, answers: list[bool | None]) -> None:
        self.must_end = self.must_end or any(answer is True for answer in answers)
