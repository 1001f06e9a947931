"""Damaged or unsuitable config.json, folders that are no models, and names that do not exist."""

import json

import pytest
from provoke import CONFIG, Case, arguments, cases, check_message, check_python_face

from flexengine.models.fields import LARGEST
from flexengine.models.registry import MAX_CONFIG_BYTES

LONGROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}
DEEPSEEK = {
    "model_type": "deepseek_v3", "num_key_value_heads": None, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2,
    "v_head_dim": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
    "num_experts_per_tok": 2, "moe_intermediate_size": 8,
}  # fmt: skip
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def text(contents: str | bytes):
    """config.json holds this."""
    return lambda f: (f / "config.json").write_bytes(contents.encode() if isinstance(contents, str) else contents)


def without(name: str):
    return text(json.dumps({key: value for key, value in CONFIG.items() if key != name}))


LLAMA_NAMES = dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"))
GPT2 = {"model_type": "gpt2", **LLAMA_NAMES, "n_embd": 16, "n_layer": 1}


def having(**changes: object):
    return text(json.dumps({**CONFIG, **changes}))


def wrong(name: str, value: object, found: str, allowed: str | None = None) -> Case:
    """A field with a value that its type or range forbids."""
    allowed = allowed or f"expected a whole number from 1 to {LARGEST[name]}"
    kind = "".join(c if c.isalnum() else "_" for c in found)[:24]
    return Case(f"{name}_is_{kind}", having(**{name: value}), (f"{name}={found} in", allowed, "fetch"))


