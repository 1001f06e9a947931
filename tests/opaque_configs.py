"""Tiny configs of types that run as opaque blocks."""

import json

SIZES = {"vocab_size": 67, "initializer_range": 0.2, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
USUAL = {**SIZES, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
OF_GPT = {**SIZES, "n_embd": 24, "n_head": 4, "n_layer": 2, "n_positions": 64}
CONFIGS = {
    "gpt_neox": {**USUAL, "rotary_pct": 0.5},  # branches side by side, norms with biases
    "gptj": {**OF_GPT, "rotary_dim": 4},  # a bias of the head
    "falcon": {**USUAL, "new_decoder_architecture": True, "num_kv_heads": 2},
    "bloom": {**SIZES, "hidden_size": 24, "n_head": 4, "n_layer": 2},  # ALiBi, a norm after the embedding
    "gpt_neo": {**USUAL, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
                "window_size": 5},  # learned positions, two kinds of layers
    "lfm2": {**USUAL, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "mamba2": {**SIZES, "hidden_size": 24, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 12, "state_size": 8,
               "n_groups": 1, "chunk_size": 16},
    "cohere2_moe": {**USUAL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                    "logit_scale": 0.5},
}  # fmt: skip


WITH_ADAPTERS = {"openai-gpt": OF_GPT}  # weights input by output


def config_of(kind):
    return {"model_type": kind, **(CONFIGS | WITH_ADAPTERS)[kind]}


def folder_with(config, folder):
    (folder / "config.json").write_text(json.dumps(config))
    return folder


RANDOM = {"max_seq_len": 16, "max_global_batch_tokens": 64, "hardware": "cpu-test", "device": "cpu",
          "dtype": "float32", "init": "random"}  # fmt: skip
