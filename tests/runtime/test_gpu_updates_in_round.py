"""Updates by the GPU inside the last round change no bit, whether gradients are stored or not, clipped or not."""

from dataclasses import replace

import pytest
import torch
from family_configs import CASES
from hypothesis import given, settings
from hypothesis import strategies as st

from flexengine.hardware.presets import preset
from flexengine.metrics import GIB
from flexengine.models import blocks
from flexengine.models.in_parts import in_parts
from flexengine.models.lora import with_lora
from flexengine.models.registry import open_model
from flexengine.optim import AdamW, Muon
from flexengine.options.lora import LoRA
from flexengine.plan import GroupPlan, Numerics, PlanError, Request
from flexengine.planner.feasibility.shortage import Feasibility
from flexengine.planner.planner import find_plan
from flexengine.planner.planner import make_plan as make_best
from flexengine.planner.problem import Problem
from flexengine.reports.picture import Picture
from flexengine.reports.plan_page import html_page
from flexengine.reports.plan_text import describe
from flexengine.schedule.layout import Layout
from tests.engine_helpers import (
    FLOAT32,
    build_engine,
    chunk_by_chunk,
    make_plan,
    random_batch,
    random_weights,
    same_bits,
    shuffled_order,
    spec_of,
    tiny_config,
)
from tests.planner.oracle import slow_link
from tests.runtime.test_engine_plan_independence import (
    NUMERICS,
    SETTINGS,
    batches,
    models,
    plan_decisions,
    sizes,
    tokens_of,
)

MAX_SEQ_LEN = 40
RULES = NUMERICS | {
    "8-bit states": Numerics("bfloat16", "stochastic", "bfloat16", "int8"),
    "muon": Numerics("bfloat16", "split", "bfloat16", "bfloat16", optimizer="muon"),
}


def in_round(plan, clipping=False):
    """The plan whose GPU updates inside the last round; with clipping once a run of its round has found the norm."""
    way = {"gpu_updates": "unstored", "whole_steps": True} if clipping else {"gpu_updates": "in_round"}
    return replace(plan, request=replace(plan.request, clipping=clipping, **way))


def unstored(spec, home, group):
    """The home with no place for a gradient that one layer makes."""
    once = sum(group in layer.groups for layer in spec.layers) == spec.groups[group].num_parts == 1
    return replace(home, grads="none") if once and home.update == "gpu" else home


def trained(engine, tokens, num_steps=2):
    """Losses, norms and weights after steps of one call each."""
    found = []
    for number in range(num_steps):
        out, step = engine.train_step(tokens[number % len(tokens)])
        found += [out.loss, step.grad_norm]
    weights = engine.state_dict()
    engine.close()
    return found, weights


