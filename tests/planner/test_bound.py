"""The speed of light: never above any plan's time, near it where memory is plenty, and what it is made of."""

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from family_configs import CASES
from thorough import cases

from flexengine.hardware.presets import preset
from flexengine.hardware.profile import HardwareProfile
from flexengine.models.registry import build_model, open_model
from flexengine.models.spec import ModelSpec
from flexengine.options.job import Job
from flexengine.plan import GroupPlan, LayerPlan, Numerics, Plan, Request
from flexengine.planner.bound import linear_program
from flexengine.planner.bound.linear_program import LinearProgram
from flexengine.planner.bound.relaxation import TOLERANCE, Bound
from flexengine.planner.bound.speed_of_light import SizeBounds, size_bounds, speed_of_light, speed_of_light_s
from flexengine.planner.bound.unavoidable import SizeWork, Unavoidable
from flexengine.planner.cost.cost_model import StepPricer, step_seconds
from flexengine.planner.cost.memory import gpu_required_bytes, host_required_bytes
from flexengine.planner.cost.save_sets import Keeping, lower_hull, save_choices
from flexengine.planner.planner import make_plan
from flexengine.planner.problem import Problem
from flexengine.request import described
from flexengine.schedule.layer_compiler import compile_layer
from flexengine.schedule.layout import Layout
from flexengine.schedule.save_sets import recomputed, save_sets
from tests.planner.oracle import all_plans, slow_link
from tests.schedule.small_plans import FLOAT32, random_plan, resident_plan, small_model

ROOMY = 1 << 40
PINNED = {"chunk_tokens": 64, "round_tokens": 128}


def bound_of(model: ModelSpec, request: Request, profile: HardwareProfile) -> Bound:
    found = speed_of_light(model, request, profile)
    assert found is not None
    return found


def tight(plan: Plan, model: ModelSpec, profile: HardwareProfile, **changes) -> Plan:
    """The plan with budgets of exactly what it takes."""
    plan = replace(plan, request=replace(plan.request, **{**PINNED, **changes}))
    layout = Layout(model, plan)
    budgets = {
        "max_gpu_bytes": gpu_required_bytes(layout, profile),
        "max_host_bytes": host_required_bytes(layout, profile),
    }
    return replace(plan, request=replace(plan.request, **budgets))


# ---- never above -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", cases(range(60), range(20)))
def test_never_above_a_random_plan_that_just_fits(seed):
    random = Random(seed)
    model = small_model(random.randint(1, 4), seed % 2 == 0, random.choice([64, 128]), random.choice([64, 256, 1024]))
    profile = slow_link(random.choice([1e7, 1e8, 1e9, 1e11])) if seed % 4 else preset("rtx-4090")
    profile = profile.changed(h2d_duplex_bytes_per_s=profile.link.h2d_bytes_per_s * random.choice([0.5, 0.9, 1.1]))
    plan = random_plan(random, model, sliced=seed % 3 == 0)
    plan = tight(plan, model, profile, max_global_batch_tokens=random.choice([128, 256, 640, 1000]))
    step_s = step_seconds(Layout(model, plan), profile).step_s
    assert 0 < bound_of(model, plan.request, profile).seconds <= step_s


@pytest.mark.parametrize("seed", cases(range(40), range(20)))
def test_never_above_a_plan_with_a_busy_host(seed):
    """Updates by CPUs of all speeds, which slow the link down and are slowed down by it."""
    random = Random(seed)
    link, adamw = random.choice([1e7, 1e9, 2.5e10]), random.choice([1e6, 1e7, 1e8, 1e9])
    profile = slow_link(link).changed(
        device_type="cuda",
        d2h_duplex_bytes_per_s=link * random.choice([0.5, 0.9]),
        h2d_beside_cpu_bytes_per_s=link * random.choice([0.2, 0.5, 2.0]),
        d2h_beside_cpu_bytes_per_s=link * random.choice([0.2, 0.5, 2.0]),
        h2d_only_beside_cpu_bytes_per_s=link * random.choice([0.0, 0.3, 3.0]),
        d2h_only_beside_cpu_bytes_per_s=link * random.choice([0.0, 0.3, 3.0]),
        cpu_share_beside_link=random.choice([0.0, 0.3, 1.0]),
        host_bytes_per_s=random.choice([1e8, 1e9, 1e11]),
        cpu_adamw_parameters_per_s=(("float32", adamw), ("bfloat16", 1.5 * adamw)),
    )
    model = small_model(random.randint(1, 4), seed % 2 == 0, hidden=random.choice([64, 128]))
    plan = random_plan(random, model, sliced=seed % 3 == 0)
    groups = (GroupPlan(update="cpu") if random.random() < 0.5 else group for group in plan.groups)
    plan = tight(replace(plan, groups=tuple(groups)), model, profile, max_global_batch_tokens=random.choice([128, 640]))
    step_s = step_seconds(Layout(model, plan), profile).step_s
    assert 0 < bound_of(model, plan.request, profile).seconds <= step_s


