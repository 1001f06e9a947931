"""Mixtral (type `mixtral`), OLMoE (`olmoe`), Qwen2-MoE (`qwen2_moe`) and Qwen3-MoE (`qwen3_moe`; with images
`qwen3_vl_moe_text`): the attention of their dense relatives and an FFN of many experts, of which a token sees a few; in
Qwen2-MoE one more for all tokens. The Qwen types may have layers with a plain FFN among them.

Source: Jiang et al. 2024, "Mixtral of Experts"; Muennighoff et al. 2024, "OLMoE"; Qwen Team 2025, "Qwen3 Technical
Report"; config fields as in Hugging Face.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flexengine.models.block_shape import BlockNames, ExpertShape
from flexengine.models.decoder import DecoderShape, decoder_model
from flexengine.models.fields import Fields
from flexengine.models.rope import THETA, rope_table
from flexengine.models.sizes import (
    FULL,
    Sizes,
    layer_types,
    read_activation,
    read_rms_norm_eps,
    read_sizes,
    read_window,
)
from flexengine.models.spec import ModelSpec
from flexengine.ops.attention.style import AttentionStyle
from flexengine.ops.rmsnorm import NormStyle
from flexengine.wording import shown

MIXTRAL_THETA = 1e6
BALANCE, OLMOE_BALANCE = 0.001, 0.01
"""Coefficients of the loss that balances experts, for configs that leave them out."""
WITH_IMAGES = "qwen3_vl_moe_text"
OUTPUT_BY_INPUT = "experts_output_by_input"
"""Says of a text with images how a checkpoint holds its experts (`with_images.as_stored`)."""
NAMES = {
    "mixtral": BlockNames(router="block_sparse_moe.gate", experts="block_sparse_moe.experts",
                          expert_gate_up=("w1", "w3"), expert_down="w2"),
    WITH_IMAGES: BlockNames(expert_gate_up=(), expert_down=""),
}  # fmt: skip
"""Names of tensors, where they are others than Llama's."""


def build(name: str, config: dict) -> ModelSpec:
    """Describe the model of a config of one of these types. Raises ValueError as the others do."""
    fields, family = Fields(name, config), config["model_type"]
    read_activation(fields, family)
    refuse_others(fields)
    sizes = read_sizes(fields)
    norm = NormStyle(read_rms_norm_eps(fields, 1e-6 if family.startswith("qwen") else 1e-5))
    theta = MIXTRAL_THETA if family == "mixtral" else THETA
    table = rope_table(config, sizes.head_dim, name, family=family, theta=theta)
    kinds = {"mixtral": _mixtral, "olmoe": _olmoe, "qwen2_moe": _qwen2, "qwen3_moe": _qwen3, WITH_IMAGES: _with_images}
    options = kinds[family](fields, sizes)
    check_counts(name, options["experts"])
    # A layer without experts differs in its FFN alone, which has the config's intermediate_size.
    sparse = sizes.block(norm, rope_scaling=table.scaling, **options)
    dense = replace(sparse, experts=None)
    without = layers_without_experts(fields, sizes.num_hidden_layers) if family.startswith("qwen") else set()
    shape = DecoderShape(
        vocab_size=sizes.vocab_size,
        tie_word_embeddings=fields.switch("tie_word_embeddings", False),
        blocks=tuple(dense if i in without else sparse for i in range(sizes.num_hidden_layers)),
        tables=(table,),
        final_norm=norm,
        names=NAMES.get(family, BlockNames()),
        balance_coefficient=read_balance(fields, OLMOE_BALANCE if family == "olmoe" else BALANCE),
    )
    return decoder_model(name, family, config, shape)


def read_balance(fields: Fields, coefficient: float = BALANCE) -> float:
    """Read the coefficient of the loss that balances experts; 0 if the config does not ask for the loss.

    coefficient: what the config stands for when it leaves the coefficient out.
    """
    # Read and checked even if the loss is off, so that a damaged config does not pass.
    coefficient = fields.number("router_aux_loss_coef", coefficient, high=1e6)
    return coefficient if fields.switch("output_router_logits", False) else 0.0