@pytest.mark.long
@settings(SETTINGS, max_examples=12)
@given(
    model=models(), lengths=batches(), size=sizes(), data=st.data(), rule=st.sampled_from(list(RULES)),
    stored=st.booleans(), clip=st.sampled_from((None, 0.3, 1e9)), way=st.sampled_from(("adapted", "by chunk", "usual")),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_any_plan_gives_the_bits_of_the_resident_plan(model, lengths, size, data, rule, stored, clip, way, seed):
    source = random_weights(model)
    if way == "adapted" and rule != "muon":
        source = source._replace(spec=with_lora(source.spec, LoRA(rank=3)))
    spec, tokens = source.spec, tokens_of(lengths, source.spec)
    chunks = size[1] if stored else 24
    chunk = max(size[0], MAX_SEQ_LEN) if way == "by chunk" else size[0]
    options = {"chunk_tokens": chunk, "chunks_per_round": chunks, "max_seq_len": MAX_SEQ_LEN, "numerics": RULES[rule]}
    clip = None if stored else clip
    rules = {"optimizer": Muon(lr=1e-2) if rule == "muon" else AdamW(lr=1e-2), "max_grad_norm": clip}
    resident = build_engine(source, make_plan(spec, **options), **rules)
    decisions = data.draw(plan_decisions(spec))
    if rule in ("8-bit states", "muon"):
        decisions["groups"] = [GroupPlan() if home.update == "cpu" else home for home in decisions["groups"]]
    if not stored:
        decisions["groups"] = [unstored(spec, home, group) for group, home in enumerate(decisions["groups"])]
    plan = in_round(make_plan(spec, **options, **decisions), clipping=clip is not None)
    plan = chunk_by_chunk(plan) if way == "by chunk" else plan
    losses, weights = trained(build_engine(source, plan, order=shuffled_order(seed), **rules), tokens)
    expected, expected_weights = trained(resident, tokens)
    assert losses == expected
    same_bits(weights, expected_weights)


STREAMED = (GroupPlan(),)


def unstored_plan(spec, clipping=False, homes=STREAMED, **options):
    """A plan of one streamed round that stores no gradients. homes: of groups, in turn."""
    spec = in_parts(spec) if options.get("in_parts") else spec
    groups = [unstored(spec, homes[group % len(homes)], group) for group in range(len(spec.groups))]
    return in_round(make_plan(spec, groups=groups, chunk_tokens=64, **options), clipping)


TIED = tiny_config(num_hidden_layers=2, tie_word_embeddings=True)
CLIPPED = {
    "rounded": (TIED, None, {"numerics": RULES["8-bit states"]}),
    "by both processors": (TIED, None, {"homes": (GroupPlan(), GroupPlan(update="cpu"))}),
    "adapters with dropout": (TIED, LoRA(rank=3, dropout=0.3), {}),
    "experts in parts": (CASES["qwen3_moe"], None, {"in_parts": True}),
    "experts in balance": (CASES["qwen3_moe"] | {"router_aux_loss_coef": 0.3, "output_router_logits": True}, None, {}),
}


@pytest.mark.parametrize("case", list(CLIPPED))
@pytest.mark.parametrize("clip", [0.3, 1e9])
def test_gradients_that_are_clipped_need_no_place(case, clip, monkeypatch):
    monkeypatch.setattr(blocks, "PART_ELEMENTS", 1)
    config, lora, options = CLIPPED[case]
    source = random_weights(config)
    source = source if lora is None else source._replace(spec=with_lora(source.spec, lora))
    plans = [
        unstored_plan(source.spec, clipping=True, chunks_per_round=2, **options),
        make_plan(source.spec, chunk_tokens=64, chunks_per_round=2, numerics=options.get("numerics", FLOAT32)),
    ]
    tokens = [random_batch(i, lengths, source.spec.vocab_size) for i, lengths in enumerate(((48, 17, 9), (30,)))]
    found = [trained(build_engine(source, plan, max_grad_norm=clip), tokens) for plan in plans]
    assert (found[0][0][1] > clip) is (clip < 1)
    assert found[0][0] == found[1][0]
    same_bits(found[0][1], found[1][1])


def summed_losses(calls, interrupted=None, scale=1.0):
    """The cross-entropy, `scale` times; the call of this number is interrupted."""

    def loss(block):
        calls.append(len(block.labels))
        if len(calls) == interrupted:
            raise KeyboardInterrupt
        return scale * torch.nn.functional.cross_entropy(block.logits, block.labels, reduction="sum")

    return loss


def test_a_step_whose_norm_is_not_finite_runs_once_and_updates_nothing():
    source, calls = random_weights(TIED), list[int]()
    engine = build_engine(source, unstored_plan(source.spec, clipping=True))
    before = engine.state_dict()
    _, step = engine.train_step(
        random_batch(0, (40, 20), source.spec.vocab_size), loss=summed_losses(calls, scale=1e38)
    )
    assert step.skipped
    assert engine.step_count == 0
    once = len(calls)
    same_bits(engine.state_dict(), before)
    engine.train_step(random_batch(0, (40, 20), source.spec.vocab_size), loss=summed_losses(calls))
    assert len(calls) == 3 * once
    assert engine.step_count == 1


def test_an_interrupt_before_the_norm_is_known_loses_the_step_alone():
    source = random_weights(TIED)
    tokens = [random_batch(0, (40, 20), source.spec.vocab_size)]
    engine = build_engine(source, unstored_plan(source.spec, clipping=True))
    with pytest.raises(KeyboardInterrupt):
        engine.train_step(tokens[0], loss=summed_losses([], interrupted=1))
    assert not engine.has_gradients
    expected = trained(build_engine(source, make_plan(source.spec, chunk_tokens=64)), tokens)
    found = trained(engine, tokens)
    assert found[0] == expected[0]
    same_bits(found[1], expected[1])
    engine, calls = build_engine(source, unstored_plan(source.spec, clipping=True)), list[int]()
    engine.train_step(tokens[0], loss=summed_losses(calls))
    with pytest.raises(KeyboardInterrupt):
        engine.train_step(tokens[0], loss=summed_losses([], interrupted=len(calls) // 2 + 1))
    with pytest.raises(ValueError, match="half updated"):
        engine.train_step(tokens[0])
    engine.close()


def test_one_call_and_one_round_are_asked_for():
    source = random_weights(tiny_config())
    engine = build_engine(source, unstored_plan(source.spec, chunks_per_round=2), max_grad_norm=None)
    with pytest.raises(ValueError, match=r"no gradients.*use train_step\(batch\), or plan with whole_steps=False"):
        engine.fwd_bwd(random_batch(0, (48, 9), source.spec.vocab_size))
    with pytest.raises(ValueError, match="stores no gradients"):  # three chunks
        engine.train_step(random_batch(0, (48, 48, 48), source.spec.vocab_size))
    before = engine.state_dict()
    same_bits(engine.state_dict(), before)
    assert not engine.has_gradients
    engine.train_step(random_batch(0, (48, 9), source.spec.vocab_size))
    assert engine.step_count == 1


def test_a_gradient_that_is_added_up_needs_a_place(monkeypatch):
    homes = [GroupPlan(grads="none")]
    tied = spec_of(tiny_config(tie_word_embeddings=True))
    with pytest.raises(ValueError, match=r"embed.* has its gradient from 2 layers in 1 parts.* give grads=host or gpu"):
        Layout(tied, in_round(make_plan(tied, groups=homes * len(tied.groups))))
    monkeypatch.setattr(blocks, "expert_divisions", lambda *_: 2)
    experts = spec_of(CASES["qwen3_moe"])
    stored = [GroupPlan(), *homes * (len(experts.groups) - 2), GroupPlan()]
    with pytest.raises(ValueError, match=r"has its gradient from 1 layers in 2 parts"):
        Layout(experts, in_round(make_plan(experts, groups=stored, in_parts=True)))


def test_a_gradient_that_is_not_finite_updates_no_weight_of_its_layer():
    source = random_weights(tiny_config(num_hidden_layers=2))
    stored = make_plan(source.spec, groups=[GroupPlan()] * len(source.spec.groups), chunk_tokens=64)
    stored = replace(stored, request=replace(stored.request, clipping=False))
    found = []
    for plan in (stored, unstored_plan(source.spec)):
        engine = build_engine(source, plan, max_grad_norm=None)
        tokens = random_batch(3, (40, 20), source.spec.vocab_size)
        weights = [torch.full((len(row),), 1e38 if number else 1.0) for number, row in enumerate(tokens)]
        _, step = engine.train_step({"input_ids": tokens, "weights": weights})
        assert step.skipped
        found.append(engine.state_dict())
        engine.close()
    same_bits(*found)


def test_the_planner_finds_what_fits_without_stored_gradients():
    source = random_weights(tiny_config(hidden_size=128, intermediate_size=512, num_hidden_layers=12, vocab_size=64))
    profile = slow_link(1e9).changed(gpu_context_bytes=0, host_base_bytes=0)
    types = Numerics("bfloat16", "stochastic", "bfloat16", "int8")
    request = Request(32, 64, 4 << 20, 200 << 20, numerics=types, clipping=False, whole_steps=True)

    def least_host(way):
        asked = replace(request, gpu_updates=way)
        return Feasibility(Problem(source.spec, asked, profile)).least_host().host_bytes

    assert least_host("unstored") < least_host("auto")
    tight = replace(request, max_host_bytes=(least_host("unstored") + least_host("auto")) // 2)
    plan = make_best(source.spec, tight, profile)
    assert not plan.stores_gradients
    assert plan.predicted.speed_of_light_s <= plan.predicted.step_s
    with pytest.raises(PlanError):
        make_best(source.spec, replace(tight, whole_steps=False), profile)
    clipped = make_best(source.spec, replace(tight, clipping=True), profile)
    assert clipped.request.norm_first
    assert clipped.predicted.speed_of_light_s <= clipped.predicted.step_s
    assert clipped.predicted.unclipped_s < clipped.predicted.step_s <= 2 * clipped.predicted.unclipped_s
    assert "--max-grad-norm 0 takes" in describe(clipped, source.spec)
    assert "not stored" in html_page(Picture(clipped, source.spec, profile))
    roomy = replace(tight, clipping=True, max_host_bytes=2 * least_host("auto"))
    assert not make_best(source.spec, roomy, profile).request.norm_first
    tokens = [random_batch(i, (32, 9, 20), source.spec.vocab_size) for i in range(2)]
    options = {"chunk_tokens": plan.chunk_tokens, "chunks_per_round": plan.chunks_per_round, "max_seq_len": 32}
    resident = make_plan(source.spec, **options, numerics=types)
    (losses, weights), (expected, expected_weights) = (
        trained(build_engine(source, one, max_grad_norm=None), tokens) for one in (plan, resident)
    )
    assert losses == expected
    same_bits(weights, expected_weights)


def test_14b_is_clipped_within_24_and_64_gib():
    types = Numerics("bfloat16", "stochastic", "bfloat16", "int8")
    spec, card = open_model("preset:qwen3-14b", needs_weights=False).spec, preset("rtx-4090")
    asked = Request(
        1024, 65536, 24 * GIB, 64 * GIB, 9216, numerics=types, whole_steps=True, segment_blocks=2
    )  # pinned, so that planning is short
    plan = make_best(spec, asked, card)
    assert plan.request.norm_first
    assert plan.predicted.speed_of_light_s <= plan.predicted.step_s < 120
    assert plan.predicted.unclipped_s < 0.51 * plan.predicted.step_s
    assert find_plan(Problem(spec, replace(asked, whole_steps=False), card)) is None


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ["bf16, exact master", "8-bit states"])
def test_bits_on_a_gpu(rule):
    source = random_weights(tiny_config(hidden_size=256, intermediate_size=512, num_hidden_layers=4, vocab_size=512))
    options = {"numerics": RULES[rule], "chunks_per_round": 4}
    plans = [unstored_plan(source.spec, **options), make_plan(source.spec, chunk_tokens=64, **options)]
    tokens = [random_batch(i, (48, 40, 17, 48), source.spec.vocab_size) for i in range(2)]
    found = [
        trained(build_engine(source, plan, device="cuda", max_grad_norm=None, deterministic=True), tokens, num_steps=4)
        for plan in plans
    ]
    assert found[0][0] == found[1][0]
    same_bits(found[0][1], found[1][1])
