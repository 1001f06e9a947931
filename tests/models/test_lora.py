"""Adapters in float32 on the CPU against PEFT on transformers: loss, gradients, two steps, files both ways."""

import json
from dataclasses import replace

import pytest
import torch
from engine_helpers import (
    FLOAT32,
    GIB,
    ON_GPU,
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
from family_checks import reference_loss
from family_configs import CASES, FAMILY_CASES, OF_BLOCKS
from peft_helpers import SETTINGS, by_name, check_files, engine_on, peft_model, train_both
from safetensors.torch import load_file
from thorough import cases

from flexengine import LoRA
from flexengine.checkpoint import bounded_process
from flexengine.hardware.presets import named_profile
from flexengine.models.base_dtype import with_base_dtype
from flexengine.models.keep_dtype import with_keep_dtype
from flexengine.models.lora import adapters, with_lora
from flexengine.models.registry import build_model, open_model
from flexengine.ops.adapters.lora import LoraDown
from flexengine.ops.base import DropoutDraws
from flexengine.ops.dropout import drop
from flexengine.optim import AdamW
from flexengine.options.job import Job
from flexengine.options.lora import ALL_LINEAR
from flexengine.plan import GroupPlan, Numerics, PlanError, Request
from flexengine.planner import planner
from flexengine.planner.feasibility.shortage import Feasibility
from flexengine.planner.problem import Problem
from flexengine.request import with_read_adapter
from flexengine.schedule.layout import Layout

LARGE_EPS = replace(SETTINGS, eps=3e-4)
"""So many families have smaller gradients among theirs."""
WITH_ALL_TESTS = ("llama", "phi3", "gemma4_text", "gpt2", "nemotron", "gpt_oss", "deepseek_v32", "bamba")
"""Linear layers of every kind: fused ones, with biases, behind norms, of latent attention, beside other mixers."""


@pytest.mark.parametrize("family", cases(["llama", *OF_BLOCKS], WITH_ALL_TESTS))
def test_loss_gradients_steps_and_files(family, tmp_path):
    config = tiny_config() if family == "llama" else CASES[FAMILY_CASES[family]]
    has_experts = any("experts" in field for field in config)
    # Of a model with experts PEFT takes the names of other MLPs for those of experts.
    targets = ALL_LINEAR if not has_experts else r".*(attn|attention)\..*"
    lora = LoRA(targets, rank=3, alpha=5.0, use_rslora=family in ("mistral", "qwen3"))
    saved_model(tmp_path / "base", config)
    model = peft_model(tmp_path, lora, use_rslora=lora.use_rslora)
    with engine_on(tmp_path, lora, LARGE_EPS, adapter=tmp_path / "adapter") as engine:
        check_files(engine, train_both(engine, model, settings=LARGE_EPS), tmp_path)
    files = (tmp_path / name / "adapter_model.safetensors" for name in ("out", "adapter"))
    assert len({frozenset(load_file(file)) for file in files}) == 1


def bits_of_three_steps(source, plan, device="cpu"):
    engine = build_engine(source, plan, AdamW(lr=1e-2), device, seed=3, deterministic=device != "cpu")
    losses = [engine.train_step(random_batch(step, [48, 7, 31], 67))[0].loss for step in range(3)]
    state = {name: tensor for name, tensor in engine.state_dict().items() if ".lora_" in name}
    engine.close()
    return losses, state


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("base", "keep"),
    [("compute", "compute"), ("compute", "fp8"), ("nf4", "fp8"), ("fp8", "compute"), ("int8", "compute")],
)
def test_the_plan_changes_no_bit_on_a_gpu(base, keep, tmp_path):
    saved_model(tmp_path, tiny_config(hidden_size=256, intermediate_size=384, head_dim=64, initializer_range=0.05))
    source = open_model(tmp_path)
    adapted = with_lora(with_keep_dtype(source.spec, keep), LoRA(rank=16))
    source = source._replace(spec=with_base_dtype(adapted, base))
    numerics = replace(Numerics(), base=base, keep=keep)
    sizes = {"chunk_tokens": 64, "chunks_per_round": 2, "numerics": numerics}
    losses, state = bits_of_three_steps(source, streamed_plan(source.spec, **sizes), "cuda")
    everywhere = make_plan(source.spec, groups=[ON_GPU] * len(source.spec.groups), **sizes)
    others, other_state = bits_of_three_steps(source, everywhere, "cuda")
    assert losses == others
    same_bits(other_state, state)
    on_cpu, _ = bits_of_three_steps(source, streamed_plan(source.spec, **sizes))
    assert losses[0] == pytest.approx(on_cpu[0], abs=0.02)  # B is zero; A is drawn by the device
    assert losses[2] != losses[0]


