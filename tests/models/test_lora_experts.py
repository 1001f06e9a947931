"""Adapters of experts in float32 on the CPU against PEFT on transformers: modules of each expert, and one tensor."""

from dataclasses import replace

import pytest
import torch
from engine_helpers import (
    FLOAT32,
    ON_GPU,
    build_engine,
    make_plan,
    random_batch,
    random_weights,
    relative_error,
    same_bits,
    saved_model,
    streamed_plan,
)
from family_configs import CASES, FAMILY_CASES
from peft import PeftModel
from peft_helpers import adapted, by_name, check_files, check_merged, engine_on, loaded, train_both
from safetensors.torch import load_file, save_file
from thorough import cases

from flexengine import LoRA
from flexengine.checkpoint.manifest import FOLDER_MANIFEST
from flexengine.models import blocks
from flexengine.models.base_dtype import with_base_dtype
from flexengine.models.lora import adapters, with_lora
from flexengine.models.registry import build_model, open_model
from flexengine.optim import AdamW
from flexengine.options.job import Job
from flexengine.plan import GroupPlan
from flexengine.request import with_read_adapter

RANK = 3
PREFIX = "base_model.model."


def draw_adapter(folder, lora):
    """Save adapters whose B is not zero."""
    with engine_on(folder, lora) as engine:
        engine.save_pretrained(folder / "adapter")
    path = folder / "adapter" / "adapter_model.safetensors"
    (folder / "adapter" / FOLDER_MANIFEST).unlink()  # as of a file that others wrote
    torch.manual_seed(3)
    tensors = {n: torch.randn_like(t) * 0.2 if ".lora_B." in n else t for n, t in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def of_experts(tensors, config):
    """PEFT's tensors as files have them: of experts it stacks those of gate and up, and then B has blocks of zeros."""
    mixtral = config["model_type"] == "mixtral"
    parts, last = (("w1", "w3"), "w2") if mixtral else (("gate_proj", "up_proj"), "down_proj")
    found = {}
    for name, tensor in tensors.items():
        name_there = name.replace(".default.", ".")
        block, experts, rest = name_there.partition(".mlp.experts.")
        if not experts:
            found[name_there] = tensor
            continue
        own = f"{block}.{'block_sparse_moe' if mixtral else 'mlp'}.experts"
        names = parts if "base_layer" in rest else (last,)
        rank, kind = len(names) * RANK, "lora_A" if "lora_A" in rest else "lora_B"
        if kind == "lora_A":
            stacked = tensor.view(-1, rank, tensor.shape[1])
        else:
            stacked = tensor.view(tensor.shape[0], rank, -1).permute(2, 0, 1)
        for e, matrix in enumerate(stacked):
            for j, part in enumerate(names):
                rows = matrix[j * RANK : (j + 1) * RANK]
                if kind == "lora_B":
                    rows = matrix.chunk(len(names))[j][:, j * RANK : (j + 1) * RANK]
                found[f"{own}.{e}.{part}.{kind}.weight"] = rows
    return found


def keep_zero_blocks(model):
    """PEFT would train the zeros of stacked Bs, too."""
    for name, parameter in model.named_parameters():
        if ".experts.base_layer.lora_B." in name:
            mask = (parameter.detach() != 0).float()
            parameter.register_hook(lambda grad, mask=mask: grad * mask)


def check_read(logits, tokens, folder):
    """An engine whose adapters are what the saved folder says gives these logits."""
    read = with_read_adapter(Job(adapter=str(folder / "out"))).lora_setup
    assert read is not None
    with engine_on(folder, read, adapter=folder / "out") as again:
        assert relative_error(again.next_token_logits(tokens), logits) <= 1e-5


@pytest.mark.parametrize(
    "family",
    cases(["qwen3_moe", "mixtral", "olmoe", "deepseek_v2", "deepseek_v3"], ["mixtral", "olmoe", "deepseek_v3"]),
)
def test_modules_of_each_expert(family, tmp_path):
    config = CASES[FAMILY_CASES[family]]
    saved_model(tmp_path / "base", config)
    lora = LoRA(["all-experts", r".*(attn|attention)\.[a-z]*_proj"], RANK, 5.0)
    draw_adapter(tmp_path, lora)
    model = PeftModel.from_pretrained(loaded(tmp_path / "base"), tmp_path / "adapter", is_trainable=True)
    keep_zero_blocks(model)
    with engine_on(tmp_path, lora, adapter=tmp_path / "adapter") as engine:
        tokens = train_both(engine, model, lambda tensors: of_experts(tensors, config))
        logits = check_files(engine, tokens, tmp_path)
    check_read(logits, tokens, tmp_path)


@pytest.mark.parametrize("targets", [["experts.gate_up_proj", "experts.down_proj"], ["experts.down_proj", "q_proj"]])
def test_experts_in_one_tensor(targets, tmp_path):
    config = CASES[FAMILY_CASES["gpt_oss"]]
    base = saved_model(tmp_path / "base", config)
    lora = LoRA(targets, RANK, 5.0)
    parameters = [target for target in targets if "experts" in target]
    modules = [target for target in targets if "experts" not in target]
    model = adapted(tmp_path, base, r=RANK, lora_alpha=5, target_modules=modules, target_parameters=parameters)
    with engine_on(tmp_path, lora, adapter=tmp_path / "adapter") as engine:
        tokens = train_both(engine, model)
        logits = check_files(engine, tokens, tmp_path)
    check_read(logits, tokens, tmp_path)


def test_all_means_linear_layers_and_experts_where_there_are_some():
    for family, same in (("olmoe", ["all-linear", "all-experts"]), ("qwen3", "all-linear")):
        spec = random_weights(CASES[family]).spec
        found, meant = (adapters(with_lora(spec, LoRA(targets, rank=2))) for targets in ("all", same))
        assert [adapter.module.name for adapter in found] == [adapter.module.name for adapter in meant]


@pytest.mark.parametrize(
    ("family", "base", "use_dora"),
    [
        ("qwen3_moe", "compute", False),
        ("qwen3_moe", "compute", True),
        ("gpt_oss", "compute", False),
        ("qwen3_next", "nf4", False),
        pytest.param("qwen3_5_moe_text", "int8", False, marks=pytest.mark.thorough),
    ],
)
def test_neither_plan_nor_parts_change_a_bit(family, base, use_dora, monkeypatch):
    monkeypatch.setattr(blocks, "PART_ELEMENTS", 1)
    source = random_weights(CASES[FAMILY_CASES[family]])
    router = [] if use_dora else ["router" if family == "gpt_oss" else "gate"]
    lora = LoRA(["all-linear", "all-experts", *router], rank=4, use_dora=use_dora)
    source = source._replace(spec=with_base_dtype(with_lora(source.spec, lora), base))
    sizes = {"chunk_tokens": 48, "chunks_per_round": 2, "numerics": replace(FLOAT32, base=base)}
    streamed, by_cpu = streamed_plan(source.spec, **sizes), [GroupPlan(update="cpu")] * len(source.spec.groups)
    plans = [
        streamed,
        make_plan(source.spec, groups=[ON_GPU] * len(source.spec.groups), **sizes),
        replace(streamed, in_parts=True),
        replace(streamed_plan(source.spec, groups=by_cpu, **sizes), in_parts=True, weight_slots=4, touched_only=True),
    ]
    found = []
    for plan in plans:
        with build_engine(source, plan, AdamW(lr=1e-2), seed=3) as engine:
            losses = [engine.train_step(random_batch(step, [48, 7, 31], 67))[0].loss for step in range(2)]
            found.append((losses, {n: t for n, t in engine.state_dict().items() if ".lora_" in n}))
    for losses, state in found[1:]:
        assert losses == found[0][0]
        same_bits(state, found[0][1])
    assert found[0][0][1] != found[0][0][0]


def test_targets_of_experts():
    spec = build_model("tiny", CASES[FAMILY_CASES["qwen3_moe"]])
    names = {adapter.module.short for adapter in adapters(with_lora(spec, LoRA(rank=2)))}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}
    names = {adapter.module.short for adapter in adapters(with_lora(spec, LoRA("up_proj", rank=2)))}
    assert names == {"up_proj"}
    with pytest.raises(
        ValueError, match=r"name some experts of a layer.*name all of them, by gate_proj or all-experts"
    ):
        with_lora(spec, LoRA("experts.0.gate_proj"))
    with pytest.raises(ValueError, match=r"dropout=0.1 with adapters of experts.* is not built"):
        with_lora(spec, LoRA("all-experts", dropout=0.1))
    spec = build_model("tiny", CASES[FAMILY_CASES["gpt_oss"]])
    with pytest.raises(ValueError, match=r"use_dora=True with adapters of experts.* is not built"):
        with_lora(spec, LoRA("all-experts", use_dora=True))


