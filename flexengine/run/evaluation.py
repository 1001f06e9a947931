"""Evaluates the validation data while a run goes on, keeps the best model, and ends a run that no longer improves."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flexengine.checkpoint.state_files import Fields
from flexengine.data.batches import Batch
from flexengine.metrics import EvalMetrics, JsonlWriter
from flexengine.run.steps import AnswerSteps, Steps
from flexengine.runtime.engine import Engine

EVALUATIONS = 10
"""Evaluations of a run that says nothing about them."""


def perplexity_of(loss: float) -> float:
    """Return e to the power of a mean loss; infinity where that is no float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


@dataclass
class EvaluatorActions:
    """What follows an evaluation: the log that it goes to, who is told, and how a better model is kept."""

    log: JsonlWriter
    tell: Callable[[EvalMetrics], None]
    keep_best: Callable[[int], None] = lambda step: None


class Evaluator:
    """Evaluates after every `every` steps and after the last.

    patience: evaluations in a row without a lower loss after which the run ends; None = it does not end for them.
    steps: how the run's objective evaluates.
    """

    def __init__(
        self, engine: Engine, batches: Iterable[Batch], every: int, patience: int | None, actions: EvaluatorActions,
        steps: Steps | None = None,
    ) -> None:  # fmt: skip
        self._engine, self._batches, self._every, self._patience = engine, batches, every, patience
        self._actions, self._steps = actions, steps or AnswerSteps()
        self.best_loss, self.best_step, self._last_step = math.inf, 0, 0
        self._without_gain = 0

    def state(self) -> dict[str, Any]:
        """What `restore` needs to go on, as JSON values."""
        best_loss = self.best_loss if math.isfinite(self.best_loss) else None
        return {
            "best_loss": best_loss,
            "best_step": self.best_step,
            "last_step": self._last_step,
            "without_gain": self._without_gain,
        }

    def restore(self, state: Mapping[str, Any], batch_of: Callable[[int], Batch]) -> None:
        """Go on from the `state` of a run that was resumed."""
        found = Fields(state, "the checkpoint's evaluations")
        self.best_loss = math.inf if state.get("best_loss") is None else found.number("best_loss")
        self.best_step, self._last_step = found.whole("best_step"), found.whole("last_step")
        self._without_gain = found.whole("without_gain")

    @property
    def must_end(self) -> bool:
        """True when the loss did not fall for as long as the run's patience lasts."""
        return self._patience is not None and self._without_gain >= self._patience

    def after_step(self, step: int) -> EvalMetrics | None:
        """Evaluate if it is time to."""
        return self.evaluate(step) if step % self._every == 0 else None

    def finish(self, step: int) -> EvalMetrics | None:
        """Evaluate after the last step, unless that was done."""
        return self.evaluate(step) if step != self._last_step else None

    def evaluate(self, step: int) -> EvalMetrics:
        """Evaluate the model after `step` steps, log it, and keep the model if it is the best so far."""
        start_s = time.perf_counter()
        loss, num_targets, details = self._steps.evaluate(self._engine, self._batches)
        is_best, eval_s = loss < self.best_loss, time.perf_counter() - start_s
        perplexity = perplexity_of(loss) if self._steps.has_perplexity else math.nan
        metrics = EvalMetrics(step, loss, perplexity, num_targets, eval_s, is_best, dict(details))
        self._last_step = step
        self._without_gain = 0 if is_best else self._without_gain + 1
        self._actions.log.write(metrics)
        if is_best:
            self.best_loss, self.best_step = loss, step
            self._actions.keep_best(step)
        self._actions.tell(metrics)
        return metrics

    def describe(self) -> str:
        """Describe the best evaluation in one line, and why the run ended if it ended for it."""
        text = f"validation: lowest loss {self.best_loss:.4f}"
        if self._steps.has_perplexity:
            text += f" (perplexity {perplexity_of(self.best_loss):.2f})"
        text += f" after step {self.best_step}"
        if self.must_end:
            text += f"; ended after {self._without_gain} evaluations without a lower one (--early-stopping-patience)"
        return text
