"""Frozen layers in NF4, FP8 and int8: the bits of a model that holds the decoded values, whatever the plan."""

from dataclasses import replace

import pytest
import torch
from engine_helpers import (
    FLOAT32,
    build_engine,
    make_plan,
    random_batch,
    random_weights,
    same_bits,
    saved_model,
    shuffled_order,
    spec_of,
    streamed_plan,
    tiny_config,
)
from family_configs import CASES

from flexengine import LoRA
from flexengine.models import blocks
from flexengine.models.base_dtype import with_base_dtype
from flexengine.models.freezing import with_frozen
from flexengine.models.lora import with_lora
from flexengine.models.registry import ModelSource, open_model
from flexengine.plan import GroupPlan, Numerics
from flexengine.runtime.decode_weights import decode_weights, rows_of_experts
from flexengine.runtime.execution import handlers as command_handlers

SPLIT = Numerics("bfloat16", "split", "bfloat16", "float32")
SIZES = {"chunk_tokens": 24, "chunks_per_round": 3}
CONFIGS = {
    "dense": tiny_config(num_hidden_layers=3, hidden_size=32, intermediate_size=48, head_dim=8, qkv_bias=True),
    "experts": CASES["qwen3_moe"],
    "stacked experts": CASES["gpt_oss"],
    "transposed": CASES["gpt2"],
}
FROZEN = ["embed", "blocks"]


@pytest.fixture(autouse=True)
def one_expert_each(monkeypatch):
    """Every expert may be a part of its own."""
    monkeypatch.setattr(blocks, "PART_ELEMENTS", 1)


def with_base(source: ModelSource, base: str, *frozen: str) -> ModelSource:
    return source._replace(spec=with_base_dtype(with_frozen(source.spec, frozen or FROZEN), base))


def stored_plans(spec, numerics, **more):
    """Everything on the GPU, everything streamed, and streamed weights of every second group, of frozen ones from a
    drive."""
    numerics = replace(numerics, base=next(p.storage for g in spec.groups for p in g.params if p.storage != "compute"))
    streamed = [GroupPlan(weights="drive", update="none") if g.frozen else GroupPlan() for g in spec.groups]
    groups = [GroupPlan(weights="gpu") if i % 2 else home for i, home in enumerate(streamed)]
    sizes = {**SIZES, "numerics": numerics, **more}
    if more.get("in_parts"):
        groups = streamed
    driven = make_plan(spec, groups=groups, **{**sizes, "touched_only": False})
    return [make_plan(spec, **sizes), streamed_plan(spec, **sizes), driven]


def outcome(source, plan, batch, **options):
    """Loss, gradients and, after a step, evaluation and weights."""
    engine = build_engine(source, plan, **options)
    loss, gradients = engine.fwd_bwd(batch).loss, engine.gradients()
    engine.step()
    found = loss, gradients, engine.evaluate(batch).loss, engine.state_dict()
    engine.close()
    return found


def same_outcome(found, expected):
    assert (found[0], found[2]) == (expected[0], expected[2])
    same_bits(found[1], expected[1])
    same_bits(found[3], expected[3])


@pytest.mark.parametrize(
    ("case", "base", "numerics"),
    [
        ("dense", "nf4", FLOAT32),
        ("dense", "nf4", SPLIT),
        ("dense", "fp8", SPLIT),
        ("dense", "int8", SPLIT),
        ("experts", "nf4", SPLIT),
        ("stacked experts", "fp8", SPLIT),
        ("transposed", "int8", FLOAT32),
    ],
    ids=lambda value: getattr(value, "compute", value),
)
def test_training_beside_a_stored_base_is_training_beside_its_decoded_values(case, base, numerics, tmp_path):
    """An export has the decoded values, so a run on it is the reference; every plan gives its bits."""
    saved_model(tmp_path / "source", CONFIGS[case])
    source = with_base(open_model(tmp_path / "source"), base)
    batch = random_batch(1, (40, 7, 33, 20), source.spec.vocab_size)
    plans = stored_plans(source.spec, numerics)
    engine = build_engine(source, plans[0])
    engine.save_pretrained(tmp_path / "decoded")
    engine.close()
    plain = open_model(tmp_path / "decoded")
    plain = plain._replace(spec=with_frozen(plain.spec, FROZEN))
    expected = outcome(plain, make_plan(plain.spec, **SIZES, numerics=numerics), batch)
    for plan in plans:
        same_outcome(outcome(source, plan, batch, order=shuffled_order(3)), expected)
    if case.endswith("experts"):
        [_, touched, driven] = stored_plans(source.spec, numerics, in_parts=True, touched_only=True)
        for plan in (touched, driven):
            same_outcome(outcome(source, plan, batch, order=shuffled_order(5)), expected)


