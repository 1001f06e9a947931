"""A profile corrected by measured commands: it recovers what a machine really does."""

from dataclasses import replace

import pytest

from flexengine.hardware.presets import preset
from flexengine.plan import Request
from flexengine.planner.correction import (
    MAX_FACTOR,
    Factors,
    corrected_profile,
    predicted_totals,
    review,
    stream_factors,
)
from flexengine.planner.cost.cost_model import step_seconds
from flexengine.planner.planner import make_plan
from flexengine.schedule.layout import Layout
from tests.planner.oracle import slow_link
from tests.schedule.small_plans import FLOAT32, small_model

TRUTH = Factors(compute=1.7, h2d=0.8, d2h=1.25)


def small_case():
    model = small_model(blocks=3)
    profile = slow_link(1e9).changed(copy_latency_s=1e-12)
    request = Request(32, 512, 1_500_000, 1 << 40, chunk_tokens=64, round_tokens=128, numerics=FLOAT32)
    return model, profile, make_plan(model, request, profile)


def test_review_finds_the_machine_that_ran():
    model, profile, plan = small_case()
    layout, real = Layout(model, plan), corrected_profile(profile, TRUTH)
    measured_s = step_seconds(layout, real).step_s
    found = review(plan, model, profile, predicted_totals(layout, real), measured_s)
    assert tuple(found.factors) == pytest.approx(tuple(TRUTH), rel=0.06)
    assert found.expected.step_s == pytest.approx(measured_s, rel=0.02)
    assert sum(found.expected.busy_s.values()) > sum(plan.predicted.busy_s.values())
    assert plan.predicted.speed_of_light_s < found.expected.speed_of_light_s <= found.expected.step_s
    assert found.expected.gpu_categories == plan.predicted.gpu_categories
    assert found.predicted_s == pytest.approx(plan.predicted.step_s)
    assert "compute x1.7" in found.describe()


def test_a_step_with_more_rounds_is_compared_per_command():
    model, profile, plan = small_case()
    layout, real = Layout(model, plan), corrected_profile(profile, TRUTH)
    thrice = {k: t._replace(count=3 * t.count, seconds=3 * t.seconds, num_bytes=3 * t.num_bytes)
              for k, t in predicted_totals(layout, real).items()}  # fmt: skip
    once = review(plan, model, profile, predicted_totals(layout, real), 1.0)
    found = review(plan, model, profile, thrice, 1.0)
    assert tuple(found.factors) == pytest.approx(tuple(once.factors))


def test_disturbed_measurements_are_held():
    model, profile, plan = small_case()
    wild = corrected_profile(profile, Factors(1000.0, 1.0, 1.0))
    found = review(plan, model, profile, predicted_totals(Layout(model, plan), wild), 1.0)
    assert found.factors.compute == MAX_FACTOR
    assert review(plan, model, profile, {}, 1.0).factors == Factors()


def test_correction_leaves_memory_alone():
    profile = preset("h200")
    changed = corrected_profile(profile, TRUTH)
    assert replace(changed.memory, bytes_per_s=profile.memory.bytes_per_s) == profile.memory
    assert changed.matmul.rate(4096) == pytest.approx(profile.matmul.rate(4096) / 1.7)


def test_nothing_measured_corrects_nothing():
    assert stream_factors({}, {}) == Factors()
