"""Types of the checkpoints that are trained most, whose decoder differs from Llama's in values alone, each as a row.

Sources: Jiang et al. 2023, "Mistral 7B"; Qwen Team 2024, "Qwen2.5 Technical Report"; 2025, "Qwen3 Technical Report";
Team OLMo 2024, "2 OLMo 2 Furious"; 2025, "OLMo 3"; Abdin et al. 2024, "Phi-3 Technical Report" and "Phi-4 Technical
Report"; Gemma Team 2024, "Gemma 2"; 2025, "Gemma 3 Technical Report"; config fields as in Hugging Face.
"""

from __future__ import annotations

from typing import Any

from flexengine.models.block_shape import BlockNames
from flexengine.models.fields import Fields
from flexengine.models.sizes import FULL, SLIDING, layer_types, read_window
from flexengine.models.variant import (
    Variant,
    all_windows,
    always,
    from_query_scalar,
    last_full_of,
    one_kind,
    root_of_width,
)
from flexengine.ops.rmsnorm import NormStyle
from flexengine.wording import shown

WINDOWS_FROM = 28
"""First layer with a window in a config of Qwen that switches windows on and states none."""
LONGROPE_TYPES = {None: None, "default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}
"""Rope types by the names in configs of Phi-3; early ones say "su" or "yarn" for longrope."""
MISTRAL = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}
QWEN = {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096}
OLMO: dict[str, Any] = {
    "norm": NormStyle(0.0, wide=True), "eps": ("rms_norm_eps", 1e-5), "norms": always("post"), "qk_norm": "row",
    "qkv_bias": "attention_bias", "o_bias": "attention_bias",
}  # fmt: skip
GEMMA: dict[str, Any] = {
    # checkpoints store the weights of norms less 1
    "norm": NormStyle(0.0, offset=1.0, wide=True), "norms": always("both"), "tied": True, "qkv_bias": "attention_bias",
    "o_bias": "attention_bias", "activation": "gelu_pytorch_tanh", "activation_field": "hidden_activation",
    "embedding_scale": root_of_width, "score_scale": from_query_scalar, "logit_cap": True,
    "names": BlockNames(mlp_norm="pre_feedforward_layernorm"),
}  # fmt: skip


def qwen_kinds(fields: Fields, count: int) -> list[str]:
    """Read the kinds of layers where windows, which published configs state and switch off, begin at a layer."""
    if not (fields.switch("use_sliding_window", False) and read_window(fields)):
        return layer_types(fields, count, [FULL] * count, (FULL,))
    stated = fields.whole("max_window_layers", WINDOWS_FROM, least=0)
    full = min(count, stated)
    # transformers writes its default into every config, so that it says nothing beside layer_types.
    older = None if stated == WINDOWS_FROM else "max_window_layers"
    return layer_types(fields, count, [FULL] * full + [SLIDING] * (count - full), older=older)


def longrope_alone(fields: Fields) -> dict:
    """Name the rope type as today's configs do. Raises ValueError for types that Phi-3 does not have."""
    renamed = dict(fields.values)
    for place in ("rope_parameters", "rope_scaling"):
        options = fields.nested(place)
        for spelling in ("rope_type", "type"):
            kind = options.get(spelling)
            if not isinstance(kind, str | None) or kind not in LONGROPE_TYPES:
                raise ValueError(
                    f"{fields.model}: rope type {shown(kind)} in config.json; a phi3 model has none, default or "
                    "longrope, others are not supported"
                )
            options |= {spelling: LONGROPE_TYPES[kind]} if kind else {}
        renamed[place] = options
    return renamed


USUAL: dict[str, Variant] = {
    "mistral": Variant(
        "Mistral 7B, Mistral Nemo, Mistral Small 24B", "sliding window",
        configs_compared=3, defaults=MISTRAL, kinds=all_windows,
    ),
    "ministral": Variant("Ministral", "sliding window in some layers", defaults=MISTRAL, kinds=all_windows),
    "qwen2": Variant(
        "Qwen2, Qwen2.5", "biases on queries, keys and values; windows in upper layers",
        configs_compared=3, defaults=QWEN, qkv_bias=True, kinds=qwen_kinds,
    ),
    "qwen3": Variant(
        "Qwen3 (dense)", "queries and keys normalised head by head",
        configs_compared=3, defaults={**QWEN, "head_dim": 128}, qk_norm="head", qkv_bias="attention_bias",
        o_bias="attention_bias", kinds=qwen_kinds, quantised=("fp8",),
    ),
    "olmo2": Variant(
        "OLMo 2", "norms after attention and FFN, queries and keys normalised by row",
        configs_compared=3, defaults={"max_position_embeddings": 2048}, kinds=one_kind(FULL), **OLMO,
    ),
    "olmo3": Variant(
        "OLMo 3", "as OLMo 2; windows in three layers of four, two rope tables",
        configs_compared=3, defaults={"max_position_embeddings": 2048, "sliding_window": 4096}, theta=5e5,
        window_theta=5e5, typed_ropes=True, kinds=last_full_of(4), **OLMO,
    ),
    "phi3": Variant(
        "Phi-3, Phi-3.5, Phi-4", "fused projections, longrope, a part of each head rotated",
        configs_compared=4, defaults={"max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
        adjusted=longrope_alone, eps=("rms_norm_eps", 1e-5), partial=True, kinds=one_kind(SLIDING),
        names=BlockNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
    ),
    "gemma2": Variant(
        "Gemma 2",
        "GeGLU, norms before and after, weights around zero, soft caps, alternating windows, scaled embedding",
        configs_compared=3,
        defaults={
            "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192, "sliding_window": 4096,
            "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        },
        kinds=last_full_of(2), score_cap=True, **GEMMA,
    ),
    "gemma3_text": Variant(
        "Gemma 3 (text)", "as Gemma 2; normalised queries and keys in place of caps, two rope bases",
        configs_compared=3,
        defaults={
            "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        kinds=last_full_of(6, "sliding_window_pattern"), qk_norm="head", typed_ropes=True, theta=1e6,
        window_theta_field="rope_local_base_freq", **GEMMA,
    ),
}  # fmt: skip
"""Model type -> what it has beside Llama's decoder."""
