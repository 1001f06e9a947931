"""What a config.json leaves out, calls by another name, sets to null or states in two places means what transformers
takes it for: both read the same file."""

import json

import pytest
import torch
import transformers
from engine_helpers import FLOAT32, build_engine, spec_of, streamed_plan, tiny_config
from family_checks import MAX_SEQ_LEN, draw_batch, reference_loss
from family_configs import CASES, lacking

from flexengine.models.registry import open_model

LLAMA = {**tiny_config(), "max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.5] * 3, "long_factor": [3.0] * 3}
TYPED = {"full_attention": {"rope_type": "linear", "factor": 4.0}, "sliding_attention": {"rope_type": "default"}}


SPELLINGS = {
    "yarn, original length beside it": {
        **LLAMA,
        "rope_scaling": lacking(YARN, "original_max_position_embeddings"),
        "original_max_position_embeddings": 32,
    },
    "llama3, original length beside it too": {
        **LLAMA,
        "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 32},
        "original_max_position_embeddings": 32,
    },
    "both spellings of the rope options": {
        **lacking(LLAMA, "rope_theta"),
        "rope_theta": 500.0,
        "rope_scaling": {"type": "linear", "factor": 4},
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
    },
    "dynamic, within the length": {**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
    "llama3, no original length": {**LLAMA, "rope_scaling": LLAMA3},
    "yarn, truncate null": {**LLAMA, "rope_scaling": {**YARN, "truncate": None}},
    "yarn, factor by the longest": {
        **lacking(LLAMA, "max_position_embeddings"), "rope_scaling": {**YARN, "factor": None}
    },
    "longrope, factor by the longest": {
        **lacking(LLAMA, "max_position_embeddings"),
        "rope_scaling": {**LONGROPE, "original_max_position_embeddings": 100},
    },
    "two bases beside the options by layer type": {
        **CASES["gemma3"], "rope_parameters": TYPED, "rope_theta": 50.0, "rope_local_base_freq": 20.0
    },
    "gpt_oss, no rope options": {**CASES["gpt_oss"], "rope_parameters": {}},
    "deepseek_v3, rope_interleave null": {**CASES["deepseek_v3"], "rope_interleave": None},
    "deepseek_v3, norm_topk_prob null": {**CASES["deepseek_v3"], "norm_topk_prob": None},
    "mixtral, num_experts": {**lacking(CASES["mixtral"], "num_local_experts"), "num_experts": 5},
    "olmoe, num_local_experts": {**lacking(CASES["olmoe"], "num_experts"), "num_local_experts": 5},
    "deepseek_v2, num_experts": {**lacking(CASES["deepseek_v2"], "n_routed_experts"), "num_experts": 8},
    "deepseek_v3, also num_local_experts": {**CASES["deepseek_v3"], "n_routed_experts": 16, "num_local_experts": 16},
    "qwen3, kinds beside the class's max_window_layers": {
        **CASES["qwen3, window"],
        "layer_types": ["sliding_attention", "full_attention"],
        "max_window_layers": 28,
    },
    "gpt2, as others call it": {
        **lacking(CASES["gpt2"], "n_embd", "n_head", "n_layer", "n_positions"),
        "hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "max_position_embeddings": 96,
    },
}  # fmt: skip


@pytest.mark.parametrize("config", SPELLINGS.values(), ids=SPELLINGS.keys())
def test_both_read_the_same(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    described = transformers.AutoConfig.from_pretrained(tmp_path)
    torch.manual_seed(7)
    transformers.AutoModelForCausalLM.from_config(described).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto", attn_implementation="eager")
    source = open_model(tmp_path)
    engine = build_engine(source, streamed_plan(source.spec, max_seq_len=MAX_SEQ_LEN, numerics=FLOAT32))
    ids, labels = draw_batch(config["vocab_size"])
    with torch.no_grad():
        expected = reference_loss(model, ids, labels).item()
    assert engine.evaluate(input_ids=ids, labels=labels).loss == pytest.approx(expected, abs=1e-5)
    engine.close()


LINEAR = {"rope_type": "linear", "factor": 4.0}
GEMMA3 = CASES["gemma3"]
TOLD_TWICE = {
    "base": ({**LLAMA, "rope_parameters": {"rope_theta": 500.0}}, r"rope_theta=500.0 .* rope_theta=10000.0 outside"),
    "base of mixtral": (
        {**CASES["mixtral"], "rope_theta": 1e4, "rope_scaling": {"rope_theta": 1e6, "type": "default"}},
        r"rope_theta=1000000.0 .* and rope_theta=10000.0 outside",
    ),
    "base of layers with a window": (
        {**GEMMA3, "rope_local_base_freq": 900.0},
        r"rope_theta=800.0 .* and rope_local_base_freq=900.0 outside",
    ),
    "base of olmo3": ({**CASES["olmo3"], "rope_theta": 500.0}, r"rope_theta=10000.0 .* and rope_theta=500.0 outside"),
    "factor": ({**LLAMA, "rope_parameters": {**LINEAR, "factor": 2.0}, "rope_scaling": LINEAR}, r"factor=2.0 and 4.0"),
    "kind": ({**LLAMA, "rope_parameters": LINEAR, "rope_scaling": {**LINEAR, "rope_type": "dynamic"}},
             r"rope_type='linear' and 'dynamic'"),
    "base of one spelling": (
        {**lacking(LLAMA, "rope_theta"), "rope_parameters": {**LINEAR, "rope_theta": 500.0}, "rope_scaling": LINEAR},
        r"rope_theta=500.0 and None",
    ),
    "kind by both keys": ({**LLAMA, "rope_scaling": {**LINEAR, "type": "yarn"}}, r"rope_type='linear' and type='yarn'"),
    "share of a head": (
        {**CASES["qwen3_next"], "partial_rotary_factor": 0.25}, r"factor=0.4 .* and partial_rotary_factor=0.25 outside"
    ),
    "original length": (
        {**LLAMA, "rope_scaling": YARN, "original_max_position_embeddings": 32},
        r"original_max_position_embeddings=16 .* and original_max_position_embeddings=32 outside",
    ),
    "options by kind beside those of all": (
        {**GEMMA3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, r"factor=4.0 and 8.0"
    ),
    "options of all layers for two kinds": (
        {**GEMMA3, "rope_parameters": LINEAR}, r"rope_parameters in config.json has 'rope_type', 'factor' for no kind"
    ),
    "options by kind for one": ({**LLAMA, "rope_parameters": TYPED}, r"rope options for 'full_attention', 'slid"),
    "experts": ({**CASES["mixtral"], "num_experts": 7}, r"num_local_experts=5 and num_experts=7"),
    "experts of qwen3_moe": ({**CASES["qwen3_moe"], "num_local_experts": 7}, r"num_experts=5 and num_local_experts=7"),
    "experts of deepseek": ({**CASES["deepseek_v3"], "num_local_experts": 8}, r"experts=8 and n_routed_experts=16"),
    "experts of a token": ({**CASES["gpt_oss"], "experts_per_token": 4}, r"per_tok=2 and experts_per_token=4"),
    "width of gpt2": ({**CASES["gpt2"], "hidden_size": 48}, r"n_embd=24 and hidden_size=48"),
    "kinds of gemma3": (
        {**GEMMA3, "layer_types": ["full_attention"] * 3, "sliding_window_pattern": 2},
        r"layer_types=.* and sliding_window_pattern=2",
    ),
    "kinds of qwen3": (
        {**CASES["qwen3, window"], "layer_types": ["sliding_attention", "full_attention"]}, r"and max_window_layers=1"
    ),
    "kinds with a window that is off": (
        {**CASES["qwen3"], "use_sliding_window": False, "layer_types": ["sliding_attention", "full_attention"]},
        r"windows are switched off",
    ),
    "kinds without a window": (
        {**CASES["ministral, alternating"], "sliding_window": None}, r"windows are switched off"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "named"), TOLD_TWICE.values(), ids=TOLD_TWICE.keys())
def test_what_is_told_twice_in_different_ways_is_refused_by_name(config, named):
    with pytest.raises(ValueError, match=named):
        spec_of(config)


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next"])
def test_the_balancing_loss_has_the_coefficient_of_the_class(family):
    stated = transformers.AutoConfig.for_model(family).router_aux_loss_coef
    config = {**lacking(CASES[family], "router_aux_loss_coef"), "output_router_logits": True}
    assert spec_of(config).balancing.coefficient == stated


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**LLAMA, "attention_dropout": 0.1}, "dropout is left out (attention_dropout=0.1 in config.json)"),
        ({**CASES["gpt2"], "embd_pdrop": 0.0}, ""),
        ({**CASES["gpt2"], "resid_pdrop": 0.2, "attn_pdrop": 0.1}, "(attn_pdrop=0.1, resid_pdrop=0.2 in"),
    ],
)
def test_dropout_that_is_left_out_is_named(config, said):
    assert said in spec_of(config).notice
    assert bool(said) == bool(spec_of(config).notice)


def test_a_notice_of_the_family_is_kept_beside_that_of_dropout():
    config = {**CASES["qwen3_next"], "attention_dropout": 0.5}
    dropout = "dropout is left out (attention_dropout=0.5 in config.json)"
    assert spec_of(config).notice == f"{spec_of(CASES['qwen3_next']).notice}; {dropout}"
