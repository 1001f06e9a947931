"""When the planner lets experts that no token of a round goes to stay on the host, and what it expects of that."""

from dataclasses import replace

import pytest
from family_configs import experts, without_head_dim

from flexengine.models import blocks
from flexengine.models.in_parts import in_parts
from flexengine.models.registry import build_model
from flexengine.plan import GroupPlan, LayerPlan, Plan, Request
from flexengine.planner.cost.cost_model import CostModel
from flexengine.planner.problem import Problem
from flexengine.planner.search import Search
from flexengine.planner.shared_buffers import LEAST_TILE
from flexengine.reports.charts.streams import kind_of
from flexengine.reports.picture import Picture
from flexengine.reports.plan_text import report
from flexengine.schedule.commands import Stream
from flexengine.schedule.expert_fetch import least_touched_share
from flexengine.schedule.layout import Layout
from flexengine.schedule.packing import full_round
from flexengine.schedule.programs import lower_round
from flexengine.schedule.simulator import simulate
from tests.planner.oracle import slow_link
from tests.schedule.small_plans import FLOAT32

PROFILE = slow_link(1e8)


@pytest.fixture
def model(monkeypatch):
    """Sixteen experts in parts of four, of which a token takes two."""
    monkeypatch.setattr(blocks, "expert_divisions", lambda *_: 4)
    config = without_head_dim(experts("olmoe", num_experts=16, num_experts_per_tok=2))
    return in_parts(build_model("olmoe", config))


def search_of(model, tokens, max_gpu_bytes=1 << 30):
    """For rounds of so many tokens in two chunks."""
    sizes = {"chunk_tokens": tokens // 2, "round_tokens": tokens}
    request = Request(tokens // 2, 2 * tokens, max_gpu_bytes, 1 << 40, numerics=FLOAT32, **sizes)
    return Search(Problem(model, request, PROFILE))


def streamed(search, **decisions):
    """A plan with all weights on the host."""
    model, request = search.model, search.request
    layers = (LayerPlan(),) + (LayerPlan((), (), "host"),) * len(model.blocks) + (LayerPlan(),)
    groups = (GroupPlan(),) * len(model.groups)
    return Plan(model.name, request, request.chunk_tokens, 2, layers, groups, in_parts=True, **decisions)


def choice(search):
    """Whether the planner changes a streamed plan, with seconds of both."""
    plan = streamed(search)
    before = search.pricer.step(Layout(search.model, plan))
    chosen, after = search.touched_only(plan, before)
    assert chosen == replace(plan, touched_only=chosen.touched_only)
    return chosen.touched_only, before, after


def test_rounds_of_few_tokens_fetch_what_they_touch(model):
    chosen, before, after = choice(search_of(model, 4))
    assert chosen
    assert after.step_s < 0.9 * before.step_s
    assert after.busy_s["h2d"] < before.busy_s["h2d"]


def test_rounds_of_many_tokens_fetch_everything(model):
    search = search_of(model, 64)
    assert least_touched_share(model, 64) > 0.9
    chosen, before, after = choice(search)
    assert not chosen
    assert before is after


def test_the_search_ends_with_it(model):
    few = {"weight_slots": 2, "optimizer_tile": LEAST_TILE, "share_edge_slots": True}
    smallest = Layout(model, streamed(search_of(model, 4), **few)).gpu_bytes
    for max_gpu_bytes, streams in ((1 << 30, False), (smallest, True)):
        plan = search_of(model, 4, max_gpu_bytes).plan()
        assert plan is not None
        assert plan.touched_only == streams
        assert plan.predicted.speed_of_light_s <= plan.predicted.step_s


def test_price_falls_with_the_share(model):
    """Link bytes of a round, the simulator's seconds on the stream to the GPU, and the kind that charts show."""
    found = {}
    for tokens in (2, 4, 8, 16):
        search = search_of(model, tokens)
        layout = Layout(model, streamed(search, touched_only=True))
        shape = full_round(search.request, tokens // 2, 2)
        program = lower_round(layout, shape, first=True)
        fetches = [c for c in program.commands if c.kind == "fetch_experts"]
        assert {kind_of(command) for command in fetches} == {"weights"}
        rates = CostModel.of(search.request, search.profile, tokens // 2).rates()
        busy_s = simulate(program, rates).busy_s[Stream.H2D]
        found[tokens] = sum(c.copy_bytes for c in fetches), busy_s
    assert list(found.values()) == sorted(found.values())
    assert found[2][0] == pytest.approx(
        found[16][0] * least_touched_share(model, 2) / least_touched_share(model, 16), rel=1e-3
    )
    assert found[2][1] < 0.8 * found[16][1]


def test_reports_say_so(model):
    search = search_of(model, 4)
    plan = search.predicted(*search.touched_only(plan := streamed(search), search.pricer.step(Layout(model, plan))))
    text = report(Picture(plan, model, PROFILE))
    assert "only those that some token of the round goes to" in text
