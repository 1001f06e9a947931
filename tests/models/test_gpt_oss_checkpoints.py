"""Checkpoints of gpt-oss as published, with experts in MXFP4: what is read, trained, and exported in 16 bits."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from engine_helpers import (
    FLOAT32,
    build_engine,
    random_batch,
    random_weights,
    relative_error,
    same_bits,
    saved_model,
    streamed_plan,
    tiny_config,
)
from engine_helpers import make_plan as resident_plan
from family_configs import gpt_oss
from safetensors.torch import load_file, save_file

from flexengine import LoRA, from_pretrained
from flexengine.models.base_dtype import with_base_dtype
from flexengine.models.freezing import with_frozen
from flexengine.models.lora import with_lora
from flexengine.models.registry import open_model
from flexengine.optim import AdamW
from flexengine.options.job import Job
from flexengine.plan import Numerics
from flexengine.request import described
from flexengine.runtime.weights import weight_store

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


def kept_in_mxfp4(folder):
    source = open_model(folder)
    job = Job(mode="lora", lora_rank=2, base_dtype="mxfp4", max_seq_len=48, max_global_batch_tokens=96)
    return source._replace(spec=described(source.spec, job))


def test_a_frozen_base_keeps_codes_and_scales(published, dequantised):
    """Also where experts come in parts and only those touched are fetched; training has the bits of decoded weights."""
    source, plain = kept_in_mxfp4(published), open_model(published)
    plain = plain._replace(spec=with_lora(plain.spec, LoRA(["all-linear"], rank=2)))
    numerics = replace(SPLIT, base="mxfp4")
    streamed = streamed_plan(source.spec, numerics=numerics)
    plans = [streamed, resident_plan(source.spec, numerics=numerics), replace(streamed, in_parts=True)]
    plans.append(replace(streamed, in_parts=True, weight_slots=4, touched_only=True))
    wanted = {name: p.detach().float() for name, p in dequantised.named_parameters()}
    found = []
    for origin, plan in [(plain, streamed_plan(plain.spec, numerics=SPLIT)), *((source, plan) for plan in plans)]:
        with build_engine(origin, plan, AdamW(lr=1e-2), seed=3) as engine:
            state = engine.state_dict()
            same_bits({name: state[name] for name in wanted}, wanted)
            if origin is source:
                check_codes(engine, published)
            found.append([engine.train_step(random_batch(step, [40, 9], 71))[0].loss for step in range(3)])
    assert found[0][2] != found[0][0]
    assert all(losses == found[0] for losses in found)


def check_codes(engine, folder):
    """What is stored are the bytes of the checkpoint, matrix by matrix."""
    tensors = {n: t for path in sorted(folder.glob("*.safetensors")) for n, t in load_file(path).items()}
    runs = [run for run in engine.weights.runs.values() if run.in_fewer_bytes]
    assert len(runs) == 2 * CONFIG["num_hidden_layers"]
    for run in runs:
        matrices = [span.layout.views(matrix) for span in run.spans for matrix in span.stored]
        for number, fields in enumerate(matrices):
            assert torch.equal(fields["codes"], tensors[f"{run.source.name}_blocks"][number])
            assert torch.equal(fields["scales"], tensors[f"{run.source.name}_scales"][number])


def test_weights_in_16_bits_are_stored_in_mxfp4(tmp_path):
    """As specified: storing what was decoded changes nothing."""
    source = random_weights(CONFIG)
    spec = with_base_dtype(with_frozen(source.spec, ["embed", "blocks"]), "mxfp4")
    plan = resident_plan(spec, numerics=replace(SPLIT, base="mxfp4"))
    with build_engine(source._replace(spec=spec), plan) as engine:
        stored = engine.state_dict()
        engine.save_pretrained(tmp_path)
    again = open_model(tmp_path)
    spec = with_base_dtype(with_frozen(again.spec, ["embed", "blocks"]), "mxfp4")
    with build_engine(again._replace(spec=spec), plan) as engine:
        state = engine.state_dict()
    frozen = [name for name in stored if ".layers." in name]
    same_bits({name: state[name] for name in frozen}, {name: stored[name] for name in frozen})


def test_mxfp4_is_for_experts_of_gpt_oss():
    spec = with_frozen(random_weights(tiny_config()).spec, ["blocks"])
    with pytest.raises(ValueError, match=r"base_dtype=mxfp4 stores experts as gpt-oss has them.*give nf4"):
        with_base_dtype(spec, "mxfp4")


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
