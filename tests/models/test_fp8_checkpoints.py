"""Checkpoints in FP8 of families that have no other tests of theirs: values, and codes where the base stays in FP8."""

import json
from dataclasses import replace

import pytest
import torch
from engine_helpers import FLOAT32, build_engine, make_plan, same_bits, saved_model, tiny_config
from family_configs import experts
from safetensors.torch import load_file, save_file

from flexengine.models.base_dtype import with_base_dtype
from flexengine.models.freezing import with_frozen
from flexengine.models.matmul_dtype import with_matmul_dtype
from flexengine.models.registry import open_model
from flexengine.ops.formats.weight_formats import FORMATS
from flexengine.plan import Numerics
from flexengine.runtime.weights.weight_store import check_checkpoint

CONFIGS = {
    "qwen3": tiny_config(model_type="qwen3", hidden_size=136, intermediate_size=200, head_dim=8),
    "whole squares": tiny_config(
        model_type="qwen3",
        hidden_size=144,
        num_attention_heads=16,
        num_key_value_heads=16,
        intermediate_size=256,
        head_dim=8,
    ),
    "qwen3_moe": experts("qwen3_moe", hidden_size=136, moe_intermediate_size=24, norm_topk_prob=True),
}
OPTIONS = {"activation_scheme": "dynamic", "quant_method": "fp8", "weight_block_size": [128, 128]}
LEFT_OUT = ("mlp.gate.weight", "layers.1.self_attn.o_proj")
"""Weights in 16 bits, which the config does not list."""
FP8 = Numerics("bfloat16", "split", "bfloat16", "float32", base="fp8")


@pytest.fixture(params=CONFIGS)
def published(request, tmp_path):
    """A folder as on the Hub, and what its tensors are in float32. Scales are larger than they must be, so that storing
    the values anew would give other codes."""
    saved_model(tmp_path, CONFIGS[request.param], torch.bfloat16)
    form, held, plain = FORMATS["fp8"], {}, {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        held[name] = tensor
        if tensor.dim() == 2 and "layers" in name and not any(part in name for part in LEFT_OUT):
            layout = form.layout(*tensor.shape)
            stored = torch.zeros(layout.num_bytes, dtype=torch.uint8)
            form.encoder(stored, layout).add(0, tensor.float())
            fields = layout.views(stored)
            held[name] = (fields["codes"].float() / 1.6).to(torch.float8_e4m3fn)
            held[f"{name}_scale_inv"] = (fields["scales"] * 1.6).clone()
            fields["codes"].copy_(held[name])
            fields["scales"].mul_(1.6)
            plain[name] = form.values(fields, layout, 0, layout.rows)
        else:
            plain[name] = tensor.float()
    save_file(held, tmp_path / "model.safetensors", {"format": "pt"})
    config = {**json.loads((tmp_path / "config.json").read_text()), "quantization_config": OPTIONS}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path, plain


def test_masters_are_the_decoded_weights(published):
    folder, plain = published
    source = open_model(folder)
    spec = check_checkpoint(source.spec, folder)
    engine = build_engine(source._replace(spec=spec), make_plan(spec, numerics=FLOAT32))
    same_bits(engine.state_dict(), plain)
    engine.close()


def keeps_codes_and_scales(published, numerics):
    folder, plain = published
    source = open_model(folder)
    spec = with_matmul_dtype(check_checkpoint(source.spec, folder), numerics.matmul)
    spec = with_base_dtype(with_frozen(spec, ["blocks"]), "fp8")
    engine = build_engine(source._replace(spec=spec), make_plan(spec, numerics=numerics))
    same_bits(engine.state_dict(), {name: tensor.bfloat16().float() for name, tensor in plain.items()})
    return engine


def test_a_frozen_base_keeps_codes_and_scales(published):
    keeps_codes_and_scales(published, FP8).close()


@pytest.mark.parametrize("published", ["whole squares"], indirect=True)
def test_products_multiply_the_codes_and_scales_of_a_checkpoint(published):
    """Queries, keys and values lie as one matrix; what a block has in 16 bits is rounded as ever."""
    engine = keeps_codes_and_scales(published, replace(FP8, matmul="fp8-blockwise"))
    held, [first, second] = load_file(published[0] / "model.safetensors"), engine.layout.model.blocks
    assert first.ops != second.ops
    group = first.groups[0]
    storage = engine.layout.groups[group]
    assert storage.decoded is None
    assert storage.stored is not None
    slot = engine.layout.slots[engine.layout.stored_slot("weights", group)]
    piece, start = storage.stored.place_of(0)
    fields = piece.layout.views(engine.weights.arenas.view(slot, start, (piece.num_bytes,), torch.uint8))
    names = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"]
    for field, suffix in (("codes", ""), ("scales", "_scale_inv")):
        assert torch.equal(fields[field].float(), torch.cat([held[name + suffix].float() for name in names]))
    engine.close()
