"""Types whose decoder differs from Llama's in values alone, each as a row.

Sources: the papers and model cards of the checkpoints that the rows name; config fields as in Hugging Face.
"""

from __future__ import annotations

from typing import Any

from flexengine.models.block_shape import BlockNames
from flexengine.models.decoder import DecoderNames
from flexengine.models.granite_rows import GRANITES
from flexengine.models.latent_rows import LATENT, LATER
from flexengine.models.mamba_rows import MAMBAS
from flexengine.models.routed import (
    aria_experts,
    ernie_experts,
    hunyuan_experts,
    mellum_experts,
    minimax_experts,
    sigmoid_experts,
)
from flexengine.models.usual_rows import USUAL
from flexengine.models.variant import (
    Variant,
    all_windows,
    all_windows_named,
    always,
    from_query_scalar,
    full_every,
    in_windows,
    in_windows_if_any,
    llama4_scaling,
    ntk_alpha,
    root_of_width,
    smollm_kinds,
    smollm_rotated,
    tanh_gelu,
    times,
    upper_windows,
    with_rope,
    with_rotary_dim,
)
from flexengine.ops.layernorm import LayerNormStyle
from flexengine.ops.rmsnorm import NormStyle

LN, BARE = LayerNormStyle(0.0), LayerNormStyle(0.0, weight=False, bias=False)
GLM = {"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072, "attention_bias": True}
SHARED = "mlp.shared_experts"
APERTUS: dict[str, Any] = {
    "defaults": {"max_position_embeddings": 65536},
    "adjusted": with_rope(
        rope_type="llama3",
        rope_theta=12e6,
        factor=8.0,
        original_max_position_embeddings=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    ),
    "theta": 12e6,
    "eps": ("rms_norm_eps", 1e-5),
    "qk_norm": "head",
    "qkv_bias": "attention_bias",
    "o_bias": "attention_bias",
    "activation": "xielu",
    "plain": True,
    "names": BlockNames(attn_norm="attention_layernorm", mlp_norm="feedforward_layernorm", gate_up=("mlp.up_proj",)),
}
BALANCE = "a loss that balances experts"
EXPERT_COUNTS = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}

