"""Files of adapters of every family and target in float32 on the CPU: PEFT and flexengine read what was trained."""

import logging
from copy import deepcopy

import pytest
import torch
from engine_helpers import build_engine, random_batch, relative_error, saved_model, streamed_plan
from family_checks import MAX_SEQ_LEN, last_logits
from family_configs import CASES, FAMILY_CASES, OF_BLOCKS
from peft import PeftModel
from peft_helpers import loaded
from thorough import cases

from flexengine import LoRA
from flexengine.models.lora import adapters, with_lora
from flexengine.models.lora_files import unread_by_peft
from flexengine.models.registry import open_model
from flexengine.options.job import Job
from flexengine.request import described, with_read_adapter
from flexengine.runtime.weights.weight_store import check_checkpoint

EXPERTS = [["all-experts"], ["all-linear", "all-experts"], ["down_proj"], ["gate_proj", "up_proj"], ["gate_proj"]]
OF_FAMILY = {
    "gpt_oss": [["all-linear", "all-experts", "router"], ["gate_up_proj"]],
    "mixtral": [["all-linear", "all-experts", "gate"], ["w2"], ["w1", "w3"]],
    "qwen3_5_moe_text": [*EXPERTS[:3], ["gate_up_proj"], ["gate_proj"], ["experts.down_proj", "shared_expert.up_proj"]],
    "gpt2": [["c_proj"], ["attn.c_proj", "c_fc"]],
    "phi3": [["gate_up_proj"], ["qkv_proj"]],
    "glm4": [["gate_up_proj"]],
    "granitemoeshared": [["shared_mlp.input_linear"], ["all-experts"]],
    "granitemoehybrid": [["in_proj", "shared_mlp.input_linear"], ["all-experts"]],
    "bamba": [["out_proj", "down_proj"]],
    "starcoder2": [["c_proj"]],
}
"""Targets of a family beside all-linear; of others with experts EXPERTS, of dense ones one module of two."""
WITH_EXPERTS = {
    "qwen2_moe, layers without experts", "qwen3_moe, layers without experts",
    *(FAMILY_CASES[name] for name in ("olmoe", "qwen2_moe", "qwen3_next", "deepseek_v2", "deepseek_v3")),
}  # fmt: skip
UNREAD = (["gate_proj", "up_proj"], ["gate_proj"], ["w1", "w3"])
"""Of experts one by one PEFT reads these with their other products alone."""
CALLED_OTHERWISE = {("hy_v3", "all-linear"), ("hy_v3", "down_proj"), ("granitemoeshared", "all-experts"),
                    ("granitemoehybrid", "all-experts")}  # fmt: skip
"""Families and targets of modules that transformers calls by other names than checkpoints."""
VARIANTS = {"use_rslora": True}, {"use_dora": True}, {"dropout": 0.1}, {"init": "pissa"}


def targets_of(case):
    family = case.partition(",")[0]
    others = EXPERTS if case in WITH_EXPERTS else OF_FAMILY.get(family, [["down_proj"]])
    return [["all-linear"], *others]


def adapted_source(folder, lora):
    source = open_model(folder / "base")
    return source._replace(spec=check_checkpoint(with_lora(source.spec, lora), folder / "base"))


def exported(folder, lora):
    """Save drawn adapters in `folder`/out; returns what is named as unread, tokens, and the logits after them."""
    source = adapted_source(folder, lora)
    torch.manual_seed(5)
    with build_engine(source, streamed_plan(source.spec, chunk_tokens=MAX_SEQ_LEN)) as engine:
        for adapter in adapters(source.spec):
            engine.weights.write(adapter.up.name, torch.randn(adapter.up.shape) * 0.4)
        tokens = random_batch(1, [30], source.spec.vocab_size)[0]
        logits = engine.next_token_logits(tokens)
        engine.save_pretrained(folder / "out")
    return unread_by_peft(source.spec), tokens, logits


def error_in_peft(base, folder, tokens, logits):
    """How far PEFT is from the logits on a copy of the base; infinite where it refuses the file."""
    try:
        model = PeftModel.from_pretrained(deepcopy(base), folder / "out")
    except ValueError:
        return float("inf")
    return relative_error(logits, last_logits(model, tokens))


def error_here(folder, tokens, logits):
    lora = with_read_adapter(Job(adapter=str(folder / "out"))).lora_setup
    source = adapted_source(folder, lora)
    plan = streamed_plan(source.spec, chunk_tokens=MAX_SEQ_LEN)
    with build_engine(source, plan, adapter=folder / "out") as engine:
        return relative_error(engine.next_token_logits(tokens), logits)


@pytest.mark.parametrize(
    "case",
    cases(
        sorted({*OF_BLOCKS.values(), *WITH_EXPERTS}),
        {*(OF_BLOCKS[family] for family in ("phi3", "gemma4_text", "gpt2", "gpt_oss", "bamba")), *WITH_EXPERTS},
    ),
)
def test_every_target_is_read_or_named(case, tmp_path):
    # Published checkpoints of Qwen3.5 hold all experts of a layer in one tensor.
    as_published = {"save_original_format": False} if case.startswith("qwen3_5") else {}
    saved_model(tmp_path / "base", CASES[case], **as_published)
    base = loaded(tmp_path / "base")
    for targets in targets_of(case):
        unread, *said = exported(tmp_path, LoRA(targets, 3, 5.0))
        named = (targets in UNREAD and not case.startswith("qwen3_5")) or (case, targets[0]) in CALLED_OTHERWISE
        assert (unread is not None) == named, targets
        error = error_in_peft(base, tmp_path, *said)
        assert error > 1e-2 if unread else error <= 1e-4, f"{targets}: {error:.1e} in PEFT"
        assert error_here(tmp_path, *said) <= 1e-5, targets


@pytest.mark.parametrize("case", ["deepseek_v2", "qwen2_moe", "qwen3_moe, layers without experts", "mixtral"])
def test_every_variant_is_read_or_named(case, tmp_path, caplog):
    saved_model(tmp_path / "base", CASES[FAMILY_CASES.get(case, case)])
    base = loaded(tmp_path / "base")
    for options in VARIANTS:
        for targets in ["all-linear"], ["all-linear", "all-experts"]:
            if "dropout" in options and "all-experts" in targets:
                continue  # refused
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                unread, *said = exported(tmp_path, LoRA(targets, 4, 5.0, **options))
            assert unread is None or unread in caplog.messages
            error = error_in_peft(base, tmp_path, *said)
            assert error > 1e-2 if unread else error <= 1e-4, f"{targets}, {options}: {error:.1e} in PEFT"
            assert error_here(tmp_path, *said) <= 2e-5, f"{targets}, {options}"
            assert unread is None or "use_dora" in options


def test_what_peft_will_not_read_is_told_before_a_run(caplog):
    spec = open_model("preset:qwen3-30b-a3b").spec
    with caplog.at_level(logging.WARNING):
        described(spec, Job(mode="lora", lora_targets=("all-linear", "all-experts")))
        assert not caplog.messages
        described(spec, Job(mode="lora", lora_targets=("up_proj",)))
    assert caplog.messages == [
        "PEFT does not read adapters of up_proj of experts without those of their other products; elsewhere than here"
        " use the merged model (--format merged)"
    ]
