"""Granite and types like it, whose decoder differs from Llama's in values alone, each as a row.

Sources: the model cards of the checkpoints that the rows name; config fields as in Hugging Face.
"""

from __future__ import annotations

from typing import Any

from flexengine.models.block_shape import BlockNames
from flexengine.models.routed import granite_experts
from flexengine.models.variant import Variant, both_if, full_every, over, own_scale, times

GRANITE: dict[str, Any] = {
    "qkv_bias": "attention_bias",
    "o_bias": "attention_bias",
    "embedding_scale": times("embedding_multiplier"),
    "residual_scale": times("residual_multiplier"),
    "logit_scale": over("logits_scaling"),
    "score_scale": times("attention_multiplier"),
    "defaults": {"max_position_embeddings": 2048},
}
GRANITE_MOE: dict[str, Any] = {
    **GRANITE,
    "defaults": {"max_position_embeddings": 2048, "num_local_experts": 8, "num_experts_per_tok": 2},
    "experts": granite_experts,
    "balanced": True,
    "names": BlockNames(
        router="block_sparse_moe.router.layer",
        experts="block_sparse_moe",
        experts_fused=("input_linear.weight", "output_linear.weight"),
        expert_gate_up=(),
        expert_down="",
        shared="shared_mlp",
        shared_gate_up=("input_linear",),
        shared_down="output_linear",
    ),
}
SWASH: dict[str, Any] = {"kinds": full_every(4, 0), "sinks": True, "layer_thetas": "layer_rope_theta"}

GRANITES: dict[str, Variant] = {
    "granite": Variant(
        "Granite 3.0 to 3.3, dense 4.0", "scaled embedding, residuals, scores and logits", mlp_bias="mlp_bias",
        **GRANITE
    ),
    "granitemoe": Variant("Granite 3.0 and 3.1 1B-A400M, 3B-A800M", "as granite; experts in one tensor", **GRANITE_MOE),
    "granitemoeshared": Variant("Granite MoE with a shared expert", "as granitemoe; a shared expert", **GRANITE_MOE),
    "hyperclovax": Variant(
        "HyperCLOVA X SEED", "as granite; norms before and after",
        configs_compared=2, defaults={"max_position_embeddings": 2048, "use_post_norm": True},
        norms=both_if("use_post_norm"),
        qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias",
        embedding_scale=times("embedding_multiplier"), residual_scale=times("residual_multiplier"),
        logit_scale=times("logits_scaling"), score_scale=own_scale,
        names=BlockNames(attn_post_norm="post_norm1", mlp_post_norm="post_norm2"),
    ),
    "granite_swa": Variant(
        "Granite Swash 2B", "as granite; windows and sinks, and a base of the rotations for each layer",
        mlp_bias="mlp_bias", **{**GRANITE, **SWASH, "defaults": {
            "num_key_value_heads": 4, "max_position_embeddings": 8192, "sliding_window": 128,
        }}, tied=True, eps=("rms_norm_eps", 1e-5),
    ),
    "granitemoe_swa": Variant(
        "Granite Swash MoE", "as granitemoe; windows and sinks, and a base of the rotations for each layer",
        **{**GRANITE_MOE, **SWASH, "defaults": {**GRANITE_MOE["defaults"], "sliding_window": 128}, "names": BlockNames(
            router="block_sparse_moe.router", experts="block_sparse_moe.experts", expert_gate_up=(), expert_down="",
            shared="shared_mlp", shared_gate_up=("input_linear",), shared_down="output_linear",
        )},
    ),
}  # fmt: skip
"""Model type -> what it has beside Llama's decoder."""
