"""Mistral 7B and every other checkpoint of Hugging Face type `mistral` or `ministral`: Llama's block, where all layers
(Mistral) or some of them (Ministral) see a window of keys only.

Source: Jiang et al. 2023, "Mistral 7B"; config fields as in Hugging Face.
"""

from __future__ import annotations

from flexengine.models.decoder import DecoderShape, decoder_model
from flexengine.models.fields import Fields
from flexengine.models.rope import rope_table
from flexengine.models.sizes import (
    FULL,
    SLIDING,
    layer_types,
    read_activation,
    read_rms_norm_eps,
    read_sizes,
    read_window,
)
from flexengine.models.spec import ModelSpec
from flexengine.ops.attention.style import CAUSAL, AttentionStyle
from flexengine.ops.rmsnorm import NormStyle


def build(name: str, config: dict) -> ModelSpec:
    """Describe the model of a config of type `mistral` or `ministral`. Raises ValueError as the others do."""
    fields, family = Fields(name, config), config["model_type"]
    read_activation(fields, family)
    sizes, norm, window = read_sizes(fields), NormStyle(read_rms_norm_eps(fields)), read_window(fields)
    table = rope_table(config, sizes.head_dim, name, family=family)
    # Without layer_types all layers have the window, or none has one.
    styles = {FULL: CAUSAL, SLIDING: AttentionStyle(window=window)}
    kinds = layer_types(fields, sizes.num_hidden_layers, [SLIDING if window else FULL] * sizes.num_hidden_layers)
    shape = DecoderShape(
        vocab_size=sizes.vocab_size,
        tie_word_embeddings=fields.switch("tie_word_embeddings", False),
        blocks=tuple(sizes.block(norm, rope_scaling=table.scaling, attention=styles[kind]) for kind in kinds),
        tables=(table,),
        final_norm=norm,
    )
    return decoder_model(name, family, config, shape)