class SeparateExperts(torch.nn.Module):
    """Experts as linear layers of their own, as PEFT adapts with magnitudes, in the place of transformers' tensors."""

    def __init__(self, stacked):
        super().__init__()
        for number, (gate_up, down) in enumerate(zip(stacked.gate_up_proj, stacked.down_proj, strict=True)):
            expert, parts = torch.nn.Module(), (*gate_up.chunk(2), down)
            for name, weight in zip(("gate_proj", "up_proj", "down_proj"), parts, strict=True):
                layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
                layer.weight.data.copy_(weight.data)
                setattr(expert, name, layer)
            self.add_module(str(number), expert)

    def forward(self, x, chosen, weights):
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.children()):
            rows, k = (chosen == number).nonzero(as_tuple=True)
            hidden = torch.nn.functional.silu(expert.gate_proj(x[rows])) * expert.up_proj(x[rows])
            y = y.index_add(0, rows, expert.down_proj(hidden) * weights[rows, k, None])
        return y


@pytest.mark.parametrize(("family", "targets"), [("qwen3_moe", "all-experts"), ("olmoe", "up_proj")])
def test_dora_of_experts(family, targets, tmp_path):
    config = CASES[FAMILY_CASES[family]]
    base = saved_model(tmp_path / "base", config)
    for layer in base.model.layers:
        layer.mlp.experts = SeparateExperts(layer.mlp.experts)
    base.config.model_type = "separate experts"  # PEFT translates targets of the type that it knows
    lora = LoRA(targets, RANK, 5.0, use_dora=True)
    modules = r".*experts.*_proj" if targets == "all-experts" else ["up_proj"]
    model = adapted(tmp_path, base, r=RANK, lora_alpha=5, target_modules=modules, use_dora=True)
    with engine_on(tmp_path, lora, adapter=tmp_path / "adapter") as engine:
        tokens = train_both(engine, model)
        logits = check_merged(engine, tokens, tmp_path)
    with engine_on(tmp_path, lora, adapter=tmp_path / "out") as again:
        assert relative_error(again.next_token_logits(tokens), logits) <= 1e-5


