"""Compares predicted with measured seconds after the first steps, and changes to a plan that measured speeds favour.

Planner and runtime meet here a second time, after `api`: what the engine measured corrects what the planner assumed.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from tqdm import tqdm

from flexengine.api import PlannedRun
from flexengine.data.batches import Batch
from flexengine.hardware.profile import HardwareProfile
from flexengine.metrics import FAR_OFF, TIMED_STEP, StepMetrics, format_seconds
from flexengine.objectives import OBJECTIVES
from flexengine.options.train_config import TrainConfig
from flexengine.parallel.team import is_first
from flexengine.plan import Plan, PlanError, Prediction
from flexengine.planner.correction import Factors, Review, mended_profile
from flexengine.planner.ranks.plan import plan_for_ranks
from flexengine.planner.ranks.price import review_for_ranks
from flexengine.reports.plan_text import describe
from flexengine.run.folder import write_plan
from flexengine.run.recording import Recorder, reviewed_step
from flexengine.run.step_prediction import StepPredictor
from flexengine.runtime.engine import Engine
from flexengine.wording import going_on_without

LEAST_GAIN = 0.01
"""Least share of the step time that a new plan must save: predictions are no better than that."""

BEATEN = 0.9
"""A step below this share of its bound says that the rates are too slow, not that clocks wander."""


def review_step(
    planned: PlannedRun, engine: Engine, measured_step_s: float, predicted_step_s: float, lengths: Sequence[int]
) -> Review:
    """Compare the engine's plan with a step whose commands were timed (`Engine.measure_next_step`).

    measured_step_s: wall seconds of a step, preferably one without time stamps, which cost time. predicted_step_s: of
    that step. lengths: of the sequences of the timed step. Of several ranks, this one's part of the step is compared.
    """
    plan, spec, profile = engine.plan, planned.source.spec, planned.profile
    share, totals = StepPredictor(plan, spec, profile).chunk_share(lengths), engine.command_totals
    found = review_for_ranks(plan, spec, profile, totals, measured_step_s, share)
    return replace(found, predicted_s=predicted_step_s)


def correct_prediction(engine: Engine, found: Review) -> None:
    """Give the engine's plan the prediction of the corrected profile; its decisions stay."""
    engine.plan = replace(engine.plan, predicted=found.expected)


def faster_plan(planned: PlannedRun, engine: Engine, found: Review) -> Plan | None:
    """Search a plan that should be faster under the corrected profile; None if there is none.

    It keeps chunk and round sizes, so that results keep their bits, and fits the memory that the engine already holds,
    so that changing to it allocates nothing.
    """
    plan, spec = engine.plan, planned.source.spec
    request = replace(
        plan.request,
        max_gpu_bytes=plan.predicted.gpu_bytes,
        max_host_bytes=plan.predicted.host_bytes,
        chunk_tokens=plan.chunk_tokens,
        round_tokens=plan.round_tokens,
    )
    try:
        other = plan_for_ranks(spec, request, found.profile)
    except PlanError:  # the search is narrower than what is running, which stays
        return None
    if other.predicted.step_s > (1 - LEAST_GAIN) * found.expected.step_s:
        return None
    # the bound of the whole request, not of the pinned one
    light_s = min(found.expected.speed_of_light_s, other.predicted.step_s) if other.is_bounded else 0.0
    other = replace(other, predicted=replace(other.predicted, speed_of_light_s=light_s))
    return other.for_request(plan.request)


def change_plan(planned: PlannedRun, engine: Engine, found: Review) -> str:
    """Change to a faster plan if there is one that fits; returns what was done in words.

    Of several ranks, the first one searches, and all of them make this call.
    """
    team = planned.team
    plan = faster_plan(planned, engine, found) if is_first(team) else None
    if team is not None:
        plan = team.control.broadcast(plan, Plan)
    if plan is None:
        return "the plan stays: no other within its memory promises to be faster"
    try:
        engine.adopt(plan, describe(plan, planned.source.spec))
    except ValueError as error:  # the engine checks before it moves anything
        return f"the plan stays: {error}"
    return f"changed the plan: {plan.predicted.step_s:.3g} s per step expected instead of {found.expected.step_s:.3g} s"


