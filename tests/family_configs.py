"""Tiny configs of every family: odd sizes, and each option of the family in one of them at least."""

from typing import Any

from engine_helpers import tiny_config

LONGROPE = {"type": "longrope", "short_factor": [1.1, 1.2, 1.5], "long_factor": [2.0, 3.5, 7.0]}
GEMMA = {"tie_word_embeddings": True, "num_hidden_layers": 3}
PARTIAL = {"rope_type": "default", "partial_rotary_factor": 0.67}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}


def config(model_type: str, **changes: Any) -> dict:
    """A tiny config without Llama's own fields, which others read differently."""
    common = {k: v for k, v in tiny_config().items() if k not in ("hidden_act", "rope_theta", "model_type")}
    return {"model_type": model_type, **common, "pad_token_id": None, **changes}


def gemma3(**changes: Any) -> dict:
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 800.0},
    }
    options = {"sliding_window": 7, "query_pre_attn_scalar": 9, "rope_parameters": ropes, **GEMMA}
    return config("gemma3_text", **{**options, **changes})


def gemma4(kind: str = "gemma4_text", **changes: Any) -> dict:
    """Of three layers the second and the third have no window, and heads of another width."""
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    options = {"sliding_window": 7, "layer_types": kinds, "global_head_dim": 12, "hidden_size_per_layer_input": 0}
    return config(kind, **{**options, **GEMMA, **changes})


def gemma2(**changes: Any) -> dict:
    caps = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}
    return config("gemma2", **{"sliding_window": 7, "query_pre_attn_scalar": 11, **caps, **GEMMA, **changes})


def olmo3(**changes: Any) -> dict:
    ropes = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    options = {"sliding_window": 5, "num_hidden_layers": 5, "rope_parameters": ropes}
    return without_head_dim(config("olmo3", **{**options, **changes}))


def lacking(values: dict, *names: str) -> dict:
    return {name: value for name, value in values.items() if name not in names}


def without_head_dim(values: dict) -> dict:
    return lacking(values, "head_dim")


def phi3(**changes: Any) -> dict:
    return without_head_dim(config("phi3", **changes))


def gpt2(**changes: Any) -> dict:
    common = {"n_embd": 24, "n_layer": 2, "n_head": 4, "vocab_size": 67, "n_positions": 60, "initializer_range": 0.2}
    ends = {"bos_token_id": None, "eos_token_id": None}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return {"model_type": "gpt2", **common, **ends, **dropouts, **changes}


def experts(model_type: str, **changes: Any) -> dict:
    counts = {"num_local_experts": 5} if model_type in ("mixtral", "gpt_oss") else {"num_experts": 5}
    own = {"moe_intermediate_size": 12} if model_type.startswith("qwen") else {}  # torch's products want 16 bytes
    ends = {"bos_token_id": None, "eos_token_id": None}
    return config(model_type, **{**counts, "num_experts_per_tok": 2, **own, **ends, **changes})


def qwen_next(model_type: str, **changes: Any) -> dict:
    """Of three layers the last has full attention; rotated are 4 of 10 columns. eps is large, and so are weights: the
    norm of what a first token gives would magnify the rounding of transformers in float32 a thousandfold."""
    common = config(model_type) if model_type == "qwen3_5_text" else experts(model_type)
    linear = {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5,
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.4}
    shared = {} if model_type == "qwen3_5_text" else {"shared_expert_intermediate_size": 12}
    sizes = {"num_hidden_layers": 3, "full_attention_interval": 3, "head_dim": 10, "rope_parameters": rope}
    ends = {"bos_token_id": None, "eos_token_id": None, "rms_norm_eps": 1e-2, "initializer_range": 0.3}
    return {**common, **linear, **sizes, **shared, **ends, **changes}


LINEAR_ONLY = {"layer_types": ["linear_attention"] * 2, "num_hidden_layers": 2}
FULL_ONLY = {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}


def gpt_oss(**changes: Any) -> dict:
    """The limit is so low that many a gate and factor is clamped."""
    rope = {**YARN, "truncate": False, "rope_theta": 700.0}
    own = {"sliding_window": 7, "swiglu_limit": 0.9, "num_hidden_layers": 3, "rope_parameters": rope}
    return experts("gpt_oss", **{**own, **changes})


