"""The configs of 100 of the most used open checkpoints, by their essential fields, and a rule that makes them tiny.

A row is a name, the published size in 10^9 parameters (of the text, where there are images), and the config.
"""

import math
from collections.abc import Iterator
from typing import Any

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
YARN40 = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
          "original_max_position_embeddings": 4096}  # fmt: skip
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
PLACES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
          "vocab_size")  # fmt: skip


# ---- families -----------------------------------------------------------------------------------------------------


def sized(kind: str, of_class: str, *sizes: int, **more: Any) -> dict[str, Any]:
    """A config of sizes in the order of PLACES."""
    named = dict(zip(PLACES, sizes, strict=True))
    more = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-5, **more}
    return {"model_type": kind, "architectures": [of_class], **named, **more}


def llama(*sizes: int, theta: float = 1e4, **more: Any) -> dict[str, Any]:
    return sized("llama", "LlamaForCausalLM", *sizes, rope_theta=theta, hidden_act="silu", **more)


def llama3(*sizes: int, factor: float = 8.0, **more: Any) -> dict[str, Any]:
    return llama(*sizes, 128256, theta=5e5, rope_scaling={**LLAMA3, "factor": factor}, **more)


def mistral(*sizes: int, theta: float = 1e6, **more: Any) -> dict[str, Any]:
    return sized("mistral", "MistralForCausalLM", *sizes, rope_theta=theta, **{"sliding_window": None, **more})


def qwen2(*sizes: int, tied: bool = False, **more: Any) -> dict[str, Any]:
    options = {"tie_word_embeddings": tied, "use_sliding_window": False, "sliding_window": 131072}
    return sized("qwen2", "Qwen2ForCausalLM", *sizes, rope_theta=1e6, **options, **more)


def qwen3(*sizes: int, tied: bool = False, **more: Any) -> dict[str, Any]:
    return sized(
        "qwen3", "Qwen3ForCausalLM", *sizes, 151936, head_dim=128, rope_theta=1e6, tie_word_embeddings=tied, **more
    )


def qwen3_moe(*sizes: int, experts: int = 128, width: int, **more: Any) -> dict[str, Any]:
    options = {
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": width,
        "decoder_sparse_step": 1,
    }
    options |= {"mlp_only_layers": [], "norm_topk_prob": True, "head_dim": 128, "rope_theta": 1e6}
    return sized("qwen3_moe", "Qwen3MoeForCausalLM", *sizes, 151936, tie_word_embeddings=False, **options, **more)


def gemma(kind: str, of_class: str, *sizes: int, head_dim: int = 256, **more: Any) -> dict[str, Any]:
    activation = {"hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6}
    return sized(kind, of_class, *sizes, head_dim=head_dim, **{**activation, **more})


def gemma2(*sizes: int, head_dim: int = 256, scalar: int = 256) -> dict[str, Any]:
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096}
    options = {"query_pre_attn_scalar": scalar, "rope_theta": 1e4, **caps}
    return gemma("gemma2", "Gemma2ForCausalLM", *sizes, 256000, head_dim=head_dim, **options)


def gemma3_text(
    *sizes: int, head_dim: int = 256, scalar: int = 256, window: int = 1024, factor: float = 0
) -> dict[str, Any]:
    rope = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": None}
    rope |= {"rope_scaling": {"rope_type": "linear", "factor": factor}} if factor else {}
    options = {"sliding_window": window, "sliding_window_pattern": 6, "query_pre_attn_scalar": scalar, **rope}
    return gemma("gemma3_text", "Gemma3ForCausalLM", *sizes, head_dim=head_dim, **options)


def gemma3(*sizes: int, **more: Any) -> dict[str, Any]:
    vision = {"model_type": "siglip_vision_model", "hidden_size": 1152, "num_hidden_layers": 27}
    text = {**gemma3_text(*sizes, 262208, **more), "architectures": None}
    classes = ["Gemma3ForConditionalGeneration"]
    return {"model_type": "gemma3", "architectures": classes, "text_config": text, "vision_config": vision}


