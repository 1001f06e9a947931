"""Plans whose experts cross the link in parts: where whole blocks do not fit or are slower, with the same promises."""

from dataclasses import replace
from itertools import product
from random import Random

import pytest
from thorough import cases

from flexengine.hardware.presets import preset
from flexengine.models.in_parts import in_parts
from flexengine.plan import Numerics, Plan, PlanError, Request
from flexengine.planner.cost.memory import gpu_required_bytes, host_required_bytes
from flexengine.planner.feasibility.shortage import Feasibility
from flexengine.planner.planner import make_plan
from flexengine.planner.problem import Problem
from flexengine.planner.variants import OF_WHOLE_EXPERTS, fastest
from flexengine.schedule.checker import check_program
from flexengine.schedule.layout import Layout
from flexengine.schedule.packing import full_round
from flexengine.schedule.programs import lower_evaluation, lower_round, lower_update
from tests.planner.oracle import slow_link
from tests.planner.test_parts import check_bytes, check_surrogate, memory_of, random_candidate
from tests.schedule.small_plans import FLOAT32, divided_model

ROOMY = 1 << 40


@pytest.mark.parametrize("seed", range(8))
def test_bytes_by_formula_are_those_of_the_layout(seed):
    random = Random(seed)
    profile, numerics = preset("cpu-test"), random.choice([FLOAT32, Numerics()])
    model = in_parts(divided_model(random.randint(2, 6)))
    memory = memory_of(model, profile, seq_len=32 if seed % 3 else 128, numerics=numerics)
    check_bytes(memory, random_candidate(memory, random))


@pytest.mark.parametrize("seed", range(6))
def test_the_surrogate_is_near_the_simulator(seed):
    random = Random(seed)
    profile, model = slow_link(random.choice([1e9, 4e9, 1e10])), in_parts(divided_model(8))
    memory = memory_of(model, profile, chunk=256)
    check_surrogate(memory, random_candidate(memory, random))


@pytest.mark.usefixtures("quick_search")
@pytest.mark.parametrize(("factor", "seq_len"), cases(product((1.0, 1.3), (32, 256)), [(1.0, 32), (1.3, 256)]), ids=str)
def test_small_budgets_are_met_in_parts(factor, seq_len):
    """Below what whole blocks need, down to what parts need; with room, blocks are whole."""
    profile, model = slow_link(1e9), divided_model(4)
    request = Request(seq_len, 256, ROOMY, ROOMY, chunk_tokens=64, numerics=FLOAT32)
    whole, parts = (least_bytes(m, request, profile) for m in (model, in_parts(model)))
    assert parts < 0.75 * whole
    request = replace(request, max_gpu_bytes=int(min(factor * parts, whole - 1)))
    plan = make_plan(model, request, profile)
    assert plan.in_parts
    assert Plan.from_json(plan.to_json()) == plan
    layout = Layout(model, plan)
    assert Problem(model, request, profile).fits(layout)
    assert plan.predicted.gpu_bytes == gpu_required_bytes(layout, profile)
    assert plan.predicted.host_bytes == host_required_bytes(layout, profile)
    assert 0 < plan.predicted.speed_of_light_s <= plan.predicted.step_s
    shape = full_round(request, plan.chunk_tokens, plan.chunks_per_round)
    rounds = [lower_round(layout, shape, True), lower_round(layout, shape, False), lower_evaluation(layout, shape)]
    for program in (*rounds, lower_update(layout)):
        check_program(program, layout.gpu_bytes, layout.host_bytes)
    assert not make_plan(model, replace(request, max_gpu_bytes=ROOMY), profile).in_parts
    with pytest.raises(PlanError, match="smallest plan needs"):
        make_plan(model, replace(request, max_gpu_bytes=int(0.95 * parts)), profile)


def least_bytes(model, request, profile):
    """GPU bytes of the smallest plan."""
    return Feasibility(Problem(model, request, profile)).least_gpu().gpu_bytes


@pytest.mark.usefixtures("quick_search")
def test_the_faster_of_both_where_whole_blocks_hardly_fit():
    profile, model = slow_link(1e9), divided_model(4)
    request = Request(32, 256, ROOMY, ROOMY, numerics=FLOAT32)
    request = replace(request, max_gpu_bytes=int(1.02 * least_bytes(model, request, profile)))
    plan, whole = make_plan(model, request, profile), fastest(OF_WHOLE_EXPERTS, Problem(model, request, profile))
    assert plan.in_parts
    assert plan.predicted.step_s < whole.predicted.step_s
