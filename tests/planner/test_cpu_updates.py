"""Updates by the CPU: when the planner takes them, what a program of them looks like, and that the bound holds."""

from dataclasses import replace

import pytest
from thorough import cases

from flexengine.hardware.presets import preset
from flexengine.models.registry import open_model
from flexengine.plan import GroupPlan, Numerics, Plan, Request
from flexengine.planner.bound.speed_of_light import speed_of_light_s
from flexengine.planner.cost.cost_model import CostModel, step_seconds
from flexengine.planner.planner import make_plan
from flexengine.reports.plan_text import describe
from flexengine.reports.simulated_step import simulate_step
from flexengine.schedule.checker import check_program
from flexengine.schedule.commands import Stream
from flexengine.schedule.following import followed
from flexengine.schedule.layout import Layout
from flexengine.schedule.packing import full_round
from flexengine.schedule.programs import lower_round, lower_update
from flexengine.schedule.simulator import simulate
from flexengine.schedule.step_parts import unfinished_updates, until_gpu_ends
from tests.schedule.small_plans import resident_plan, small_model

GIB = 2**30
MODEL = open_model("preset:llama-3.2-1b").spec
REQUEST = Request(2048, 32768, 6 * GIB, 60 * GIB, numerics=Numerics(state="bfloat16"), graphs="never")
OF_ONE_SIZE = replace(REQUEST, chunk_tokens=4096, round_tokens=16384)


def machine(parameters_per_s: float):
    """An H200 beside a CPU that updates so many parameters a second."""
    rates = tuple((dtype, parameters_per_s) for dtype in ("float32", "bfloat16"))
    return preset("h200").changed(cpu_adamw_parameters_per_s=rates)


def num_by_cpu(plan: Plan) -> int:
    return sum(group.update == "cpu" for group in plan.groups)


@pytest.mark.usefixtures("quick_search")
def test_a_fast_cpu_updates_and_a_slow_one_does_not():
    fast, slow = (make_plan(MODEL, OF_ONE_SIZE, machine(rate)) for rate in (30e9, 0.2e9))
    assert num_by_cpu(fast) > 0 == num_by_cpu(slow)
    assert fast.predicted.step_s < slow.predicted.step_s
    assert fast.predicted.busy_s["cpu"] > 0 == slow.predicted.busy_s["cpu"]
    assert f"{num_by_cpu(fast)} of {len(fast.groups)} groups on the CPU" in describe(fast, MODEL)


@pytest.mark.usefixtures("quick_search")
def test_on_a_cpu_both_updates_are_one():
    request = Request(32, 256, 2 << 20, 1 << 40, numerics=Numerics("float32", "full", "float32", "float32"))
    assert num_by_cpu(make_plan(small_model(), request, preset("cpu-test"))) == 0


@pytest.mark.usefixtures("quick_search")
@pytest.mark.parametrize(
    ("rate", "gpu_gib", "clipping"),
    [(3e9, 4, False), (40e9, 4, True)],
)
def test_the_bound_is_below_plans_with_and_without(rate, gpu_gib, clipping):
    request, profile = replace(OF_ONE_SIZE, max_gpu_bytes=gpu_gib * GIB, clipping=clipping), machine(rate)
    bound_s = speed_of_light_s(MODEL, request, profile)
    plan = make_plan(MODEL, request, profile)
    assert 0 < bound_s <= plan.predicted.step_s
    assert bound_s <= speed_of_light_s(MODEL, replace(request, clipping=True), profile) * (1 + 1e-6)
    for update in ("cpu", "gpu"):  # all that can be, by one of both
        able = GroupPlan(update=update)
        groups = tuple(able if g == replace(able, update=g.update) else g for g in plan.groups)
        layout = Layout(MODEL, replace(plan, groups=groups))
        assert bound_s <= step_seconds(layout, profile).step_s


def test_what_lives_on_the_gpu_cannot_be_updated_by_the_cpu():
    with pytest.raises(ValueError, match="update on the CPU needs"):
        GroupPlan(weights="gpu", update="cpu")


@pytest.mark.parametrize("everything", [True, False])
def test_the_program_updates_in_place(everything):
    model = small_model(blocks=3)
    plan = resident_plan(model, Request(32, 128, 1 << 30, 1 << 40))
    others = GroupPlan(update="cpu") if everything else GroupPlan("gpu", "host", "gpu")
    groups = (others, GroupPlan(update="cpu"), *(others,) * (len(model.groups) - 2))
    layout = Layout(model, replace(plan, groups=groups))
    program = lower_update(layout)
    check_program(program, layout.gpu_bytes, layout.host_bytes)
    by_cpu = [c for c in program.commands if c.stream is Stream.CPU]
    updated = {c.args.group for c in by_cpu}
    assert updated == {i for i, group in enumerate(groups) if group.update == "cpu"}
    assert sum(c.args.count for c in by_cpu) == sum(layout.groups[i].numel for i in updated)
    assert all(program.slots[place.slot].memory == "host" for c in by_cpu for place in c.args.planes.values())
    copies = [c for c in program.commands if c.copies]
    assert (len(copies) == 1) == everything  # the factor on the gradients alone
    assert bool(layout.ring("tile")) != everything


