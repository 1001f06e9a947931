"""Names, sizes and counts of a model's description against transformers and against sums done by hand."""

import copy
import json
from dataclasses import replace

import pytest
import torch
import transformers
from engine_helpers import spec_of, tiny_config

from flexengine.models.matmul_dtype import with_fp8_linears
from flexengine.models.probe_shapes import attention_shapes, expert_shapes, head_shape, linear_shapes
from flexengine.models.registry import ASSETS, open_model, preset_names
from flexengine.ops.attention.style import AttentionShape
from flexengine.ops.experts.experts import GroupedLinear
from flexengine.ops.fp8 import Fp8Linear
from flexengine.ops.linear import Linear
from flexengine.ops.linear_shape import HeadShape, LinearShape

VARIANTS = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "attention biases": {"attention_bias": True},
    "all biases, tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "multi-query, wide heads": {"num_key_value_heads": 1, "head_dim": 10},
    "one layer, odd sizes": {"num_hidden_layers": 1, "intermediate_size": 37, "vocab_size": 71},
}


def on_meta(config):
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))


def trained_tensors(model):
    """Names and shapes as in a checkpoint: a tied head is the embedding and is not stored."""
    tied = model.config.tie_word_embeddings
    return {k: tuple(v.shape) for k, v in model.state_dict().items() if not (tied and k == "lm_head.weight")}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_sources_are_exactly_the_tensors_of_transformers(changes):
    config = tiny_config(**changes)
    sources = [s for group in spec_of(config).groups for p in group.params for s in p.sources]
    assert len({s.name for s in sources}) == len(sources)
    assert {s.name: s.shape for s in sources} == trained_tensors(on_meta(config))


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_a_parameter_is_its_sources_stacked(changes):
    for group in spec_of(tiny_config(**changes)).groups:
        for p in group.params:
            assert p.shape[0] == sum(s.shape[0] for s in p.sources)
            assert all(s.shape[1:] == p.shape[1:] for s in p.sources)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_vectors_are_norms_and_biases(changes):
    for group in spec_of(tiny_config(**changes)).groups:
        for p in group.params:
            assert (p.kind == "vector") == (len(p.shape) == 1)
            assert p.init == ("ones" if "norm" in p.name else "zeros" if p.name.endswith("bias") else "normal")


def test_every_layer_finds_its_parameters():
    spec = spec_of(tiny_config(tie_word_embeddings=True, attention_bias=True))
    for layer in spec.layers:
        bound = {local: (group, name) for local, group, name in layer.params}
        assert set(bound) == {name for op in layer.ops for name in op.params}
        for group, name in bound.values():
            assert name in {p.name for p in spec.groups[group].params}


def test_tied_head_reads_the_embeddings_group():
    tied, untied = (spec_of(tiny_config(tie_word_embeddings=t)) for t in (True, False))
    assert tied.layers[-1].groups == (3, 0)
    assert untied.layers[-1].groups == (3,)


PRESET_SIZES = {
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "codellama-7b": 6_738_546_688,
}


@pytest.mark.parametrize("name", PRESET_SIZES)
def test_presets_have_the_parameters_of_the_published_models(name):
    spec, config = open_model(f"preset:{name}").spec, json.loads((ASSETS / "presets" / f"{name}.json").read_text())
    assert spec.num_parameters == PRESET_SIZES[name]
    assert on_meta(config).num_parameters() == PRESET_SIZES[name]


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_opens(name):
    source = open_model(f"preset:{name}")
    assert source.weights_folder is None
    assert source.spec.num_parameters > 0


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("Meta-Llama-3-8B-Instruct", "llama-3-8b"), ("llama-3.1-8b-instruct", "llama-3.1-8b"),
        ("gemma-3-4b-it", "gemma-3-4b"), ("Qwen3-8B-Base", "qwen3-8b"), ("Llama-2-7b-chat-hf", "llama-2-7b"),
        ("Mistral-7B-Instruct-v0.3", "mistral-7b"),
    ],
)  # fmt: skip
def test_names_of_tuned_models_are_those_of_their_shape(name, preset):
    assert open_model(f"preset:{name}").spec.num_parameters == open_model(f"preset:{preset}").spec.num_parameters


def test_unknown_presets_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown preset 'llama-9'.*llama-2-7b"):
        open_model("preset:llama-9")


def test_model_flops_by_hand():
    """D=24, F=40, 4 heads of 6 with 2 key/value heads, V=67, 2 layers."""
    block = 24 * (4 + 2 * 2) * 6 + 24 * 24 + 24 * 80 + 40 * 24
    lengths = (5, 1, 12)
    attention = 6 * 2 * 24 * (25 + 1 + 144)
    for tied in (False, True):
        spec = spec_of(tiny_config(tie_word_embeddings=tied))
        assert spec.model_flops(lengths) == 6 * (2 * block + 67 * 24) * 18 + attention


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, r"hidden_act='gelu'.*'silu'"),
        ({"num_key_value_heads": 3}, r"num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ({"head_dim": 5}, r"head_dim=5 is odd"),
        ({"model_type": "dbrx"}, r"model_type 'dbrx'(.|\n)*missing: clamped queries"),
    ],
)
def test_configs_that_cannot_be_trained_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        spec_of(tiny_config(**changes))


def test_a_missing_field_is_named():
    config = tiny_config()
    del config["intermediate_size"]
    with pytest.raises(ValueError, match=r"lacks the field 'intermediate_size'"):
        spec_of(config)


def test_key_value_heads_and_head_width_have_defaults():
    config = tiny_config(hidden_size=24)
    del config["num_key_value_heads"], config["head_dim"]
    spec = spec_of(config)
    assert spec.head_dim == 6


