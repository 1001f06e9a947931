"""Speculative updates are planned where host memory has second planes for them, and priced as they run."""

from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, cast

import pytest

from flexengine.hardware.presets import preset
from flexengine.metrics import format_seconds
from flexengine.models.registry import open_model
from flexengine.plan import GroupPlan, Numerics, Plan, Request
from flexengine.planner import variants
from flexengine.planner.feasibility.shortage import Feasibility
from flexengine.planner.planner import make_plan
from flexengine.planner.problem import Problem
from flexengine.planner.search import Search, Unclipped
from flexengine.planner.speculation import Speculation, completed_order, speculating_plans
from flexengine.reports.plan_text import describe
from flexengine.reports.simulated_step import simulate_step
from flexengine.run.step_prediction import StepPredictor
from flexengine.schedule.commands import Stream
from flexengine.schedule.layout import Layout
from flexengine.schedule.second_planes import second_plane_bytes
from flexengine.schedule.step_parts import StepEstimate

if TYPE_CHECKING:
    from flexengine.planner.cost.cost_model import StepPricer
    from flexengine.planner.feasibility.shortage import Needs

GIB = 2**30
MODEL = open_model("preset:llama-3.2-1b").spec
REQUEST = Request(2048, 8192, 6 * GIB, 60 * GIB, 4096, 8192, numerics=Numerics(state="bfloat16"), graphs="never")


PROFILE = preset("h200").changed(cpu_adamw_parameters_per_s=(("float32", 9e9), ("bfloat16", 9e9)))


@pytest.fixture(scope="module")
def plan(quick_search_in_module):
    return make_plan(MODEL, REQUEST, PROFILE)


def test_a_plan_with_room_speculates_and_is_priced_as_it_runs(plan):
    assert plan.speculates
    assert plan.predicted.host_bytes <= REQUEST.max_host_bytes
    assert plan.predicted.host_categories["second planes"] > 0
    assert "as if nothing were clipped" in describe(plan, MODEL)
    assert Plan.from_json(plan.to_json()) == plan
    bold, cautious = (simulate_step(p, MODEL, PROFILE) for p in (plan, plan.after_clipping()))
    assert bold.total_s == pytest.approx(plan.predicted.step_s, rel=1e-9)
    assert bold.total_s < 0.99 * cautious.total_s
    assert plan.predicted.after_clipping_s == pytest.approx(cautious.total_s, rel=1e-9)
    assert f"after a step that was clipped: {format_seconds(cautious.total_s)} per step" in describe(plan, MODEL)
    predictor = StepPredictor(plan, MODEL, PROFILE)
    full, part = [2048] * 4, [2048, 1000]
    assert predictor.step_s(full, after_clipping=True) == plan.predicted.after_clipping_s
    assert predictor.step_s(part) < predictor.step_s(part, after_clipping=True) < plan.predicted.after_clipping_s
    busy = [sum(p.timing.busy_s[Stream.CPU] for p in step.parts) for step in (bold, cautious)]
    # the same work, beside other copies; into second planes it takes longer, and none of it is forgotten
    assert 0.9 * busy[1] <= busy[0] <= 1.3 * busy[1]


MEASURED = preset("h200").changed(
    h2d_beside_cpu_bytes_per_s=33e9,
    d2h_beside_cpu_bytes_per_s=49e9,
    h2d_only_beside_cpu_bytes_per_s=41e9,
    d2h_only_beside_cpu_bytes_per_s=52e9,
    cpu_share_beside_link=0.79,
    cpu_adamw_parameters_per_s=(("bfloat16", 8.5e9), ("bfloat16 into second planes", 8e9)),
)
"""What one H200's probe found beside updates by the CPU."""


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, float]]:
    """Searches for updates inside backward: whether second planes are counted, and the seconds of the fastest plan."""
    told: list[tuple[bool, float]] = []
    inside = Search._updating_in_backward

    def search(self: Search, second_planes: bool) -> Unclipped:
        found = inside(self, second_planes)
        told.append((second_planes, found.least_s))
        return found

    monkeypatch.setattr(Search, "_updating_in_backward", search)
    return told


