"""Checkpoints of Qwen3.5 and Qwen3-Next as published: with what sees and what predicts further tokens beside the text,
and with the experts of a layer in one tensor."""

import pytest
import torch
import transformers
from engine_helpers import random_batch, relative_error, saved_model, spec_of
from family_configs import CASES
from safetensors.torch import load_file, save_file

from flexengine import from_pretrained
from flexengine.models.registry import open_model
from flexengine.optim import AdamW

VISION = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 20, "num_position_embeddings": 16,
    "patch_size": 4,
}  # fmt: skip
TOKENS = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}


def opened(folder):
    return from_pretrained(
        folder,
        AdamW(lr=1e-2),
        max_seq_len=40,
        max_global_batch_tokens=128,
        hardware="cpu-test",
        device="cpu",
        dtype="float32",
    )


def loss_of(model, row):
    logits = model(input_ids=torch.tensor([row]), use_cache=False).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(row[1:]))


def fused(tensors):
    """The experts of a layer in one tensor each, as published: gate over up, and down."""
    found, experts = {}, {}
    for name, tensor in tensors.items():
        block, is_expert, rest = name.partition(".mlp.experts.")
        if not is_expert:
            found[name] = tensor
            continue
        number, kind, _ = rest.split(".")
        experts.setdefault(block, {}).setdefault(int(number), {})[kind] = tensor
    for block, numbered in experts.items():
        rows = [torch.cat((e["gate_proj"], e["up_proj"])) for _, e in sorted(numbered.items())]
        found[f"{block}.mlp.experts.gate_up_proj"] = torch.stack(rows)
        found[f"{block}.mlp.experts.down_proj"] = torch.stack([e["down_proj"] for _, e in sorted(numbered.items())])
    return found


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_of_a_model_with_images(family, tmp_path, caplog):
    """Loss is that of transformers without an image, and of the export; all that is not text comes back bit by bit."""
    torch.manual_seed(7)
    text = CASES[f"{family}_text"]
    vision = {**VISION, "out_hidden_size": text["hidden_size"]}
    described = transformers.AutoConfig.for_model(family, text_config=text, vision_config=vision, **TOKENS)
    model = transformers.AutoModelForImageTextToText.from_config(described, attn_implementation="eager").eval()
    model.save_pretrained(tmp_path / "source")
    tensors = fused(load_file(tmp_path / "source" / "model.safetensors"))
    tensors["mtp.norm.weight"] = torch.randn(5)
    save_file(tensors, tmp_path / "source" / "model.safetensors")
    engine = opened(tmp_path / "source")
    beside = "the tensors beside it are exported unchanged (vision tower, projector)"
    assert f"the text part is trained; {beside}; heads that predict further tokens (mtp)" in caplog.text
    row = random_batch(1, [37], 59)[0]
    assert engine.train_step([row])[0].loss == pytest.approx(loss_of(model, row).item(), abs=1e-5)
    engine.save_pretrained(tmp_path / "export")
    export = load_file(tmp_path / "export" / "model.safetensors")
    assert {name: t.shape for name, t in export.items()} == {name: t.shape for name, t in tensors.items()}
    for name, tensor in tensors.items():
        others = name.startswith(("model.visual.", "mtp."))
        assert torch.equal(export[name], tensor) == others, name
    again = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "export").eval()
    logits = again(input_ids=torch.tensor([row]), use_cache=False).logits[0, -1].detach()
    assert relative_error(engine.next_token_logits(row), logits) <= 1e-4
    engine.close()


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe_text"])
def test_experts_in_one_tensor(family, tmp_path):
    """Both ways are read and written as they came."""
    model = saved_model(tmp_path, CASES[family])
    separate = load_file(tmp_path / "model.safetensors")
    row = random_batch(2, [30], 60)[0]
    for tensors in (separate, fused(separate)):
        save_file(tensors, tmp_path / "model.safetensors")
        engine = opened(tmp_path)
        assert engine.evaluate([row]).loss == pytest.approx(loss_of(model, row).item(), abs=1e-5)
        engine.save_pretrained(tmp_path / "export")
        assert load_file(tmp_path / "export" / "model.safetensors").keys() == tensors.keys()
        engine.close()


def test_published_configs_are_the_presets():
    """As Qwen3.5-9B: what its text_config says beside defaults, and what says nothing of the text."""
    rope = {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25}
    text = {"rope_parameters": {**rope, "rope_theta": 10000000, "rope_type": "default"}, "full_attention_interval": 4,
            "attn_output_gate": True, "mtp_num_hidden_layers": 1, "max_position_embeddings": 262144}  # fmt: skip
    published = spec_of({"model_type": "qwen3_5", "text_config": text, "vision_config": {}})
    preset = open_model("preset:qwen3.5-9b").spec
    assert published.num_parameters == preset.num_parameters
    assert published.tables == preset.tables
    assert [layer.ops for layer in published.blocks] == [layer.ops for layer in preset.blocks]