@pytest.mark.parametrize(
    "field", ["max_position_embeddings", "initializer_range", "num_key_value_heads", "rope_scaling"]
)
def test_null_is_as_good_as_absent(field):
    """Hugging Face writes null for what was never set."""
    config = tiny_config()
    absent = spec_of({name: value for name, value in config.items() if name != field})
    null = spec_of({**config, field: None})
    for name in ("max_position_embeddings", "initializer_range", "tables", "groups"):
        assert getattr(null, name) == getattr(absent, name)


def test_attention_of_all_blocks_by_shape():
    """Gemma 2 alternates between a window and none, with soft caps in both; DeepSeek has narrow values."""
    gemma = open_model("preset:gemma-2-9b", needs_weights=False).spec
    whole, window = (AttentionShape(2, 256, 256, window, True) for window in (0, 4096))
    assert dict(attention_shapes(gemma)) == {whole: 21 * 16, window: 21 * 16}
    deepseek = open_model("preset:deepseek-v2-lite", needs_weights=False).spec
    assert attention_shapes(deepseek) == ((AttentionShape(1, 192, 128), 27 * 16),)


def test_experts_of_all_blocks_by_shape():
    """DeepSeek's first block has none; all others have the same."""
    deepseek = open_model("preset:deepseek-v2-lite", needs_weights=False).spec
    assert expert_shapes(deepseek) == ((64, 6, 2048, 2 * 1408), (64, 6, 1408, 2048))
    assert expert_shapes(open_model("preset:gemma-2-9b", needs_weights=False).spec) == ()


def test_fp8_linears_replace_those_of_blocks_and_nothing_else():
    spec = spec_of(tiny_config(hidden_size=32, intermediate_size=48, head_dim=8))
    fp8 = with_fp8_linears(spec)
    assert (fp8.groups, fp8.layers[0], fp8.layers[-1]) == (spec.groups, spec.layers[0], spec.layers[-1])
    assert fp8.blocks[0].ops is fp8.blocks[1].ops  # what is derived from ops is derived once
    for old, new in zip(spec.blocks[0].ops, fp8.blocks[0].ops, strict=True):
        assert isinstance(new, Fp8Linear) == isinstance(old, Linear)
        assert (new is old) != isinstance(old, Linear)
        assert (new.inputs, new.outputs, new.params) == (old.inputs, old.outputs, old.params)
        assert new.forward_work(64, 64, 2).flops == old.forward_work(64, 64, 2).flops
    assert with_fp8_linears(fp8).blocks[0].ops[1].out_features == fp8.blocks[0].ops[1].out_features


def test_experts_take_fp8_and_no_operands_of_blackwell_cards():
    spec = open_model("preset:olmoe-1b-7b", needs_weights=False).spec
    for matmul in ("fp8", "mxfp8", "nvfp4-gw-hp"):
        ops = with_fp8_linears(spec, matmul).blocks[0].ops
        assert {op.scaling.name for op in ops if isinstance(op, Fp8Linear)} == {matmul}
        assert {op.fp8 for op in ops if isinstance(op, GroupedLinear)} == {matmul if matmul == "fp8" else None}


def test_models_with_sizes_that_fp8_cannot_take_are_refused():
    with pytest.raises(ValueError, match=r"tiny: qkv_proj has 24 input and 48 output features.*--matmul-dtype"):
        with_fp8_linears(spec_of(tiny_config()))


@pytest.mark.parametrize("name", ["gpt2", "gemma-2-2b", "deepseek-v2-lite", "qwen3.5-9b"])
def test_linear_layers_of_all_blocks_by_shape(name: str):
    """They hold the matrices of all blocks, but those of experts, routers and gates; names are unique."""
    spec = open_model(f"preset:{name}", needs_weights=False).spec
    shapes = linear_shapes(spec)
    assert len({shape.name for shape in shapes}) == len(shapes)
    ops = [op for layer in spec.blocks for op in layer.ops if isinstance(op, Linear)]
    times = len(ops) // sum(shape.count for shape in shapes)
    assert times * sum(shape.count * shape.flops(1) for shape in shapes) == sum(op.shape.flops(1) for op in ops)


def test_linear_layers_of_fewer_alike_blocks_are_the_same():
    names = ("qkv_proj", "o_proj", "up_proj", "down_proj")
    sizes = ((768, 2304), (768, 768), (768, 3072), (3072, 768))
    expected = tuple(
        LinearShape(name, *size, adds=name in ("o_proj", "down_proj"), transposed=True)
        for name, size in zip(names, sizes, strict=True)
    )
    spec = open_model("preset:gpt2", needs_weights=False).spec
    assert linear_shapes(spec) == linear_shapes(spec.with_layers([0, 1, 2, len(spec.layers) - 1])) == expected


def test_layers_of_one_name_and_several_sizes_are_told_apart():
    spec = open_model("preset:gpt2", needs_weights=False).spec
    first, *others = spec.layers[1:]
    wider = copy.copy(next(op for op in first.ops if op.name == "up_proj"))
    wider.out_features = 4096
    ops = tuple(wider if op.name == "up_proj" else op for op in first.ops)
    changed = replace(spec, layers=(spec.layers[0], replace(first, ops=ops), *others))
    counts = {shape.name: shape.count for shape in linear_shapes(changed)}
    assert counts == {"qkv_proj": 12, "o_proj": 12, "up_proj 768 x 4096": 1, "up_proj 768 x 3072": 11, "down_proj": 12}


def test_the_head_of_a_model():
    assert head_shape(open_model("preset:gemma-2-9b", needs_weights=False).spec) == HeadShape(3584, 256000, 30.0)
