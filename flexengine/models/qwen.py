"""Qwen2, Qwen2.5 (type `qwen2`) and dense Qwen3 (`qwen3`): Llama's block with biases on queries, keys and values, or
with queries and keys normalised head by head; upper layers may see a window of keys only.

Source: Qwen Team 2024, "Qwen2.5 Technical Report"; 2025, "Qwen3 Technical Report"; config fields as in Hugging Face.
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

WINDOWS_FROM = 28
"""First layer with a window in a config that switches windows on and states none."""


def build(name: str, config: dict) -> ModelSpec:
    """Describe the model of a config of type `qwen2` or `qwen3`. Raises ValueError as the others do."""
    fields, family = Fields(name, config), config["model_type"]
    read_activation(fields, family)
    third = family == "qwen3"
    sizes, norm = read_sizes(fields), NormStyle(read_rms_norm_eps(fields))
    table = rope_table(config, sizes.head_dim, name, family=family)
    bias = third and fields.switch("attention_bias", False)
    options = {"qk_norm": "head", "qkv_bias": bias, "o_bias": bias} if third else {"qkv_bias": True}
    styles = {FULL: CAUSAL, SLIDING: AttentionStyle(window=_window(fields))}
    shape = DecoderShape(
        vocab_size=sizes.vocab_size,
        tie_word_embeddings=fields.switch("tie_word_embeddings", False),
        blocks=tuple(
            sizes.block(norm, rope_scaling=table.scaling, attention=styles[kind], **options)
            for kind in _kinds(fields, sizes.num_hidden_layers)
        ),
        tables=(table,),
        final_norm=norm,
    )
    return decoder_model(name, family, config, shape)


def _window(fields: Fields) -> int:
    # Published configs state a window that they switch off.
    return read_window(fields) if fields.switch("use_sliding_window", False) else 0


def _kinds(fields: Fields, count: int) -> list[str]:
    """Read `layer_types`; a config without it has a window from layer `max_window_layers` on."""
    if not _window(fields):
        return layer_types(fields, count, [FULL] * count, (FULL,))
    stated = fields.whole("max_window_layers", WINDOWS_FROM, least=0)
    full = min(count, stated)
    # transformers writes its default into every config, so that it says nothing beside layer_types.
    older = None if stated == WINDOWS_FROM else "max_window_layers"
    return layer_types(fields, count, [FULL] * full + [SLIDING] * (count - full), older=older)
