"""Qwen3-Next (type `qwen3_next`), the text of Qwen3.5, 3.6 and 3.8 (`qwen3_5_text`, with experts `qwen3_5_moe_text`):
linear attention in three layers of four, in the fourth attention with gated output and a part of each head rotated;
norms with weights around zero; a dense FFN, or experts beside a gated one that all tokens share.

Source: Qwen Team 2025, "Qwen3-Next"; Yang et al. 2024, "Gated Delta Networks"; Qiu et al. 2025, "Gated Attention for
Large Language Models"; config fields as in Hugging Face.
"""

from __future__ import annotations

from dataclasses import replace

from flexengine.models.block_shape import ExpertShape
from flexengine.models.decoder import DecoderShape, decoder_model
from flexengine.models.delta_block import DeltaShape
from flexengine.models.fields import Fields
from flexengine.models.moe import check_counts, layers_without_experts, read_balance, refuse_others
from flexengine.models.rope import rope_table
from flexengine.models.sizes import (
    FULL,
    LINEAR,
    layer_types,
    read_activation,
    read_rms_norm_eps,
    read_sizes,
)
from flexengine.models.spec import ModelSpec
from flexengine.ops.rmsnorm import NormStyle

NOTICE = "heads that predict further tokens (mtp), if any, are exported as they are"


def build(name: str, config: dict) -> ModelSpec:
    """Describe the model of a config of one of these types. Raises ValueError as the others do."""
    family = config["model_type"]
    fields, experts, without = Fields(name, config), None, set()
    read_activation(fields, family)
    if family != "qwen3_5_text":
        experts = _experts(fields, family)
        config = {"intermediate_size": experts.width, **config}  # Qwen3.5 lacks it, and has no dense FFN
    sizes = read_sizes(Fields(name, config))
    if family == "qwen3_next":  # only these configs may name layers without experts
        without = layers_without_experts(fields, sizes.num_hidden_layers)
    norm, bias = NormStyle(read_rms_norm_eps(fields), offset=1.0, wide=True), fields.switch("attention_bias", False)
    table = rope_table(config, sizes.head_dim, name, family, partial=True, share=0.25)
    # All layers share these sizes; a layer of linear attention ignores the options of attention.
    block = sizes.block(norm, qk_norm="head", gated=True, qkv_bias=bias, o_bias=bias, rope_scaling=table.scaling)
    mixers = {FULL: None, LINEAR: _delta(fields, norm.eps, family == "qwen3_next")}
    shape = DecoderShape(
        vocab_size=sizes.vocab_size,
        tie_word_embeddings=fields.switch("tie_word_embeddings", False),
        blocks=tuple(
            replace(block, mixer=mixers[kind], experts=None if i in without else experts)
            for i, kind in enumerate(_kinds(fields, sizes.num_hidden_layers))
        ),
        tables=(table,),
        final_norm=norm,
        balance_coefficient=read_balance(fields) if experts else 0.0,
    )
    return replace(decoder_model(name, family, config, shape), notice=NOTICE)


def _kinds(fields: Fields, count: int) -> list[str]:
    """Read `layer_types`; a config without it has full attention in every full_attention_interval-th layer."""
    interval = fields.whole("full_attention_interval", 4)
    default = [LINEAR if (i + 1) % interval else FULL for i in range(count)]
    return layer_types(fields, count, default, (LINEAR, FULL))


def _delta(fields: Fields, eps: float, interleaved: bool) -> DeltaShape:
    keys, values = fields.whole("linear_num_key_heads", 16), fields.whole("linear_num_value_heads", 32)
    if values % keys:
        raise ValueError(
            f"{fields.model}: linear_num_value_heads={values} is not a multiple of linear_num_key_heads={keys}; one of "
            "them is wrong in config.json: fetch the published one again"
        )
    widths = (fields.whole("linear_key_head_dim", 128), fields.whole("linear_value_head_dim", 128))
    return DeltaShape(keys, values, *widths, fields.whole("linear_conv_kernel_dim", 4, least=2), eps, interleaved)


def _experts(fields: Fields, family: str) -> ExpertShape:
    refuse_others(fields)
    count, per_token = (512, 10) if family == "qwen3_next" else (256, 8)
    count, per_token = fields.whole("num_experts", count), fields.whole("num_experts_per_tok", per_token)
    width, shared = fields.whole("moe_intermediate_size"), fields.whole("shared_expert_intermediate_size")
    normalised = family != "qwen3_next" or fields.switch("norm_topk_prob", True)
    experts = ExpertShape(count, per_token, width, normalised, shared)
    check_counts(fields.model, experts)
    return experts