@pytest.mark.parametrize(
    "family",
    cases(["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "qwen3_next"], ["mixtral", "gpt_oss", "deepseek_v3"]),
)
def test_routers_by_name(family, tmp_path):
    """transformers holds a router's weight as a parameter, so PEFT takes it as one of `target_parameters`."""
    config = CASES[FAMILY_CASES[family]]
    base = saved_model(tmp_path / "base", config)
    router = "router" if family == "gpt_oss" else "gate"
    lora = LoRA([router, "q_proj" if family != "deepseek_v3" else "o_proj"], RANK, 5.0)
    parameters = [f"{router}.weight"]
    model = adapted(
        tmp_path, base, r=RANK, lora_alpha=5, target_modules=[lora.targets[1]], target_parameters=parameters
    )

    def names(tensors):
        there = ".block_sparse_moe.gate." if family == "mixtral" else ".mlp.gate."
        return {name.replace(".mlp.gate.", there): tensor for name, tensor in by_name(tensors).items()}

    with engine_on(tmp_path, lora, adapter=tmp_path / "adapter") as engine:
        tokens = train_both(engine, model, names)
        logits = check_files(engine, tokens, tmp_path)
    check_read(logits, tokens, tmp_path)
    with pytest.raises(ValueError, match=r"use_dora=True with adapters of routers.* is not built"):
        with_lora(open_model(tmp_path / "base").spec, replace(lora, use_dora=True))
    with pytest.raises(ValueError, match=f"modules_to_save names .*{router}, which has an adapter"):
        with_lora(open_model(tmp_path / "base").spec, replace(lora, modules_to_save=[router]))
