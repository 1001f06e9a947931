"""OLMo 2 (type `olmo2`) and OLMo 3 (`olmo3`): norms after attention and FFN, within the residual branch, and over all
query and all key heads of a token; OLMo 3 has windows in three layers of four.

Source: Team OLMo 2024, "2 OLMo 2 Furious"; 2025, "OLMo 3"; config fields as in Hugging Face.
"""

from __future__ import annotations

from flexengine.models.block_shape import BlockNames
from flexengine.models.decoder import DecoderShape, decoder_model
from flexengine.models.fields import Fields
from flexengine.models.rope import rope_table, typed_rope_table
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

OLMO3_THETA = 500000.0
"""Base of the rotations in a config that states none."""


def build(name: str, config: dict) -> ModelSpec:
    """Describe the model of a config of type `olmo2` or `olmo3`. Raises ValueError as the others do."""
    fields, family = Fields(name, config), config["model_type"]
    read_activation(fields, family)
    sizes, norm = read_sizes(fields), NormStyle(read_rms_norm_eps(fields, 1e-5), wide=True)
    count, bias = sizes.num_hidden_layers, fields.switch("attention_bias", False)
    # OLMo 2 has one kind of layers; OLMo 3 rotates layers with and without a window by tables of their own.
    kinds = [FULL] * count
    tables = {FULL: rope_table(config, sizes.head_dim, name, family)} if family == "olmo2" else {}
    if family == "olmo3":
        kinds = layer_types(fields, count, [SLIDING if (i + 1) % 4 else FULL for i in range(count)])
        tables = {
            kind: typed_rope_table(config, sizes.head_dim, name, kind, "rope_theta", OLMO3_THETA)
            for kind in (FULL, SLIDING)
        }
    styles = {FULL: CAUSAL, SLIDING: AttentionStyle(window=read_window(fields))}
    shape = DecoderShape(
        vocab_size=sizes.vocab_size,
        tie_word_embeddings=fields.switch("tie_word_embeddings", False),
        blocks=tuple(
            sizes.block(
                norm,
                norms="post",
                qkv_bias=bias,
                o_bias=bias,
                qk_norm="row",
                rope=tables[kind].name,
                rope_scaling=tables[kind].scaling,
                attention=styles[kind],
            )
            for kind in kinds
        ),
        tables=tuple(tables.values()),
        final_norm=norm,
        names=BlockNames(),
    )
    return decoder_model(name, family, config, shape)
