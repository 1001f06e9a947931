"""Explains the config of an unknown family: which known family is nearest, and what no known one has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from flexengine.models.sizes import ACTIVATIONS, LAYER_TYPES
from flexengine.wording import did_you_mean, shown

Config = dict[str, Any]

MARKS: dict[str, tuple[str, ...]] = {
    "gpt2": ("n_embd", "n_head", "n_positions"),
    "gemma2": ("query_pre_attn_scalar", "attn_logit_softcapping"),
    "gemma3_text": ("query_pre_attn_scalar", "sliding_window_pattern", "rope_local_base_freq"),
    "phi3": ("original_max_position_embeddings", "resid_pdrop"),
    "qwen2": ("use_sliding_window", "max_window_layers"),
    "mistral": ("sliding_window",),
    "mixtral": ("num_local_experts", "num_experts_per_tok"),
    "gpt_oss": ("num_local_experts", "num_experts_per_tok", "swiglu_limit", "experts_per_token"),
    "olmoe": ("num_experts", "num_experts_per_tok", "norm_topk_prob"),
    "qwen2_moe": ("num_experts", "num_experts_per_tok", "norm_topk_prob", "shared_expert_intermediate_size"),
    "qwen3_moe": ("num_experts", "num_experts_per_tok", "norm_topk_prob", "moe_intermediate_size"),
    "qwen3_next": ("linear_num_key_heads", "linear_conv_kernel_dim", "num_experts", "shared_expert_intermediate_size"),
    "qwen3_5_text": ("linear_num_key_heads", "linear_conv_kernel_dim"),
    "deepseek_v2": ("kv_lora_rank", "qk_rope_head_dim", "n_routed_experts", "n_shared_experts"),
    "deepseek_v3": ("kv_lora_rank", "qk_rope_head_dim", "n_routed_experts", "n_shared_experts", "norm_topk_prob"),
}
"""Fields that are typical of each family; a config with none of them is nearest to `llama`."""


def _any(*fields: str) -> Callable[[Config], bool]:
    return lambda config: any(config.get(field) for field in fields)


def _other_layers(config: Config) -> bool:
    kinds = config.get("layer_types")
    return isinstance(kinds, list) and any(kind not in LAYER_TYPES for kind in kinds)


def _other_activation(config: Config) -> bool:
    named = config.get("hidden_act", config.get("hidden_activation", config.get("activation_function")))
    return isinstance(named, str) and named not in ACTIVATIONS


MISSING: dict[str, Callable[[Config], bool]] = {
    "shared experts": _any("num_shared_experts"),
    "state-space layers": _any("ssm_cfg", "state_size", "mamba_d_state", "conv_kernel", "attn_layer_indices"),
    "layers of other kinds": _other_layers,
    "another activation": _other_activation,
    "ALiBi": _any("alibi"),
    "attention beside the FFN": _any("parallel_attn", "use_parallel_residual", "parallel_block"),
    "scaled residuals or logits": _any(
        "residual_multiplier", "embedding_multiplier", "logits_scaling", "logit_scale", "scale_depth", "scale_emb"
    ),
    "clamped queries, keys and values": _any("clip_qkv"),
    "an encoder": _any("is_encoder_decoder", "encoder_layers"),
    "images or sound": _any("vision_config", "audio_config"),
}
"""Features that no known family has, with tests for the fields that ask for them."""


def nearest_family(family: str, config: Config, known: Iterable[str]) -> str:
    """Find the known family of which the config has most fields; a tie goes to the nearest name."""

    def score(name: str) -> tuple[int, int]:
        marks = sum(field in config for field in MARKS.get(name, ()))
        return marks, len(_common_start(family, name))

    # max takes the first of equals, so llama, which has no marks, comes last.
    names = [name for name in known if name in MARKS] + ["llama"]
    return max(names, key=score)


def _common_start(a: str, b: str) -> str:
    count = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:count]


def unknown_family(model: str, family: Any, config: Config, known: Iterable[str]) -> ValueError:
    """Make the error for a config of an unknown family."""
    known = list(known)
    if not isinstance(family, str):
        return ValueError(
            f"{model}: model_type {shown(family)} in config.json is not supported; known: {', '.join(known)}"
        )
    # A feature is named only if a field asks for it: absent fields say nothing about an unknown architecture.
    missing = [feature for feature, found in MISSING.items() if found(config)]
    lacks = f"; not supported in it: {', '.join(missing)}" if missing else ""
    return ValueError(
        f"{model}: model_type {shown(family)} in config.json is not supported{did_you_mean(family, known)}\n"
        f"  nearest known family: {nearest_family(family, config, known)}{lacks}\n"
        f"  known: {', '.join(known)}"
    )
