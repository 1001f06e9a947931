"""Llama 2, 3, 3.1, 3.2, 3.3 and CodeLlama, and every other checkpoint of Hugging Face type `llama`.

Source: Touvron et al. 2023, "Llama 2"; Dubey et al. 2024, "The Llama 3 Herd of Models"; config fields as in Hugging
Face.
"""

from __future__ import annotations

from flexengine.models.blocks import DecoderShape, decoder_model
from flexengine.models.fields import Fields
from flexengine.models.rope import rope_parameters
from flexengine.models.spec import ModelSpec
from flexengine.wording import shown


def build(name: str, config: dict) -> ModelSpec:
    """The model of a Hugging Face config of type `llama`. Raises ValueError where the config asks for something
    else, or where a field is absent, of a wrong type or out of range.
    """
    fields = Fields(name, config)
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(
            f"{name}: hidden_act={shown(activation)} in config.json; a llama model has 'silu', others are not supported"
        )
    heads, hidden = fields.whole("num_attention_heads"), fields.whole("hidden_size")
    kv_heads, head_dim = fields.whole("num_key_value_heads", heads), _head_dim(fields, heads, hidden)
    if heads % kv_heads:
        raise ValueError(
            f"{name}: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}; one of them is "
            "wrong in config.json: fetch the published one again"
        )
    rope = rope_parameters(config, head_dim, name)
    if 2 * len(rope.inv_freq) != head_dim:
        raise ValueError(
            f"{name}: partial_rotary_factor in config.json rotates {2 * len(rope.inv_freq)} of head_dim={head_dim}; "
            "a llama model rotates all of it. Fetch the published config.json again"
        )
    shape = DecoderShape(
        hidden_size=hidden,
        intermediate_size=fields.whole("intermediate_size"),
        num_hidden_layers=fields.whole("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=fields.whole("vocab_size"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6, high=1.0),
        tie_word_embeddings=fields.switch("tie_word_embeddings", False),
        attention_bias=fields.switch("attention_bias", False),
        mlp_bias=fields.switch("mlp_bias", False),
        rope_scaling_factor=rope.scaling,
    )
    return decoder_model(name, "llama", config, shape, rope.inv_freq)


def _head_dim(fields: Fields, heads: int, hidden: int) -> int:
    """Width of a head: stated, or an equal share of hidden_size."""
    head_dim = fields.whole("head_dim", None)
    if head_dim is None and hidden % heads:
        raise ValueError(
            f"{fields.model}: hidden_size={hidden} is not a multiple of num_attention_heads={heads}, and config.json "
            "has no head_dim; one of the three is wrong"
        )
    head_dim = head_dim or hidden // heads
    if head_dim % 2:
        raise ValueError(
            f"{fields.model}: head_dim={head_dim} is odd; rotary embeddings need an even width. Correct head_dim in "
            f"config.json, or hidden_size={hidden} and num_attention_heads={heads} that it follows from"
        )
    return head_dim
