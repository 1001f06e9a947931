"""Checkpoints in NF4 as bitsandbytes writes them: their values, and their codes where the base stays in NF4."""

import json

import pytest
import torch
from engine_helpers import FLOAT32, build_engine, make_plan, random_batch, same_bits, saved_model, spec_of, tiny_config
from safetensors.torch import load_file, save_file

from flexengine.models.base_dtype import with_base_dtype
from flexengine.models.freezing import with_frozen
from flexengine.models.registry import open_model
from flexengine.models.vocabulary import with_rows
from flexengine.ops.formats.nf4 import Nf4, PlainNf4, codebook, dynamic_map
from flexengine.plan import Numerics
from flexengine.runtime.weights.weight_store import check_checkpoint

CONFIG = tiny_config(num_hidden_layers=2, hidden_size=32, intermediate_size=48, head_dim=8)
OPTIONS = {
    "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
    "quant_method": "bitsandbytes", "llm_int8_skip_modules": ["model.layers.1.mlp"],
}  # fmt: skip
LEFT_OUT = ("layers.1.mlp", "layers.0.self_attn.k_proj")
"""Modules in 16 bits; a config may list some of them only."""
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
        if tensor.dim() == 2 and "layers" in name and not any(part in name for part in LEFT_OUT):
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
    """Those of modules that are stored in NF4; what was left in 16 bits stays so."""
    folder, plain = published
    source = opened(folder, "nf4")
    with build_engine(source, make_plan(source.spec, **SIZES, numerics=NF4)) as engine:
        same_bits(engine.state_dict(), plain)
    plain_magnitudes = source.spec.hf_config["quantization_config"]["bnb_4bit_use_double_quant"] is False
    own = "nf4_float32" if plain_magnitudes else "nf4"
    kept = {(0, "qkv_proj.weight"), (1, "gate_up_proj.weight"), (1, "down_proj.weight")}  # qkv for its keys
    matrices = [(i, p) for i, g in enumerate(source.spec.groups[1:-1]) for p in g.params if p.kind == "matrix"]
    assert {(i, p.name): p.storage for i, p in matrices} == {
        (i, p.name): "compute" if (i, p.name) in kept else own for i, p in matrices
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_codes_are_read_as_elements_of_any_dtype(published, dtype):
    folder, plain = published
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if f"{name}.absmax" in tensors:
            tensors[name] = tensor.flatten().view(dtype)[:, None]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for base, numerics in ((None, FLOAT32), ("nf4", NF4)):
        source = opened(folder, base)
        with build_engine(source, make_plan(source.spec, **SIZES, numerics=numerics)) as engine:
            same_bits(engine.state_dict(), plain)


def test_a_config_alone_names_what_is_left_out():
    """Planning before a download counts the modules that it lists in 16 bits."""
    model = with_base_dtype(with_frozen(spec_of({**CONFIG, "quantization_config": OPTIONS}), ["blocks"]), "nf4")
    storages = [{p.name: p.storage for p in group.params} for group in model.groups]
    assert storages[1]["down_proj.weight"] == storages[2]["qkv_proj.weight"] == "nf4"
    assert storages[2]["down_proj.weight"] == storages[0]["embed.weight"] == "compute"


def test_rows_for_new_tokens_leave_the_rest_as_it_is_stored(published):
    folder, plain = published
    wider = with_rows(open_model(folder).spec, 72, in_checkpoint=True)
    spec = with_base_dtype(with_frozen(check_checkpoint(wider, folder), ["blocks"]), "nf4")
    with build_engine(open_model(folder)._replace(spec=spec), make_plan(spec, **SIZES, numerics=NF4)) as engine:
        found = engine.state_dict()
    same_bits({name: tensor[: len(plain[name])] for name, tensor in found.items()}, plain)
    assert len(found["lm_head.weight"]) == 72


def test_codes_of_another_size_are_refused(published):
    folder, _ = published
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"][:-1].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"up_proj.weight has 767 bytes in the checkpoint, but config.json asks for 768"
    ):
        opened(folder)


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