@pytest.mark.parametrize(
    ("family", "base"),
    [("qwen3", "compute"), ("gemma2", "nf4"), ("qwen3_next", "compute"), ("gpt_oss", "compute"), ("mistral", "int8")],
)
def test_the_plan_changes_no_bit(family, base):
    source = random_weights(CASES[FAMILY_CASES[family]])
    source = source._replace(spec=with_base_dtype(with_lora(source.spec, LoRA(rank=4, dropout=0.1)), base))
    numerics = replace(FLOAT32, base=base)
    sizes = {"chunk_tokens": 48, "chunks_per_round": 2, "numerics": numerics}
    everywhere = [ON_GPU] * len(source.spec.groups)
    losses, state = bits_of_three_steps(source, make_plan(source.spec, groups=everywhere, **sizes))
    by_cpu = [GroupPlan(update="cpu")] * len(source.spec.groups)
    for plan in (streamed_plan(source.spec, **sizes), streamed_plan(source.spec, groups=by_cpu, **sizes)):
        others, other_state = bits_of_three_steps(source, plan)
        assert losses == others
        same_bits(other_state, state)
    assert losses[2] != losses[0]


def test_planned_bytes_are_those_of_the_layout():
    spec = with_lora(build_model("small", tiny_config(num_hidden_layers=6)), LoRA(rank=8))
    for gpu_mib in (3, 6, 400):
        request = Request(48, 480, gpu_mib << 20, 3 * GIB, numerics=Numerics())
        plan = planner.make_plan(spec, request, named_profile("cpu-test"))
        assert plan.predicted.gpu_bytes == Layout(spec, plan).gpu_bytes <= gpu_mib << 20
        assert adapter_homes(spec, plan) == [ON_GPU] * 6


def adapter_homes(spec, plan):
    return [home for home, group in zip(plan.groups, spec.groups, strict=True) if group.adapter]