MORE = {"marks": pytest.mark.thorough}


@pytest.mark.long
@pytest.mark.parametrize(
    ("size", "profile", "most"),
    [
        pytest.param((512, 8192, 48, 8192), preset("h200"), 1.05, id="none that waits speculates well", **MORE),
        pytest.param((2048, 8192, 24, 8192), MEASURED, 1.05, id="the best takes longer where it waits", **MORE),
        pytest.param((2048, 16384, 24, 8192), MEASURED, 1.1, id="the best keeps little on the host", **MORE),
    ],
)
def test_a_step_that_waits_for_updates_is_planned_as_if_they_began_in_backward(size, profile, most, searches):
    """8B parameters: longest sequence, tokens per step, GiB of GPU memory, and tokens of a chunk;
    hardly slower than without clipping."""
    model, (seq_len, tokens, gib, chunk_tokens) = open_model("preset:llama-3.1-8b").spec, size
    numerics = Numerics(state="bfloat16")
    request = Request(seq_len, tokens, gib * GIB, 110 * GIB, chunk_tokens, tokens, numerics=numerics, graphs="never")
    clipped = make_plan(model, request, profile)
    (_, unclipped_s), *_ = searches
    assert clipped.speculates
    assert clipped.request == request
    assert clipped.predicted.step_s < most * unclipped_s
    assert clipped.predicted.host_bytes <= request.max_host_bytes


@pytest.mark.usefixtures("quick_search")
@pytest.mark.parametrize(("gain", "counted"), [(variants.LEAST_LEFT_GAIN, [False, True]), (1.0, [False])])
def test_second_planes_are_searched_for_where_they_may_gain(gain, counted, searches, monkeypatch):
    """8B parameters and 8192 tokens, whose updates inside backward gain more than there is room for."""
    monkeypatch.setattr(variants, "LEAST_LEFT_GAIN", gain)
    model = open_model("preset:llama-3.1-8b").spec
    numerics = Numerics(state="bfloat16")
    request = Request(2048, 8192, 24 * GIB, 110 * GIB, numerics=numerics, graphs="never", segment_blocks=1)
    make_plan(model, request, MEASURED)
    assert [second_planes for second_planes, _ in searches] == counted


class Prices:
    """Stands for a `StepPricer`: seconds of plans with and without speculation by the tokens of their chunks."""

    def __init__(self, seconds: dict[int, tuple[float, float]]) -> None:
        self.seconds, self.simulated_commands = seconds, 0

    def step(self, layout: Layout) -> StepEstimate:
        speculating, waiting = self.seconds[layout.plan.chunk_tokens]
        return StepEstimate(speculating if layout.plan.speculates else waiting, {}, 0.0, {})


