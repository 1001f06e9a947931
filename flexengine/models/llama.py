"""Llama 2, 3, 3.1, 3.2, 3.3 and CodeLlama, and every other checkpoint of Hugging Face type `llama`.

Source: Touvron et al. 2023, "Llama 2"; Dubey et al. 2024, "The Llama 3 Herd of Models"; config fields as in Hugging
Face.
"""

from __future__ import annotations

from flexengine.models.decoder import DecoderShape, decoder_model
from flexengine.models.fields import Fields
from flexengine.models.rope import rope_table
from flexengine.models.sizes import read_activation, read_rms_norm_eps, read_sizes
from flexengine.models.spec import ModelSpec
from flexengine.ops.rmsnorm import NormStyle


def build(name: str, config: dict) -> ModelSpec:
    """Describe the model of a Hugging Face config of type `llama`.

    Raises ValueError if the config asks for something else, or if a field is absent, of a wrong type or out of range.
    """
    fields = Fields(name, config)
    read_activation(fields, "llama")
    sizes, norm = read_sizes(fields), NormStyle(read_rms_norm_eps(fields))
    table = rope_table(config, sizes.head_dim, name, family="llama")
    bias = fields.switch("attention_bias", False)
    block = sizes.block(
        norm,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.switch("mlp_bias", False),
        rope_scaling=table.scaling,
    )
    shape = DecoderShape(
        vocab_size=sizes.vocab_size,
        tie_word_embeddings=fields.switch("tie_word_embeddings", False),
        blocks=(block,) * sizes.num_hidden_layers,
        tables=(table,),
        final_norm=norm,
    )
    return decoder_model(name, "llama", config, shape)