@pytest.mark.parametrize("gain", [1.0, 1.3])
def test_never_above_an_update_by_tiles_on_a_link_that_is_faster_when_busy(gain):
    rates = {"h2d_duplex_bytes_per_s": gain * 1e7, "d2h_duplex_bytes_per_s": gain * 1e7}
    compute = {"matmul_flops_per_s": ((16, 1e14),), "memory_bytes_per_s": 1e12, "launch_s": 1e-12}
    compute |= {"cpu_adamw_parameters_per_s": (("float32", 1e4),)}  # nothing for the CPU
    profile = slow_link(1e7).changed(**rates, **compute, copy_latency_s=1e-13, device_type="cuda", gpu_context_bytes=0)
    model = small_model(12, False, 128, 64)
    request = Request(32, 64, ROOMY, ROOMY, numerics=FLOAT32, recompute="full", chunk_tokens=64, round_tokens=64)
    groups, layers = (GroupPlan("gpu", "gpu", "host"),) * len(model.groups), (LayerPlan(),) * 14
    plan = Plan("small", request, 64, 1, layers, groups, 1, 1, 1, 3, 1 << 10, False)
    plan = tight(plan, model, profile, round_tokens=64)
    step_s = step_seconds(Layout(model, plan), profile).step_s
    assert 0.7 * step_s < bound_of(model, plan.request, profile).seconds <= step_s


def test_never_above_updates_by_the_cpu_on_a_cpu():
    """The planner does not offer them there, but they are plans."""
    model, profile = small_model(4, False, 128, 64), slow_link(1e8)
    request = Request(32, 128, ROOMY, ROOMY, numerics=FLOAT32, recompute="full", **PINNED)
    resident = resident_plan(model, request)
    plan = tight(replace(resident, groups=(GroupPlan(update="cpu"),) * len(model.groups)), model, profile)
    assert bound_of(model, plan.request, profile).seconds <= step_seconds(Layout(model, plan), profile).step_s


ORACLES = [(link, seq_len, share) for link in (1e8, 1e9, 1e10) for seq_len in (32, 128) for share in (0.5, 1.0)]
EVERY_PAIR = [ORACLES[i] for i in (0, 3, 5, 6, 8, 11)]
"""Of links, lengths and budgets every pair of two occurs."""


@pytest.mark.parametrize(("link", "seq_len", "budget_share"), cases(ORACLES, EVERY_PAIR))
def test_never_above_any_plan_of_the_exhaustive_oracle(link, seq_len, budget_share):
    model, profile, pricer = small_model(blocks=1), slow_link(link), StepPricer(slow_link(link))
    request = Request(seq_len, 256, ROOMY, ROOMY, numerics=FLOAT32, **PINNED)
    sizes = [gpu_required_bytes(Layout(model, plan), profile) for plan in all_plans(model, request, 64, 2)]
    budget = int(min(sizes) + budget_share * (max(sizes) - min(sizes)))
    request = replace(request, max_gpu_bytes=budget)
    least_s = bound_of(model, request, profile).seconds
    layouts = [Layout(model, plan) for plan in all_plans(model, request, 64, 2)]
    fitting = [layout for layout in layouts if Problem(model, request, profile).fits(layout)]
    assert fitting
    assert least_s <= min(pricer.step(layout).step_s for layout in fitting)


def test_never_above_plans_of_two_blocks():
    model, profile, random = small_model(blocks=2, tied=True), slow_link(3e8), Random(0)
    request = Request(32, 256, ROOMY, ROOMY, numerics=FLOAT32, **PINNED)
    for plan in random.sample(list(all_plans(model, request, 64, 2)), 80):
        fitting = tight(plan, model, profile)
        step_s = step_seconds(Layout(model, fitting), profile).step_s
        assert bound_of(model, fitting.request, profile).seconds <= step_s


# ---- not far below, and in the right direction -----------------------------------------------------------------


def test_is_the_step_when_everything_fits():
    model, profile = small_model(), preset("cpu-test")
    plan = tight(resident_plan(model, Request(32, 256, ROOMY, ROOMY, numerics=FLOAT32)), model, profile)
    step_s = step_seconds(Layout(model, plan), profile).step_s
    assert 0.98 * step_s < bound_of(model, plan.request, profile).seconds <= step_s


