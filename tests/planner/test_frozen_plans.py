"""Plans of models with frozen layers: near the oracle, within their budgets, above the bound, and cheaper."""

from dataclasses import replace
from random import Random

import pytest
from thorough import cases

from flexengine.hardware.presets import preset
from flexengine.models.freezing import with_frozen
from flexengine.models.registry import open_model
from flexengine.plan import Plan, Request
from flexengine.planner.bound.speed_of_light import speed_of_light
from flexengine.planner.cost.cost_model import step_seconds
from flexengine.planner.cost.memory import gpu_required_bytes, host_required_bytes
from flexengine.planner.feasibility.shortage import Feasibility
from flexengine.planner.planner import make_plan
from flexengine.planner.problem import Problem
from flexengine.reports.picture import Picture
from flexengine.reports.plan_data import as_json
from flexengine.reports.plan_page import html_page
from flexengine.reports.plan_text import report
from flexengine.schedule.checker import check_program
from flexengine.schedule.layout import Layout
from flexengine.schedule.packing import full_round
from flexengine.schedule.programs import lower_round, lower_update
from tests.planner.oracle import best_step_s, slow_link
from tests.schedule.small_plans import FLOAT32, mixed_model, random_plan, small_model

GIB, ROOMY = 1 << 30, 1 << 40
FROZEN = (("embed", "block.0"), ("embed", "blocks"), ("blocks",), ("block.1", "head"), ("head",))


def request_of(seq_len: int = 32, **changes) -> Request:
    return Request(seq_len, 256, ROOMY, ROOMY, **{"numerics": FLOAT32, "chunk_tokens": 64, **changes})


def tight_request(model, profile, factor: float, **changes) -> Request:
    request = request_of(**changes)
    least = Feasibility(Problem(model, request, profile)).least_gpu().gpu_bytes
    return replace(request, max_gpu_bytes=int(factor * least))


@pytest.mark.parametrize("case", cases(range(len(FROZEN)), (1,)), ids=lambda case: " ".join(FROZEN[case]))
def test_matches_the_exhaustive_oracle(case):
    names, (link, seq_len, factor) = FROZEN[case], ((4e8, 32, 1.25), (2e9, 128, 1.5))[case % 2]
    model, profile = with_frozen(small_model(blocks=2), names), slow_link(link)
    request = tight_request(model, profile, factor, seq_len=seq_len, round_tokens=128)
    best_s = best_step_s(model, request, profile, 64, 2)
    assert best_s is not None
    assert make_plan(model, request, profile).predicted.step_s <= 1.02 * best_s


@pytest.mark.parametrize("seed", cases(range(40), range(20)))
def test_the_bound_is_never_above_a_random_plan_that_just_fits(seed):
    random = Random(seed)
    model = small_model(random.randint(2, 4), seed % 2 == 0, random.choice([64, 128]), random.choice([64, 256, 1024]))
    model = with_frozen(model, FROZEN[seed % len(FROZEN)])
    profile = slow_link(random.choice([1e7, 1e8, 1e9, 1e11])) if seed % 4 else preset("rtx-4090")
    plan = random_plan(random, model, sliced=seed % 3 == 0)
    sizes = {"chunk_tokens": 64, "round_tokens": 128, "max_global_batch_tokens": random.choice([128, 256, 640])}
    layout = Layout(model, replace(plan, request=replace(plan.request, **sizes)))
    budgets = {
        "max_gpu_bytes": gpu_required_bytes(layout, profile),
        "max_host_bytes": host_required_bytes(layout, profile),
    }
    request = replace(layout.plan.request, **budgets)
    bound = speed_of_light(model, request, profile)
    assert bound is not None
    assert 0 < bound.seconds <= step_seconds(layout, profile).step_s


@pytest.mark.usefixtures("quick_search")
@pytest.mark.parametrize("names", FROZEN, ids=" ".join)
@pytest.mark.parametrize(
    ("kind", "seq_len"),
    cases([(kind, length) for kind in ("tied", "mixed") for length in (32, 256)], [("tied", 256), ("mixed", 32)]),
)
def test_plans_keep_their_promises(names, seq_len, kind):
    """Budgets hold on the exact layout, programs are proven, the prediction is the simulator's, and it can be told."""
    model = with_frozen(mixed_model(3) if kind == "mixed" else small_model(3, tied=True), names)
    profile = slow_link(1e9)
    request = tight_request(model, profile, 1.3, seq_len=seq_len)
    plan = make_plan(model, request, profile)
    layout = Layout(model, plan)
    assert Problem(model, request, profile).fits(layout)
    assert plan.predicted.gpu_bytes == gpu_required_bytes(layout, profile)
    assert step_seconds(layout, profile).step_s == pytest.approx(plan.predicted.step_s)
    assert 0 < plan.predicted.speed_of_light_s <= plan.predicted.step_s
    shape = full_round(request, plan.chunk_tokens, plan.chunks_per_round)
    for program in (lower_round(layout, shape, True), lower_round(layout, shape, False), lower_update(layout)):
        check_program(program, layout.gpu_bytes, layout.host_bytes)
    assert Plan.from_json(plan.to_json()) == plan
    picture = Picture(plan, model, profile)
    frozen = sum(group.frozen for group in model.groups)
    assert f"frozen: {frozen} of {len(model.groups)} groups" in report(picture)
    assert sum(row["update"] == "none" for row in as_json(picture)["groups"]) == frozen
    assert "frozen" in html_page(picture, "flexengine plan")


@pytest.mark.usefixtures("quick_search")
def test_frozen_layers_take_less_time_and_memory():
    """Llama 3.1 8B on a card of 24 GiB: without optimizer states and gradients of half of the blocks, and no backward
    in them, a step has less to do and fits a smaller host."""
    whole = open_model("preset:llama-3.1-8b").spec
    half = with_frozen(whole, ["embed", "block.0-15"])
    above = with_frozen(whole, ["block.16-31", "head"])
    request = Request(2048, 32768, 20 * GIB, 120 * GIB, 4096, 16384, graphs="never", segment_blocks=1)
    plans = [make_plan(model, request, preset("rtx-4090")) for model in (whole, half, above)]
    steps = [plan.predicted.step_s for plan in plans]
    assert steps[1] < 0.75 * steps[0]
    assert steps[1] < steps[2] < steps[0]
    least = [Feasibility(Problem(model, request, preset("rtx-4090"))).least_host() for model in (whole, half)]
    assert least[0] is not None
    assert least[1] is not None
    assert least[1].host_bytes < 0.6 * least[0].host_bytes
    flops = [model.model_flops([2048]) for model in (whole, half, above)]
    assert flops[1] < flops[2] < flops[0]
