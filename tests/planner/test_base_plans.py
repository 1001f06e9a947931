"""Plans of models whose frozen layers are in fewer bytes: near the oracle, within budgets, above the bound, smaller."""

from dataclasses import replace
from random import Random

import pytest

from flexengine.hardware.presets import preset
from flexengine.models.base_dtype import with_base_dtype
from flexengine.models.freezing import with_frozen
from flexengine.models.registry import open_model
from flexengine.plan import Plan, Request
from flexengine.planner.bound.speed_of_light import speed_of_light
from flexengine.planner.cost.cost_model import step_seconds
from flexengine.planner.cost.memory import gpu_required_bytes, host_required_bytes
from flexengine.planner.feasibility.shortage import Feasibility
from flexengine.planner.planner import make_plan
from flexengine.planner.problem import Problem
from flexengine.schedule.layout import Layout
from tests.planner.oracle import best_step_s, slow_link
from tests.schedule.small_plans import FLOAT32, homes_of, mixed_model, random_plan, small_model

GIB, ROOMY = 1 << 30, 1 << 40
BASES = ("nf4", "fp8", "int8")
FROZEN = (("embed", "block.0"), ("embed", "blocks"), ("blocks",), ("block.1", "head"))


def model_of(base, names, model):
    return with_base_dtype(with_frozen(model, names), base)


def request_of(base, seq_len=32, **changes):
    numerics = replace(FLOAT32, base=base)
    return Request(seq_len, 256, ROOMY, ROOMY, **{"numerics": numerics, "chunk_tokens": 64, **changes})


def test_matches_the_exhaustive_oracle():
    model, profile = model_of("nf4", ("blocks",), small_model(blocks=2)), slow_link(1e8)
    request = request_of("nf4", round_tokens=128)
    least = Feasibility(Problem(model, request, profile)).least_gpu().gpu_bytes
    request = replace(request, max_gpu_bytes=int(1.3 * least))
    best_s = best_step_s(model, request, profile, 64, 2)
    assert best_s is not None
    assert make_plan(model, request, profile).predicted.step_s <= 1.02 * best_s


@pytest.mark.parametrize("seed", range(12))
def test_the_bound_is_never_above_a_random_plan_that_just_fits(seed):
    random, base = Random(seed), BASES[seed % 3]
    model = small_model(random.randint(2, 4), seed % 2 == 0, random.choice([64, 128]), random.choice([64, 256, 1024]))
    model = model_of(base, FROZEN[seed % len(FROZEN)], model)
    profile = slow_link(random.choice([1e7, 1e8, 1e9, 1e11])) if seed % 4 else preset("rtx-4090")
    plan = random_plan(random, model, sliced=seed % 3 == 0)
    sizes = {"chunk_tokens": 64, "round_tokens": 128, "max_global_batch_tokens": random.choice([128, 256, 640])}
    sizes["numerics"] = replace(plan.request.numerics, base=base)
    plan = replace(plan, request=replace(plan.request, **sizes), groups=homes_of(model, plan.groups))
    layout = Layout(model, plan)
    budgets = {
        "max_gpu_bytes": gpu_required_bytes(layout, profile),
        "max_host_bytes": host_required_bytes(layout, profile),
    }
    bound = speed_of_light(model, replace(layout.plan.request, **budgets), profile)
    assert bound is not None
    assert 0 < bound.seconds <= step_seconds(layout, profile).step_s


@pytest.mark.usefixtures("quick_search")
@pytest.mark.parametrize("seq_len", [32, 256], ids=["packed", "sliced"])
@pytest.mark.parametrize(("base", "kind"), [("nf4", "dense"), ("fp8", "mixed"), ("int8", "mixed")])
def test_plans_keep_their_promises(base, seq_len, kind):
    """Budgets hold on the exact layout, and the prediction is the simulator's."""
    model = model_of(base, FROZEN[seq_len % 3], mixed_model(3) if kind == "mixed" else small_model(3))
    profile, request = slow_link(1e9), request_of(base, seq_len)
    least = Feasibility(Problem(model, request, profile)).least_gpu().gpu_bytes
    request = replace(request, max_gpu_bytes=int(1.3 * least))
    plan = make_plan(model, request, profile)
    layout = Layout(model, plan)
    assert Problem(model, request, profile).fits(layout)
    assert plan.predicted.gpu_bytes == gpu_required_bytes(layout, profile)
    assert step_seconds(layout, profile).step_s == pytest.approx(plan.predicted.step_s)
    assert 0 < plan.predicted.speed_of_light_s <= plan.predicted.step_s
    assert Plan.from_json(plan.to_json()) == plan


def test_a_base_in_fewer_bytes_takes_less_of_the_host():
    """Llama 3.1 8B with a trained head: its blocks have 7 G parameters in linear layers."""
    frozen = with_frozen(open_model("preset:llama-3.1-8b").spec, ["embed", "blocks"])
    request = Request(2048, 32768, 8 * GIB, 120 * GIB, chunk_tokens=4096, round_tokens=16384)
    bytes_of = {}
    for base in ("compute", "fp8", "nf4"):
        asked = replace(request, numerics=replace(request.numerics, base=base))
        bytes_of[base] = (
            Feasibility(Problem(with_base_dtype(frozen, base), asked, preset("rtx-4090"))).least_host().host_bytes
        )
    numel = 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336)
    assert bytes_of["compute"] - bytes_of["fp8"] == pytest.approx(numel, rel=0.01)
    assert bytes_of["compute"] - bytes_of["nf4"] == pytest.approx((2 - 0.516) * numel, rel=0.01)