@pytest.mark.parametrize(
    ("other", "taken"),
    [
        pytest.param((0.8, 1.1), True, id="much faster, a little slower where it waits"),
        pytest.param((0.95, 1.1), True, id="three steps in four gain more than one loses"),
        pytest.param((0.97, 1.1), False, id="one step in four loses more than three gain"),
        pytest.param((0.5, 1.2), False, id="too slow where it waits, however fast it is"),
    ],
)
def test_a_step_in_four_is_taken_to_wait(plan, other, taken):
    waiting = plan.after_clipping()
    tokens = waiting.chunk_tokens
    prices = Prices({tokens: (1.0, 1.0), tokens // 2: other})
    estimate = StepEstimate(1.0, {}, 0.0, {})
    bold = Speculation(Problem(MODEL, REQUEST, PROFILE), cast("StepPricer", prices), (waiting, estimate))
    bold.try_plans([waiting, replace(waiting, chunk_tokens=tokens // 2, chunks_per_round=2 * waiting.chunks_per_round)])
    assert (bold.chosen[0].chunk_tokens == tokens // 2) is taken
    assert bold.chosen[0].speculates is taken


def test_only_the_plan_that_wins_is_searched_as_if_nothing_were_clipped(monkeypatch: pytest.MonkeyPatch):
    found = Search.plan
    calls: list[str] = []
    monkeypatch.setattr(Search, "plan", lambda self: (calls.append(f"found, {self.request.graphs}"), found(self))[1])
    monkeypatch.setattr(Search, "may_gain_in_backward", property(lambda self: not calls.append("without clipping")))
    monkeypatch.setattr(Search, "_updating_in_backward", lambda self, second_planes: Unclipped([], inf))
    model = open_model("preset:tiny-llama3-150m").spec
    request = Request(512, 4096, 2 * GIB, 60 * GIB, numerics=Numerics(state="bfloat16"), segment_blocks=1)
    plan = make_plan(model, request, preset("h200"))
    assert calls == ["found, auto", "found, always", "without clipping"]
    assert plan.replays


def test_updates_into_second_planes_have_a_price_of_their_own(plan):
    slower = PROFILE.changed(
        cpu_adamw_parameters_per_s=(*PROFILE.host.adamw_parameters_per_s, ("bfloat16 into second planes", 3e9))
    )
    into, in_place = (
        [simulate_step(p, MODEL, profile) for profile in (PROFILE, slower)] for p in (plan, plan.after_clipping())
    )
    assert in_place[0].total_s == in_place[1].total_s
    assert into[0].total_s < into[1].total_s


def test_second_planes_take_no_more_than_what_is_left(plan):
    plan = plan.after_clipping()
    layout = Layout(MODEL, plan)
    able = [group for group in completed_order(MODEL) if plan.groups[group].update == "cpu"]
    one = sum(size for kind, size in layout.groups[able[0]].plane_bytes.items() if kind != "grad")
    for spare, most in ((one - 1, 0), (one + 4096, 1), (1 << 60, len(able))):
        plans = list(speculating_plans(layout, spare, (1.0, 0.5)))
        chosen = [{i for i, group in enumerate(p.groups) if group.speculative} for p in plans]
        assert chosen[:1] == ([set(able[:most])] if most else [])
        for p in plans:
            assert Layout(MODEL, p).host_bytes - layout.host_bytes <= spare


def test_only_the_cpu_speculates_and_only_on_one_rank(plan):
    with pytest.raises(ValueError, match="only the CPU"):
        GroupPlan(speculative=True)
    with pytest.raises(ValueError, match="one rank"):
        replace(plan, request=replace(plan.request, ranks=2))


def test_states_in_blocks_wait_for_the_norm(plan):
    groups = tuple(GroupPlan(update="cpu") for _ in plan.groups)
    waiting = replace(plan, groups=groups, request=replace(REQUEST, numerics=Numerics(state="int8")))
    [bold, *_] = speculating_plans(Layout(MODEL, waiting), 1 << 60, (1.0,))
    edges = [i for i, group in enumerate(MODEL.groups) if group.slot_class != "block"]
    assert [i for i, group in enumerate(bold.groups) if group.speculative] == edges
    everything = tuple(replace(group, speculative=True) for group in groups)
    with pytest.raises(ValueError, match="cannot be updated speculatively"):
        Layout(MODEL, replace(waiting, groups=everything))


def test_nothing_is_searched_for_speculation_where_the_least_host_memory_leaves_no_second_planes():
    least = cast("Needs", Feasibility(Problem(MODEL, REQUEST, PROFILE)).least_host())
    second = min(second_plane_bytes(stored, GroupPlan(update="cpu")) for stored in Layout(MODEL, least.plan).groups)
    for spare_bytes in (second - 1, second):
        asked = Problem(MODEL, replace(REQUEST, max_host_bytes=least.host_bytes + spare_bytes), PROFILE)
        waiting = replace(least.plan, request=asked.request), StepEstimate(1.0, {}, 0.0, {})
        bold = Speculation(asked, cast("StepPricer", None), waiting)
        assert bold.may_find_room(Feasibility(asked)) == (spare_bytes == second)