@pytest.mark.parametrize("case", ["experts", "stacked experts"])
def test_only_touched_experts_are_decoded(case, monkeypatch):
    """Rounds of at most four tokens: memory of experts without rows holds NaN, and bits are those of whole layers."""
    decoded = []

    def watched(args, slots, arenas, compute):
        if args.touched is not None:
            arenas.bytes_view("gpu", slots[args.target].offset, slots[args.target].num_bytes).fill_(255)
            decoded.append(bool((rows_of_experts(args.touched, slots, arenas) == 0).any()))
        decode_weights(args, slots, arenas, compute)

    monkeypatch.setattr(command_handlers, "decode_weights", watched)
    source = with_base(random_weights(CONFIGS[case]), "nf4")
    sizes = {"chunk_tokens": 2, "chunks_per_round": 2, "max_seq_len": 4}
    batch, found = random_batch(1, (4, 2, 3), source.spec.vocab_size), []
    for decisions in ({}, {"in_parts": True, "touched_only": True}):
        [_, plan, _] = stored_plans(source.spec, SPLIT, **{**sizes, **decisions})
        found.append(outcome(source, plan, batch))
    same_outcome(found[1], found[0])
    assert any(decoded)


def check_adapters(config, base, device="cpu"):
    """Adapters beside a stored base and beside its decoded values: equal losses and gradients, bit for bit."""
    adapted = with_lora(spec_of(config), LoRA(rank=4))
    sizes, found = {"chunk_tokens": 48, "chunks_per_round": 2}, []
    for spec, numerics in (
        (with_base_dtype(adapted, base), replace(SPLIT, base=base)),
        (adapted, SPLIT),
    ):
        plan = streamed_plan(spec, **sizes, numerics=numerics)
        engine = build_engine(ModelSource(spec, None, None), plan, None, device, deterministic=device != "cpu")
        if found:
            for name, values in found[0][2].items():
                plane = engine.weights.plane("weights", engine.weights.runs[name])
                plane.copy_(values.flatten())
        losses = [engine.train_step(random_batch(step, (48, 31), spec.vocab_size))[0].loss for step in range(2)]
        losses.append(engine.fwd_bwd(random_batch(9, (40, 48), spec.vocab_size)).loss)
        runs = engine.weights.runs.items()
        stored = {name: engine.weights.read(name, torch.bfloat16) for name, run in runs if run.in_fewer_bytes}
        found.append((losses, engine.gradients(), stored))
        engine.close()
    (losses, gradients, stored), (plain_losses, plain_gradients, _) = found
    assert stored
    assert losses == plain_losses
    assert any(gradient.abs().max() > 0 for name, gradient in gradients.items() if "lora_A" in name)
    same_bits(gradients, plain_gradients)


@pytest.mark.parametrize("base", ["nf4", "fp8"])
def test_adapters_learn_as_beside_the_decoded_values(base):
    check_adapters(CONFIGS["dense"], base)


@pytest.mark.gpu
@pytest.mark.parametrize("base", ["nf4", "fp8", "int8"])
@pytest.mark.parametrize("width", [2048, 3456, 10752, 21504], ids=lambda width: f"{width * 2**15 >> 20} MiB")
def test_adapters_of_large_layers_learn_as_beside_the_decoded_values(base, width):
    """A gate and up projection of 64 MiB to 672 MiB in bf16, which is decoded at once."""
    shape = {"hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
    check_adapters(tiny_config(**shape, intermediate_size=width, num_hidden_layers=1), base, "cuda")


def test_some_blocks_may_be_frozen_and_some_trained():
    """Trained blocks and stored ones pass through slots of one class."""
    source = with_base(random_weights(CONFIGS["dense"]), "nf4", "block.0", "block.2")
    batch = random_batch(1, (40, 33), source.spec.vocab_size)
    resident, *others = [outcome(source, plan, batch) for plan in stored_plans(source.spec, SPLIT)]
    for other in others:
        same_outcome(other, resident)


def test_a_change_of_plan_moves_stored_weights():
    source = with_base(random_weights(CONFIGS["dense"]), "int8")
    [resident, streamed, _] = stored_plans(source.spec, SPLIT)
    batches = [random_batch(step, (40, 33), source.spec.vocab_size) for step in range(3)]
    changing, fixed = build_engine(source, streamed_to(streamed, resident)), build_engine(source, resident)
    for step, batch in enumerate(batches):
        assert changing.train_step(batch)[0].loss == fixed.train_step(batch)[0].loss
        if step == 0:
            changing.adopt(streamed)
    same_bits(changing.state_dict(), fixed.state_dict())


def streamed_to(streamed, resident):
    """A plan with the activations of one and the groups of another: as large as both need."""
    return replace(resident, groups=streamed.groups)


def test_a_base_in_fewer_bytes_needs_frozen_blocks():
    spec = spec_of(CONFIGS["dense"])
    with pytest.raises(ValueError, match="freeze blocks"):
        with_base_dtype(spec, "nf4")
    with pytest.raises(ValueError, match="freeze blocks"):
        with_base_dtype(with_frozen(spec, ["embed"]), "nf4")


def test_a_plan_of_another_base_is_refused():
    source = with_base(random_weights(CONFIGS["dense"]), "nf4")
    with pytest.raises(ValueError, match="stores linear layers in nf4, but numerics ask for compute"):
        build_engine(source, make_plan(source.spec, **SIZES))


def test_weights_that_are_not_finite_are_named(tmp_path):
    model = saved_model(tmp_path, CONFIGS["dense"])
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 4] = torch.inf
    model.save_pretrained(tmp_path)
    source = with_base(open_model(tmp_path), "nf4")
    with pytest.raises(
        ValueError, match=r"model.layers.1.mlp.down_proj.weight: it has values that are NaN or infinite"
    ):
        build_engine(source, stored_plans(source.spec, SPLIT)[0])
