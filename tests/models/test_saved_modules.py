"""Modules that are trained in full beside adapters, in float32 on the CPU against PEFT on transformers."""

import json
from dataclasses import replace

import pytest
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
)
from family_checks import draw_batch
from family_configs import CASES, FAMILY_CASES
from peft_helpers import check_files, engine_on, peft_model, train_both

from flexengine import LoRA
from flexengine.checkpoint.manifest import FOLDER_MANIFEST
from flexengine.checkpoint.safetensors_format import CheckpointError
from flexengine.hardware.presets import named_profile
from flexengine.models.lora import with_lora
from flexengine.models.registry import build_model
from flexengine.optim import AdamW
from flexengine.plan import Numerics, Request
from flexengine.planner import planner
from flexengine.reports.plan_decisions import adapter_counts
from flexengine.schedule.layout import Layout


@pytest.mark.parametrize(
    ("family", "saved"),
    [
        ("mistral", ["embed_tokens", "lm_head", "model.norm", "input_layernorm"]),
        ("qwen3", ["lm_head", "q_norm", "k_norm"]),
        ("qwen3_moe", ["model.norm", "mlp.gate"]),
        ("gpt2", ["wte", "ln_1"]),
    ],
)
def test_loss_gradients_steps_and_files(family, saved, tmp_path):
    config = {**CASES[FAMILY_CASES[family]], "tie_word_embeddings": False}
    lora = LoRA(r".*(attn|attention)\..*", 3, 5.0, modules_to_save=saved)
    saved_model(tmp_path / "base", config)
    model = peft_model(tmp_path, lora, modules_to_save=list(saved))
    with engine_on(tmp_path, lora, adapter=tmp_path / "adapter") as engine:
        check_files(engine, train_both(engine, model), tmp_path)
        state = engine.state_dict()
    with engine_on(tmp_path, lora, adapter=tmp_path / "out") as engine:
        same_bits({name: engine.state_dict()[name] for name in state}, state)


def test_a_tied_embedding_is_one_tensor_with_two_names(tmp_path):
    saved_model(tmp_path / "base", tiny_config(tie_word_embeddings=True))
    lora = LoRA("q_proj", 3, modules_to_save="embed_tokens")
    ids, labels = draw_batch(67)
    with engine_on(tmp_path, lora) as engine:
        assert "lm_head.weight" not in engine.state_dict()
        engine.train_step(input_ids=ids, labels=labels)
        check_files(engine, ids[0], tmp_path)
        trained = engine.state_dict()
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["modules_to_save"] == [
        "embed_tokens", "lm_head",
    ]  # fmt: skip
    with engine_on(tmp_path, replace(lora, modules_to_save=("lm_head",)), adapter=tmp_path / "out") as engine:
        same_bits(engine.state_dict(), trained)


def test_a_head_that_is_no_longer_tied(tmp_path):
    from safetensors.torch import load_file, save_file  # noqa: PLC0415

    saved_model(tmp_path / "base", tiny_config(tie_word_embeddings=True))
    lora = LoRA("q_proj", 3, modules_to_save="embed_tokens")
    with engine_on(tmp_path, lora) as engine:
        engine.save_pretrained(tmp_path / "out")
    path = tmp_path / "out" / "adapter_model.safetensors"
    (tmp_path / "out" / FOLDER_MANIFEST).unlink()  # as of a file that others wrote
    tensors = load_file(path)
    tensors["base_model.model.lm_head.weight"] += 1.0
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="differs from the embedding"):
        engine_on(tmp_path, lora, adapter=tmp_path / "out")


@pytest.mark.parametrize("saved", [("lm_head",), ("embed_tokens", "norm"), ("norm",)])
def test_the_plan_changes_no_bit(saved):
    source = random_weights({**CASES[FAMILY_CASES["qwen3"]], "tie_word_embeddings": False})
    source = source._replace(spec=with_lora(source.spec, LoRA(rank=4, modules_to_save=saved)))
    sizes = {"chunk_tokens": 48, "chunks_per_round": 2, "numerics": FLOAT32}
    found = []
    for plan in (
        streamed_plan(source.spec, **sizes),
        streamed_plan(source.spec, share_edge_slots=True, grads_over_weights=True, **sizes),
        make_plan(source.spec, groups=[ON_GPU] * len(source.spec.groups), **sizes),
    ):
        with build_engine(source, plan, AdamW(lr=1e-2), seed=3) as engine:
            losses = [engine.train_step(random_batch(step, [48, 7, 31], 67))[0].loss for step in range(3)]
            found.append((losses, engine.state_dict()))
    for losses, state in found[1:]:
        assert losses == found[0][0]
        same_bits(state, found[0][1])


@pytest.mark.parametrize("saved", [("lm_head",), ("embed_tokens", "lm_head", "model.norm"), ("norm",)])
def test_planned_bytes_are_those_of_the_layout(saved):
    spec = with_lora(build_model("small", tiny_config(num_hidden_layers=6)), LoRA(rank=8, modules_to_save=saved))
    for gpu_mib in (3, 6, 400):
        request = Request(48, 480, gpu_mib << 20, 3 * GIB, numerics=Numerics())
        plan = planner.make_plan(spec, request, named_profile("cpu-test"))
        assert plan.predicted.gpu_bytes == Layout(spec, plan).gpu_bytes <= gpu_mib << 20


def test_modules_that_cannot_be_saved():
    spec = build_model("tiny", tiny_config())
    with pytest.raises(ValueError, match=r"'lm_heat'.*did you mean lm_head\?.*embed_tokens, .*k_proj, q_proj, v_proj"):
        with_lora(spec, LoRA("q_proj", modules_to_save="lm_heat"))
    with pytest.raises(ValueError, match="a linear layer of a block"):
        with_lora(spec, LoRA("q_proj", modules_to_save=["up_proj"]))
    qwen3 = build_model("qwen3", CASES[FAMILY_CASES["qwen3"]])
    with pytest.raises(ValueError, match=r"k_norm, .*q_norm, which train together; name all"):
        with_lora(qwen3, LoRA("q_proj", modules_to_save=["q_norm"]))


def test_what_is_trained_is_counted():
    spec = with_lora(build_model("tiny", tiny_config()), LoRA("q_proj", modules_to_save=["lm_head", "model.norm"]))
    counts = adapter_counts(spec)
    assert set(counts) == {"q_proj", "lm_head", "norm"}
    assert sum(counts.values()) == spec.num_trained_parameters