def check_counts(name: str, experts: ExpertShape) -> None:
    """Raise ValueError if a token has more experts than there are."""
    if experts.per_token > experts.count:
        raise ValueError(
            f"{name}: num_experts_per_tok={experts.per_token} in config.json is more than its {experts.count} experts; "
            "one of them is wrong: fetch the published one again"
        )


def refuse_others(fields: Fields) -> None:
    """Raise ValueError for features that configs with experts can ask for and no op has."""
    asked = {
        "clip_qkv, clamped queries, keys and values": fields.number("clip_qkv", 0.0) > 0,
        "router_jitter_noise, noise before the router": fields.number("router_jitter_noise", 0.0) > 0,
        "use_sliding_window=true, layers with a window": fields.switch("use_sliding_window", False),
    }
    found = [feature for feature, present in asked.items() if present]
    if found:
        raise ValueError(f"{fields.model}: config.json asks for {'; '.join(found)}: not supported with experts")


def layers_without_experts(fields: Fields, count: int) -> set[int]:
    """Find the layers that `mlp_only_layers` names, and all but every decoder_sparse_step-th layer."""
    named, step = fields.values.get("mlp_only_layers") or [], fields.whole("decoder_sparse_step", 1)
    if not isinstance(named, list) or any(type(i) is not int or not 0 <= i < count for i in named):
        raise ValueError(
            f"{fields.model}: mlp_only_layers={shown(named)} in config.json; expected a list of layers, from 0 "
            f"to {count - 1}. Fetch the published config.json again"
        )
    return {i for i in range(count) if i in named or (i + 1) % step}


def _mixtral(fields: Fields, sizes: Sizes) -> dict[str, Any]:
    count = fields.whole("num_local_experts", 8, other="num_experts")
    per_token = fields.whole("num_experts_per_tok", 2)
    experts = ExpertShape(count, per_token, sizes.intermediate_size, normalised=True)
    return {"experts": experts, "attention": AttentionStyle(window=read_window(fields))}


def _olmoe(fields: Fields, sizes: Sizes) -> dict[str, Any]:
    count = fields.whole("num_experts", 64, other="num_local_experts")
    per_token = fields.whole("num_experts_per_tok", 8)
    normalised, bias = fields.switch("norm_topk_prob", False), fields.switch("attention_bias", False)
    experts = ExpertShape(count, per_token, sizes.intermediate_size, normalised)
    return {"experts": experts, "qk_norm": "row", "qkv_bias": bias, "o_bias": bias}


def _qwen2(fields: Fields, sizes: Sizes) -> dict[str, Any]:
    count, per_token = fields.whole("num_experts", 60), fields.whole("num_experts_per_tok", 4)
    width, normalised = fields.whole("moe_intermediate_size", 1408), fields.switch("norm_topk_prob", False)
    shared = fields.whole("shared_expert_intermediate_size", 5632)
    layer_types(fields, sizes.num_hidden_layers, [], (FULL,))  # refuses windows
    experts = ExpertShape(count, per_token, width, normalised, shared)
    return {"experts": experts, "qkv_bias": fields.switch("qkv_bias", True)}


def _qwen3(fields: Fields, sizes: Sizes, count: int = 128) -> dict[str, Any]:
    count = fields.whole("num_experts", count, other="num_local_experts")
    per_token, bias = fields.whole("num_experts_per_tok", 8), fields.switch("attention_bias", False)
    width, normalised = fields.whole("moe_intermediate_size", 768), fields.switch("norm_topk_prob", False)
    experts = ExpertShape(count, per_token, width, normalised)
    return {"experts": experts, "qk_norm": "head", "qkv_bias": bias, "o_bias": bias}


def _with_images(fields: Fields, sizes: Sizes) -> dict[str, Any]:
    options, transposed = _qwen3(fields, sizes, count=60), not fields.switch(OUTPUT_BY_INPUT, False)
    return {**options, "experts": options["experts"]._replace(normalised=True, transposed=transposed)}