def phi3(*sizes: int, longrope: int = 0, **more: Any) -> dict[str, Any]:
    factors = {"short_factor": [1.0] * longrope, "long_factor": [2.0] * longrope}
    scaling = {"type": "longrope", **factors} if longrope else None
    options = {"original_max_position_embeddings": 4096, "max_position_embeddings": 131072 if longrope else 4096}
    return sized("phi3", "Phi3ForCausalLM", *sizes, rope_scaling=scaling, **{**options, **more})


def deepseek_v3(**more: Any) -> dict[str, Any]:
    latent = {
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    experts = {"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4}
    experts |= {"moe_intermediate_size": 2048, "first_k_dense_replace": 3, "norm_topk_prob": True}
    options = {
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "rope_scaling": YARN40,
        "topk_method": "noaux_tc",
    }
    options |= {
        "quantization_config": FP8,
        "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    }
    sizes = (7168, 18432, 61, 128, 128, 129280)
    return sized("deepseek_v3", "DeepseekV3ForCausalLM", *sizes, **latent, **experts, **options, **more)


def gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    rope = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096}  # fmt: skip
    options = {"num_local_experts": experts, "num_experts_per_tok": 4, "head_dim": 64, "sliding_window": 128}
    options |= {"layer_types": ["sliding_attention", "full_attention"] * (layers // 2), "rope_theta": 150000}
    options |= {"attention_bias": True, "swiglu_limit": 7.0, "quantization_config": {"quant_method": "mxfp4"}}
    return sized("gpt_oss", "GptOssForCausalLM", 2880, 2880, layers, 64, 8, 201088, rope_scaling=rope, **options)


def gpt2(width: int, layers: int, heads: int) -> dict[str, Any]:
    sizes = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": 1024, "vocab_size": 50257}
    return {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes, "layer_norm_epsilon": 1e-5}


def mixtral(*sizes: int) -> dict[str, Any]:
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6, "sliding_window": None}
    return sized("mixtral", "MixtralForCausalLM", *sizes, **experts)


def with_images(kind: str, of_class: str, text: dict[str, Any], **more: Any) -> dict[str, Any]:
    vision = {"model_type": "pixtral", "hidden_size": 1024, "num_hidden_layers": 24}
    return {"model_type": kind, "architectures": [of_class], "text_config": {**text, "architectures": None},
            "vision_config": vision, **more}  # fmt: skip


def glm4_moe(*sizes: int, experts: int, dense: int, width: int, qk_norm: bool) -> dict[str, Any]:
    chosen = {
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
    }
    chosen |= {"moe_intermediate_size": width, "first_k_dense_replace": dense, "norm_topk_prob": True}
    options = {"head_dim": 128, "attention_bias": True, "partial_rotary_factor": 0.5, "rope_theta": 1e6}
    options |= {"use_qk_norm": qk_norm, "routed_scaling_factor": 1.0, "tie_word_embeddings": False}
    return sized("glm4_moe", "Glm4MoeForCausalLM", *sizes, **chosen, **options)


def olmo2(*sizes: int) -> dict[str, Any]:
    return sized("olmo2", "Olmo2ForCausalLM", *sizes, rope_theta=5e5, rms_norm_eps=1e-6)


def plain(kind: str, of_class: str, **fields: Any) -> dict[str, Any]:
    return {"model_type": kind, "architectures": [of_class], **fields}


MISTRAL_SMALL = (5120, 32768, 40, 32, 8, 131072)
QWEN7B, QWEN32B = (3584, 18944, 28, 28, 4, 152064), (5120, 27648, 64, 40, 8, 152064)
LLAMA8B, LLAMA70B = (4096, 14336, 32, 32, 8), (8192, 28672, 80, 64, 8)
YARN4 = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
MULTIPLIERS = {"embedding_multiplier": 12.0, "attention_multiplier": 0.0078125, "residual_multiplier": 0.22,
               "logits_scaling": 16.0, "rope_theta": 1e7, "tie_word_embeddings": True}  # fmt: skip
LINEAR = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
          "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
          "partial_rotary_factor": 0.25, "rope_theta": 1e7, "head_dim": 256}  # fmt: skip
NEXT = {**LINEAR, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512, "norm_topk_prob": True,
        "shared_expert_intermediate_size": 512, "decoder_sparse_step": 1, "mlp_only_layers": []}  # fmt: skip
V2LITE = {"q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
          "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
          "first_k_dense_replace": 1, "topk_method": "greedy", "norm_topk_prob": False, "routed_scaling_factor": 1.0,
          "rope_scaling": {**YARN40, "mscale": 0.707, "mscale_all_dim": 0.707}}  # fmt: skip
COHERE = {"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "rope_theta": 8e6, "tie_word_embeddings": True}
EXAONE = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": 4096, "sliding_window_pattern": "LLLG",
          "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 16,
          "rope_scaling": {**LLAMA3, "factor": 16.0}}  # fmt: skip
HYBRID = {"mamba_n_heads": 64, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_chunk_size": 256,
          "shared_intermediate_size": 8192, "num_local_experts": 0, "num_experts_per_tok": 0,
          "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4}  # fmt: skip

CHECKPOINTS: dict[str, tuple[float, dict[str, Any]]] = {
    "meta-llama/Llama-2-7b-hf": (6.74, llama(4096, 11008, 32, 32, 32, 32000)),
    "meta-llama/Llama-2-13b-chat-hf": (13.02, llama(5120, 13824, 40, 40, 40, 32000)),
    "meta-llama/Llama-2-70b-hf": (68.98, llama(8192, 28672, 80, 64, 8, 32000)),
    "meta-llama/Meta-Llama-3-8B-Instruct": (8.03, llama(*LLAMA8B, 128256, theta=5e5)),
    "meta-llama/Meta-Llama-3-70B": (70.55, llama(*LLAMA70B, 128256, theta=5e5)),
    "meta-llama/Llama-3.1-8B-Instruct": (8.03, llama3(*LLAMA8B)),
    "meta-llama/Llama-3.1-70B-Instruct": (70.55, llama3(*LLAMA70B)),
    "meta-llama/Llama-3.1-405B": (405.85, llama3(16384, 53248, 126, 128, 8)),
    "meta-llama/Llama-3.2-1B-Instruct": (
        1.236, llama3(2048, 8192, 16, 32, 8, factor=32.0, head_dim=64, tie_word_embeddings=True)),
    "meta-llama/Llama-3.2-3B-Instruct": (3.21, llama3(3072, 8192, 28, 24, 8, factor=32.0, tie_word_embeddings=True)),
    "meta-llama/Llama-3.3-70B-Instruct": (70.55, llama3(*LLAMA70B)),
    "codellama/CodeLlama-7b-hf": (6.74, llama(4096, 11008, 32, 32, 32, 32016, theta=1e6)),
    "codellama/CodeLlama-34b-Instruct-hf": (33.74, llama(8192, 22016, 48, 64, 8, 32000, theta=1e6)),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": (1.1, llama(2048, 5632, 22, 32, 4, 32000)),
    "lmsys/vicuna-7b-v1.5-16k": (
        6.74, llama(4096, 11008, 32, 32, 32, 32000, rope_scaling={"factor": 4.0, "type": "linear"})),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": (8.03, llama3(*LLAMA8B)),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": (70.55, llama3(*LLAMA70B)),
    "deepseek-ai/deepseek-llm-7b-chat": (6.91, llama(4096, 11008, 30, 32, 32, 102400)),
    "deepseek-ai/deepseek-coder-6.7b-instruct": (
        6.74, llama(4096, 11008, 32, 32, 32, 32256, theta=1e5, rope_scaling={"factor": 4.0, "type": "linear"})),
    "01-ai/Yi-6B": (6.06, llama(4096, 11008, 32, 32, 4, 64000, theta=5e6)),
    "01-ai/Yi-1.5-34B-Chat": (34.39, llama(7168, 20480, 60, 56, 8, 64000, theta=5e6)),
    "HuggingFaceTB/SmolLM-135M": (0.1345, llama(576, 1536, 30, 9, 3, 49152, tie_word_embeddings=True)),
    "HuggingFaceTB/SmolLM2-360M-Instruct": (
        0.362, llama(960, 2560, 32, 15, 5, 49152, theta=1e5, tie_word_embeddings=True)),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": (
        1.711, llama(2048, 8192, 24, 32, 32, 49152, theta=1.3e5, tie_word_embeddings=True)),
    "nvidia/Llama-3.1-Nemotron-70B-Instruct-HF": (70.55, llama3(*LLAMA70B)),
    "upstage/SOLAR-10.7B-Instruct-v1.0": (10.73, llama(4096, 14336, 48, 32, 8, 32000)),
    "tiiuae/Falcon3-7B-Instruct": (7.46, llama(3072, 23040, 28, 12, 4, 131072, theta=1000042, head_dim=256)),
    "mistralai/Mistral-7B-v0.1": (7.24, mistral(*LLAMA8B, 32000, theta=1e4, sliding_window=4096)),
    "mistralai/Mistral-7B-Instruct-v0.3": (7.25, mistral(*LLAMA8B, 32768)),
    "HuggingFaceH4/zephyr-7b-beta": (7.24, mistral(*LLAMA8B, 32000, theta=1e4, sliding_window=4096)),
    "mistralai/Mistral-Nemo-Instruct-2407": (12.25, mistral(5120, 14336, 40, 32, 8, 131072, head_dim=128)),
    "mistralai/Ministral-8B-Instruct-2410": (8.02, mistral(4096, 12288, 36, 32, 8, 131072, theta=1e8, head_dim=128)),
    "mistralai/Mistral-Small-24B-Instruct-2501": (23.57, mistral(*MISTRAL_SMALL, theta=1e8, head_dim=128)),
    "mistralai/Devstral-Small-2507": (23.57, mistral(*MISTRAL_SMALL, theta=1e9, head_dim=128)),
    "mistralai/Mistral-Large-Instruct-2407": (122.6, mistral(12288, 28672, 88, 96, 8, 32768)),
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": (
        23.57, with_images("mistral3", "Mistral3ForConditionalGeneration",
                           mistral(*MISTRAL_SMALL, theta=1e9, head_dim=128), tie_word_embeddings=False)),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": (46.7, mixtral(4096, 14336, 32, 32, 8, 32000)),
    "mistralai/Mixtral-8x22B-v0.1": (140.6, mixtral(6144, 16384, 56, 48, 8, 32000)),
    "Qwen/Qwen2-0.5B": (0.494, qwen2(896, 4864, 24, 14, 2, 151936, tied=True)),
    "Qwen/Qwen2-7B-Instruct": (7.62, qwen2(*QWEN7B)),
    "Qwen/Qwen2.5-0.5B-Instruct": (0.494, qwen2(896, 4864, 24, 14, 2, 151936, tied=True)),
    "Qwen/Qwen2.5-1.5B-Instruct": (1.544, qwen2(1536, 8960, 28, 12, 2, 151936, tied=True)),
    "Qwen/Qwen2.5-3B-Instruct": (3.086, qwen2(2048, 11008, 36, 16, 2, 151936, tied=True)),
    "Qwen/Qwen2.5-7B-Instruct": (7.62, qwen2(*QWEN7B)),
    "Qwen/Qwen2.5-14B-Instruct": (14.77, qwen2(5120, 13824, 48, 40, 8, 152064)),
    "Qwen/Qwen2.5-32B-Instruct": (32.76, qwen2(*QWEN32B)),
    "Qwen/Qwen2.5-72B-Instruct": (72.7, qwen2(8192, 29568, 80, 64, 8, 152064)),
    "Qwen/Qwen2.5-Coder-7B-Instruct": (7.62, qwen2(*QWEN7B, rope_scaling=YARN4)),
    "Qwen/Qwen2.5-Math-1.5B": (1.544, qwen2(1536, 8960, 28, 12, 2, 151936, tied=True)),
    "Qwen/QwQ-32B": (32.76, qwen2(*QWEN32B)),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": (1.777, qwen2(1536, 8960, 28, 12, 2, 151936)),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": (7.62, qwen2(*QWEN7B)),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": (32.76, qwen2(*QWEN32B)),
    "Qwen/Qwen1.5-MoE-A2.7B": (14.32, sized(
        "qwen2_moe", "Qwen2MoeForCausalLM", 2048, 5632, 24, 16, 16, 151936, num_experts=60, num_experts_per_tok=4,
        moe_intermediate_size=1408, shared_expert_intermediate_size=5632, decoder_sparse_step=1, rope_theta=1e6)),
    "Qwen/Qwen2.5-VL-7B-Instruct": (7.62, {
        **qwen2(*QWEN7B), "model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vision_config": {"depth": 32}}),
    "Qwen/Qwen3-0.6B": (0.596, qwen3(1024, 3072, 28, 16, 8, tied=True)),
    "Qwen/Qwen3-1.7B": (1.72, qwen3(2048, 6144, 28, 16, 8, tied=True)),
    "Qwen/Qwen3-4B-Instruct-2507": (4.02, qwen3(2560, 9728, 36, 32, 8, tied=True)),
    "Qwen/Qwen3-8B": (8.19, qwen3(4096, 12288, 36, 32, 8)),
    "Qwen/Qwen3-8B-FP8": (8.19, qwen3(4096, 12288, 36, 32, 8, quantization_config=FP8)),
    "Qwen/Qwen3-14B": (14.77, qwen3(5120, 17408, 40, 40, 8)),
    "Qwen/Qwen3-32B": (32.76, qwen3(5120, 25600, 64, 64, 8)),
    "Qwen/Qwen3-Embedding-0.6B": (0.596, qwen3(1024, 3072, 28, 16, 8, tied=True)),
    "Qwen/Qwen3-30B-A3B": (30.53, qwen3_moe(2048, 6144, 48, 32, 4, width=768)),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": (30.53, qwen3_moe(2048, 6144, 48, 32, 4, width=768)),
    "Qwen/Qwen3-235B-A22B": (235.1, qwen3_moe(4096, 12288, 94, 64, 4, width=1536)),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (
        79.67, sized("qwen3_next", "Qwen3NextForCausalLM", 2048, 5120, 48, 16, 2, 151936, **NEXT)),
    "google/gemma-2b": (
        2.51, gemma("gemma", "GemmaForCausalLM", 2048, 16384, 18, 8, 1, 256000, hidden_activation=None,
                    hidden_act="gelu_pytorch_tanh")),
    "google/gemma-7b-it": (8.54, gemma("gemma", "GemmaForCausalLM", 3072, 24576, 28, 16, 16, 256000)),
    "google/gemma-2-2b-it": (2.61, gemma2(2304, 9216, 26, 8, 4)),
    "google/gemma-2-9b-it": (9.24, gemma2(3584, 14336, 42, 16, 8)),
    "google/gemma-2-27b-it": (27.23, gemma2(4608, 36864, 46, 32, 16, head_dim=128, scalar=144)),
    "google/gemma-3-1b-it": (1.0, gemma3_text(1152, 6912, 26, 4, 1, 262144, window=512)),
    "google/gemma-3-4b-it": (3.88, gemma3(2560, 10240, 34, 8, 4, factor=8.0)),
    "google/gemma-3-27b-it": (27.0, gemma3(5376, 21504, 62, 32, 16, head_dim=128, scalar=168, factor=8.0)),
    "microsoft/Phi-3-mini-4k-instruct": (3.82, phi3(3072, 8192, 32, 32, 32, 32064, sliding_window=2047)),
    "microsoft/Phi-3.5-mini-instruct": (3.82, phi3(3072, 8192, 32, 32, 32, 32064, longrope=48)),
    "microsoft/phi-4": (14.66, phi3(5120, 17920, 40, 40, 10, 100352, rope_theta=250000)),
    "microsoft/Phi-4-mini-instruct": (
        3.84, phi3(3072, 8192, 32, 24, 8, 200064, longrope=48, partial_rotary_factor=0.75, tie_word_embeddings=True)),
    "microsoft/phi-2": (0, plain(
        "phi", "PhiForCausalLM", hidden_size=2560, intermediate_size=10240, num_hidden_layers=32, vocab_size=51200,
        num_attention_heads=32, num_key_value_heads=32, partial_rotary_factor=0.4, hidden_act="gelu_new")),
    "deepseek-ai/DeepSeek-V2-Lite-Chat": (
        15.71, sized("deepseek_v2", "DeepseekV2ForCausalLM", 2048, 10944, 27, 16, 16, 102400, **V2LITE)),
    "deepseek-ai/DeepSeek-V3": (671.0, deepseek_v3()),
    "deepseek-ai/DeepSeek-R1-0528": (671.0, deepseek_v3(num_nextn_predict_layers=1)),
    "openai/gpt-oss-20b": (20.9, gpt_oss(24, 32)),
    "openai/gpt-oss-120b": (116.8, gpt_oss(36, 128)),
    "HuggingFaceTB/SmolLM3-3B": (3.08, sized(
        "smollm3", "SmolLM3ForCausalLM", 2048, 11008, 36, 16, 4, 128256, no_rope_layers=[1, 1, 1, 0] * 9,
        rope_theta=5e6, tie_word_embeddings=True)),
    "allenai/OLMo-2-1124-7B-Instruct": (7.3, olmo2(4096, 11008, 32, 32, 32, 100352)),
    "allenai/OLMo-2-1124-13B": (13.72, olmo2(5120, 13824, 40, 40, 40, 100352)),
    "allenai/OLMoE-1B-7B-0924": (6.92, sized(
        "olmoe", "OlmoeForCausalLM", 2048, 1024, 16, 16, 16, 50304, num_experts=64, num_experts_per_tok=8)),
    "ibm-granite/granite-3.3-8b-instruct": (
        8.17, sized("granite", "GraniteForCausalLM", 4096, 12800, 40, 32, 8, 49159, **MULTIPLIERS)),
    "ibm-granite/granite-4.0-h-micro": (3.19, sized(
        "granitemoehybrid", "GraniteMoeHybridForCausalLM", 2048, 8192, 40, 32, 8, 100352, **HYBRID, **MULTIPLIERS)),
    "zai-org/GLM-4-9B-0414": (9.4, sized(
        "glm4", "Glm4ForCausalLM", 4096, 13696, 40, 32, 2, 151552, head_dim=128, attention_bias=True,
        partial_rotary_factor=0.5, tie_word_embeddings=False, pad_token_id=151329)),
    "zai-org/GLM-4.5-Air": (106.9, glm4_moe(
        4096, 10944, 46, 96, 8, 151552, experts=128, dense=1, width=1408, qk_norm=False)),
    "CohereLabs/c4ai-command-r-v01": (
        34.98, sized("cohere", "CohereForCausalLM", 8192, 22528, 40, 64, 64, 256000, **COHERE)),
    "CohereLabs/c4ai-command-r7b-12-2024": (8.03, sized(
        "cohere2", "Cohere2ForCausalLM", 4096, 14336, 32, 32, 8, 256000, sliding_window=4096, sliding_window_pattern=4,
        **{**COHERE, "rope_theta": 5e4})),
    "nvidia/Minitron-4B-Base": (4.19, plain(
        "nemotron", "NemotronForCausalLM", hidden_size=3072, intermediate_size=9216, num_hidden_layers=32,
        num_attention_heads=24, num_key_value_heads=8, head_dim=128, vocab_size=256000, hidden_act="relu2",
        norm_eps=1e-5, partial_rotary_factor=0.5, tie_word_embeddings=False)),
    "stabilityai/stablelm-2-1_6b": (1.64, plain(
        "stablelm", "StableLmForCausalLM", hidden_size=2048, intermediate_size=5632, num_hidden_layers=24,
        num_attention_heads=32, num_key_value_heads=32, vocab_size=100352, use_qkv_bias=True,
        partial_rotary_factor=0.25, layer_norm_eps=1e-5, hidden_act="silu")),
    "bigcode/starcoder2-3b": (3.03, plain(
        "starcoder2", "Starcoder2ForCausalLM", hidden_size=3072, intermediate_size=12288, num_hidden_layers=30,
        num_attention_heads=24, num_key_value_heads=2, vocab_size=49152, use_bias=True, norm_epsilon=1e-5,
        sliding_window=4096, rope_theta=999999.4, hidden_act="gelu_pytorch_tanh")),
    "openai-community/gpt2": (0.1244, gpt2(768, 12, 12)),
    "openai-community/gpt2-xl": (1.558, gpt2(1600, 48, 25)),
    "EleutherAI/pythia-1.4b": (0, plain(
        "gpt_neox", "GPTNeoXForCausalLM", hidden_size=2048, intermediate_size=8192, num_hidden_layers=24,
        num_attention_heads=16, vocab_size=50304, rotary_pct=0.25, hidden_act="gelu", tie_word_embeddings=False)),
    "facebook/opt-1.3b": (0, plain(
        "opt", "OPTForCausalLM", hidden_size=2048, ffn_dim=8192, num_hidden_layers=24, num_attention_heads=32,
        vocab_size=50272, word_embed_proj_dim=2048, do_layer_norm_before=True)),
    "bigscience/bloom-560m": (0, plain(
        "bloom", "BloomForCausalLM", hidden_size=1024, n_layer=24, n_head=16, vocab_size=250880)),
    "tiiuae/falcon-7b": (0, plain(
        "falcon", "FalconForCausalLM", hidden_size=4544, num_hidden_layers=32, num_attention_heads=71,
        vocab_size=65024, multi_query=True, parallel_attn=True, bias=False, alibi=False)),
    "ByteDance-Seed/Seed-OSS-36B-Instruct": (36.15, sized(
        "seed_oss", "SeedOssForCausalLM", 5120, 27648, 64, 80, 8, 155136, head_dim=128, attention_bias=True,
        attention_out_bias=False, rope_theta=1e7, tie_word_embeddings=False)),
    "LGAI-EXAONE/EXAONE-4.0-32B": (32.0, sized(
        "exaone4", "Exaone4ForCausalLM", 5120, 27392, 64, 40, 8, 102400, **EXAONE)),
    "internlm/internlm2_5-7b-chat": (0, plain(
        "internlm2", "InternLM2ForCausalLM", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, vocab_size=92544,
        auto_map={"AutoModelForCausalLM": "modeling_internlm2.InternLM2ForCausalLM"})),
    "moonshotai/Kimi-K2-Instruct": (0, {**deepseek_v3(), "model_type": "kimi_k2"}),
}  # fmt: skip

TINY = {
    "hidden_size": 64, "intermediate_size": 96, "ffn_dim": 96, "word_embed_proj_dim": 64, "head_dim": 16,
    "vocab_size": 128, "n_embd": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "mamba_n_heads": 8, "mamba_d_head": 16,
    "mamba_d_state": 16,
}  # fmt: skip
LAYERS, HEADS, EXPERTS = 4, 4, 8
COUNTS = {**dict.fromkeys(("num_hidden_layers", "n_layer"), LAYERS), "n_group": 2, "topk_group": 1,
          **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), EXPERTS),
          **dict.fromkeys(("num_experts_per_tok",), 2)}  # fmt: skip


