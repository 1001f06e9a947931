"""Types with latent attention whose decoder differs from DeepSeek-V3's in values alone, each as a row.

Sources: the papers and model cards of the checkpoints that the rows name; config fields as in Hugging Face.
"""

from __future__ import annotations

from typing import Any

from flexengine.models.block_shape import BlockNames
from flexengine.models.routed import sigmoid_experts
from flexengine.models.variant import (
    Variant,
    always,
    base_scale,
    depth_scale,
    indexed,
    latent_heads,
    side_by_side,
    times,
)

LATER = "layers that predict further tokens, if any, are not trained: they are exported as they are"
INDEXED = (
    "the indexers, which choose keys in sequences of more than index_topk tokens, are not trained: they are exported as"
    " they are"
)
ROUTED: dict[str, Any] = {
    "adjusted": latent_heads,
    "latent": side_by_side,
    "experts": sigmoid_experts,
    "names": BlockNames(shared="mlp.shared_experts"),
    "refused": {"output_router_logits": "a loss that balances experts"},
}
DSA: dict[str, Any] = {
    **ROUTED, "kinds": indexed, "longest": "index_topk", "beyond": "attention over keys that an indexer chooses",
    "notice": f"{INDEXED}; {LATER}",
}  # fmt: skip
WIDE = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_topk": 2048, "n_shared_experts": 1, "head_dim": 64}

LATENT: dict[str, Variant] = {
    "youtu": Variant(
        "Youtu-LLM 2B", "latent attention with a dense FFN",
        defaults={
            "num_key_value_heads": 16,
            "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "qk_nope_head_dim": 128, "max_position_embeddings": 131072,
        },
        adjusted=latent_heads, latent=side_by_side, tied=True,
    ),
    "minicpm3": Variant(
        "MiniCPM3 4B", "latent attention with a dense FFN; scaled embedding, residuals and logits",
        defaults={
            "num_key_value_heads": 40,
            "kv_lora_rank": 256, "q_lora_rank": 768, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64,
            "max_position_embeddings": 32768, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256,
        },
        adjusted=latent_heads, latent=always(False), tied=True, eps=("rms_norm_eps", 1e-5), mlp_bias="mlp_bias",
        embedding_scale=times("scale_emb", 12.0), residual_scale=depth_scale, logit_scale=base_scale,
    ),
    "glm4_moe_lite": Variant(
        "GLM-4.7-Flash", "latent attention and DeepSeek-V3's experts, after one dense layer",
        defaults={
            "num_key_value_heads": 20,
            "kv_lora_rank": 512, "q_lora_rank": 768, "qk_rope_head_dim": 64, "v_head_dim": 256,
            "qk_nope_head_dim": 192, "max_position_embeddings": 202752, "moe_intermediate_size": 1536,
            "n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 4, "routed_scaling_factor": 1.8,
            "first_k_dense_replace": 1,
        },
        eps=("rms_norm_eps", 1e-5), notice=LATER, renamed={"num_local_experts": "n_routed_experts"}, **ROUTED,
    ),
    "sarvam_mla": Variant(
        "Sarvam 105B", "as DeepSeek-V3, without groups of experts",
        defaults={
            "num_key_value_heads": None,
            "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "qk_nope_head_dim": 128, "max_position_embeddings": 4096, "moe_intermediate_size": 2048,
            "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 1,
        },
        notice=LATER, renamed={"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}, **ROUTED,
    ),
    "deepseek_v32": Variant(
        "DeepSeek-V3.2", "as DeepSeek-V3, in sequences of up to index_topk tokens, where the indexers choose all keys",
        defaults={
            "num_key_value_heads": 128,
            **WIDE, "q_lora_rank": 1536, "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 8, "topk_group": 4,
            "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "n_routed_experts": 256,
            "num_experts_per_tok": 8, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3,
        },
        renamed={"num_experts": "n_routed_experts"}, **DSA,
    ),
    "glm_moe_dsa": Variant(
        "GLM-5, 5.1, 5.2", "as DeepSeek-V3.2, without groups of experts",
        defaults={
            "num_key_value_heads": 64,
            **WIDE, "q_lora_rank": 2048, "v_head_dim": 256, "qk_nope_head_dim": 192, "max_position_embeddings": 202752,
            "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8,
            "routed_scaling_factor": 2.5, "first_k_dense_replace": 3,
        },
        eps=("rms_norm_eps", 1e-5), renamed={"num_experts": "n_routed_experts"}, **DSA,
    ),
}  # fmt: skip
"""Model type -> what it has beside Llama's decoder."""
