"""Checkpoints of gpt-oss as published, with experts in MXFP4: what is read, trained, and exported in 16 bits."""

import json

import pytest
import torch
import transformers
from engine_helpers import FLOAT32, build_engine, random_batch, relative_error, same_bits, saved_model, streamed_plan
from engine_helpers import make_plan as resident_plan
from family_configs import gpt_oss
from safetensors.torch import load_file, save_file

from flexengine import from_pretrained
from flexengine.models.registry import open_model
from flexengine.optim import AdamW
from flexengine.plan import Numerics
from flexengine.runtime import weight_store

CONFIG = gpt_oss(hidden_size=64, intermediate_size=32, vocab_size=71, sliding_window=9)
QUANTISED = {"modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"], "quant_method": "mxfp4"}
SPLIT = Numerics("bfloat16", "split", "bfloat16", "float32")
STOCHASTIC = Numerics("bfloat16", "stochastic", "bfloat16", "bfloat16")


@pytest.fixture
def published(tmp_path):
    """A folder as on the Hub: two shards, blocks of a weight in one of them and scales in the other."""
    folder = tmp_path / "published"
    saved_model(folder, CONFIG, torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards = {f"model-0000{i}-of-00002.safetensors": {} for i in (1, 2)}
    first, second = shards.values()
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            first[name] = tensor
            continue
        count, inner, columns = tensor.shape
        first[f"{name}_blocks"] = torch.randint(0, 256, (count, columns, inner // 32, 16), dtype=torch.uint8)
        second[f"{name}_scales"] = torch.randint(121, 125, (count, columns, inner // 32), dtype=torch.uint8)
    for file, held in shards.items():
        save_file(held, folder / file, {"format": "pt"})
    places = {name: file for file, held in shards.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": QUANTISED}))
    return folder


@pytest.fixture
def dequantised(published):
    """As transformers reads it on the CPU."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        published, dtype=torch.bfloat16, attn_implementation="eager",
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    )  # fmt: skip


@pytest.mark.parametrize("plan", [streamed_plan, resident_plan], ids=["streamed", "resident"])
@pytest.mark.parametrize("numerics", [FLOAT32, SPLIT, STOCHASTIC], ids=["float32", "split", "bf16"])
def test_masters_are_the_dequantised_weights(published, dequantised, numerics, plan, monkeypatch):
    monkeypatch.setattr(weight_store, "PIECE_ELEMENTS", 1000)  # a matrix has several pieces
    source = open_model(published)
    engine = build_engine(source, plan(source.spec, numerics=numerics))
    wanted = {name: p.detach().float() for name, p in dequantised.named_parameters()}
    same_bits(engine.state_dict(), wanted)
    engine.close()


def test_exports_are_in_16_bits(published, dequantised, tmp_path, caplog):
    engine = from_pretrained(
        published, AdamW(lr=1e-3), max_seq_len=48, max_global_batch_tokens=96, hardware="cpu-test", device="cpu",
        dtype="float32",
    )  # fmt: skip
    assert "read from MXFP4, and exported in bfloat16" in caplog.text
    engine.save_pretrained(tmp_path / "untrained")
    batch = random_batch(1, [48, 20, 7], CONFIG["vocab_size"])
    losses = [engine.train_step(batch)[0].loss for _ in range(2)]
    assert losses[1] < losses[0]
    engine.save_pretrained(tmp_path / "trained")
    config = json.loads((tmp_path / "trained" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    kept = dict(dequantised.state_dict())
    same_bits(load_file(tmp_path / "untrained" / "model.safetensors"), kept)
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained", dtype=torch.float32)
    with torch.no_grad():
        logits = exported(input_ids=torch.tensor([batch[0]]), use_cache=False).logits[0, -1]
    assert relative_error(engine.next_token_logits(batch[0]), logits) < 0.02  # the export is rounded
    engine.close()
    again = open_model(tmp_path / "trained")
    assert not again.spec.notice
    build_engine(again, resident_plan(again.spec)).close()


def test_a_checkpoint_without_scales_is_refused(published):
    path = published / "model-00002-of-00002.safetensors"
    held = load_file(path)
    lost = next(iter(held))
    save_file({n: t for n, t in held.items() if n != lost}, path, {"format": "pt"})
    index = json.loads((published / "model.safetensors.index.json").read_text())
    del index["weight_map"][lost]
    (published / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"lacks 1 of the model's \d+ tensors, such as \['{lost}'\]"):
        from_pretrained(published, max_seq_len=48, max_global_batch_tokens=96, hardware="cpu-test", device="cpu")


def test_scales_of_another_dtype_are_refused(published):
    path = published / "model-00002-of-00002.safetensors"
    save_file({name: t.to(torch.int8) for name, t in load_file(path).items()}, path, {"format": "pt"})
    with pytest.raises(ValueError, match=r"_scales holds torch.int8.*needed is torch.uint8"):
        from_pretrained(published, max_seq_len=48, max_global_batch_tokens=96, hardware="cpu-test", device="cpu")


def test_another_quantisation_is_refused(published):
    config = json.loads((published / "config.json").read_text())
    (published / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ValueError, match=r"quantization_config \(method 'fp8'\): its weights are quantised"):
        open_model(published)