CONFIGS = (
    Case(
        "config_missing", lambda f: (f / "config.json").unlink(), ("no config.json \\(found model-0", "give the folder")
    ),
    Case("config_no_json", text("{'model_type'"), ("config.json: not valid JSON.*column 2", "fetch")),
    Case("config_empty", text(""), ("config.json: not valid JSON", "fetch")),
    Case("config_no_text", text(b"\xff\xfe\x00"), ("config.json: not valid JSON: no UTF-8 text at byte 0", "fetch")),
    Case("config_nested_too_deep", text("[" * 100000), ("nested too deep", "fetch")),
    Case(
        "config_with_a_number_of_5000_digits",
        text('{"a": ' + "9" * 5000 + "}"),
        ("config.json.*more than 4300 digits", "fetch"),
    ),
    Case("config_is_a_list", text("[]"), ("config.json holds a list, expected an object of fields; fetch",)),
    Case(
        "config_of_many_MiB",
        text(b" " * (MAX_CONFIG_BYTES + 1)),
        (f"{MAX_CONFIG_BYTES + 1} bytes, a config at most {MAX_CONFIG_BYTES}", "fetch"),
    ),
    *(
        Case(f"config_without_{name}", without(name), (f"lacks the field '{name}' \\(it is absent\\)", "fetch"))
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    ),
    Case("config_with_null", having(hidden_size=None), ("lacks the field 'hidden_size' \\(it is null\\)",)),
    wrong("hidden_size", "16", "'16'"),
    wrong("hidden_size", 16.5, "16.5"),
    wrong("hidden_size", -16, "-16"),
    wrong("hidden_size", 10**12, "1000000000000"),
    wrong("intermediate_size", True, "True"),
    wrong("num_hidden_layers", 0, "0"),
    wrong("num_hidden_layers", 10**9, "1000000000"),
    wrong("vocab_size", [61], "\\[61\\]"),
    wrong("num_key_value_heads", {"a": 1}, "{'a': 1}"),
    wrong("head_dim", float("nan"), "nan"),
    wrong("max_position_embeddings", 2**31, "2147483648"),
    wrong("rms_norm_eps", float("inf"), "inf", "expected a number from 0 to 1"),
    wrong("rms_norm_eps", -1e-5, "-1e-05", "expected a number from 0 to 1"),
    wrong("rope_theta", 0.5, "0.5", "expected a number from 1.001 to 1e\\+30"),
    wrong("rope_theta", 1e300, "1e\\+300", "expected a number from 1.001 to 1e\\+30"),
    wrong("tie_word_embeddings", "yes", "'yes'", "expected true or false"),
    wrong("rope_scaling", 4.0, "4.0", "expected an object or null"),
    wrong("hidden_act", 3, "3", "expected a text"),
    Case(
        "sizes_that_are_allowed_alone_but_not_together",
        having(hidden_size=2**18, intermediate_size=2**20, num_hidden_layers=1024, vocab_size=2**24),
        ("come to \\d+ parameters, more than the 8796093022208", "hidden_size=262144, num_hidden_layers=1024"),
    ),
    Case(
        "heads_that_do_not_divide_the_width", having(num_attention_heads=3), ("hidden_size=16.*num_attention_heads=3",)
    ),
    Case(
        "heads_that_do_not_divide",
        having(num_attention_heads=4, num_key_value_heads=3),
        ("num_attention_heads=4 is not a multiple of num_key_value_heads=3",),
    ),
    Case("odd_heads", having(head_dim=5), ("head_dim=5 is odd.*even", "Correct head_dim")),
    Case("activation_of_another_family", having(hidden_act="gelu"), ("hidden_act='gelu'.*'silu'",)),
    Case("activation_of_5000_letters", having(hidden_act="x" * 5000), ("hidden_act='xxx.*\\.\\.\\.xxx.*'silu'",)),
    Case(
        "unknown_family",
        having(model_type="dbrx", clip_qkv=8, sliding_window=7),
        ("model_type 'dbrx'", "missing: clamped queries, keys and values", "flexengine models lists"),
    ),
    Case(
        "opaque_blocks_that_do_not_run",
        having(model_type="gpt_neox", num_attention_heads=5),
        ("model_type 'gpt_neox'", "nor does it run as opaque blocks", "flexengine models lists"),
    ),
    Case(
        "code_of_its_own",
        having(model_type="own", auto_map={"AutoModelForCausalLM": "own.Model"}),
        ("brings code of its own", "own.py", "give --trust-remote-code"),
    ),
    Case(
        "model_for_another_task",
        having(architectures=["LlamaForQuestionAnswering"]),
        ("architectures=\\['LlamaForQuestionAnswering'\\]", "for question answering", "predicts tokens"),
    ),
    Case(
        "sequence_beyond_learned_positions",
        having(**GPT2, n_head=2, n_positions=4),
        ("max_seq_len=[0-9]+, but .* has learned positions for 4 tokens.*give --max-seq-len 4",),
    ),
    Case(
        "embedding_model",
        lambda f: (f / "modules.json").write_text('[{"idx": 1, "type": "sentence_transformers.models.Pooling"}]'),
        ("modules.json names 'sentence_transformers.models.Pooling'", "an embedding model", "remove modules.json"),
    ),
    Case(
        "layers_of_another_kind", having(model_type="ministral", layer_types=["mamba"]), ("layer_types=\\['mamba'\\]",)
    ),
    Case(
        "value_heads_that_do_not_divide",
        having(model_type="qwen3_5_text", linear_num_key_heads=3, linear_num_value_heads=4),
        ("linear_num_value_heads=4 is not a multiple of linear_num_key_heads=3", "fetch"),
    ),
    Case(
        "gpt2_of_odd_heads",
        having(**GPT2, n_head=3),
        ("n_embd=16 is not a multiple of n_head=3", "fetch"),
    ),
    Case(
        "gpt2_with_cross_attention",
        having(**GPT2, n_head=2, add_cross_attention=True),
        ("add_cross_attention=true in config.json", "not supported"),
    ),
    Case(
        "rope_type_of_another_family",
        having(model_type="phi3", rope_scaling={"rope_type": "linear", "factor": 2.0}),
        ("rope type 'linear' in config.json; a phi3 model has none, default or longrope",),
    ),
    Case(
        "balanced_experts",
        having(**DEEPSEEK, output_router_logits=True),
        ("config.json asks for output_router_logits=true, a loss that balances experts: not supported in",),
    ),
    Case(
        "more_experts_of_a_token_than_there_are",
        having(model_type="mixtral", num_local_experts=4, num_experts_per_tok=5),
        ("num_experts_per_tok=5 in config.json is more than its 4 experts", "fetch"),
    ),
    Case(
        "layers_without_experts_that_there_are_not",
        having(model_type="qwen3_moe", num_key_value_heads=None, mlp_only_layers=[99]),
        ("mlp_only_layers=\\[99\\] in config.json; expected a list of layers, from 0 to [0-9]+", "Fetch"),
    ),
    Case(
        "groups_of_experts_that_hold_too_few",
        having(**DEEPSEEK | {"num_experts_per_tok": 5}),
        ("n_routed_experts=8, n_group=4, topk_group=2 and num_experts_per_tok=5.*do not go together", "Fetch"),
    ),
    Case(
        "another_choice_of_experts",
        having(**DEEPSEEK | {"topk_method": "greedy"}),
        ("config.json asks for topk_method='greedy': not supported in a deepseek_v3 model",),
    ),
    Case(
        "values_wider_than_keys",
        having(**DEEPSEEK | {"v_head_dim": 7}),
        ("v_head_dim=7 in config.json is more than the 6 of", "not supported"),
    ),
    Case("an_odd_rotated_part", having(**DEEPSEEK | {"qk_rope_head_dim": 3}), ("qk_rope_head_dim=3.*is odd", "Fetch")),
    Case(
        "grouped_keys_of_a_latent",
        having(**DEEPSEEK | {"num_key_value_heads": 1}),
        ("num_key_value_heads=1 in config.json; latent attention has as many as num_attention_heads", "Fetch"),
    ),
    Case(
        "fp8_in_other_blocks",
        having(**DEEPSEEK, quantization_config={**FP8, "weight_block_size": [64, 64]}),
        ("weight_block_size=\\[64, 64\\].*read in blocks of \\[128, 128\\]", "16 bits that it was made from"),
    ),
    Case(
        "both_ways_of_attention",
        having(model_type="gemma2", use_bidirectional_attention=True),
        ("use_bidirectional_attention=true", "Give a model without it"),
    ),
    Case("no_causal_attention", having(is_causal=False), ("is_causal=false in", "Give a model without it")),
    Case(
        "both_ways_of_attention_of_the_text",
        having(model_type="gemma3", text_config={"use_bidirectional_attention": True}),
        ("use_bidirectional_attention=true", "Give a model without it"),
    ),
    Case(
        "keys_of_other_layers",
        having(model_type="gemma4_text", num_kv_shared_layers=1, hidden_size_per_layer_input=8),
        ("num_kv_shared_layers=1 .*hidden_size_per_layer_input=8 .*in config.json", "such as 12B, 31B or 26B-A4B"),
    ),
    Case(
        "sizes_by_layer_that_differ",
        having(model_type="gemma4_unified_text", sliding_window=8, per_layer_config={"0": {"head_dim": 16}}),
        ("per_layer_config=.* expected head_dim and perhaps num_key_value_heads", "Fetch the published"),
    ),
    Case(
        "rope_options_twice",
        having(rope_parameters={"rope_theta": 5e5}, rope_scaling={"9" * 5000: 1.0, "rope_type": "linear"}),
        ("rope_parameters and rope_scaling, which differ \\(.{1,200}\\), and", "set rope_scaling to null"),
    ),
    Case(
        "rope_type_is_no_number",
        having(rope_scaling={"rope_type": float("nan"), "factor": 4.0}),
        ("rope type nan in config.json is not supported", "supported: "),
    ),
    Case(
        "base_of_rotations_twice",
        having(rope_theta=10000.0, rope_parameters={"rope_theta": 500000.0}),
        ("rope_theta=500000.0 in its rope options and rope_theta=10000.0 outside of them", "Remove the wrong one"),
    ),
    Case(
        "number_of_experts_twice",
        having(model_type="mixtral", num_local_experts=4, num_experts=8),
        ("num_local_experts=4 and num_experts=8, which say the same thing in different ways", "Remove the wrong one"),
    ),
    Case(
        "windows_between_experts",
        having(model_type="qwen2_moe", layer_types=["sliding_attention"] * CONFIG["num_hidden_layers"]),
        ("layer_types=.*each full_attention", "Fetch"),
    ),
    Case(
        "longrope_of_few_factors", having(rope_scaling=LONGROPE), ("short_factor=\\[1.0\\].*a list of [0-9]+ numbers",)
    ),
    Case("family_missing", without("model_type"), ("model_type None.*flexengine models lists",)),
    Case("family_is_a_list", having(model_type=["llama"]), ("model_type \\['llama'\\].*flexengine models lists",)),
    Case(
        "quantised_weights",
        having(quantization_config={"quant_method": "awq", "bits": 4}, intermediate_size=96),  # not those of the file
        ("quantization_config \\(method 'awq'\\)", "16 or 32 bits that it was made from"),
    ),
    Case(
        "mxfp4_of_an_odd_width",
        having(model_type="gpt_oss", quantization_config={"quant_method": "mxfp4"}),
        ("MXFP4 holds stacks of matrices whose 32 inputs share a scale.*\\[128, 16, 48\\]", "in 16 or 32 bits"),
    ),
    Case("unknown_rope_type", having(rope_scaling={"rope_type": "dynamo"}), ("rope type 'dynamo'", "supported: def")),
    Case("misspelt_rope_type", having(rope_scaling={"type": "lama3"}), ("rope type 'lama3'.*did you mean llama3",)),
    Case(
        "rope_without_factor",
        having(rope_scaling={"rope_type": "linear"}),
        ("rope options.*lacks the field 'factor'", "fetch"),
    ),
    Case(
        "rope_bands_the_wrong_way_round",
        having(rope_scaling={**LLAMA3, "low_freq_factor": 4.0, "original_max_position_embeddings": 64}),
        ("low_freq_factor=4 must be below high_freq_factor=4",),
    ),
    Case("rope_factor_of_zero", having(rope_scaling={"rope_type": "yarn", "factor": 0}), ("factor=0 in the rope",)),
    Case("partly_rotated_heads", having(partial_rotary_factor=0.5), ("rotates 4 of head_dim=8", "all of it", "Fetch")),
)


