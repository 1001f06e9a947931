"""Compares predicted with measured seconds after the first steps, and changes to a plan that measured speeds favour.

Planner and runtime meet here a second time, after `api`: what the engine measured corrects what the planner assumed.
"""

from __future__ import annotations

from dataclasses import replace

from flexengine.api import Prepared
from flexengine.plan import Plan, PlanError
from flexengine.planner.correction import Review, review
from flexengine.planner.search import make_plan
from flexengine.reports.plan_text import describe
from flexengine.runtime.engine import Engine

LEAST_GAIN = 0.01
"""Least share of the step time that a new plan must save: predictions are no better than that."""


def review_step(prepared: Prepared, engine: Engine, measured_step_s: float) -> Review:
    """Compare the engine's plan with a step whose commands were timed (`Engine.measure_next_step`).

    measured_step_s: wall seconds of a step, preferably one without time stamps, which cost time.
    """
    return review(engine.plan, prepared.source.spec, prepared.profile, engine.command_totals, measured_step_s)


def correct_prediction(engine: Engine, found: Review) -> None:
    """Give the engine's plan the prediction of the corrected profile; its decisions stay."""
    engine.plan = replace(engine.plan, predicted=found.expected)


def faster_plan(prepared: Prepared, engine: Engine, found: Review) -> Plan | None:
    """Search a plan that should be faster under the corrected profile; None if there is none.

    It keeps chunk and round sizes, so that results keep their bits, and fits the memory that the engine already holds,
    so that changing to it allocates nothing.
    """
    plan, spec = engine.plan, prepared.source.spec
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


def change_plan(prepared: Prepared, engine: Engine, found: Review) -> str:
    """Change to a faster plan if there is one that fits; returns what was done in words."""
    plan = faster_plan(prepared, engine, found)
    if plan is None:
        return "the plan stays: no other within its memory promises to be faster"
    try:
        engine.adopt(plan, describe(plan, prepared.source.spec))
    except ValueError as error:  # the engine checks before it moves anything
        return f"the plan stays: {error}"
    return f"changed the plan: {plan.predicted.step_s:.3g} s per step expected instead of {found.expected.step_s:.3g} s"