def test_counts_what_must_cross_a_slow_link():
    """Without room for parameters, one step moves at least every state and gradient both ways or to the host."""
    model, profile = small_model(blocks=4, hidden=128), slow_link(1e7)
    request = Request(32, 256, ROOMY, ROOMY, numerics=FLOAT32, recompute="full", **PINNED)
    step = Unavoidable(model, request, profile)
    size = SizeWork(step, 64, 2)
    states, grads, weights = (sum(getattr(p, k) for p in step.parameters) for k in ("states", "grads", "weights"))
    head = sum(p.weights for p in step.parameters if p.head)
    found = bound_of(model, replace(request, max_gpu_bytes=head + size.head_bytes + size.block_bytes), profile)
    # the room is for the operands of one command; at most that much of what must be fetched can be there before
    least_bytes = states + grads + weights - 3 * (head + size.head_bytes + size.block_bytes)
    assert least_bytes > 0
    assert found.seconds > least_bytes / profile.link.h2d_bytes_per_s
    assert "the host-to-device link" in found.limits


@pytest.mark.parametrize("field", ["max_gpu_bytes", "max_host_bytes"])
def test_more_memory_never_raises_it(field):
    model, profile = small_model(4, hidden=128), slow_link(3e8)
    plan = tight(random_plan(Random(5), model, sliced=False), model, profile)
    budgets = [int(getattr(plan.request, field) * factor) for factor in (1.0, 1.3, 2.0, 8.0)]
    bounds = [speed_of_light_s(model, replace(plan.request, **{field: b}), profile) for b in budgets]
    for less, more in pairwise(bounds):
        assert more <= less * (1 + TOLERANCE)


def test_a_faster_link_never_raises_it():
    model = open_model("preset:llama-3.2-1b").spec
    request = Request(2048, 8192, 5 << 30, 60 << 30)
    by_cpu = (("float32", 1e6),)  # too slow to spare the link the update
    card = preset("rtx-4090").changed(cpu_adamw_parameters_per_s=by_cpu)
    links = ("h2d_bytes_per_s", "d2h_bytes_per_s", "h2d_duplex_bytes_per_s", "d2h_duplex_bytes_per_s")
    cards = [card.changed(**{name: factor * getattr(card.link, name) for name in links}) for factor in (0.25, 1.0, 4.0)]
    bounds = [speed_of_light_s(model, request, c) for c in cards]
    assert bounds[0] > 1.5 * bounds[2] > 0
    assert bounds == sorted(bounds, reverse=True)


def test_near_a_step_that_is_mostly_update():
    """What must wait for the last gradient cannot hide behind the backward; what is updated speculatively can."""
    model, card = open_model("preset:llama-3.1-8b").spec, preset("h200")
    numerics = Numerics(state="bfloat16")
    request = Request(2048, 8192, 24 << 30, 110 << 30, 4096, 8192, numerics=numerics, graphs="never", segment_blocks=1)
    plan = make_plan(model, request, card)
    assert plan.speculates
    assert 0.6 * plan.predicted.step_s < bound_of(model, request, card).seconds <= plan.predicted.step_s
    step = step_seconds(Layout(model, plan.after_clipping()), card)
    (_, waiting), *_ = size_bounds(model, request, card).ascending()
    waiting_s = waiting.seconds
    assert 0.75 * step.step_s < waiting_s <= step.step_s
    assert max(step.busy_s.values()) < 0.75 * step.step_s  # no stream is busy all the time


def test_streams_of_the_relaxed_step_are_within_it():
    model = open_model("preset:llama-3.1-8b").spec
    found = bound_of(
        model, Request(2048, 131072, 24 << 30, 110 << 30, numerics=Numerics(state="bfloat16")), preset("h200")
    )
    assert 0.9 * found.seconds < max(found.compute_s, found.h2d_s, found.d2h_s) <= found.seconds * (1 + 1e-3)
    assert 0 <= found.recompute_s < found.compute_s
    assert found.limits[0] == "compute"


def test_nothing_fits():
    model = small_model()
    assert speed_of_light(model, Request(32, 256, 1000, ROOMY, numerics=FLOAT32), preset("cpu-test")) is None
    assert speed_of_light_s(model, Request(32, 256, ROOMY, 1000, numerics=FLOAT32), preset("cpu-test")) == 0.0


@pytest.mark.parametrize(("batch", "gpu_gib", "many"), [(131072, 24, True), (32768, 6, False), (8192, 24, False)])
def test_sizes_come_in_the_order_of_their_bounds(batch, gpu_gib, many):
    """As if all had been solved and sorted. many: a third or more are not solved for the first, as they compute for
    longer."""
    model = open_model("preset:llama-3.1-8b").spec
    found = SizeBounds(model, Request(2048, batch, gpu_gib << 30, 110 << 30), preset("h200"))
    first = next(found.ascending())
    solved = sum(found.is_solved(size) for size in found.sizes)
    bounds = [(size, found.at(size)) for size in found.sizes]
    fitting = [(size, bound) for size, bound in bounds if bound is not None]
    assert all(found.least_s(size) < bound.seconds for size, bound in fitting)
    assert list(found.ascending()) == sorted(fitting, key=lambda pair: pair[1].seconds)
    assert first == min(fitting, key=lambda pair: pair[1].seconds)
    assert solved < 2 * len(bounds) / 3 or not many


