"""gpt-oss (type `gpt_oss`): experts with biases and clamped gated units, attention with sinks, a window in every other
layer. Published checkpoints hold the experts in MXFP4; these are decoded when they are read.

Source: OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card"; config fields as in Hugging Face.
"""

from __future__ import annotations

from dataclasses import replace

from flexengine.models.block_shape import BlockNames, BlockShape, ExpertShape
from flexengine.models.decoder import DecoderShape, decoder_model
from flexengine.models.fields import Fields
from flexengine.models.moe import check_counts, read_balance, refuse_others
from flexengine.models.rope import rope_table
from flexengine.models.sizes import (
    FULL,
    SLIDING,
    Sizes,
    layer_types,
    read_activation,
    read_rms_norm_eps,
    read_sizes,
    read_window,
)
from flexengine.models.spec import ModelSpec, Table
from flexengine.ops.attention.style import AttentionStyle
from flexengine.ops.glu import ClampedSwiGLU
from flexengine.ops.rmsnorm import NormStyle

THETA = 150000.0
YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
"""Rope options of a config that states none."""
LIMIT, ALPHA = 7.0, 1.702
"""Bound and slope of the clamped gated unit in a config that states none."""


def build(name: str, config: dict) -> ModelSpec:
    """Describe the model of a config of type `gpt_oss`. Raises ValueError as the others do."""
    fields, quantised = Fields(name, config), bool(config.get("quantization_config"))
    read_activation(fields, "gpt_oss")
    refuse_others(fields)
    sizes = read_sizes(fields)
    norm, count = NormStyle(read_rms_norm_eps(fields, 1e-5)), sizes.num_hidden_layers
    table = _table(name, config, sizes.head_dim)
    # Layers alternate, the first one with a window.
    kinds = layer_types(fields, count, [(SLIDING, FULL)[i % 2] for i in range(count)])
    blocks = {kind: _block(fields, sizes, norm, table, kind) for kind in (SLIDING, FULL)}
    shape = DecoderShape(
        vocab_size=sizes.vocab_size,
        tie_word_embeddings=fields.switch("tie_word_embeddings", False),
        blocks=tuple(blocks[kind] for kind in kinds),
        tables=(table,),
        final_norm=norm,
        balance_coefficient=read_balance(fields),
        names=BlockNames(router="mlp.router", expert_decode="mxfp4" if quantised else None),
    )
    spec = decoder_model(name, "gpt_oss", config, shape)
    notice = "the experts' weights are read from MXFP4, and exported in bfloat16 without a quantization_config"
    return replace(spec, notice=notice) if quantised else spec


def _table(name: str, config: dict, head_dim: int) -> Table:
    if config.get("rope_parameters") is None and not config.get("rope_scaling"):
        config = {**config, "rope_parameters": YARN}
    return rope_table(config, head_dim, name, family="gpt_oss", theta=THETA)


def _block(fields: Fields, sizes: Sizes, norm: NormStyle, table: Table, kind: str) -> BlockShape:
    bias = fields.switch("attention_bias", True)
    count = fields.whole("num_experts", 128, other="num_local_experts")
    per_token = fields.whole("num_experts_per_tok", 4, other="experts_per_token")
    experts = ExpertShape(count, per_token, sizes.intermediate_size, normalised=True, stacked=True)
    check_counts(fields.model, experts)
    return sizes.block(
        norm,
        qkv_bias=bias,
        o_bias=bias,
        rope_scaling=table.scaling,
        attention=AttentionStyle(window=read_window(fields) if kind == SLIDING else 0, sinks=True),
        activation=ClampedSwiGLU(fields.number("swiglu_limit", LIMIT), fields.number("swiglu_alpha", ALPHA)),
        experts=experts,
    )