class ExpectedStep(NamedTuple):
    """What is expected of a step: its seconds, and the least that any plan could take for its batch, 0 = not known."""

    step_s: float
    speed_of_light_s: float


class Reviewed(NamedTuple):
    """A step that a review may look at: its metrics, its sequences, and whether the step before was clipped."""

    metrics: StepMetrics
    lengths: list[int]
    after_clipping: bool


class Reviewer:
    """Compares steps with their predictions and corrects what is predicted of later ones.

    The commands of an earlier step are timed for that. With config.replan it also changes, once ten steps have shown
    the machine's speeds, to a plan that these make faster; a run too short for that changes after the reviewed step. A
    run of two steps is compared by its timed one; a run of a single step is not reviewed.
    """

    def __init__(
        self, config: TrainConfig, planned: PlannedRun, engine: Engine, num_steps: int, recorder: Recorder
    ) -> None:
        self.config, self.planned, self.engine, self.recorder = config, planned, engine, recorder
        self.timed_step, self.retimed_step = recorder.timed_step, recorder.retimed_step or 0
        start = self.timed_step - TIMED_STEP
        self.reviewed_step = start + max(TIMED_STEP, min(reviewed_step(planned.plan), num_steps - start))
        self.replan_step = recorder.replan_step or 0
        self._predictor = self._predict_by(planned.profile)
        self._steps: list[Reviewed] = []
        self._was_clipped = False
        self._told_of: set[str] = set()

    def predict(self, batch: Batch) -> ExpectedStep:
        """What is expected of a step on a batch, from its own sequences and the step before."""
        if self.config.objective == "grpo":
            return ExpectedStep(0.0, 0.0)  # what it writes is not known yet
        predicted, lengths = self.engine.plan.predicted, self._lengths(batch)
        usual_s = self._predictor.step_s(lengths)
        step_s = self._predictor.step_s(lengths, after_clipping=True) if self._was_clipped else usual_s
        light_s = usual_s / predicted.step_s * predicted.speed_of_light_s
        return ExpectedStep(step_s + self._first_pass_s(self._predictor, _lengths(batch)), light_s)

    def _first_pass_s(self, predictor: StepPredictor, lengths: Sequence[int]) -> float:
        """Seconds of the forward pass that preferences take before a step."""
        return predictor.forward_s(lengths) if self.config.compares else 0.0

    def _lengths(self, batch: Batch) -> list[int]:
        """Lengths of the sequences that the run's objective trains."""
        lengths, name = _lengths(batch), self.config.objective
        return lengths if name not in OBJECTIVES or OBJECTIVES[name].trains_second else lengths[0::2]

    def _predict_by(self, profile: HardwareProfile) -> StepPredictor:
        return StepPredictor(self.engine.plan, self.planned.source.spec, profile)

    def after_step(self, batch: Batch, metrics: StepMetrics) -> None:
        """Called when a step has ended."""
        if self.config.objective == "grpo":
            return
        if metrics.step <= max(self.reviewed_step, self.replan_step):
            self._steps.append(Reviewed(metrics, self._lengths(batch), self._was_clipped))
        limit = self.engine.max_grad_norm
        self._was_clipped = limit is not None and not metrics.grad_norm <= limit
        if metrics.step in (self.timed_step - 1, self.retimed_step - 1):
            self.engine.measure_next_step()
        if metrics.step == self.reviewed_step:
            self._review(metrics)
        if metrics.step == self.replan_step:
            self._replan(self._reviewed_again())
        self._tell_of_card(metrics)

    def _tell_of_card(self, metrics: StepMetrics) -> None:
        """Say once what slows the GPU down, where that makes a step take more than predicted."""
        card = metrics.card
        slow = metrics.off_prediction > FAR_OFF and metrics.step > self.timed_step
        if card is None or not slow or self.recorder.disturbed(metrics.step):
            return
        found = {*card.slowed_by, *(["its clock"] if card.is_slow else [])}
        if found - self._told_of:
            self._told_of |= found
            tqdm.write(
                f"step {metrics.step}: took {1 + metrics.off_prediction:.1f} times what was predicted, at"
                f" {card.describe()}; `flexengine doctor` says what to do"
            )

    def _review(self, metrics: StepMetrics) -> None:
        found = self._found(self.timed_step, metrics.step_s, metrics.predicted_step_s)
        reason = self.recorder.slowed_by(metrics.step)
        slowed = f" (slowed by {reason})" if reason else ""
        if metrics.card is not None and metrics.card.is_slow:
            slowed += f" ({metrics.card.describe()})"
        tqdm.write(f"step {metrics.step}{slowed}: {found.describe()}")
        self._correct(found)
        self._mend(metrics, found)
        self._tell_of_the_first_step()
        if self.config.replan and not self.replan_step:
            self._replan(found)

    def _mend(self, metrics: StepMetrics, found: Review) -> None:
        """Mend the remembered rates where a step beats the bound that follows from them, which is no bound then."""
        planned, engine = self.planned, self.engine
        bound_s = metrics.sol_pct / 100 * metrics.step_s  # NaN where there is no bound
        if not (metrics.step_s < BEATEN * bound_s and is_first(planned.team) and planned.profile.source == "measured"):
            return
        mended = partial(mended_profile, factors=found.factors)
        if planned.mend_rates(mended):
            rate = mended(planned.profile).matmul.peak_flops_per_s
            engine.settings = replace(engine.settings, matmul_flops_per_s=rate)
            tqdm.write(
                f"step {metrics.step} took {format_seconds(metrics.step_s)}, less than the {format_seconds(bound_s)}"
                " that this machine's remembered rates allow: they were measured while it was busy, and are mended for"
                " later runs by what this step showed"
            )

    def _found(self, timed_step: int, measured_s: float, predicted_s: float) -> Review:
        """What a timed step shows, beside measured and predicted seconds of a step; to all ranks what the first saw."""
        lengths = next(step.lengths for step in self._steps if step.metrics.step == timed_step)
        team = self.planned.team
        found = review_step(self.planned, self.engine, measured_s, predicted_s, lengths) if is_first(team) else None
        found = found if team is None else team.control.broadcast(found, Review, Prediction, Factors, HardwareProfile)
        assert found is not None
        return found

    def _reviewed_again(self) -> Review:
        """The commands of a later step, and what the undisturbed steps since the review took."""
        before = StepPredictor(self.planned.plan, self.planned.source.spec, self.planned.profile)  # not yet corrected
        steps = [
            (metrics, before.step_s(lengths, after_clipping) + self._first_pass_s(before, lengths))
            for metrics, lengths, after_clipping in self._steps
            if metrics.step >= self.reviewed_step and not self.recorder.disturbed(metrics.step)
        ]
        measured_s = statistics.median(metrics.step_s for metrics, _ in steps)
        predicted_s = statistics.median(seconds for _, seconds in steps)
        found = self._found(self.retimed_step, measured_s, predicted_s)
        tqdm.write(f"steps {steps[0][0].step} to {steps[-1][0].step}, their median: {found.describe()}")
        self._correct(found)
        return found

    def _correct(self, found: Review) -> None:
        """Predict later steps by the corrected profile."""
        correct_prediction(self.engine, found)
        self._predictor = self._predict_by(found.profile)

    def _tell_of_the_first_step(self) -> None:
        """Say what the first step took beside its work, by the corrected prediction."""
        first, lengths, _ = self._steps[0]
        work_s = self._predictor.step_s(lengths)
        if first.step_s > work_s and first.step < self.timed_step:
            tqdm.write(
                f"step {first.step}: {format_seconds(first.step_s - work_s)} of its {format_seconds(first.step_s)} were"
                " spent once, on kernels, libraries and first touches of memory"
            )

    def _replan(self, found: Review) -> None:
        tqdm.write(change_plan(self.planned, self.engine, found))
        self._predictor = self._predict_by(found.profile)
        with going_on_without("the plan that the run changed to"):
            write_plan(self.config, replace(self.planned, plan=self.engine.plan, profile=found.profile))


def _lengths(batch: Batch) -> list[int]:
    return [len(sequence) for sequence in batch.input_ids]
