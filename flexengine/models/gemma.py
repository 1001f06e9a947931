"""Gemma 2 (type `gemma2`) and Gemma 3 (`gemma3_text`): norms before and after each branch, with weights stored around
zero; GeGLU; an embedding scaled by sqrt(hidden_size); windows in most layers. Gemma 2 bounds scores and logits; Gemma 3
normalises queries and keys, and rotates them at another base where a layer has a window.

Source: Gemma Team 2024, "Gemma 2"; 2025, "Gemma 3 Technical Report"; config fields as in Hugging Face.
"""

from __future__ import annotations

import math

from flexengine.models.block_shape import BlockNames, BlockShape
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
from flexengine.models.spec import ModelSpec, Table
from flexengine.ops.attention.style import AttentionStyle
from flexengine.ops.rmsnorm import NormStyle

NAMES = BlockNames(mlp_norm="pre_feedforward_layernorm")


def build(name: str, config: dict) -> ModelSpec:
    """Describe the model of a config of type `gemma2` or `gemma3_text`. Raises ValueError as the others do."""
    fields, family = Fields(name, config), config["model_type"]
    activation = read_activation(fields, family, "hidden_activation", "gelu_pytorch_tanh")
    second, sizes = family == "gemma2", read_sizes(fields)
    # Every `pattern`-th layer has full attention: every second one in Gemma 2, by default every sixth in Gemma 3.
    pattern = 2 if second else fields.whole("sliding_window_pattern", 6)
    older = None if second else "sliding_window_pattern"
    count, tables = sizes.num_hidden_layers, _tables(config, sizes.head_dim, name, second)
    default = [SLIDING if (i + 1) % pattern else FULL for i in range(count)]
    # Checkpoints store the weights of norms less 1.
    norm = NormStyle(read_rms_norm_eps(fields), offset=1.0, wide=True)
    bias = fields.switch("attention_bias", False)

    def block(kind: str) -> BlockShape:
        return sizes.block(
            norm,
            norms="both",
            qkv_bias=bias,
            o_bias=bias,
            qk_norm=None if second else "head",
            rope=tables[kind].name,
            rope_scaling=tables[kind].scaling,
            attention=_style(fields, kind, second),
            activation=activation,
        )

    blocks = {kind: block(kind) for kind in (FULL, SLIDING)}
    shape = DecoderShape(
        vocab_size=sizes.vocab_size,
        tie_word_embeddings=fields.switch("tie_word_embeddings", True),
        blocks=tuple(blocks[kind] for kind in layer_types(fields, count, default, older=older)),
        tables=tuple(dict.fromkeys(tables.values())),  # each once: Gemma 2 has the same table twice
        final_norm=norm,
        embedding_scale=math.sqrt(sizes.hidden_size),
        logit_soft_cap=fields.number("final_logit_softcapping", 0.0),
        names=NAMES,
    )
    return decoder_model(name, family, config, shape)


def _style(fields: Fields, kind: str, second: bool) -> AttentionStyle:
    scale = fields.number("query_pre_attn_scalar", 256.0, low=1e-3) ** -0.5
    soft_cap = fields.number("attn_logit_softcapping", 0.0) if second else 0.0
    return AttentionStyle(scale, read_window(fields) if kind == SLIDING else 0, soft_cap)


def _tables(config: dict, head_dim: int, name: str, second: bool) -> dict[str, Table]:
    """Give the frequencies of each layer type; Gemma 2 has one table for both."""
    if second:
        return dict.fromkeys((FULL, SLIDING), rope_table(config, head_dim, name, "gemma2"))
    thetas = {FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)}
    return {kind: typed_rope_table(config, head_dim, name, kind, *theta) for kind, theta in thetas.items()}
