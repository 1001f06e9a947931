"""The planner's parts: knapsack against brute force, memory by formula against layouts, sketch against simulator."""

from itertools import combinations_with_replacement
from random import Random

import numpy as np
import pytest

from flexengine.hardware.presets import preset
from flexengine.models.freezing import with_frozen
from flexengine.models.registry import build_model, open_model
from flexengine.ops.base import Work
from flexengine.plan import Numerics, Request
from flexengine.planner import knapsack
from flexengine.planner.cost import loads
from flexengine.planner.cost.cost_model import GROUPED_SHARE, CostModel, price, round_shape
from flexengine.planner.cost.memory import gpu_required_bytes, host_required_bytes
from flexengine.planner.drafts import Drafting
from flexengine.planner.frontier import frontier, pareto_sets, save_set
from flexengine.planner.kinds import ever_smaller_sets
from flexengine.planner.search import make_plan
from flexengine.planner.solver import Placement, RoundProblem
from flexengine.planner.templates import SlotCounts, Structure, Templates
from flexengine.reports.plan_text import describe
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering import lower_round
from flexengine.schedule.save_sets import save_sets
from tests.family_configs import CASES
from tests.planner.oracle import slow_link
from tests.schedule.small_plans import FLOAT32, mixed_model, small_model


@pytest.mark.parametrize("seed", range(5))
def test_knapsack_finds_the_best_multiset(seed):
    random = np.random.default_rng(seed)
    num_bytes, cost = random.integers(0, 100, 6), random.random(6)
    layer = knapsack.one_layer(num_bytes, cost, np.arange(6))
    choices = knapsack.repeat(layer, 5, 10_000)
    for budget in (100, 200, 300, 500):
        fitting = [c for c in combinations_with_replacement(range(6), 5) if num_bytes[list(c)].sum() <= budget]
        best = min((cost[list(c)].sum() for c in fitting), default=None)
        point = choices.best_within(budget)
        assert (point is None) == (best is None)
        if point is not None:
            assert choices.cost[point] == pytest.approx(best, rel=0.02)
            counts = choices.counts(point)
            assert sum(counts.values()) == 5
            assert sum(int(num_bytes[o]) * n for o, n in counts.items()) <= budget


def problem_of(model, profile, seq_len=32, chunk=64, chunks=2, numerics=FLOAT32) -> RoundProblem:
    request = Request(seq_len, 512, 1 << 40, 1 << 40, numerics=numerics)
    templates = Templates(model, request, profile)
    return RoundProblem(templates, chunk, chunks, ever_smaller_sets(templates.kinds))


def random_placement(problem: RoundProblem, random: Random) -> Placement:
    share = random.random() < 0.5
    levels = (loads.STREAMED, loads.RESIDENT_BOTH, loads.RESIDENT)[0 if share else 1 :]
    slots = SlotCounts(random.randint(1, 3), random.randint(1, 2), random.randint(1, 3), 2)
    rows = tuple(random.randrange(len(problem.row_option)) for _ in range(problem.num_blocks))
    edges = tuple(random.choice(levels) for _ in range(2))
    over_weights = share and loads.STREAMED in edges and random.random() < 0.5
    structure = Structure(share, over_weights, edges, loads.STREAMED)
    return problem.normalised(Placement(structure, slots, rows))


FROZEN = ((), ("embed", "block.0"), ("embed", "blocks"), ("block.1", "head"), ("blocks", "head"))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", ["cpu-test", "rtx-4090"])
@pytest.mark.parametrize("frozen", FROZEN, ids=" ".join)
def test_bytes_by_formula_are_those_of_the_layout(seed, name, frozen):
    random = Random(seed)
    profile, numerics = preset(name), random.choice([FLOAT32, Numerics()])
    count = random.randint(2, 6)
    model = mixed_model(count) if seed % 4 == 3 else small_model(count, tied=seed % 2 == 0, hidden=256)
    model = with_frozen(model, frozen)
    problem = problem_of(model, profile, seq_len=32 if seed % 3 else 128, numerics=numerics)
    placement = random_placement(problem, random)
    layout = Layout(model, problem.plan(placement))
    assert problem.gpu_bytes(placement) == gpu_required_bytes(layout, profile)
    host = problem.host_bytes(placement.structure, placement.rows)
    drafting = Drafting(problem)
    drafts = drafting.drafts([placement])
    assert drafting.gpu_bytes(drafts)[0] == problem.gpu_bytes(placement)
    assert drafting.host_bytes(drafts)[0] == host
    assert host == pytest.approx(host_required_bytes(layout, profile), abs=256 * 8 * len(model.groups) * 3)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("frozen", [(), ("embed", "block.0-3"), ("block.1-6",), ("block.0", "head")], ids=" ".join)