@cases(*CONFIGS)
def test_config(case, model, command, tmp_path):
    case.provoke(model)
    outcome = command("train", *arguments(model=model, output_dir=tmp_path / "run"))
    assert outcome.status == case.status
    check_message(outcome.err, case.says)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("case", CONFIGS[::6], ids=lambda case: case.name)
def test_python_face(case, model):
    check_python_face(case, model)


NAMES = (
    Case("no_such_folder", "nowhere", ("model nowhere: no such folder", "an id on the hub", "preset:demo")),
    Case(
        "hub_model_without_a_network",
        "meta-llama/Llama-3.1-8B",
        (
            "no such folder, and not to be had from the hub",
            "HF_HUB_OFFLINE",
            "preset:llama-3.1-8b is its shape with random",
        ),
    ),
    Case("preset_without_its_prefix", "llama-3.2-1b", ("did you mean preset:llama-3.2-1b\\?",)),
    Case(
        "misspelt_preset", "preset:lama-3.1-8b", ("unknown preset 'lama-3.1-8b'; did you mean llama-3.1-8b\\?", "demo")
    ),
    Case("preset_that_is_a_path", "preset:../../secret", ("unknown preset '../../secret'; known presets: demo",)),
    Case("empty_folder", "empty", ("model folder empty has no config.json \\(found nothing\\)",)),
    Case("name_of_900_letters", "x" * 900, ("File name too long|no such folder",)),
)


@cases(*NAMES)
def test_model_names(case, command, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    outcome = command("train", *arguments(model=case.provoke))
    assert outcome.status == case.status
    check_message(outcome.err, case.says)


def test_file_in_place_of_a_folder(model, command):
    outcome = command("train", *arguments(model=model / "config.json"))
    assert outcome.status == 2
    check_message(outcome.err, ("config.json is a file; give the folder",))
