"""make_plan: exhaustive oracle, promises kept, JSON, pinned sizes."""

from dataclasses import replace

import pytest
from thorough import cases

from flexengine import LoRA
from flexengine.hardware.presets import preset
from flexengine.models.lora import with_lora
from flexengine.models.registry import open_model
from flexengine.options.job import Job
from flexengine.plan import GroupPlan, Numerics, Plan, PlanError, PlanReason, Request
from flexengine.planner.cost.cost_model import step_seconds
from flexengine.planner.cost.memory import gpu_required_bytes, host_required_bytes
from flexengine.planner.feasibility.shortage import Feasibility
from flexengine.planner.limits import LIMITS
from flexengine.planner.planner import make_plan
from flexengine.planner.problem import Problem
from flexengine.planner.search import Search
from flexengine.reports.simulated_step import simulate_step
from flexengine.request import described, make_request
from flexengine.schedule.checker import check_program
from flexengine.schedule.layout import Layout
from flexengine.schedule.packing import full_round
from flexengine.schedule.programs import lower_round, lower_update
from tests.planner.oracle import best_step_s, slow_link
from tests.schedule.small_plans import FLOAT32, mixed_model, small_model

MIB, GIB = 1 << 20, 1 << 30
ROOMY = 1 << 40


def request_of(gpu_bytes: int, seq_len: int = 32, host_bytes: int = ROOMY, **changes) -> Request:
    return Request(seq_len, 256, gpu_bytes, host_bytes, **{"numerics": FLOAT32, **changes})


def least_gpu_bytes(model, request, profile) -> int:
    return Feasibility(Problem(model, replace(request, max_gpu_bytes=ROOMY), profile)).least_gpu().gpu_bytes