def test_sketch_is_near_the_simulator(seed, frozen):
    random = Random(seed)
    profile = slow_link(random.choice([1e9, 4e9, 1e10]))
    model = with_frozen(mixed_model(8) if seed % 4 == 3 else small_model(8, hidden=256), frozen)
    problem = problem_of(model, profile, seq_len=32 if seed % 3 else 128, chunk=256 if seed % 3 else 64)
    placement = random_placement(problem, random)
    layout = Layout(model, problem.plan(placement))
    cost = CostModel(profile, layout.compute_bytes, problem.chunk_tokens, layout.plan.request.max_seq_len)
    simulated_s = price(lower_round(layout, problem.shape, first=False), cost).total_s
    drafting = Drafting(problem)
    sketched_s = drafting.round_s(drafting.drafts([placement]), np.array([True]))
    assert sketched_s[0] == pytest.approx(simulated_s, rel=0.25)


def test_frontier_is_a_frontier():
    model = open_model("preset:llama-3.1-8b").spec
    cost = CostModel(preset("h200"), 2, 8192, 2048)
    shape = round_shape(Request(2048, 131072, 1, 1), 8192, 2)
    sets = frontier(model.blocks[0], shape, cost)
    sizes, seconds = [s.num_bytes for s in sets], [s.recompute_s for s in sets]
    assert sizes == sorted(sizes)
    assert seconds == sorted(seconds, reverse=True)
    assert (sets[0].ops, sets[-1].recompute_s) == ((), 0)


@pytest.mark.parametrize(("case", "chunk"), [("gemma2", 48), ("olmoe", 20)], ids=["whole sequences", "slices"])
def test_frontier_is_that_of_all_sets(case, chunk):
    layer, cost = build_model(case, CASES[case]).blocks[0], CostModel(preset("cpu-test"), 4, chunk, 48)
    shape = round_shape(Request(48, 96, 1, 1), chunk, 3)
    assert frontier(layer, shape, cost) == pareto_sets([save_set(layer, s, shape, cost) for s in save_sets(layer.ops)])


def test_products_of_experts_run_at_a_share_of_the_rate_of_one_product():
    profile, layer = preset("h200"), open_model("preset:olmoe-1b-7b").spec.blocks[0]
    cost = CostModel(profile, 2, 8192, 2048)
    work = next(op for op in layer.ops if op.name == "experts_down").forward_work(8192, 2048, 2)
    assert work.flops == 2 * 8192 * 8 * 1024 * 2048
    seconds = work.flops / (GROUPED_SHARE * profile.matmul_rate(8192)) + profile.launch_s
    assert cost.work_s(work) == cost.work_s(work.plus(Work())) == pytest.approx(seconds)
    assert cost.work_s(work.shared(4)) == pytest.approx((seconds - profile.launch_s) / 4)


def test_slices_cover_the_sequence():
    shape = round_shape(Request(250, 1000, 1, 1), 64, 8)
    assert [c.tokens for c in shape.chunks] == [64, 64, 64, 58] * 2
    assert [c.first_slice for c in shape.chunks] == [0] * 4 + [4] * 4
    # causal pairs of all slices together are those of the whole sequence
    assert sum(c.tokens * c.seq_len for c in shape.chunks[:4]) == 250 * 250


def test_description_names_what_matters():
    model = small_model()
    request = Request(32, 256, 2 << 20, 1 << 40, numerics=FLOAT32)
    text = describe(make_plan(model, request, slow_link(1e9)), model)
    for word in (
        "round",
        "weights:",
        "gradients:",
        "optimizer states:",
        "block",
        "predicted:",
        "limited by",
        "GPU memory",
    ):
        assert word in text
