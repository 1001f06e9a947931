"""Llama 2, 3, 3.1, 3.2, 3.3 and CodeLlama, and every other checkpoint of Hugging Face type `llama`.

Source: Touvron et al. 2023, "Llama 2"; Dubey et al. 2024, "The Llama 3 Herd of Models"; config fields as in Hugging
Face.
"""

from __future__ import annotations

from flexengine.models.blocks import DecoderShape, decoder_model
from flexengine.models.rope import rope_parameters
from flexengine.models.spec import ModelSpec


def build(name: str, config: dict) -> ModelSpec:
    """The model of a Hugging Face config of type `llama`. Raises ValueError where the config asks for something
    else.
    """
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"{name}: hidden_act={activation!r} in config.json; a llama model has 'silu'")
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    if heads % kv_heads:
        raise ValueError(f"{name}: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
    if head_dim % 2:
        raise ValueError(f"{name}: head_dim={head_dim} is odd; rotary embeddings need an even width")
    rope = rope_parameters(config, head_dim)
    shape = DecoderShape(
        hidden_size=hidden,
        intermediate_size=int(config["intermediate_size"]),
        num_hidden_layers=int(config["num_hidden_layers"]),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=int(config["vocab_size"]),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        rope_scaling_factor=rope.scaling,
    )
    return decoder_model(name, "llama", config, shape, rope.inv_freq)
