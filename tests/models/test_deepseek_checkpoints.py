"""Checkpoints of DeepSeek-V3 as published: FP8 weights with scales of blocks, layers that predict further tokens, and a
bias that nothing trains."""

import json

import pytest
import torch
import transformers
from engine_helpers import FLOAT32, build_engine, random_batch, relative_error, same_bits, saved_model, streamed_plan
from engine_helpers import make_plan as resident_plan
from family_configs import CASES, deepseek
from safetensors.torch import load_file, save_file

from flexengine import from_pretrained
from flexengine.models.registry import open_model
from flexengine.optim import AdamW
from flexengine.plan import Numerics
from flexengine.runtime.weights import weight_store

SIZES = {"hidden_size": 136, "intermediate_size": 200, "kv_lora_rank": 132, "q_lora_rank": 130, "vocab_size": 71}
CONFIG = deepseek(3, **SIZES, first_k_dense_replace=1, num_hidden_layers=2)
QUANTISED = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
}  # fmt: skip
SPLIT = Numerics("bfloat16", "split", "bfloat16", "float32")
FOLLOWING = "model.layers.2."


def in_fp8(weight):
    """(values, scales) of the blocks of a matrix, each with its largest value at 448."""
    rows, columns = (-(-n // 128) for n in weight.shape)
    padded = torch.zeros(128 * rows, 128 * columns)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    blocks = padded.view(rows, 128, columns, 128)
    scales = blocks.abs().amax((1, 3)) / 448
    values = (blocks / scales[:, None, :, None]).view(padded.shape)[: weight.shape[0], : weight.shape[1]]
    return values.contiguous().to(torch.float8_e4m3fn), scales


def decoded(values, scales):
    return values.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[tuple(map(slice, values.shape))]


def quantised(name, tensor):
    return tensor.dim() == 2 and name.startswith("model.layers.") and not name.endswith("mlp.gate.weight")


@pytest.fixture
def published(tmp_path):
    """A folder as on the Hub, and what its tensors are in float32."""
    folder = tmp_path / "published"
    saved_model(folder, CONFIG, torch.bfloat16)
    held, plain = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if quantised(name, tensor):
            held[name], held[f"{name}_scale_inv"] = in_fp8(tensor.float())
            plain[name] = decoded(held[name], held[f"{name}_scale_inv"])
        else:
            held[name] = tensor.float() if name.endswith("correction_bias") else tensor
            plain[name] = held[name].float()
    held[f"{FOLLOWING}eh_proj.weight"], held[f"{FOLLOWING}eh_proj.weight_scale_inv"] = in_fp8(torch.randn(136, 272))
    held[f"{FOLLOWING}enorm.weight"] = torch.randn(136, dtype=torch.bfloat16)
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": QUANTISED, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, held, plain


@pytest.mark.parametrize("plan", [streamed_plan, resident_plan], ids=["streamed", "resident"])
@pytest.mark.parametrize("numerics", [FLOAT32, SPLIT], ids=["float32", "split"])
def test_masters_are_the_decoded_weights(published, numerics, plan, monkeypatch):
    monkeypatch.setattr(weight_store, "PIECE_ELEMENTS", 1000)
    folder, _, plain = published
    source = open_model(folder)
    engine = build_engine(source, plan(source.spec, numerics=numerics))
    biases = {name: plain.pop(name) for name in list(plain) if name.endswith("correction_bias")}
    same_bits(engine.state_dict(), plain)
    same_bits(engine.buffers, biases)
    engine.close()


def test_exports_are_in_16_bits(published, tmp_path, caplog):
    folder, held, plain = published
    engine = from_pretrained(
        folder, AdamW(lr=1e-3), max_seq_len=48, max_global_batch_tokens=96, hardware="cpu-test", device="cpu",
        dtype="float32", recompute="full",
    )  # fmt: skip
    assert "weights are read from FP8, and exported in bfloat16 without a quantization_config" in caplog.text
    assert "model.layers.2 and on, which predict further tokens, are not trained" in caplog.text
    engine.save_pretrained(tmp_path / "untrained")
    untrained = load_file(tmp_path / "untrained" / "model.safetensors")
    assert untrained.keys() == plain.keys() | {name for name in held if name.startswith(FOLLOWING)}
    for name, tensor in untrained.items():
        wanted = held[name] if name not in plain or not quantised(name, tensor) else plain[name].bfloat16()
        assert tensor.dtype == wanted.dtype
        assert torch.equal(tensor.view(torch.uint8), wanted.view(torch.uint8)), name
    batch = random_batch(1, [48, 20, 7], CONFIG["vocab_size"])
    losses = [engine.train_step(batch)[0].loss for _ in range(2)]
    assert losses[1] < losses[0]
    engine.save_pretrained(tmp_path / "trained")
    config = json.loads((tmp_path / "trained" / "config.json").read_text())
    assert "quantization_config" not in config
    trained = load_file(tmp_path / "trained" / "model.safetensors")
    for name in trained:
        if name.endswith("correction_bias") or name.startswith(FOLLOWING):
            assert torch.equal(trained[name].view(torch.uint8), held[name].view(torch.uint8)), name
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained", dtype=torch.float32)
    with torch.no_grad():
        logits = exported(input_ids=torch.tensor([batch[0]]), use_cache=False).logits[0, -1]
    assert relative_error(engine.next_token_logits(batch[0]), logits) < 0.05  # the export is rounded
    engine.close()


def test_scales_of_other_blocks_are_refused(published):
    folder, held, _ = published
    name = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    save_file({**held, name: torch.ones(1, 1)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=rf"tensor {name} has shape \[1, 1\] .* asks for \[2, 1\]"):
        from_pretrained(folder, max_seq_len=48, max_global_batch_tokens=96, hardware="cpu-test", device="cpu")


def test_a_preset_is_exported_with_its_bias(tmp_path):
    """A model without a checkpoint: transformers finds every tensor."""
    config = CASES["deepseek_v3, experts everywhere"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = open_model(tmp_path, needs_weights=False)
    engine = build_engine(source, resident_plan(source.spec))
    engine.save_pretrained(tmp_path / "export")
    model, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    bias = model.state_dict()["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert bias.dtype == torch.float32
    assert not bias.any()
    engine.close()


def test_the_indexer_is_exported_as_it_is_and_longer_sequences_are_refused(tmp_path):
    """As DeepSeek-V3.2 trains: within index_topk tokens its indexers choose every key."""
    saved_model(tmp_path / "base", CASES["deepseek_v32"])
    options = {"max_global_batch_tokens": 128, "hardware": "cpu-test", "device": "cpu"}
    with from_pretrained(tmp_path / "base", AdamW(lr=1e-2), max_seq_len=64, **options) as engine:
        engine.train_step(random_batch(0, [60, 9], 60))
        engine.save_pretrained(tmp_path / "export")
    base, export = (load_file(tmp_path / folder / "model.safetensors") for folder in ("base", "export"))
    assert base.keys() == export.keys()
    indexers = {name for name in base if ".indexer." in name}
    same_bits({name: export[name] for name in indexers}, {name: base[name] for name in indexers})
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    config["layer_types"] = ["deepseek_sparse_attention"] * config["num_hidden_layers"]  # as older releases say
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"max_seq_len=65, but base has attention over keys that an indexer chooses"):
        from_pretrained(tmp_path / "base", max_seq_len=65, **options)