LINKS, FACTORS = (1e8, 4e8, 2e9, 1e10), (1.0, 1.25, 1.5)
CASES = [(LINKS[i % 4], (32, 128)[i // 4 % 2], FACTORS[i % 3]) for i in range(8)]


@pytest.mark.parametrize(("link", "seq_len", "factor"), cases(CASES, [CASES[i] for i in (0, 5, 6)]))
def test_matches_the_exhaustive_oracle(link, seq_len, factor):
    model, profile = small_model(blocks=2), slow_link(link)
    request = request_of(1, seq_len, chunk_tokens=64, round_tokens=128)
    least = least_gpu_bytes(model, request, profile)
    request = replace(request, max_gpu_bytes=int(factor * least))
    best_s = best_step_s(model, request, profile, 64, 2)
    planned_s = make_plan(model, request, profile).predicted.step_s
    assert best_s is not None
    assert planned_s <= 1.02 * best_s


@pytest.mark.parametrize(("link", "seq_len", "factor"), cases([(1e8, 32, 1.25), (4e8, 32, 1.5)], [(1e8, 32, 1.25)]))
def test_blocks_of_two_kinds_match_the_oracle(link, seq_len, factor):
    model, profile = mixed_model(blocks=2), slow_link(link)
    request = request_of(1, seq_len, chunk_tokens=64, round_tokens=128)
    request = replace(request, max_gpu_bytes=int(factor * least_gpu_bytes(model, request, profile)))
    best_s = best_step_s(model, request, profile, 64, 2)
    assert best_s is not None
    assert make_plan(model, request, profile).predicted.step_s <= 1.02 * best_s


@pytest.mark.pairs
@pytest.mark.usefixtures("quick_search")
@pytest.mark.parametrize("factor", [1.0, 2.0])
@pytest.mark.parametrize(
    "model", [small_model(3), small_model(3, tied=True), mixed_model(5)], ids=["untied", "tied", "mixed"]
)
@pytest.mark.parametrize("seq_len", [32, 256], ids=["packed", "sliced"])
def test_plans_keep_their_promises(factor, model, seq_len):
    """Budgets hold on the exact layout, programs are proven, the prediction is the simulator's."""
    profile = slow_link(1e9)
    request = request_of(1, seq_len, chunk_tokens=64)
    request = replace(request, max_gpu_bytes=int(factor * least_gpu_bytes(model, request, profile)))
    plan = make_plan(model, request, profile)
    layout, predicted = Layout(model, plan), plan.predicted
    assert Problem(model, request, profile).fits(layout)
    assert (predicted.gpu_bytes, predicted.host_bytes) == (
        gpu_required_bytes(layout, profile),
        host_required_bytes(layout, profile),
    )
    assert sum(predicted.gpu_categories.values()) == pytest.approx(predicted.gpu_bytes, rel=0.01)
    assert step_seconds(layout, profile).step_s == pytest.approx(predicted.step_s)
    assert 0 < predicted.speed_of_light_s <= predicted.step_s
    shape = full_round(request, plan.chunk_tokens, plan.chunks_per_round)
    for program in (lower_round(layout, shape, True), lower_round(layout, shape, False), lower_update(layout)):
        check_program(program, layout.gpu_bytes, layout.host_bytes)


@pytest.mark.usefixtures("quick_search")
def test_a_short_last_round_takes_less_than_a_full_one():
    """17 chunks in rounds of 16: the second round has one chunk, and the step takes little more than one round."""
    model, profile = small_model(), preset("cpu-test")
    seconds = []
    for tokens in (1024, 1088, 2048):
        request = replace(request_of(GIB), max_global_batch_tokens=tokens, chunk_tokens=64, round_tokens=1024)
        plan = make_plan(model, request, profile)
        assert simulate_step(plan, model, profile).total_s == pytest.approx(plan.predicted.step_s, rel=1e-6)
        seconds.append(plan.predicted.step_s)
    one, little_more, two = seconds
    assert one < little_more < one + 0.2 * (two - one)


@pytest.mark.usefixtures("quick_search")
def test_plan_survives_json():
    plan = make_plan(small_model(), request_of(4 * MIB), preset("cpu-test"))
    assert Plan.from_json(plan.to_json()) == plan


def test_same_request_same_plan():
    first, second = (
        make_plan(small_model(), request_of(2 * MIB, chunk_tokens=64, round_tokens=128), slow_link(1e9))
        for _ in range(2)
    )
    assert first == second


def test_everything_that_fits_stays_on_the_gpu():
    model = small_model()
    plan = make_plan(model, request_of(GIB), preset("cpu-test"))
    assert set(plan.groups) == {GroupPlan("gpu", "gpu", "gpu")}
    assert all(not kept.keep_host and kept.input_home == "gpu" for kept in plan.layers)
    assert plan.predicted.recompute_share < 1e-9
    assert plan.predicted.busy_s["d2h"] == 0


def test_recompute_switches():
    model = small_model()
    full = make_plan(model, request_of(GIB, recompute="full"), preset("cpu-test"))
    assert all(not kept.keep_gpu and not kept.keep_host for kept in full.layers)
    none = make_plan(model, request_of(GIB, recompute="none"), preset("cpu-test"))
    assert none.predicted.recompute_share == 0


@pytest.mark.parametrize("seq_len", [32, 256], ids=["whole sequences", "slices"])
def test_the_recompute_share_is_what_recomputing_adds(seq_len):
    """A slice's attention costs what its place in the sequence makes it cost."""
    found = [
        make_plan(
            small_model(),
            request_of(GIB, seq_len, recompute=recompute, chunk_tokens=64, round_tokens=256),
            preset("cpu-test"),
        ).predicted
        for recompute in ("none", "full")
    ]
    none_s, full_s = (predicted.busy_s["compute"] for predicted in found)
    assert found[1].recompute_share == pytest.approx((full_s - none_s) / full_s, rel=0.03)


@pytest.mark.usefixtures("quick_search")
def test_pinned_sizes():
    plan = make_plan(small_model(), request_of(GIB, chunk_tokens=48, round_tokens=96), preset("cpu-test"))
    assert (plan.chunk_tokens, plan.chunks_per_round) == (48, 2)
    plan = make_plan(small_model(), request_of(GIB, round_tokens=192), preset("cpu-test"))
    assert plan.round_tokens == 192


@pytest.mark.parametrize("pinned", [{"chunk_tokens": 64, "round_tokens": 96}, {"round_tokens": 16}], ids=str)
def test_contradicting_sizes_are_refused(pinned):
    with pytest.raises(PlanError, match="works with") as caught:
        make_plan(small_model(), request_of(GIB, **pinned), preset("cpu-test"))
    assert caught.value.reason is PlanReason.INVALID_REQUEST


@pytest.mark.parametrize("search", cases(["short", "whole"], ["short"]))
def test_llama_8b_in_24_gib(search, request):
    """Small rounds keep more and recompute less, long ones hide the update under their forward; both take as long."""
    if search == "short":
        request.getfixturevalue("quick_search")
    numerics = Numerics(state="bfloat16")
    asked = Request(2048, 131072, 24 * GIB, 110 * GIB, numerics=numerics, graphs="never", segment_blocks=1)
    predicted = make_plan(open_model("preset:llama-3.1-8b").spec, asked, preset("h200")).predicted
    assert 10 < predicted.step_s < 12.3
    assert predicted.recompute_share < 0.2
    assert predicted.busy_s["compute"] > 0.9 * predicted.step_s


@pytest.mark.thorough
@pytest.mark.usefixtures("quick_search")
def test_llama_1b_in_4_gib():
    request = Request(2048, 131072, 4 * GIB, 60 * GIB, graphs="never")
    plan = make_plan(open_model("preset:llama-3.2-1b").spec, request, preset("rtx-4090"))
    assert plan.predicted.gpu_bytes <= 4 * GIB


@pytest.mark.usefixtures("quick_search")
def test_edges_of_a_large_vocabulary_fit_small_budgets():
    """Weights, accumulator and gradient of the head are most of what such a budget holds; the gradient takes the place
    of the weights."""
    numerics = Numerics(state="bfloat16")
    request = Request(2048, 16384, 3 << 30, 110 << 30, numerics=numerics, graphs="never", segment_blocks=1)
    model = open_model("preset:llama-3.2-1b").spec
    plan = make_plan(model, request, preset("h200"))
    assert plan.share_edge_slots
    assert plan.grads_over_weights
    assert plan.predicted.gpu_bytes <= request.max_gpu_bytes
    assert plan.chunk_tokens >= 1024
    slots = {slot.name: slot for slot in Layout(model, plan).slots}
    for edge in ("embed", "head"):
        if f"weights.{edge}[0]" in slots and f"grad.{edge}[0]" in slots:
            assert slots[f"weights.{edge}[0]"].offset == slots[f"grad.{edge}[0]"].offset


def test_sizes_are_compared_by_what_all_seeds_reach():
    """Adapters of an 8B model at 24 GiB: the fastest size has poor first seeds, and was dropped before its best ones.

    Rates are those that were measured on an H100; graphs, which favour chunks of 4096 tokens, are left out.
    """
    rates = {"h2d_bytes_per_s": 55.1e9, "d2h_bytes_per_s": 54.6e9, "gpu_context_bytes": 828_375_040}
    rates |= {"h2d_duplex_bytes_per_s": 50e9, "d2h_duplex_bytes_per_s": 50.5e9, "launch_s": 7.6e-6, "issue_s": 16e-6}
    rates["matmul_flops_per_s"] = tuple(
        (tokens, tera * 1e12)
        for tokens, tera in ((256, 257), (512, 425), (1024, 544), (2048, 662), (4096, 697), (8192, 733), (32768, 733))
    )
    job = Job(
        mode="lora",
        max_seq_len=2048,
        max_global_batch_tokens=65536,
        max_gpu_mem_gib=24.0,
        max_host_mem_gib=110.0,
        cuda_graphs="never",
    )
    profile, model = preset("h100-80").changed(**rates), described(open_model("preset:llama-3.1-8b").spec, job)
    request = make_request(job, profile, "cuda")
    free, pinned = (
        make_plan(model, replace(request, **sizes), profile).predicted.step_s
        for sizes in ({}, {"chunk_tokens": 4096, "round_tokens": 4096})
    )
    assert free <= 1.005 * pinned


def test_sizes_whose_relaxed_steps_are_too_long_get_all_seeds():
    """First seeds of 2048 tokens a chunk are 14% slower than those of 4096, the best of all seeds 1% faster: relaxed
    steps of both are longer than steps that are found."""
    spec = with_lora(open_model("preset:deepseek-v2-lite").spec, LoRA())
    request = Request(2048, 4096, int(16.1 * GIB), 64 * GIB, clipping=False, numerics=Numerics(state="float32"))
    found = Search(Problem(spec, request, preset("rtx-4090"), limits=LIMITS.quick)).plan()
    assert found is not None
    assert (found.chunk_tokens, found.chunks_per_round) == (2048, 2)
