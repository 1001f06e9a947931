"""CUDA graphs are planned where the host would hold a step up, with their memory, and not elsewhere."""

from dataclasses import replace

import pytest

from flexengine.hardware.presets import preset
from flexengine.models.registry import open_model
from flexengine.plan import CacheBytes, Numerics, Plan, Request
from flexengine.planner.cost.cost_model import issue_calls
from flexengine.planner.planner import make_plan
from flexengine.planner.variants import graphs_may_pay
from flexengine.reports.plan_text import describe
from flexengine.reports.simulated_step import simulate_step
from flexengine.request import with_cache
from flexengine.run.step_prediction import StepPredictor
from flexengine.schedule.commands import LayerCall
from flexengine.schedule.layout import Layout
from flexengine.schedule.packing import full_round
from flexengine.schedule.programs import lower_round
from flexengine.schedule.replays import may_replay, replay_bytes

GIB = 2**30
MODEL = open_model("preset:gpt2").spec
REQUEST = Request(1024, 16384, 2 * GIB, 60 * GIB, 8192, 16384, numerics=Numerics(state="bfloat16"))
PROFILE = preset("h100-80")


@pytest.fixture(scope="module")
def plan(quick_search_in_module):
    return make_plan(MODEL, REQUEST, PROFILE)


@pytest.mark.usefixtures("quick_search")
def test_a_small_model_replays_and_its_plan_counts_the_memory(plan):
    assert plan.replays
    assert plan.predicted.gpu_bytes <= REQUEST.max_gpu_bytes
    assert plan.predicted.gpu_categories["CUDA graphs"] == replay_bytes(Layout(MODEL, plan).model, plan) > 2**22
    assert "CUDA graphs" in describe(plan, MODEL)
    assert Plan.from_json(plan.to_json()) == plan
    issued = make_plan(MODEL, replace(REQUEST, graphs="never"), PROFILE)
    assert not issued.replays
    assert plan.predicted.step_s < 0.97 * issued.predicted.step_s


def test_blocks_and_gradients_are_priced_as_replayed_and_edges_are_not(plan):
    shape = full_round(plan.request, plan.chunk_tokens, plan.chunks_per_round)
    for command in lower_round(Layout(MODEL, plan), shape, first=True).commands:
        args, cheaper = command.args, issue_calls(command, replays=True) < issue_calls(command)
        is_block = isinstance(args, LayerCall) and MODEL.layers[args.layer].kind == "block"
        assert cheaper == (is_block or command.kind == "finish_gradient"), command.label


def test_batches_of_other_lengths_are_predicted_without_graphs(plan):
    issued = replace(plan, request=replace(plan.request, graphs="never"))
    replayed, one_by_one = (StepPredictor(found, MODEL, PROFILE) for found in (plan, issued))
    assert replayed.step_s([1024] * 16) == plan.predicted.step_s
    ragged = [700] * 16
    assert replayed.step_s(ragged) == one_by_one.step_s(ragged)


@pytest.mark.usefixtures("quick_search")
def test_the_drawn_step_is_priced_as_the_plan_is():
    """With updates by the GPU, which begin when the host has read the loss."""
    slow_cpu = PROFILE.changed(cpu_adamw_parameters_per_s=(("bfloat16", 1e6),))
    on_gpu = make_plan(MODEL, REQUEST, slow_cpu)
    assert not on_gpu.updates_on_cpu
    assert simulate_step(on_gpu, MODEL, slow_cpu).total_s == pytest.approx(on_gpu.predicted.step_s, rel=1e-6)


def test_other_budgets_leave_graphs_decided(plan):
    assert with_cache(plan, REQUEST, CacheBytes(GIB)).replays
    assert plan.for_request(replace(REQUEST, max_gpu_bytes=3 * GIB)).replays


def test_what_is_not_replayed(plan):
    assert not Request(2048, 4096, GIB, GIB, graphs="always").replays(1024), "slices of a sequence"
    assert may_replay(MODEL)
    assert graphs_may_pay(MODEL, plan.for_request(REQUEST), PROFILE.changed(issue_s=1e-3))
    assert not graphs_may_pay(MODEL, plan, PROFILE.changed(issue_s=1e-3, device_type="cpu"))
    assert not graphs_may_pay(MODEL, plan, PROFILE.changed(issue_s=1e-9))
    assert not may_replay(replace(MODEL, balancing=object()))  # type: ignore[arg-type]