def test_adapters_live_on_the_host_where_they_do_not_fit_the_gpu():
    spec = with_lora(build_model("small", tiny_config(num_hidden_layers=12)), LoRA(rank=24))
    request, profile = Request(48, 480, GIB, 3 * GIB, numerics=Numerics()), named_profile("cpu-test")
    problem = Problem(spec, request, profile)
    on_gpu, least = (Feasibility(problem, as_given=given).least_gpu().gpu_bytes for given in (True, False))
    assert least < 0.5 * on_gpu
    request = replace(request, max_gpu_bytes=(least + on_gpu) // 2)
    plan = planner.make_plan(spec, request, profile)
    assert adapter_homes(spec, plan) == [GroupPlan()] * 12
    assert plan.predicted.gpu_bytes == Layout(spec, plan).gpu_bytes <= request.max_gpu_bytes
    assert 0 < plan.predicted.speed_of_light_s <= plan.predicted.step_s
    with pytest.raises(PlanError, match="smallest plan needs"):
        planner.make_plan(spec, replace(request, max_gpu_bytes=int(0.9 * least)), profile)


def test_targets(monkeypatch):
    monkeypatch.setattr(bounded_process, "ALLOWED_CPU_S", 0.2)
    spec = build_model("tiny", tiny_config())
    lora = LoRA(["q_proj", r".*layers\.1\.mlp\.up_proj"])
    names = {adapter.module.name for adapter in adapters(with_lora(spec, lora))}
    assert names == {"model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"}
    with pytest.raises(
        ValueError, match=r"no linear layer of tiny's blocks has that name; did you mean q_proj\?.*all-lin"
    ):
        with_lora(spec, LoRA("q_prj"))
    with pytest.raises(ValueError, match="no regular expression"):
        with_lora(spec, LoRA("q_proj("))
    with pytest.raises(ValueError, match=r"lora target .* did not end within 0.2 CPU seconds"):
        with_lora(spec, LoRA("(.*.*)*(.*.*)*x"))


def test_only_adapters_are_trained():
    model = with_lora(build_model("tiny", tiny_config()), LoRA("all-linear", rank=2))
    assert model.num_trained_parameters == sum(
        2 * (shape[0] + shape[1]) for adapter in adapters(model) for shape in [adapter.weight.shape]
    )
    assert all(group.frozen != group.adapter for group in model.groups)


def test_modes_and_adapters_that_contradict_each_other(tmp_path):
    with pytest.raises(ValueError, match="lora_rank=8 is for adapters, got mode=full; give mode=lora, or leave it out"):
        Job(lora_rank=8)
    with pytest.raises(ValueError, match=r"freeze=blocks chooses layers to freeze, .* got mode=lora; give mode=full"):
        Job(mode="lora", freeze=("blocks",))
    with pytest.raises(ValueError, match=r"there is no adapter_config\.json"):
        with_read_adapter(Job(adapter=str(tmp_path)))
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}))
    assert with_read_adapter(Job(adapter=str(tmp_path))).lora_setup == LoRA(["q_proj"], 4, 8)
    for name, given, made in (("lora_rank", 16, 4), ("lora_alpha", 16.0, 8), ("lora_targets", ("all-linear",), ".*")):
        with pytest.raises(ValueError, match=rf"{name}=.*, but .* was made with {made}"):
            with_read_adapter(Job(adapter=str(tmp_path), **{name: given}))
    assert with_read_adapter(Job(adapter=str(tmp_path), lora_rank=4, use_dora=False)).lora_setup == LoRA(
        ["q_proj"], 4, 8
    )
    config.write_text(json.dumps({"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "lora_bias": True}))
    with pytest.raises(ValueError, match="lora_bias=True is not supported"):
        with_read_adapter(Job(adapter=str(tmp_path)))


class CountedDropout(torch.nn.Module):
    """In the place of PEFT's dropout: the draws of one op in one layer, for a batch of one sequence."""

    def __init__(self, layer, number, step=0, seed=3):
        super().__init__()
        self.draws, self.layer, self.number = DropoutDraws(seed, step, 0), layer, number

    def forward(self, x):
        ones = torch.ones_like(x[0])
        drop(ones, ones, 0.25, self.draws, self.layer, self.number)
        return x * ones


@pytest.mark.parametrize(("family", "use_dora"), [("qwen3", False), ("qwen3", True), ("qwen2", True)])
def test_dropout_with_the_same_draws(family, use_dora, tmp_path):
    lora = LoRA(rank=3, dropout=0.25, use_dora=use_dora)
    config = CASES[FAMILY_CASES[family]]
    saved_model(tmp_path / "base", config)
    model = peft_model(tmp_path, lora, use_dora=use_dora)
    engine = engine_on(tmp_path, lora, LARGE_EPS, adapter=tmp_path / "adapter", seed=3)
    for index, layer in enumerate(engine.model.layers):
        for op in layer.ops:
            if isinstance(op, LoraDown):
                names = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
                for name, module in model.named_modules():
                    if f"layers.{index - 1}." in name and name.rpartition(".")[2] in names.get(
                        op.adapters.name, [op.adapters.name]
                    ):
                        module.lora_dropout["default"] = CountedDropout(index, op.dropout.number)
    model.train()
    ids = random_batch(2, [41], config["vocab_size"])
    loss = reference_loss(model, ids, ids)
    loss.backward()
    assert engine.fwd_bwd(input_ids=ids, labels=ids).loss == pytest.approx(loss.item(), abs=1e-5)
    expected = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    error, name = worst_error(engine.gradients(), by_name(expected))
    assert error <= 1e-4, f"gradient of {name}: relative error {error:.1e}"
    assert abs(engine.evaluate(input_ids=ids, labels=ids).loss - loss.item()) > 1e-4
    engine.close()
