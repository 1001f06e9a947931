"""float16 with dynamic loss scaling: GradScaler's steps, the same bits under any plan, and resumed ones."""

import math
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
    streamed_plan,
    tiny_config,
    worst_error,
)
from thorough import cases

from flexengine.checkpoint.safetensors_format import CheckpointError
from flexengine.checkpoint.state_files import read_description
from flexengine.models.base_dtype import with_base_dtype
from flexengine.models.lora import with_lora
from flexengine.models.registry import open_model
from flexengine.ops.custom_loss import LogitsBlock
from flexengine.optim import SGD, AdamW, Lion, Muon, loss_scale
from flexengine.optim.loss_scale import LossScale
from flexengine.options.lora import LoRA
from flexengine.plan import GroupPlan, LayerPlan, Numerics

FLOAT16 = Numerics("float16", "beside", "float32", "float32")
CONFIG = tiny_config()
BATCH = random_batch(0, (20, 7, 5, 32), CONFIG["vocab_size"])
SIZES = {"chunk_tokens": 24, "chunks_per_round": 5, "max_tokens": 300}
BY_CPU = GroupPlan(update="cpu")


def plans_of(spec, numerics=FLOAT16):
    """Everything on the GPU; streamed; updated by the CPU, once inside backward; and norms first, nothing stored."""
    count, sizes = len(spec.groups), {**SIZES, "numerics": numerics}
    ahead = replace(BY_CPU, speculative=True)
    yield "resident", make_plan(spec, **sizes)
    yield "streamed", streamed_plan(spec, **sizes)
    yield "CPU", make_plan(spec, groups=[BY_CPU] * count, **sizes)
    yield "speculative", make_plan(spec, groups=[ahead] * count, blocks=[LayerPlan()] * len(spec.blocks), **sizes)
    once = [sum(g in layer.groups for layer in spec.layers) == 1 for g in range(count)]
    unstored = [GroupPlan(grads="none" if alone else "host") for alone in once]
    plan = make_plan(spec, **sizes)
    yield "made without clipping", replace(plan, request=replace(plan.request, clipping=False, gpu_updates="in_round"))
    plan = streamed_plan(spec, **{**sizes, "groups": unstored})
    yield "norm first", replace(plan, request=replace(plan.request, gpu_updates="unstored", whole_steps=True))


def trained(engine, num_steps=4, scale=None, **options):
    if scale is not None:
        engine.state.loss_scale.scale = scale
    steps = [engine.train_step(BATCH, **options) for _ in range(num_steps)]
    found = [(out.loss, None if u.skipped else u.grad_norm, u.skipped, u.loss_scale) for out, u in steps]
    return found, engine.state_dict()


class Unlucky:
    """Cross-entropy whose gradient no float16 holds, in some of the calls."""

    def __init__(self, bad: set[int]) -> None:
        self.bad, self.calls = bad, 0

    def factor(self) -> float:
        self.calls += 1
        return 1e12 if self.calls - 1 in self.bad else 1.0

    def __call__(self, block: LogitsBlock) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(block.logits, block.labels, reduction="sum") * self.factor()


def test_steps_are_those_of_grad_scaler(tmp_path, monkeypatch):
    """The same steps are skipped, the scale is the same, and losses and weights agree within what float16 rounds."""
    monkeypatch.setattr(loss_scale, "INTERVAL", 3)
    model, bad, num_steps = saved_model(tmp_path, CONFIG), {1, 6, 7}, 14
    ids = random_batch(1, (33,), CONFIG["vocab_size"])  # 32 targets: the mean's divisor is a power of two
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    scaler, expected, unlucky = torch.amp.GradScaler("cpu", 256.0, growth_interval=3), [], Unlucky(bad)
    for _ in range(num_steps):
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(torch.tensor(ids)).logits
        loss = torch.nn.functional.cross_entropy(logits[0, :-1].float(), torch.tensor(ids[0][1:])) * unlucky.factor()
        scale = scaler.get_scale()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        expected.append((loss.item(), norm, not math.isfinite(norm), scale))
    source = open_model(tmp_path)
    plan = make_plan(source.spec, numerics=FLOAT16, chunk_tokens=48)
    with build_engine(source, plan, AdamW(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0), max_grad_norm=0.5) as engine:
        engine.state.loss_scale.scale, own = 256.0, Unlucky(bad)
        for loss, norm, skipped, scale in expected:
            found, update = engine.train_step(ids, loss=own)
            assert (update.skipped, update.loss_scale) == (skipped, scale)
            assert found.loss == pytest.approx(loss, rel=5e-3)
            assert skipped or update.grad_norm == pytest.approx(norm, rel=2e-2)
        assert engine.step_count == num_steps - len(bad)
        error, name = worst_error(engine.state_dict(), {name: p.detach() for name, p in model.named_parameters()})
    assert error < 2e-2, name
    assert {scale for *_, scale in expected} == {64.0, 128.0, 256.0}


