"""Adapters of the text of models with images, in float32 on the CPU against PEFT on transformers without an image."""

import warnings

import pytest
import torch
import transformers
from engine_helpers import build_engine, relative_error, streamed_plan, worst_error
from family_checks import MAX_SEQ_LEN, draw_batch, last_logits, reference_loss
from family_configs import CASES
from peft import LoraConfig, PeftModel, get_peft_model

from flexengine import LoRA
from flexengine.models.lora import with_lora
from flexengine.models.registry import open_model
from flexengine.optim import AdamW
from flexengine.runtime.weights.weight_store import check_checkpoint

SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
}  # fmt: skip
GEMMA_TOKENS = {"mm_tokens_per_image": 4, "image_token_index": 66, "boi_token_index": 64, "eoi_token_index": 65}
QWEN_VISION = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 20, "num_position_embeddings": 16,
    "patch_size": 4,
}  # fmt: skip
QWEN_TOKENS = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}


def config_of(family):
    if family == "gemma3":
        return {"text_config": CASES["gemma3"], "vision_config": SIGLIP, **GEMMA_TOKENS}
    text = CASES[f"{family}_text"]
    return {
        "text_config": text, "vision_config": {**QWEN_VISION, "out_hidden_size": text["hidden_size"]}, **QWEN_TOKENS,
    }  # fmt: skip


def loaded(folder):
    return transformers.AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()


def as_stored(family, tensors):
    """Tensors by the names of the checkpoint."""
    tensors = {name.replace(".default.", "."): tensor for name, tensor in tensors.items()}
    if family != "gemma3":
        return tensors
    return {
        name.replace("model.model.language_model.", "model.language_model.model."): t for name, t in tensors.items()
    }


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5", "qwen3_5_moe"])
def test_adapters_of_the_text(family, tmp_path):
    torch.manual_seed(7)
    described = transformers.AutoConfig.for_model(family, **config_of(family))
    transformers.AutoModelForImageTextToText.from_config(described).save_pretrained(tmp_path / "base")
    targets = r".*language_model.*\.\w*(attn|attention)\.[a-z_]*(proj|qkv|_z|_a|_b)"
    model = get_peft_model(loaded(tmp_path / "base"), LoraConfig(r=3, lora_alpha=5, target_modules=targets))
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    model.save_pretrained(tmp_path / "adapter")
    source = open_model(tmp_path / "base")
    spec = with_lora(check_checkpoint(source.spec, tmp_path / "base"), LoRA(r".*(attn|attention)\..*", 3, 5.0))
    plan = streamed_plan(spec, chunk_tokens=MAX_SEQ_LEN, chunks_per_round=4)
    ids, labels = draw_batch(59)
    with build_engine(source._replace(spec=spec), plan, AdamW(lr=1e-3), adapter=tmp_path / "adapter") as engine:
        loss = torch.as_tensor(reference_loss(model, ids, labels))
        loss.backward()
        assert engine.fwd_bwd(input_ids=ids, labels=labels).loss == pytest.approx(loss.item(), abs=1e-5)
        grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        error, name = worst_error(engine.gradients(), as_stored(family, grads))
        assert error <= 1e-4, f"gradient of {name}: relative error {error:.1e}"
        engine.step()
        engine.save_pretrained(tmp_path / "out")
        logits = engine.next_token_logits(ids[0])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        again = PeftModel.from_pretrained(loaded(tmp_path / "base"), tmp_path / "out")
    assert relative_error(logits, last_logits(again, ids[0])) <= 1e-4