def tiny(config: dict[str, Any]) -> dict[str, Any]:
    """The same config with small sizes: at most 4 layers, 4 heads in the same groups, 8 experts; options stay."""
    heads = config.get("num_attention_heads", config.get("n_head", HEADS))
    small = {name: value for name, value in _scaled(config, heads)}
    return {**small, "pad_token_id": None} if "pad_token_id" in small else small


def _scaled(config: dict[str, Any], heads: int) -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if name == "text_config":
            yield name, tiny(value)
        elif value is None:
            yield name, None
        elif name in TINY:
            yield name, TINY[name]
        elif name in COUNTS:
            yield name, min(value, COUNTS[name])
        elif name in ("num_attention_heads", "n_head"):
            yield name, HEADS
        elif name == "num_key_value_heads":
            yield name, max(1, HEADS * value // heads)
        elif name in ("layer_types", "no_rope_layers"):
            yield name, value[-LAYERS:]
        elif name == "rope_scaling" and "short_factor" in value:
            width = 16 * config.get("partial_rotary_factor", 1.0)
            yield (
                name,
                {key: [x[0]] * (math.floor(width) // 2) if isinstance(x, list) else x for key, x in value.items()},
            )
        elif name == "rope_scaling" and "mrope_section" in value:
            yield name, {**value, "mrope_section": [2, 3, 3]}
        else:
            yield name, value