def deepseek(version: int, **changes: Any) -> dict:
    """Heads of 6 + 4 columns for queries and keys, 8 for values; experts in all layers. transformers wants an even
    kv_lora_rank."""
    heads = {"num_key_value_heads": 4, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}
    ranks = {"q_lora_rank": 11, "kv_lora_rank": 14}
    counts = {"n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 12}
    groups = {"n_routed_experts": 16, "n_group": 4, "topk_group": 2} if version == 3 else {}
    own = {**heads, **ranks, **counts, **groups, "first_k_dense_replace": 0, "bos_token_id": None, "eos_token_id": None}
    return without_head_dim(config(f"deepseek_v{version}", **{**own, **changes}))


def variant(model_type: str, **changes: Any) -> dict:
    """Of a type with a row: its own names of sizes where these differ; ends that its config class does not allow to be
    absent."""
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    return config(model_type, **{**ends, **changes})


def routed(model_type: str, **changes: Any) -> dict:
    """With five experts, of which a token has two, in the second layer of two."""
    counts = {"n_routed_experts": 5, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    return variant(model_type, **{**counts, "first_k_dense_replace": 1, **changes})


ROUTED = (
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "first_k_dense_replace",
)


def latent(model_type: str, **changes: Any) -> dict:
    """With the heads of DeepSeek's tiny configs, and five experts in the second layer of two where it has experts."""
    heads = {"num_key_value_heads": 4, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}
    return without_head_dim(routed(model_type, **{**heads, "q_lora_rank": 11, "kv_lora_rank": 14, **changes}))


def mamba(model_type: str, **changes: Any) -> dict:
    """Four Mamba-2 heads in two groups; of the layers the second has attention in most of these configs. eps is large,
    as in `qwen_next`."""
    sizes = {"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 6, "mamba_chunk_size": 8, "rms_norm_eps": 1e-2}
    return without_head_dim(variant(model_type, **{**sizes, **changes}))


def nemotron_h(kinds: list[str], **changes: Any) -> dict:
    """Mamba-2 heads whose width is no multiple of the model's."""
    sizes = {"mamba_num_heads": 4, "mamba_head_dim": 5, "n_groups": 2, "ssm_state_size": 6, "chunk_size": 8}
    own = {"layers_block_type": kinds, "layer_norm_epsilon": 1e-2, "head_dim": 10, "rescale_prenorm_residual": False}
    values = variant("nemotron_h", **{**sizes, **own, "num_hidden_layers": len(kinds), **changes})
    return lacking(values, "rms_norm_eps")


INDEXED = {"index_topk": 64, "index_n_heads": 2, "index_head_dim": 8}
GRANITE = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.5, "attention_multiplier": 0.3,
}  # fmt: skip
GROUPS = {"n_routed_experts": 16, "n_group": 4, "topk_group": 2}
WINDOWS = {"sliding_window": 7, "num_hidden_layers": 4}

CASES: dict[str, dict] = {
    "mistral, window": config("mistral", sliding_window=9),
    "mistral, no window": config("mistral", sliding_window=None, head_dim=10, tie_word_embeddings=True),
    "mistral, window of two": config("mistral", sliding_window=2, num_key_value_heads=4),
    "ministral, alternating": config(
        "ministral", sliding_window=6, layer_types=["sliding_attention", "full_attention"], hidden_size=33
    ),
    "qwen2": config("qwen2", use_sliding_window=False, tie_word_embeddings=True),
    "qwen2, upper layers with a window": config(
        "qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1, num_hidden_layers=3
    ),
    "qwen2, multi-query": config("qwen2", num_key_value_heads=1, intermediate_size=37, vocab_size=71),
    "qwen3": config("qwen3"),
    "qwen3, biases, tied": config("qwen3", attention_bias=True, tie_word_embeddings=True, head_dim=10),
    "qwen3, window": config(
        "qwen3", use_sliding_window=True, sliding_window=3, max_window_layers=1, num_key_value_heads=1
    ),
    "gemma2": gemma2(),
    "gemma2, wide heads, untied": gemma2(head_dim=16, tie_word_embeddings=False, num_hidden_layers=2),
    "gemma2, without caps": gemma2(attn_logit_softcapping=None, final_logit_softcapping=None, intermediate_size=37),
    "gemma3": gemma3(),
    "gemma3, capped logits": gemma3(
        final_logit_softcapping=5.0, num_key_value_heads=1, head_dim=8, sliding_window_pattern=2
    ),
    "gemma3, biases, types": gemma3(attention_bias=True, layer_types=["full_attention"] * 2 + ["sliding_attention"]),
    "gemma4_text": gemma4(attention_k_eq_v=True, num_global_key_value_heads=1, final_logit_softcapping=5.0),
    "gemma4_text, experts": gemma4(
        enable_moe_block=True, num_experts=5, top_k_experts=2, moe_intermediate_size=12, attention_k_eq_v=True
    ),
    "gemma4_text, biases, untied": gemma4(
        attention_bias=True,
        tie_word_embeddings=False,
        use_bidirectional_attention="vision",
        per_layer_config={"1": {"head_dim": 10}, "2": {"head_dim": 10}},
    ),
    "gemma4_unified_text": lacking(
        gemma4("gemma4_unified_text", num_hidden_layers=7), "layer_types", "hidden_size_per_layer_input"
    ),
    "olmo2": without_head_dim(config("olmo2")),
    "olmo2, biases, tied": without_head_dim(config("olmo2", attention_bias=True, tie_word_embeddings=True)),
    "olmo2, multi-query": without_head_dim(config("olmo2", num_key_value_heads=1, hidden_size=40)),
    "olmo3": olmo3(),
    "olmo3, types": olmo3(layer_types=["full_attention", "sliding_attention"], num_hidden_layers=2),
    "olmo3, wide window": olmo3(sliding_window=30, num_hidden_layers=4, attention_bias=True),
    "phi3": phi3(sliding_window=10),
    "phi3, a part rotated, tied": phi3(tie_word_embeddings=True, rope_parameters=PARTIAL, hidden_size=40),
    "phi3, short runs": phi3(rope_scaling=LONGROPE, original_max_position_embeddings=64),
    "phi3, long runs": phi3(rope_scaling=LONGROPE, original_max_position_embeddings=2),
    "mixtral": experts("mixtral"),
    "mixtral, window": experts("mixtral", num_experts_per_tok=3, num_local_experts=7, sliding_window=9),
    "mixtral, tied, all experts": experts("mixtral", num_experts_per_tok=5, tie_word_embeddings=True, head_dim=8),
    "olmoe": without_head_dim(experts("olmoe")),
    "olmoe, normalised, biases": without_head_dim(experts("olmoe", norm_topk_prob=True, attention_bias=True)),
    "olmoe, many experts": without_head_dim(experts("olmoe", num_experts=17, num_experts_per_tok=3, hidden_size=40)),
    "qwen2_moe": without_head_dim(experts("qwen2_moe", shared_expert_intermediate_size=17)),
    "qwen2_moe, normalised, tied": without_head_dim(
        experts("qwen2_moe", shared_expert_intermediate_size=20, norm_topk_prob=True, tie_word_embeddings=True)
    ),
    "qwen2_moe, no biases, multi-query": without_head_dim(
        experts("qwen2_moe", shared_expert_intermediate_size=9, qkv_bias=False, num_key_value_heads=1)
    ),
    "qwen3_moe": experts("qwen3_moe", norm_topk_prob=True),
    "qwen3_moe, not normalised": experts("qwen3_moe", num_experts_per_tok=3, intermediate_size=37),
    "qwen2_moe, layers without experts": without_head_dim(
        experts("qwen2_moe", shared_expert_intermediate_size=9, mlp_only_layers=[1], num_hidden_layers=3)
    ),
    "qwen3_moe, layers without experts": experts(
        "qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[3], num_hidden_layers=4, intermediate_size=37
    ),
    "qwen3_moe, tied, multi-query": experts(
        "qwen3_moe", norm_topk_prob=True, tie_word_embeddings=True, num_key_value_heads=1, attention_bias=True
    ),
    "qwen3_next": qwen_next("qwen3_next"),
    "qwen3_next, linear attention, not normalised": qwen_next("qwen3_next", norm_topk_prob=False, **LINEAR_ONLY),
    "qwen3_next, wide convolution, equal heads": qwen_next(
        "qwen3_next", linear_conv_kernel_dim=7, linear_num_value_heads=2, num_key_value_heads=1, hidden_size=40
    ),
    "qwen3_5_text": qwen_next("qwen3_5_text"),
    "qwen3_5_text, full attention, biases, tied": qwen_next(
        "qwen3_5_text", attention_bias=True, tie_word_embeddings=True, **FULL_ONLY
    ),
    "qwen3_5_text, linear attention, narrow convolution": qwen_next(
        "qwen3_5_text", linear_conv_kernel_dim=2, linear_num_value_heads=6, linear_value_head_dim=7, **LINEAR_ONLY
    ),
    "qwen3_5_moe_text": qwen_next("qwen3_5_moe_text"),
    "qwen3_5_moe_text, tied, types": qwen_next(
        "qwen3_5_moe_text",
        tie_word_embeddings=True,
        num_experts_per_tok=3,
        **{
            "num_hidden_layers": 2,
            "layer_types": ["full_attention", "linear_attention"],
        },
    ),
    "qwen3_5_moe_text, many experts": qwen_next(
        "qwen3_5_moe_text", num_experts=9, num_key_value_heads=4, linear_num_key_heads=1, **LINEAR_ONLY
    ),
    "gpt_oss": gpt_oss(),
    "gpt_oss, types, gain, tied": gpt_oss(
        layer_types=["full_attention", "full_attention", "sliding_attention"],
        swiglu_alpha=1.3,
        swiglu_limit=1.5,
        tie_word_embeddings=True,
        num_key_value_heads=4,
        head_dim=10,
        intermediate_size=28,
    ),
    "gpt_oss, no biases, multi-query": gpt_oss(
        attention_bias=False, num_key_value_heads=1, rope_parameters=None, num_local_experts=17, num_experts_per_tok=3
    ),
    "gpt_oss, all experts, no scaling": gpt_oss(
        num_experts_per_tok=5,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        sliding_window=1,
        num_hidden_layers=2,
    ),
    "deepseek_v2": deepseek(2, q_lora_rank=None, n_shared_experts=2, first_k_dense_replace=1),
    "deepseek_v2, groups, biases, scaled": deepseek(
        2,
        topk_method="group_limited_greedy",
        n_group=3,
        topk_group=2,
        routed_scaling_factor=1.7,
        attention_bias=True,
        mlp_bias=True,
        rope_scaling=YARN | {"mscale": 0.707, "mscale_all_dim": 0.9},
        rms_norm_eps=1e-3,
    ),
    "deepseek_v2, dense, tied": deepseek(2, first_k_dense_replace=2, tie_word_embeddings=True, v_head_dim=10),
    "deepseek_v3": deepseek(3, first_k_dense_replace=1, num_hidden_layers=3),
    "deepseek_v3, experts everywhere": deepseek(3, tie_word_embeddings=True),
    "deepseek_v3, yarn, biases": deepseek(
        3,
        rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        attention_bias=True,
        q_lora_rank=None,
        num_experts_per_tok=3,
        routed_scaling_factor=0.8,
        v_head_dim=6,
    ),
    "deepseek_v3, halves, not normalised": deepseek(
        3,
        rope_interleave=False,
        norm_topk_prob=False,
        n_group=1,
        topk_group=1,
        qk_rope_head_dim=6,
        n_shared_experts=2,
    ),
    "gpt2": gpt2(),
    "gpt2, untied, odd sizes": gpt2(tie_word_embeddings=False, n_inner=37, vocab_size=71, n_embd=33, n_head=3),
    "gpt2, unscaled": gpt2(scale_attn_weights=False, n_layer=3),
    "gemma": variant("gemma", hidden_act="gelu", tie_word_embeddings=True),
    "vaultgemma": variant("vaultgemma", attn_logit_softcapping=3.0, final_logit_softcapping=4.0, **WINDOWS),
    "smollm3": variant("smollm3", no_rope_layer_interval=2, num_hidden_layers=3, tie_word_embeddings=True),
    "smollm3, windows": variant("smollm3", use_sliding_window=True, no_rope_layers=[1, 0, 1, 0], **WINDOWS),
    "seed_oss": variant("seed_oss", attention_out_bias=True, attention_dropout=0.0, residual_dropout=0.0),
    "arcee": variant("arcee", mlp_bias=True, num_key_value_heads=1),
    "helium": variant("helium", rms_norm_eps=1e-8),
    "internlm3": variant("internlm3", attention_bias=True, mlp_bias=True),
    "iquestcoder": variant("iquestcoder"),
    "cwm": variant("cwm", **WINDOWS),
    "ministral3": variant(
        "ministral3", rope_parameters={**YARN, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.3}
    ),
    "exaone4": without_head_dim(variant("exaone4", sliding_window_pattern=2, **WINDOWS)),
    "exaone4, no window": without_head_dim(variant("exaone4", sliding_window=None, layer_types=["full_attention"] * 2)),
    "hunyuan_v1_dense": variant("hunyuan_v1_dense", rope_scaling={"type": "dynamic", "alpha": 40.0, "factor": 1.0}),
    "hunyuan_v1_moe": variant("hunyuan_v1_moe", num_experts=5, moe_topk=[2, 2], intermediate_size=12),
    "ernie4_5": variant("ernie4_5", use_bias=True, tie_word_embeddings=True),
    "ernie4_5_moe": without_head_dim(
        variant(
            "ernie4_5_moe",
            moe_num_experts=5,
            moe_k=2,
            moe_intermediate_size=12,
            moe_num_shared_experts=2,
            moe_layer_start_index=1,
            moe_layer_end_index=-1,
        )
    ),
    "glm": variant("glm", head_dim=8),
    "glm4": variant("glm4", head_dim=8, attention_bias=False),
    "glm4_moe": routed("glm4_moe", head_dim=8, use_qk_norm=True, **GROUPS),
    "glm4_moe, biases": routed("glm4_moe", head_dim=8, attention_bias=True, first_k_dense_replace=0),
    "solar_open": lacking(routed("solar_open", head_dim=8, routed_scaling_factor=1.5), "first_k_dense_replace"),
    "dots1": without_head_dim(routed("dots1", norm_topk_prob=True, sliding_window=7, max_window_layers=1)),
    "exaone_moe": without_head_dim(routed("exaone_moe", num_experts=5, num_shared_experts=1, **WINDOWS)),
    "hy_v3": routed("hy_v3", num_experts=5, num_shared_experts=1, router_scaling_factor=1.4),
    "minimax_m2": variant("minimax_m2", num_local_experts=5, num_experts_per_tok=2, rotary_dim=4, intermediate_size=12),
    "mellum": variant(
        "mellum",
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention"],
        mlp_layer_types=["sparse", "dense"],
    ),
    "granite": without_head_dim(variant("granite", mlp_bias=True, tie_word_embeddings=True, **GRANITE)),
    "granitemoe": without_head_dim(
        variant("granitemoe", num_local_experts=5, num_experts_per_tok=2, intermediate_size=12, **GRANITE)
    ),
    "granitemoeshared": without_head_dim(
        variant(
            "granitemoeshared",
            num_local_experts=5,
            num_experts_per_tok=2,
            intermediate_size=12,
            shared_intermediate_size=9,
            **GRANITE,
        )
    ),
    "granitemoehybrid": mamba(
        "granitemoehybrid",
        layer_types=["mamba", "attention"],
        num_local_experts=5,
        num_experts_per_tok=2,
        intermediate_size=12,
        shared_intermediate_size=9,
        position_embedding_type="rope",
        **GRANITE,
    ),
    "granitemoehybrid, dense": mamba(
        "granitemoehybrid",
        layer_types=["linear_attention", "full_attention"],
        num_local_experts=0,
        shared_intermediate_size=33,
        mamba_d_head="auto",
        mamba_n_heads=8,
        hidden_size=32,
        tie_word_embeddings=True,
    ),
    "granitemoehybrid, no attention": mamba(
        "granitemoehybrid",
        num_local_experts=5,
        num_experts_per_tok=2,
        intermediate_size=12,
        mamba_proj_bias=True,
        shared_intermediate_size=9,
        time_step_limit=[0.1, 2.0],
        mamba_conv_bias=False,
    ),
    "nemotron_h": nemotron_h(["linear_attention", "mlp", "full_attention"]),
    "nemotron_h, biases": nemotron_h(
        ["mlp", "linear_attention"],
        use_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        time_step_min=0.4,
        use_conv_bias=False,
    ),
    "bamba": mamba("bamba", attn_layer_indices=[1], mamba_n_groups=1),
    "bamba, biases, limits": mamba(
        "bamba",
        attn_layer_indices=[0],
        attention_bias=True,
        mlp_bias=True,
        mamba_proj_bias=True,
        mamba_d_conv=2,
        time_step_limit=[0.5, 1.5],
        tie_word_embeddings=True,
        hidden_size=32,
    ),
    "hyperclovax": variant("hyperclovax", use_post_norm=True, **GRANITE),
    "hyperclovax, norms before": variant("hyperclovax", use_post_norm=False, attention_bias=True),
    "olmo": without_head_dim(variant("olmo")),
    "stablelm": without_head_dim(variant("stablelm", use_qkv_bias=True, hidden_size=32)),
    "stablelm, parallel": without_head_dim(variant("stablelm", use_parallel_residual=True, hidden_size=32)),
    "starcoder2": without_head_dim(variant("starcoder2", sliding_window=7, tie_word_embeddings=True)),
    "nemotron": variant("nemotron", head_dim=8),
    "jais2": variant("jais2"),
    "cohere": without_head_dim(variant("cohere", tie_word_embeddings=True, logit_scale=0.3)),
    "cohere2": without_head_dim(variant("cohere2", tie_word_embeddings=True, logit_scale=0.3, **WINDOWS)),
    "exaone": variant("exaone", num_key_value_heads=1),
    "sarvam_moe": routed("sarvam_moe", num_experts=5, num_shared_experts=1, use_qk_norm=True, head_dim=8),
    "granite_swa": without_head_dim(
        variant("granite_swa", layer_rope_theta=[0, 5e3, 700.0, 5e3], **GRANITE, **WINDOWS)
    ),
    "granitemoe_swa": without_head_dim(
        variant(
            "granitemoe_swa",
            num_local_experts=5,
            num_experts_per_tok=2,
            intermediate_size=12,
            shared_intermediate_size=9,
            layer_rope_theta=[700.0, 0],
            sliding_window=7,
            **GRANITE,
        )
    ),
    "apertus": without_head_dim(variant("apertus")),
    "apertus1p5_text": without_head_dim(variant("apertus1p5_text", num_key_value_heads=1)),
    "aria_text": variant(
        "aria_text", moe_num_experts=5, moe_topk=2, moe_num_shared_experts=2, intermediate_size=12, mlp_bias=True
    ),
    "youtu": lacking(latent("youtu", tie_word_embeddings=True), *ROUTED),
    "minicpm3": lacking(
        latent("minicpm3", scale_emb=3.0, scale_depth=0.7, dim_model_base=10, tie_word_embeddings=True), *ROUTED
    ),
    "glm4_moe_lite": lacking(latent("glm4_moe_lite", rope_interleave=False), "first_k_dense_replace"),
    "sarvam_mla": latent("sarvam_mla", q_lora_rank=None, v_head_dim=10),
    "deepseek_v32": latent("deepseek_v32", **INDEXED, **GROUPS),
    "glm_moe_dsa": latent("glm_moe_dsa", **INDEXED, mlp_layer_types=["sparse", "dense"]),
}
"""Name, whose first word is the family, -> config."""

FAMILY_CASES = {name.split(",")[0].split(" ")[0]: name for name in reversed(CASES)}
"""Family -> the name of its first case."""

LIKE_OTHERS = {
    *("gemma", "vaultgemma", "seed_oss", "arcee", "helium", "internlm3", "iquestcoder", "cwm", "exaone4", "granite"),
    *("hunyuan_v1_dense", "ernie4_5", "glm", "glm4_moe", "solar_open", "dots1", "exaone_moe", "mellum", "granitemoe"),
    *("hyperclovax", "stablelm", "jais2", "cohere", "exaone", "sarvam_moe", "granitemoe_swa", "apertus1p5_text"),
    "gemma4_unified_text",
    "nemotron_h",
    *("youtu", "minicpm3", "glm4_moe_lite", "sarvam_mla", "glm_moe_dsa"),
}
"""Families with a row whose blocks have the ops of another family, in other order or with other values."""

OF_BLOCKS = {family: case for family, case in FAMILY_CASES.items() if family not in LIKE_OTHERS}
"""Family -> the name of its first case, of those that differ in the ops of their blocks."""

FEW = (
    *(
        "mistral",
        "phi3",
        "gemma2",
        "gemma4_text",
        "olmo3",
        "gpt2",
        "cohere2",
        "nemotron",
        "apertus",
        "gpt_oss",
        "qwen3_moe",
    ),
    *("qwen3_5_moe_text", "deepseek_v3", "deepseek_v32", "bamba", "granitemoehybrid"),
)
"""Families that have every op of all blocks between them; what others add is their order and their names."""
