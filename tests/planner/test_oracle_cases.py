"""The planner against a hundred answers of the wide oracle: within 2% of the best, and the bound below it."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from flexengine.planner.bound.speed_of_light import speed_of_light_s
from flexengine.planner.search import make_plan
from tests.planner.oracle_cases import NUM_CASES, answer, answers, case

TOLERANCE = 1.02
ANSWERS = answers()
CHEAPEST = sorted(range(len(ANSWERS)), key=lambda i: (ANSWERS[i]["fitting"], i))[:3]
"""The cases with the fewest placements within their budgets, which the oracle answers soonest."""


def test_there_is_an_answer_for_every_case():
    assert [found["case"] for found in ANSWERS] == [asdict(case(seed)) for seed in range(NUM_CASES)]


@pytest.mark.parametrize("seed", CHEAPEST)
def test_answers_are_what_the_oracle_finds(seed):
    """Recomputed, so that the file cannot go stale when layout, lowering, simulator or costs change."""
    found = answer(case(seed))
    assert found["best_s"] == pytest.approx(ANSWERS[seed]["best_s"], rel=1e-9)
    assert found["fitting"] == ANSWERS[seed]["fitting"]


@pytest.mark.parametrize("seed", range(NUM_CASES))
def test_plans_are_within_two_percent_of_the_best(seed):
    which, best_s = case(seed), ANSWERS[seed]["best_s"]
    model, request, profile = which.model(), which.request(), which.profile()
    predicted = make_plan(model, request, profile).predicted
    assert predicted.step_s <= TOLERANCE * best_s
    assert 0 < predicted.speed_of_light_s <= min(predicted.step_s, best_s)
    # the prediction names the smaller of bound and step; the bound itself must not need that
    assert speed_of_light_s(model, request, profile) <= min(predicted.step_s, best_s)