VARIANTS: dict[str, Variant] = {
    **USUAL,
    "gemma": Variant(
        "Gemma 1, CodeGemma", "GeGLU, norms with weights around zero, scaled embedding",
        defaults={"head_dim": 256, "num_key_value_heads": 16, "max_position_embeddings": 8192},
        adjusted=tanh_gelu, norm=NormStyle(0.0, offset=1.0, wide=True), tied=True, qkv_bias="attention_bias",
        o_bias="attention_bias", activation="gelu_pytorch_tanh", embedding_scale=root_of_width,
    ),
    "vaultgemma": Variant(
        "VaultGemma 1B", "as Gemma 2, without norms after the branches",
        defaults={
            "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192, "sliding_window": 4096,
            "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        },
        norm=NormStyle(0.0, offset=1.0, wide=True), tied=True, qkv_bias="attention_bias", o_bias="attention_bias",
        kinds=full_every(2, 1), activation="gelu_pytorch_tanh", activation_field="hidden_activation",
        score_cap=True, logit_cap=True, embedding_scale=root_of_width, score_scale=from_query_scalar,
        names=BlockNames(mlp_norm="pre_feedforward_layernorm"),
    ),
    "smollm3": Variant(
        "SmolLM3 3B", "no rotation in every fourth layer",
        configs_compared=2, defaults={"num_key_value_heads": 4, "max_position_embeddings": 32768}, theta=2e6, tied=True,
        qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias", kinds=smollm_kinds,
        rotated=smollm_rotated,
    ),
    "seed_oss": Variant(
        "Seed-OSS 36B", "biases on queries, keys and values",
        defaults={
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288, "attention_bias": True,
        },
        qkv_bias="attention_bias", o_bias="attention_out_bias", mlp_bias="mlp_bias",
    ),
    "arcee": Variant(
        "AFM 4.5B", "squared ReLU without a gate",
        defaults={"max_position_embeddings": 4096}, eps=("rms_norm_eps", 1e-5), qkv_bias="attention_bias",
        o_bias="attention_bias", mlp_bias="mlp_bias", activation="relu2", plain=True,
        names=BlockNames(gate_up=("mlp.up_proj",)),
    ),
    "helium": Variant(
        "Helium 1 2B", "rotated pairs side by side",
        defaults={"num_key_value_heads": 20, "head_dim": 128, "max_position_embeddings": 4096}, theta=1e5,
        norm=NormStyle(0.0, wide=True), eps=("rms_norm_eps", 1e-8), interleaved=True, qkv_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "internlm3": Variant(
        "InternLM3 8B", "heads of a width of their own",
        defaults={"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 32768},
        renamed={"qkv_bias": "attention_bias", "bias": "mlp_bias"}, eps=("rms_norm_eps", 1e-5),
        qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias",
    ),
    "iquestcoder": Variant(
        "IQuest-Coder 40B", "heads of a width of their own",
        defaults={"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072},
        eps=("rms_norm_eps", 1e-5), qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias",
        refused={"clip_qkv": "clamped queries, keys and values", "use_sliding_window": "layers with a window"},
    ),
    "cwm": Variant(
        "CWM 32B", "windows in three layers of four",
        defaults={
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "sliding_window": 8192,
        },
        adjusted=with_rope(
            rope_type="llama3", rope_theta=1e6, factor=16.0, high_freq_factor=4.0, low_freq_factor=1.0,
            original_max_position_embeddings=8192,
        ),
        eps=("rms_norm_eps", 1e-5), theta=1e6, mlp_bias="mlp_bias", kinds=full_every(4, 0),
    ),
    "ministral3": Variant(
        "Ministral 3 3B, 8B, 14B", "queries scaled by position beyond the original length",
        defaults={"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144},
        adjusted=with_rope(
            rope_type="yarn", rope_theta=1e6, factor=16.0, original_max_position_embeddings=16384, beta_fast=32.0,
            beta_slow=1.0, mscale_all_dim=1.0, mscale=1.0, llama_4_scaling_beta=0.1,
        ),
        eps=("rms_norm_eps", 1e-5), kinds=all_windows, query_scale=llama4_scaling,
    ),
    "exaone4": Variant(
        "EXAONE 4.0", "norms after attention and FFN, queries and keys normalised by head, rotation in windows alone",
        configs_compared=2,
        defaults={"num_key_value_heads": 32, "max_position_embeddings": 2048, "sliding_window": 4096},
        eps=("rms_norm_eps", 1e-5), norms=always("post"), qk_norm="head", kinds=full_every(4, 3),
        rotated=in_windows_if_any,
    ),
    "hunyuan_v1_dense": Variant(
        "Hunyuan 0.5B to 7B", "queries and keys normalised after their rotation",
        defaults={"max_position_embeddings": 2048}, adjusted=ntk_alpha, eps=("rms_norm_eps", 1e-5), qk_norm="head",
        norm_after_rope=True, qkv_bias="attention_bias", o_bias="attention_bias",
        names=BlockNames(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm"),
    ),
    "hunyuan_v1_moe": Variant(
        "Hunyuan-A13B", "as the dense one; experts beside a shared one",
        defaults={"max_position_embeddings": 2048, "num_experts": 1, "moe_topk": 1}, adjusted=ntk_alpha,
        eps=("rms_norm_eps", 1e-5), qk_norm="head", norm_after_rope=True, qkv_bias="attention_bias",
        o_bias="attention_bias", experts=hunyuan_experts, refused={"output_router_logits": BALANCE},
        names=BlockNames(
            q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm", router="mlp.gate.wg",
            shared="mlp.shared_mlp",
        ),
    ),
    "ernie4_5": Variant(
        "ERNIE 4.5 0.3B", "rotated pairs side by side",
        defaults={"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072}, theta=5e5, tied=True,
        eps=("rms_norm_eps", 1e-5), interleaved=True, qkv_bias="use_bias", o_bias="use_bias", mlp_bias="use_bias",
    ),
    "ernie4_5_moe": Variant(
        "ERNIE 4.5 21B-A3B, 300B-A47B", "as the dense one; experts chosen with a bias beside shared ones",
        defaults={
            "num_key_value_heads": 4, "max_position_embeddings": 131072, "moe_num_experts": 64, "moe_k": 6,
            "moe_intermediate_size": 1536, "moe_num_shared_experts": 2,
        },
        theta=5e5, tied=True, eps=("rms_norm_eps", 1e-5), interleaved=True, experts=ernie_experts, notice=LATER,
        renamed={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
        refused={"use_bias": "a bias of the head", "output_router_logits": BALANCE},
        names=BlockNames(
            router_bias="mlp.moe_statics.e_score_correction_bias", router_bias_shape=(1,), shared=SHARED
        ),
    ),
    "glm": Variant(
        "GLM-4 9B", "fused gate and up, half of each head rotated by pairs side by side",
        defaults=GLM, eps=("rms_norm_eps", 1.5625e-7), share=0.5, interleaved=True, qkv_bias="attention_bias",
        names=BlockNames(gate_up=("mlp.gate_up_proj",)),
    ),
    "glm4": Variant(
        "GLM-4 0414 9B and 32B", "as glm, with norms before and after",
        defaults=GLM, eps=("rms_norm_eps", 1.5625e-7), share=0.5, interleaved=True, qkv_bias="attention_bias",
        norms=always("both"),
        names=BlockNames(
            gate_up=("mlp.gate_up_proj",), attn_post_norm="post_self_attn_layernorm",
            mlp_post_norm="post_mlp_layernorm",
        ),
    ),
    "glm4_moe": Variant(
        "GLM-4.5, 4.6, 4.7", "half of each head rotated; experts chosen by sigmoids and a bias beside a shared one",
        configs_compared=2, defaults={
            "num_key_value_heads": 8, "max_position_embeddings": 131072, "moe_intermediate_size": 1408,
            "num_experts_per_tok": 8, "n_shared_experts": 1, "n_routed_experts": 128, "first_k_dense_replace": 1,
        },
        eps=("rms_norm_eps", 1e-5), share=0.5, qk_norm="head", has_qk_norm="use_qk_norm", qkv_bias="attention_bias",
        renamed={"num_local_experts": "n_routed_experts"}, experts=sigmoid_experts,
        refused={"output_router_logits": BALANCE}, names=BlockNames(shared=SHARED), notice=LATER,
    ),
    "solar_open": Variant(
        "Solar Open 100B", "as GLM-4.5's experts, in all layers",
        defaults={
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "num_experts_per_tok": 8,
            "moe_intermediate_size": 1280, "n_shared_experts": 1, "n_routed_experts": 128, "intermediate_size": 1,
        },
        theta=1e6, eps=("rms_norm_eps", 1e-5), partial=True, qkv_bias="attention_bias", experts=sigmoid_experts,
        renamed={"num_local_experts": "n_routed_experts"},
        refused={"output_router_logits": BALANCE, "first_k_dense_replace": "layers without experts"},
        names=BlockNames(shared=SHARED),
    ),
    "dots1": Variant(
        "dots.llm1", "queries and keys normalised by head; DeepSeek-V3's experts",
        defaults={"max_position_embeddings": 2048, "sliding_window": 4096, "max_window_layers": 62,
                  "norm_topk_prob": False},
        qk_norm="head", qkv_bias="attention_bias", o_bias="attention_bias", kinds=upper_windows,
        renamed={"num_local_experts": "n_routed_experts"}, experts=sigmoid_experts,
        refused={"output_router_logits": BALANCE}, names=BlockNames(shared=SHARED),
    ),
    "exaone_moe": Variant(
        "K-EXAONE 236B-A23B", "queries and keys normalised by head, rotation in windows alone; DeepSeek-V3's experts",
        defaults={
            "num_key_value_heads": 32, "max_position_embeddings": 2048, "sliding_window": 4096,
            "first_k_dense_replace": 1, "moe_intermediate_size": 1024, "n_routed_experts": 64,
            "num_experts_per_tok": 8, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
        },
        renamed=EXPERT_COUNTS,
        eps=("rms_norm_eps", 1e-5), qk_norm="head", kinds=full_every(4, 3), rotated=in_windows_if_any,
        experts=sigmoid_experts, refused={"output_router_logits": BALANCE}, notice=LATER,
        names=BlockNames(router_bias="mlp.e_score_correction_bias", shared=SHARED),
    ),
    "hy_v3": Variant(
        "Hunyuan 3", "queries and keys normalised by head; experts chosen by sigmoids beside a shared one",
        defaults={
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "n_routed_experts": 192,
            "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 1536,
            "routed_scaling_factor": 2.826, "first_k_dense_replace": 1,
        },
        renamed={**EXPERT_COUNTS, "router_scaling_factor": "routed_scaling_factor"},
        eps=("rms_norm_eps", 1e-5), theta=11158840.0, qk_norm="head", qkv_bias="attention_bias",
        o_bias="attention_bias", mlp_bias="mlp_bias", experts=sigmoid_experts, notice=LATER,
        refused={"output_router_logits": BALANCE},
        names=BlockNames(router="mlp.router.gate", router_bias="mlp.expert_bias", shared="mlp.shared_mlp"),
    ),
    "minimax_m2": Variant(
        "MiniMax-M2, M2.1", "queries and keys normalised by row, a part of each head rotated; experts by sigmoids",
        defaults={
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196608, "num_experts_per_tok": 8,
            "num_local_experts": 256,
        },
        adjusted=with_rotary_dim, theta=5e6, partial=True, qk_norm="row", experts=minimax_experts, notice=LATER,
        renamed={"num_experts": "num_local_experts"},
        refused={"output_router_logits": BALANCE, "router_jitter_noise": "noise before the router"},
        names=BlockNames(
            router="block_sparse_moe.gate", router_bias="block_sparse_moe.e_score_correction_bias",
            experts="block_sparse_moe.experts", expert_gate_up=("w1", "w3"), expert_down="w2",
        ),
    ),
    "mellum": Variant(
        "Mellum 2", "Qwen3-MoE's block with windows and frequencies of their own in some layers",
        defaults={
            "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 131072, "sliding_window": 1024,
            "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 896,
        },
        theta=5e5, typed_ropes=True, qk_norm="head", qkv_bias="attention_bias", o_bias="attention_bias",
        renamed={"num_local_experts": "num_experts"}, kinds=all_windows_named, experts=mellum_experts, balanced=True,
        notice=LATER,
    ),
    "olmo": Variant(
        "OLMo 1B, 7B", "LayerNorm without weights", defaults={"max_position_embeddings": 2048}, norm=BARE,
        eps=("layer_norm_eps", 1e-5), qkv_bias="attention_bias", o_bias="attention_bias",
        refused={"clip_qkv": "clamped queries, keys and values"},
    ),
    "stablelm": Variant(
        "StableLM 2, 3B", "LayerNorm, a quarter of each head rotated, attention beside the FFN where asked for",
        configs_compared=2, defaults={"num_key_value_heads": 32, "max_position_embeddings": 4096}, norm=LN,
        eps=("layer_norm_eps", 1e-5),
        share=0.25, qkv_bias="use_qkv_bias", parallel="use_parallel_residual",
        refused={"qk_layernorm": "LayerNorm of queries and keys"},
    ),
    "starcoder2": Variant(
        "StarCoder2", "LayerNorm, GELU without a gate, biases, windows",
        defaults={"num_key_value_heads": 2, "max_position_embeddings": 4096, "use_bias": True}, norm=LN,
        eps=("norm_epsilon", 1e-5), tied=True, qkv_bias="use_bias", o_bias="use_bias", mlp_bias="use_bias",
        kinds=all_windows, activation="gelu_pytorch_tanh", plain=True,
        names=BlockNames(gate_up=("mlp.c_fc",), down="mlp.c_proj"),
    ),
    "nemotron": Variant(
        "Nemotron-4, Minitron",
        "LayerNorm with weights around zero, squared ReLU without a gate, half of a head rotated",
        defaults={"max_position_embeddings": 4096}, norm=LN._replace(offset=1.0), eps=("norm_eps", 1e-5), share=0.5,
        qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias", activation="relu2", plain=True,
        names=BlockNames(gate_up=("mlp.up_proj",)),
    ),
    "jais2": Variant(
        "Jais 2", "LayerNorm, squared ReLU without a gate, biases",
        defaults={"max_position_embeddings": 8192, "attention_bias": True, "mlp_bias": True}, norm=LN,
        eps=("layer_norm_eps", 1e-5), qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias",
        activation="relu2", plain=True, names=BlockNames(gate_up=("mlp.up_proj",)),
    ),
    "cohere": Variant(
        "Command R, Aya 23", "LayerNorm without bias, attention beside the FFN, pairs side by side, scaled logits",
        defaults={"max_position_embeddings": 8192}, norm=LN._replace(bias=False), eps=("layer_norm_eps", 1e-5),
        theta=5e5, tied=True, interleaved=True, parallel=True, qkv_bias="attention_bias", o_bias="attention_bias",
        logit_scale=times("logit_scale", 0.0625), refused={"use_qk_norm": "LayerNorm of queries and keys"},
    ),
    "cohere2": Variant(
        "Command R7B, Command A", "as cohere; windows in three layers of four, and rotation in these alone",
        defaults={"max_position_embeddings": 8192, "sliding_window": 4096}, norm=LN._replace(bias=False),
        eps=("layer_norm_eps", 1e-5), tied=True, interleaved=True, parallel=True, qkv_bias="attention_bias",
        o_bias="attention_bias", kinds=full_every(4, 3), rotated=in_windows, logit_scale=times("logit_scale", 0.0625),
    ),
    "exaone": Variant(
        "EXAONE 3.0, 3.5", "tensors of other names",
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 4096}, theta=5e5, eps=("rms_norm_eps", 1e-5),
        renamed={"num_layers": "num_hidden_layers", "layer_norm_epsilon": "rms_norm_eps",
                 "activation_function": "hidden_act"},
        qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias",
        parts=DecoderNames("transformer", "wte", "h", "ln_f"),
        names=BlockNames(
            attn_norm="ln_1", qkv=tuple(f"attn.attention.{name}_proj" for name in "qkv"), o="attn.attention.out_proj",
            mlp_norm="ln_2", gate_up=("mlp.c_fc_0", "mlp.c_fc_1"), down="mlp.c_proj",
        ),
    ),
    "sarvam_moe": Variant(
        "Sarvam 30B", "as GLM-4.5, whole heads rotated; queries, keys and values in one tensor",
        defaults={
            "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 131072, "moe_intermediate_size": 1024,
            "num_experts_per_tok": 6, "n_shared_experts": 1, "n_routed_experts": 128, "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5, "use_qk_norm": True,
        },
        theta=8e6, qk_norm="head", has_qk_norm="use_qk_norm", qkv_bias="attention_bias", experts=sigmoid_experts,
        partial=True,
        renamed={**EXPERT_COUNTS, "use_qkv_bias": "attention_bias"}, refused={"output_router_logits": BALANCE},
        notice=LATER, parts=DecoderNames(embed="word_embeddings"),
        names=BlockNames(
            qkv=("attention.query_key_value",), o="attention.dense", q_norm="attention.query_layernorm",
            k_norm="attention.key_layernorm", router_bias="mlp.gate.expert_bias", shared=SHARED,
        ),
    ),
    "apertus": Variant("Apertus 8B, 70B", "xIELU without a gate, queries and keys normalised by head", **APERTUS),
    "apertus1p5_text": Variant(
        "Apertus 1.5 (text)", "as apertus", refused={"output_vocab_size": "a head of fewer words"}, **APERTUS
    ),
    "aria_text": Variant(
        "Aria (text)", "experts in one tensor beside shared ones, stored input by output",
        defaults={"max_position_embeddings": 2048, "moe_num_experts": 8, "moe_topk": 2, "moe_num_shared_experts": 2},
        qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias", experts=aria_experts,
        names=BlockNames(
            router="mlp.router", experts_fused=("fc1.weight", "fc2.weight"), expert_gate_up=(), expert_down="",
            shared=SHARED,
        ),
    ),
    **GRANITES,
    **MAMBAS,
    **LATENT,
}  # fmt: skip
"""Model type -> what it has beside Llama's decoder."""
