"""Checkpoints in NF4 as bitsandbytes writes them: their values, and their codes where the base stays in NF4."""

import json

import pytest
import torch
from engine_helpers import FLOAT32, build_engine, make_plan, random_batch, same_bits, saved_model, tiny_config
from safetensors.torch import load_file, save_file

from flexengine.models.base_dtype import with_base_dtype
from flexengine.models.freezing import with_frozen
from flexengine.models.registry import open_model
from flexengine.ops.nf4 import Nf4, PlainNf4, codebook, dynamic_map
from flexengine.plan import Numerics
from flexengine.runtime.weight_store import check_checkpoint

CONFIG = tiny_config(num_hidden_layers=2, hidden_size=32, intermediate_size=48, head_dim=8)
OPTIONS = {
    "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
    "quant_method": "bitsandbytes", "llm_int8_skip_modules": ["model.layers.1.mlp"],
}  # fmt: skip
NF4 = Numerics("bfloat16", "split", "bfloat16", "float32", base="nf4")
SPLIT = Numerics("bfloat16", "split", "bfloat16", "float32")
SIZES = {"chunk_tokens": 24, "chunks_per_round": 2}


def in_nf4(name, weight, nested):
    """The tensors of a matrix, and its values in bf16. Its magnitudes are changed, so that storing it anew would differ
    from keeping what it has. nested: with double quantisation."""
    form = Nf4() if nested else PlainNf4()
    layout = form.layout(*weight.shape)
    stored = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    encoder = form.encoder(stored, layout)
    encoder.add(0, weight.float())
    encoder.finish()
    fields = layout.views(stored)
    fields["nested_absmax" if nested else "absmax"].mul_(1.37)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    cpu = torch.device("cpu")
    beside = {}
    if nested:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": fields["offset"].item()}
        beside[f"{name}.nested_absmax"] = fields["nested_absmax"].clone()
        beside[f"{name}.nested_quant_map"] = dynamic_map(cpu).clone()
    tensors = {
        **beside,
        name: fields["codes"][:, None].clone(),
        f"{name}.absmax": fields["absmax"].clone(),
        f"{name}.quant_map": codebook(cpu).clone(),
        f"{name}.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return tensors, form.values(fields, layout, 0, layout.rows).bfloat16()


@pytest.fixture(params=[True, False], ids=["double quantisation", "magnitudes in float32"])
def published(request, tmp_path):
    """A folder as on the Hub, and what its tensors are in float32."""
    folder = tmp_path / "published"
    saved_model(folder, CONFIG, torch.bfloat16)
    held, plain = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if tensor.dim() == 2 and "layers" in name and "layers.1.mlp" not in name:
            tensors, values = in_nf4(name, tensor, request.param)
            held, plain[name] = held | tensors, values.float()
        else:
            held[name], plain[name] = tensor, tensor.float()
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    options = {**OPTIONS, "bnb_4bit_use_double_quant": request.param}
    config = {**json.loads((folder / "config.json").read_text()), "quantization_config": options}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, plain


def opened(folder, base=None):
    source = open_model(folder)
    spec = check_checkpoint(source.spec, folder)
    return source._replace(spec=spec if base is None else with_base_dtype(with_frozen(spec, ["blocks"]), base))


@pytest.mark.parametrize("numerics", [FLOAT32, SPLIT], ids=["float32", "bf16"])
def test_all_is_trained_from_the_decoded_values(published, numerics, tmp_path):
    folder, plain = published
    source = opened(folder)
    engine = build_engine(source, make_plan(source.spec, **SIZES, numerics=numerics))
    same_bits(engine.state_dict(), plain)
    engine.train_step(random_batch(1, (20, 30), 67))
    engine.save_pretrained(tmp_path / "export")
    trained = engine.state_dict()
    engine.close()
    again = open_model(tmp_path / "export")
    assert "quantization_config" not in again.spec.hf_config
    written = load_file(tmp_path / "export" / "model.safetensors")
    assert written.keys() == plain.keys()
    same_bits({name: t.float() for name, t in written.items()}, {n: t.bfloat16().float() for n, t in trained.items()})


def test_a_frozen_base_keeps_codes_and_scales(published):
    """What was left in 16 bits is stored anew; everything else has the values of the checkpoint."""
    folder, plain = published
    source = opened(folder, "nf4")
    engine = build_engine(source, make_plan(source.spec, **SIZES, numerics=NF4))
    found = engine.state_dict()
    left_out = {name for name in plain if "layers.1.mlp" in name}
    plain_magnitudes = source.spec.hf_config["quantization_config"]["bnb_4bit_use_double_quant"] is False
    storages = {p.storage for g in source.spec.groups for p in g.params} - {"compute"}
    assert storages == {"nf4_float32" if plain_magnitudes else "nf4"}
    same_bits({name: found[name] for name in found if name not in left_out},
              {name: plain[name] for name in plain if name not in left_out})  # fmt: skip
    assert not any(torch.equal(found[name], plain[name]) for name in left_out)
    engine.close()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"load_in_4bit": False}, "load_in_4bit=False"),
        ({"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type='fp4'"),
    ],
)
def test_other_ways_to_store_are_refused(published, change, named):
    folder, _ = published
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=named):
        open_model(folder)
