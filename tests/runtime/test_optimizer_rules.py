"""Engines with every optimizer rule: no plan changes a bit, programs are proven and priced, loss falls."""

import random
from importlib import resources

import pytest
import torch
from engine_helpers import build_engine, make_plan, random_batch, same_bits, shuffled_order, streamed_plan
from thorough import cases

from flexengine.hardware.presets import preset
from flexengine.models.registry import ModelSource
from flexengine.optim import OPTIMIZERS
from flexengine.plan import GroupPlan, Numerics
from flexengine.planner.cost.cost_model import CostModel
from flexengine.schedule.checker import check_program
from flexengine.schedule.layout import Layout
from flexengine.schedule.programs import lower_update
from flexengine.schedule.simulator import simulate
from tests.schedule.small_plans import mixed_model, small_model

RULES = {
    "lion": Numerics("bfloat16", "split", "bfloat16", "bfloat16", optimizer="lion"),
    "lion, rounded masters": Numerics("bfloat16", "stochastic", "bfloat16", "bfloat16", optimizer="lion"),
    "sgd": Numerics("float32", "full", "float32", "float32", optimizer="sgd"),
    "muon": Numerics("bfloat16", "split", "bfloat16", "bfloat16", optimizer="muon"),
    "muon, rounded masters": Numerics("bfloat16", "stochastic", "bfloat16", "int8", optimizer="muon"),
    "muon, float32": Numerics("float32", "full", "float32", "float32", optimizer="muon"),
    "8-bit adamw": Numerics("bfloat16", "split", "bfloat16", "int8"),
    "8-bit adamw, rounded masters": Numerics("bfloat16", "stochastic", "bfloat16", "int8"),
    "8-bit adamw, float32": Numerics("float32", "full", "float32", "int8"),
}
WITH_ALL_TESTS = (
    "lion",
    "sgd",
    "muon, rounded masters",
    "8-bit adamw, rounded masters",
)
LR = {"adamw": 1e-2, "muon": 1e-2, "lion": 1e-2, "sgd": 1e-1}
SIZE = {"chunk_tokens": 16, "chunks_per_round": 3, "max_seq_len": 40}


def plans_of(spec, numerics):
    """A resident plan, one that streams all, one with updates by the CPU, and a mixture."""
    options = {**SIZE, "numerics": numerics}
    muon = numerics.optimizer == "muon"  # its matrices are multiplied on the GPU
    by_cpu = [GroupPlan(update="gpu" if muon and g.slot_class == "block" else "cpu") for g in spec.groups]
    homes = (GroupPlan(), GroupPlan("gpu"), GroupPlan("gpu", "gpu"), GroupPlan("gpu", "gpu", "gpu"), by_cpu[1])
    choose = random.Random(0)
    mixed = [choose.choice(homes) for _ in spec.groups]
    return {
        "resident": make_plan(spec, **options),
        "streamed": streamed_plan(spec, **options, optimizer_tile=999, share_edge_slots=True),
        "by the CPU": make_plan(spec, **options, groups=by_cpu),
        "mixed": make_plan(spec, **options, groups=mixed, optimizer_tile=1 << 12, optimizer_slots=1),
    }


def train(source, plan, seed=0):
    """Losses and weights of three steps."""
    name = plan.request.numerics.optimizer
    optimizer = OPTIMIZERS[name](lr=LR[name], weight_decay=0.1)
    batch = random_batch(1, [40, 3, 17], source.spec.vocab_size)
    with build_engine(source, plan, optimizer, order=shuffled_order(seed)) as engine:
        losses = [engine.train_step(batch)[0].loss for _ in range(3)]
        return losses, engine.state_dict()


@pytest.mark.parametrize("rule", cases(RULES, WITH_ALL_TESTS))
def test_no_plan_changes_a_bit(rule):
    source = ModelSource(mixed_model(blocks=2, hidden=32), None, None)
    plans = plans_of(source.spec, RULES[rule])
    losses, weights = train(source, plans.pop("resident"))
    assert losses[2] < losses[0]
    for name, plan in plans.items():
        other_losses, other_weights = train(source, plan, seed=len(name))
        assert other_losses == losses, name
        same_bits(other_weights, weights)


@pytest.mark.parametrize("rule", RULES)
def test_programs_are_proven_and_priced(rule):
    spec = mixed_model(blocks=2, hidden=32)
    for plan in plans_of(spec, RULES[rule]).values():
        layout = Layout(spec, plan)
        program = lower_update(layout)
        check_program(program, layout.gpu_bytes, layout.host_bytes)
        cost = CostModel(preset("h200"), 2, plan.chunk_tokens, plan.chunk_tokens, plan.request.numerics.state)
        assert simulate(program, cost.rates()).total_s > 0


@pytest.mark.parametrize("rule", ["muon, float32", "sgd"])
def test_groups_have_learning_rates_and_decays_of_their_own(rule):
    spec = mixed_model(blocks=2, hidden=32)
    plan = plans_of(spec, RULES[rule])["resident"]
    optimizer = OPTIMIZERS[plan.request.numerics.optimizer](lr=1e-2, weight_decay=0.5)
    factors = {"lr_factors": (0.0, 1.0, 0.5, 1.0), "decay_factors": (1.0, 0.0, 1.0, 1.0)}
    moved = []
    for options in ({}, factors):
        with build_engine(ModelSource(spec, None, None), plan, optimizer, **options) as engine:
            before = engine.state_dict()
            engine.train_step(random_batch(1, [40, 3, 17], spec.vocab_size))
            moved.append({name: value - before[name] for name, value in engine.state_dict().items()})
    assert moved[1]["model.embed_tokens.weight"].count_nonzero() == 0
    assert torch.equal(moved[1]["lm_head.weight"], moved[0]["lm_head.weight"])
    half = "model.layers.1.self_attn.o_proj.weight"
    assert torch.allclose(moved[1][half], 0.5 * moved[0][half], atol=1e-6)
    decay = "model.layers.0.self_attn.o_proj.weight"
    assert torch.allclose(moved[1][decay] - moved[0][decay], 1e-2 * 0.5 * before[decay], atol=1e-6)


def losses_on_bundled_text(numerics, num_steps=60):
    """Losses of a small model on the bytes of the bundled data, eight sequences a step."""
    spec = small_model(blocks=2, hidden=32, vocab=256)
    text = (resources.files("flexengine") / "assets" / "demo" / "demo_instructions.jsonl").read_bytes()
    rows = [list(text[start : start + 48]) for start in range(0, 48 * 8 * num_steps, 48)]
    plan = make_plan(spec, chunk_tokens=384, chunks_per_round=1, numerics=numerics)
    with build_engine(ModelSource(spec, None, None), plan, OPTIMIZERS["adamw"](lr=3e-3)) as engine:
        return [engine.train_step(rows[8 * i : 8 * i + 8])[0].loss for i in range(num_steps)]


def test_states_in_8_bits_learn_as_states_in_float32():
    numerics = [Numerics("float32", "full", "float32", state) for state in ("float32", "int8")]
    exact, coded = map(losses_on_bundled_text, numerics)
    ends = [sum(losses[-10:]) / 10 for losses in (exact, coded)]
    assert ends[0] < 0.7 * exact[0]
    assert abs(ends[1] / ends[0] - 1) <= 0.01