def test_plans_remember_who_updates():
    model = small_model(blocks=1)
    plan = resident_plan(model, Request(32, 128, 1 << 30, 1 << 40))
    plan = replace(plan, groups=(GroupPlan(update="cpu"),) * len(model.groups))
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.usefixtures("quick_search")
@pytest.mark.parametrize("tokens", cases([8192, 40960], [8192]))
def test_without_clipping_a_step_is_faster_and_its_parts_add_up(tokens):
    """The same plan, and the one that is chosen; the CPU takes about as long as a round."""
    profile = machine(9e9 if tokens == 8192 else 5e9)
    clipped = make_plan(MODEL, replace(REQUEST, max_global_batch_tokens=tokens), profile)
    request = replace(clipped.request, clipping=False)
    assert num_by_cpu(clipped) > 0
    cautious = clipped.after_clipping()
    cautious_s = step_seconds(Layout(MODEL, cautious), profile).step_s
    assert clipped.speculates
    assert clipped.predicted.step_s < 0.99 * cautious_s
    same = replace(cautious, request=request)
    assert step_seconds(Layout(MODEL, same), profile).step_s < 0.99 * cautious_s
    plan = make_plan(MODEL, request, profile)
    assert plan.predicted.step_s < 0.97 * cautious_s
    assert plan.updates_in_backward
    assert "on the CPU from the last backward on" in describe(plan, MODEL)
    step = simulate_step(plan, MODEL, profile)
    assert step.total_s == pytest.approx(plan.predicted.step_s, rel=1e-9)
    for part in step.parts:
        assert max(part.timing.end_s) <= part.timing.total_s * (1 + 1e-9)
        assert part.timing.busy_s[Stream.CPU] <= part.timing.total_s * (1 + 1e-9)
    assert Plan.from_json(plan.to_json()) == plan


def test_what_is_left_of_updates_when_the_gpu_has_ended():
    """A slow CPU has updated nothing but a part of the head by then, a fast one all but the embedding."""
    model = small_model(blocks=3)
    plan = resident_plan(model, Request(32, 128, 1 << 30, 1 << 40, clipping=False))
    layout = Layout(model, replace(plan, groups=(GroupPlan(update="cpu"),) * len(model.groups)))
    shape = full_round(layout.plan.request, layout.plan.chunk_tokens, layout.plan.chunks_per_round)
    program = lower_round(layout, shape, first=True, updates="in_round")
    check_program(program, layout.gpu_bytes, layout.host_bytes)
    left = {}
    for rate in (1e3, 1e14):
        timing = simulate(program, CostModel.of(plan.request, machine(rate), plan.chunk_tokens).rates())
        left[rate] = unfinished_updates(program, timing)
        cut = until_gpu_ends(program, timing)
        assert cut.total_s <= timing.total_s
        assert cut.busy_s[Stream.COMPUTE] == timing.busy_s[Stream.COMPUTE]
    assert set(left[1e3]) == set(range(len(model.groups)))
    assert left[1e3][len(model.groups) - 1] < 1.0  # the head is first
    assert [left[1e3][g] for g in range(len(model.groups) - 1)] == [1.0] * (len(model.groups) - 1)
    assert set(left[1e14]) <= {0}  # the embedding is last


@pytest.mark.usefixtures("quick_search")
@pytest.mark.parametrize("rate", [1.5e9, 3e9, 9e9])
def test_steps_one_after_another_take_what_is_predicted(rate):
    """Of one round each: the time between the ends of two of them on the GPU, simulated on end.

    The host takes no time: on end it issues ahead, where it really waits for a step's loss before the next one.
    """
    profile = machine(rate).changed(issue_s=0.0)
    plan = make_plan(MODEL, replace(REQUEST, max_global_batch_tokens=8192, chunk_tokens=8192, clipping=False), profile)
    groups = tuple(GroupPlan(update="cpu") if g.states == "host" else g for g in plan.groups)
    layout = Layout(MODEL, replace(plan, groups=groups))
    cost = CostModel.of(plan.request, profile, plan.chunk_tokens)
    shape = full_round(plan.request, plan.chunk_tokens, plan.chunks_per_round)
    program = lower_round(layout, shape, first=True, updates="in_round")
    both = followed(program, program)
    timing = simulate(both, cost.rates())
    ends = [0.0, 0.0]
    for command in both.commands:
        if command.stream is not Stream.CPU:
            number = command.index >= len(program.commands)
            ends[number] = max(ends[number], timing.end_s[command.index])
    assert step_seconds(layout, profile).step_s == pytest.approx(ends[1] - ends[0], rel=0.02)
