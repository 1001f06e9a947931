"""Compares predicted with measured seconds after the first steps, and changes to a plan that measured speeds favour.

Planner and runtime meet here a second time, after `api`: what the engine measured corrects what the planner assumed.
"""

from __future__ import annotations

from dataclasses import replace

from tqdm import tqdm

from flexengine.api import PlannedRun
from flexengine.config import TrainConfig
from flexengine.metrics import TIMED_STEP, StepMetrics
from flexengine.plan import Plan, PlanError
from flexengine.planner.correction import Review, review
from flexengine.planner.planner import make_plan
from flexengine.recording import Recorder, reviewed_step
from flexengine.reports.plan_text import describe
from flexengine.run_folder import write_plan
from flexengine.runtime.engine import Engine
from flexengine.wording import going_on_without

LEAST_GAIN = 0.01
"""Least share of the step time that a new plan must save: predictions are no better than that."""


def review_step(planned: PlannedRun, engine: Engine, measured_step_s: float) -> Review:
    """Compare the engine's plan with a step whose commands were timed (`Engine.measure_next_step`).

    measured_step_s: wall seconds of a step, preferably one without time stamps, which cost time.
    """
    return review(engine.plan, planned.source.spec, planned.profile, engine.command_totals, measured_step_s)


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
        other = make_plan(spec, request, found.profile)
    except PlanError:  # the search is narrower than what is running, which stays
        return None
    if other.predicted.step_s > (1 - LEAST_GAIN) * found.expected.step_s:
        return None
    light_s = min(
        found.expected.speed_of_light_s, other.predicted.step_s
    )  # the bound of the whole request, not of the pinned one
    return replace(other, request=plan.request, predicted=replace(other.predicted, speed_of_light_s=light_s))


def change_plan(planned: PlannedRun, engine: Engine, found: Review) -> str:
    """Change to a faster plan if there is one that fits; returns what was done in words."""
    plan = faster_plan(planned, engine, found)
    if plan is None:
        return "the plan stays: no other within its memory promises to be faster"
    try:
        engine.adopt(plan, describe(plan, planned.source.spec))
    except ValueError as error:  # the engine checks before it moves anything
        return f"the plan stays: {error}"
    return f"changed the plan: {plan.predicted.step_s:.3g} s per step expected instead of {found.expected.step_s:.3g} s"


class Reviewer:
    """Compares one step with the prediction and corrects what is predicted of later ones.

    The commands of an earlier step are timed for that. With config.replan it also changes to a plan that the measured
    speeds make faster. A run of two steps is compared by its timed one; a run of a single step is not reviewed.
    """

    def __init__(
        self, config: TrainConfig, planned: PlannedRun, engine: Engine, num_steps: int, recorder: Recorder
    ) -> None:
        self.config, self.planned, self.engine, self.recorder = config, planned, engine, recorder
        self.timed_step = recorder.timed_step
        start = self.timed_step - TIMED_STEP
        self.reviewed_step = start + max(TIMED_STEP, min(reviewed_step(planned.plan), num_steps - start))

    def after_step(self, metrics: StepMetrics) -> None:
        """Called when a step has ended."""
        if metrics.step == self.timed_step - 1:
            self.engine.measure_next_step()
        if metrics.step == self.reviewed_step:
            self._review(metrics)

    def _review(self, metrics: StepMetrics) -> None:
        found = review_step(self.planned, self.engine, metrics.step_s)
        reason = self.recorder.slowed_by(metrics.step)
        slowed = f" (slowed by {reason})" if reason else ""
        tqdm.write(f"step {metrics.step}{slowed}: {found.describe()}")
        correct_prediction(self.engine, found)
        if self.config.replan:
            tqdm.write(change_plan(self.planned, self.engine, found))
            with going_on_without("the plan that the run changed to"):
                write_plan(self.config, replace(self.planned, plan=self.engine.plan, profile=found.profile))
