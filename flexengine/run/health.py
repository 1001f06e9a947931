"""Steps that train nothing: they are counted, too many in a row end a run, and at the end the model is judged.

A step is bad when its loss or its gradient is not finite. Its update was skipped, so a batch that no model could learn
from leaves the weights as they were, and what was learnt before is worth keeping.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flexengine.checkpoint.state_files import Fields
from flexengine.data.batches import Batch, PromptBatch
from flexengine.metrics import StepMetrics
from flexengine.run.steps import Steps
from flexengine.runtime.engine import Engine
from flexengine.runtime.not_finite import first_bad_weight
from flexengine.runtime.outputs import StepOutput

logger = logging.getLogger(__name__)

MOST_NAMED = 10
"""Bad steps that are listed by number."""


def finds_scale(metrics: StepMetrics, update: StepOutput) -> bool:
    """Whether a step was skipped because its loss scale was too large, which finds the right one.

    Below a scale of 1 what overflows is not the scaled gradient, and a loss that is not finite was not scaled at all.
    """
    scale = update.loss_scale
    return update.skipped and scale is not None and scale >= 1.0 and math.isfinite(metrics.loss)


class RunHealth:
    """Follows the steps of one run. most_in_a_row: bad steps after which it ends; None = it never ends for them."""

    def __init__(self, engine: Engine, steps: Steps, most_in_a_row: int | None) -> None:
        self.engine, self._steps, self.most_in_a_row = engine, steps, most_in_a_row
        self.bad_steps: list[int] = []
        self.in_a_row = 0
        self.num_steps = self.scaled_down = 0
        self.good_batch: Batch | None = None
        self.good_step = 0

    def state(self) -> dict[str, Any]:
        """What `restore` needs to follow the rest of a run, as JSON values."""
        return {
            "bad_steps": self.bad_steps,
            "in_a_row": self.in_a_row,
            "num_steps": self.num_steps,
            "good_step": self.good_step,
            "scaled_down": self.scaled_down,
        }

    def restore(self, state: Mapping[str, Any], batch_of: Callable[[int], Batch]) -> None:
        """Go on from the `state` of a run that was resumed. batch_of: the batch of a step."""
        found = Fields(state, "the checkpoint's count of bad steps")
        self.bad_steps, self.in_a_row = found.wholes("bad_steps"), found.whole("in_a_row")
        self.num_steps, self.good_step = found.whole("num_steps"), found.whole("good_step")
        self.scaled_down = found.whole("scaled_down") if "scaled_down" in state else 0
        if self.in_a_row and self.good_step:
            self.good_batch = batch_of(self.good_step)

    def after_step(self, batch: Batch, metrics: StepMetrics, update: StepOutput) -> None:
        """Called when a step has ended."""
        self.num_steps += 1
        if finds_scale(metrics, update):
            logger.info(
                "step %d skipped its update: float16 overflows at a loss scale of %g", metrics.step, update.loss_scale
            )
            self.scaled_down += 1
            return
        if update.skipped:
            clipped = self.engine.max_grad_norm is not None
            what = "its update" if clipped else "the update of layers with such a gradient"
            logger.warning("step %d skipped %s: the gradient norm is %s", metrics.step, what, update.grad_norm)
        if update.skipped or not math.isfinite(metrics.loss):
            self.bad_steps.append(metrics.step)
            self.in_a_row += 1
        else:
            self.in_a_row, self.good_batch, self.good_step = 0, batch, metrics.step

    @property
    def must_end(self) -> bool:
        """True when so many steps in a row were bad that more would change nothing."""
        return self.most_in_a_row is not None and self.in_a_row >= self.most_in_a_row

    def diverged(self) -> bool:
        """Judge the model when a run ends: after bad steps it must still give a finite loss on the last good batch."""
        if not self.in_a_row:
            return False
        if self.must_end or self.good_batch is None:
            return True
        batch, engine = self.good_batch, self.engine
        if isinstance(batch, PromptBatch):  # a reward is finite whatever the model has become
            return not math.isfinite(engine.evaluate(input_ids=batch.input_ids, labels=batch.input_ids).loss)
        return not math.isfinite(self._steps.evaluate(engine, [batch]).loss)

    def describe(self) -> str:
        """Describe the bad steps in one line; empty when there were none."""
        scaled = f"loss scale: lowered by {self.scaled_down} of {self.num_steps} steps" if self.scaled_down else ""
        if not self.bad_steps:
            return scaled
        named = ", ".join(map(str, self.bad_steps[:MOST_NAMED])) + (", ..." if len(self.bad_steps) > MOST_NAMED else "")
        kept = " The last ones are among them; the model still works on other batches." if self.in_a_row else ""
        return (
            f"skipped: {len(self.bad_steps)} of {self.num_steps} steps, whose loss or gradient was not finite"
            f" (step {named}).{kept}"
        ) + (scaled and f"\n{scaled}")


class NotFinite(NamedTuple):
    """Where values that are not finite began. weight: a tensor's name; layer: whose gradient; empty where none did."""

    weight: str = ""
    layer: str = ""


def where_not_finite(engine: Engine) -> NotFinite:
    """Look for values that are not finite. Reads every weight, so it is for runs that went wrong.

    Of several ranks, all call it.
    """
    engine.executor.synchronize()
    engine.planes.write_back("weights")
    return NotFinite(first_bad_weight(engine.weights), engine.state.bad_layer)


def explain_divergence(health: RunHealth, last: StepMetrics, found: NotFinite) -> str:
    """Say when a run diverged, where, and what to try."""
    first = health.bad_steps[-health.in_a_row]
    name, value = ("gradient norm", last.grad_norm) if math.isfinite(last.loss) else ("loss", last.loss)
    text = f"the {name} of the last step is {value}: the run diverged at step {first} of {health.num_steps}"
    if health.must_end:
        text += f" and ended after {health.in_a_row} such steps (--max-skipped-steps)"
    if found.weight and first == 1:
        text += (
            f"; no update came before, and the weight {found.weight} holds NaN or infinity: fetch or export it again"
        )
    elif found.weight:
        text += f"; the first weight with NaN or infinity is {found.weight}"
    elif found.layer:
        text += f"; every weight is finite, and the first gradient that is not is that of {found.layer}"
    return text if first == 1 and found.weight else f"{text}\n  try a smaller --lr, or more warm-up (--lr-warmup-pct)"