# ---- parts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["full", "lora"])
def test_recomputed_ops_are_those_of_the_compiled_layer(mode):
    """Adapters' tensors are kept beside outputs of ops before those that make them, and behind them."""
    job = Job(max_seq_len=64, max_global_batch_tokens=64, mode=mode)
    block = described(small_model(), job).blocks[0]
    found = save_choices(block.ops, block.input).recomputed.T.tolist()
    for kept, places in zip(save_sets(block.ops), found, strict=True):
        program = compile_layer(block, kept, (), 64, 4)
        steps = [step.op.name for step in program.backward if step.recompute]
        assert recomputed(block.ops, block.input, kept) == steps
        assert [block.ops[i].name for i in places if i < len(block.ops)] == steps


@pytest.mark.parametrize(
    ("kept", "runs_again"),
    [((), True), (("combine",), False), (("experts_glu",), False)],
    ids=["for what follows", "what follows is kept", "kept"],
)
def test_what_an_input_half_writes_again_is_recomputed_for_what_follows_it(kept, runs_again):
    """A norm behind Gemma 4's experts reads in its input half what the experts gave, which is made of their units'
    output, before the units' input half writes that again."""
    block = build_model("gemma 4", CASES["gemma4_text, experts"]).blocks[0]
    found = save_choices(block.ops, block.input)
    number = save_sets(block.ops).index(kept)
    steps = [step.op.name for step in compile_layer(block, kept, (), 64, 4).backward if step.recompute]
    names = [block.ops[i].name for i in found.recomputed[:, number] if i < len(block.ops)]
    assert names == recomputed(block.ops, block.input, kept)
    assert ["experts_glu" in each for each in (names, steps)] == [runs_again] * 2


@pytest.mark.parametrize("kept_share", [0.0, 0.5])
def test_operands_of_one_op_are_within_any_scratch(kept_share):
    model = open_model("preset:llama-3.1-8b").spec
    step = Unavoidable(model, Request(2048, 131072, ROOMY, ROOMY), preset("h200"))
    size = SizeWork(step, 4096, 2)
    sets = save_sets(model.blocks[0].ops)
    kept = sets[int(kept_share * len(sets))]
    program = compile_layer(model.blocks[0], kept, (), 4096, 2)
    accumulators = model.groups[1].numel * 4
    hidden = 4096 * model.hidden_size * 2
    assert size.block_bytes - accumulators - hidden <= program.backward_scratch_bytes


@pytest.mark.parametrize("seed", range(5))
def test_hull_is_below_every_point(seed):
    random = Random(seed)
    points = [Keeping(random.random(), random.random()) for _ in range(40)]
    hull = lower_hull(points)
    assert [p.num_bytes for p in hull] == sorted(p.num_bytes for p in hull)
    for weight in (0.01, 0.3, 1.0, 3.0, 100.0):
        costs = [[p.recompute_s + weight * p.num_bytes for p in some] for some in (hull, points)]
        assert min(costs[0]) == pytest.approx(min(costs[1]))


def test_linear_program_by_names():
    lp = LinearProgram()
    lp.variable("x", 3.0)
    lp.variable("y")
    lp.equals({"x": 1.0, "y": 1.0}, 5.0)
    lp.at_most("room", {"y": 1.0}, 4.0)
    found = lp.minimise({"y": 1.0})
    assert found is not None
    assert (found.least, found.values) == (pytest.approx(2.0), {"x": pytest.approx(3.0), "y": pytest.approx(2.0)})
    lp.at_most("no room", {"y": 1.0}, 1.0)
    assert lp.minimise({"y": 1.0}) is None


def test_a_linear_program_is_solved_once(monkeypatch):
    solved, solve = [], linear_program.linprog
    monkeypatch.setattr(
        linear_program, "linprog", lambda *args, **keywords: solved.append(1) or solve(*args, **keywords)
    )

    def least(limit: float) -> float | None:
        lp = LinearProgram()
        lp.at_most("row", {lp.variable("x", upper=7.0): -1.0}, -limit)
        found = lp.minimise({"x": 1.0})
        return None if found is None else found.least

    assert [least(3.125), least(3.25), least(3.125), least(8.0), least(8.0)] == [3.125, 3.25, 3.125, None, None]
    assert len(solved) == 3