@pytest.mark.parametrize(
    ("kind", "max_grad_norm"),
    cases(
        [("full", None), ("experts", 1.0), ("tied", 1.0), ("lora", None), ("qlora", 1.0)],
        [("full", None), ("experts", 1.0), ("qlora", 1.0)],
    ),
)
def test_any_plan_gives_the_same_bits(kind, max_grad_norm):
    """Steps that overflow among them, without clipping, too."""
    changes = {"tied": {"tie_word_embeddings": True}}
    if kind == "experts":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "router_aux_loss_coef": 0.1}
        changes[kind] = {"model_type": "qwen3_moe", "output_router_logits": True, "norm_topk_prob": True, **experts}
    source, numerics = random_weights(tiny_config(**changes.get(kind, {}))), FLOAT16
    if "lora" in kind:
        source = source._replace(spec=with_lora(source.spec, LoRA(rank=4)))
    if kind == "qlora":
        source = source._replace(spec=with_base_dtype(source.spec, "nf4"))
        numerics = replace(FLOAT16, base="nf4")
    expected = None
    for name, plan in plans_of(source.spec, numerics):
        with build_engine(source, plan, max_grad_norm=max_grad_norm) as engine:
            found, weights = trained(engine, num_steps=5, scale=2.0**20)
        expected = expected or (found, weights)
        assert found == expected[0], name
        same_bits(weights, expected[1])
    skipped = [skipped for _, _, skipped, _ in expected[0]]
    assert skipped[0]
    assert not skipped[-1]


OPTIMIZERS = [AdamW(lr=1e-2), Lion(lr=1e-3), SGD(lr=1e-2), Muon(lr=1e-2)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda x: type(x).__name__)
def test_steps_are_near_those_of_float32(optimizer):
    name = type(optimizer).__name__.lower()
    source, found = random_weights(CONFIG), []
    for numerics in (FLOAT32, FLOAT16):
        plan = make_plan(source.spec, **SIZES, numerics=replace(numerics, optimizer=name))
        with build_engine(source, plan, optimizer) as engine:
            found.append([loss for loss, *_ in trained(engine)[0]])
    assert found[1] == pytest.approx(found[0], rel=1e-2)


def test_gradients_and_norm_are_unscaled():
    source, found = random_weights(CONFIG), []
    for scale in (2.0**12, 2.0**13):
        with build_engine(source, make_plan(source.spec, **SIZES, numerics=FLOAT16)) as engine:
            engine.state.loss_scale.scale = scale
            engine.fwd_bwd(BATCH[:2])
            engine.fwd_bwd(BATCH[2:])  # times the factor of the first
            found.append((engine.gradients(), engine.step().grad_norm))
    (first, norm), (second, other_norm) = found
    assert worst_error(first, second)[0] < 1e-3  # what was below the least normal float16 number is rounded otherwise
    assert norm == pytest.approx(other_norm, rel=1e-4)


def test_the_scale_finds_its_size():
    """From far too large, each step that overflows halves it and changes nothing."""
    source = random_weights(CONFIG)
    with build_engine(source, make_plan(source.spec, **SIZES, numerics=FLOAT16)) as engine:
        engine.train_step(BATCH)
        assert engine.state.loss_scale == LossScale(65536.0, 1)
        engine.state.loss_scale.scale, before = 2.0**30, engine.state_dict()
        engine.train_step(BATCH)
        same_bits(engine.state_dict(), before)
        engine.state.loss_scale.scale = 2.0**30
        found, _ = trained(engine, 20)
    scales = [scale for *_, scale in found]
    skipped = [each for _, _, each, _ in found]
    assert skipped == sorted(skipped, reverse=True)
    assert scales == [2.0 ** max(30 - i, 30 - sum(skipped)) for i in range(20)]
    assert 0 < sum(skipped) < 20


def test_a_checkpoint_keeps_the_scale(tmp_path, monkeypatch):
    monkeypatch.setattr(loss_scale, "INTERVAL", 3)
    source = random_weights(CONFIG)
    with build_engine(source, make_plan(source.spec, **SIZES, numerics=FLOAT16)) as engine:
        trained(engine, 5, 2.0**20)
        engine.save_checkpoint(tmp_path / "state")
        expected = trained(engine, 5)
    with build_engine(source, streamed_plan(source.spec, **SIZES, numerics=FLOAT16)) as engine:
        engine.load_checkpoint(tmp_path / "state")
        found = trained(engine, 5)
    assert found[0] == expected[0]
    same_bits(found[1], expected[1])
    assert len({scale for *_, scale in found[0]}) > 1
    state = tmp_path / "state" / "checkpoint.json"
    state.write_text(state.read_text().replace('"good_steps"', '"steps"'))
    with pytest.raises(CheckpointError, match=r"checkpoint\.json"):
        read_description(tmp_path / "state")
