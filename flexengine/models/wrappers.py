"""Types of models with images or sound whose text is trained, each as a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Wrapper:
    """What a type of model with images says of its text.

    checkpoints: published ones. text: the type of its text where the config does not say it. prefix, head: the names
    of the text's tensors. tied: whether the head is the embedding where neither config nor checkpoint tells. fixed:
    fields of the text that count for text alone, and have these values here.
    """

    checkpoints: str
    text: str
    prefix: str = "model.language_model"
    head: str = "lm_head.weight"
    tied: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)


OLDER: dict[str, Any] = {"prefix": "language_model.model", "head": "language_model.lm_head.weight"}
OF_TEXT_MODEL: dict[str, Any] = {"prefix": "model.text_model"}
AS_IT_IS: dict[str, Any] = {"prefix": "model"}
UNBOUND = {"final_logit_softcapping": None}
UNSCALED = {"logit_scale": 1.0}

WRAPPERS: dict[str, Wrapper] = {
    "gemma3": Wrapper("Gemma 3 with images", "gemma3_text", tied=True, fixed=UNBOUND, **OLDER),
    "gemma4": Wrapper("Gemma 4 31B, 26B-A4B", "gemma4_text", tied=True),
    "gemma4_unified": Wrapper("Gemma 4 12B", "gemma4_unified_text", tied=True),
    "qwen3_5": Wrapper("Qwen3.5-9B, Qwen3.6-27B, Qwen3.8-27B", "qwen3_5_text"),
    "qwen3_5_moe": Wrapper("Qwen3.5-35B-A3B, Qwen3.8-2.4T-A95B", "qwen3_5_moe_text"),
    "qwen2_vl": Wrapper("Qwen2-VL", "qwen2_vl_text"),
    "qwen2_5_vl": Wrapper("Qwen2.5-VL", "qwen2_5_vl_text"),
    "qwen3_vl": Wrapper("Qwen3-VL (dense)", "qwen3_vl_text"),
    "qwen3_vl_moe": Wrapper("Qwen3-VL-30B-A3B, 235B-A22B", "qwen3_vl_moe_text"),
    "qwen3_omni_moe_thinker": Wrapper("the thinker of Qwen3-Omni", "qwen3_omni_moe_text", **AS_IT_IS),
    "glm4v": Wrapper("GLM-4.1V", "glm4v_text"),
    "glm46v": Wrapper("GLM-4.6V-Flash", "glm4v_text"),
    "glmga": Wrapper("GLM-GA", "glm4v_text"),
    "glm4v_moe": Wrapper("GLM-4.5V, GLM-4.6V", "glm4v_moe_text"),
    "glm_ocr": Wrapper("GLM-OCR", "glm_ocr_text"),
    "paddleocr_vl": Wrapper("PaddleOCR-VL", "paddleocr_vl_text", tied=True, **AS_IT_IS),
    "hunyuan_vl": Wrapper("HunyuanOCR", "hunyuan_vl_text", tied=True),
    "mistral3": Wrapper("Mistral Small 3.1, 3.2, Ministral 3 with images", "mistral", tied=True),
    "llava": Wrapper("LLaVA 1.5, Pixtral 12B", "llama"),
    "llava_next": Wrapper("LLaVA-NeXT (1.6)", "llama"),
    "llava_next_video": Wrapper("LLaVA-NeXT-Video", "llama"),
    "llava_onevision": Wrapper("LLaVA-OneVision", "qwen2"),
    "vipllava": Wrapper("ViP-LLaVA", "llama"),
    "video_llava": Wrapper("Video-LLaVA", "llama"),
    "aria": Wrapper("Aria", "aria_text"),
    "internvl": Wrapper("InternVL3, InternVL3.5 (-HF)", "qwen2", tied=True),
    "idefics2": Wrapper("Idefics2", "mistral", **OF_TEXT_MODEL),
    "idefics3": Wrapper("Idefics3", "llama", **OF_TEXT_MODEL),
    "smolvlm": Wrapper("SmolVLM, SmolVLM2", "llama", **OF_TEXT_MODEL),
    "kimi_k25": Wrapper("Kimi K2.5", "deepseek_v3", tied=True),
    "lighton_ocr": Wrapper("LightOnOCR", "qwen3", tied=True),
    "ovis2": Wrapper("Ovis2", "qwen2", tied=True),
    "got_ocr2": Wrapper("GOT-OCR 2.0", "qwen2", tied=True),
    "pp_chart2table": Wrapper("PP-Chart2Table", "qwen2", tied=True),
    "qianfan_ocr": Wrapper("Qianfan-OCR", "qwen3"),
    "video_llama_3": Wrapper("VideoLLaMA 3", "qwen2"),
    "deepseek_vl": Wrapper("DeepSeek-VL 1.3B", "llama", tied=True),
    "deepseek_vl_hybrid": Wrapper("DeepSeek-VL 7B", "llama", tied=True),
    "exaone4_5": Wrapper("EXAONE 4.5", "exaone4"),
    "aya_vision": Wrapper("Aya Vision", "cohere2", tied=True, fixed=UNSCALED),
    "cohere2_vision": Wrapper("Command A Vision", "cohere2", tied=True, fixed=UNSCALED),
    "hyperclovax_vision_v2": Wrapper("HyperCLOVA X SEED with images", "hyperclovax", tied=True),
    "minicpm_ocr": Wrapper("MiniCPM-OCR", "qwen3_5_text", tied=True),
    "minicpmv4_6": Wrapper("MiniCPM-V 4.6", "qwen3_5_text"),
    "minicpmv4_7": Wrapper("MiniCPM-V 4.7", "qwen3_5_text"),
    "qwen2_5_omni_thinker": Wrapper("the thinker of Qwen2.5-Omni", "qwen2_5_omni_text", **AS_IT_IS),
    "moss_transcribe_diarize": Wrapper("MOSS Transcribe-Diarize", "qwen3"),
}
"""Model type -> its row."""

QWEN_VL = {
    "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
}  # fmt: skip
GLM4V = {
    "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40,
    "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": None, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5, "attention_bias": True, "partial_rotary_factor": 1.0,
}  # fmt: skip
TEXTS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "qwen2_vl": ("qwen2", QWEN_VL),
    "qwen2_5_vl": ("qwen2", QWEN_VL),
    "qwen2_vl_text": ("qwen2", QWEN_VL),
    "qwen2_5_vl_text": ("qwen2", QWEN_VL),
    "glm4v_text": ("glm4", GLM4V),
    "glm_ocr_text": (
        "glm4", {
            **GLM4V, "vocab_size": 59392, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16,
            "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 131072,
            "attention_bias": False,
        },
    ),
    "glm4v_moe_text": (
        "glm4_moe", {
            "vocab_size": 151424, "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46,
            "num_attention_heads": 96, "max_position_embeddings": 65536, "attention_bias": True,
        },
    ),
    "paddleocr_vl_text": (
        "llama", {
            "vocab_size": 103424, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18,
            "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072, "rope_theta": 500000.0,
        },
    ),
    "hunyuan_vl_text": (
        "hunyuan_v1_dense", {
            "vocab_size": 290943, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
    ),
    "qwen3_omni_moe_text": (
        "qwen3_moe", {
            "vocab_size": 3584, "hidden_size": 2048, "intermediate_size": 18944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "norm_topk_prob": True, "rope_theta": 1000000.0,
        },
    ),
    "qwen3_vl_text": ("qwen3", {"max_position_embeddings": 128000, "rope_theta": 500000.0}),
    "qwen3_vl_moe_text": (
        "qwen3_vl_moe_text", {
            "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
            "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 128000,
            "rope_theta": 500000.0, "moe_intermediate_size": 1408, "num_experts_per_tok": 4,
        },
    ),
    "qwen2_5_omni_text": (
        "qwen2", {
            "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "rope_theta": 1000000.0,
        },
    ),
}  # fmt: skip
"""Types of texts that are no models of their own -> the type that they are like, and defaults of their own."""

QWEN = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32,
}  # fmt: skip
SIZES: dict[str, Mapping[str, Any]] = {
    "llama": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "mistral": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "qwen2": QWEN,
    "qwen3": QWEN,
    "exaone4": {
        "vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
}  # fmt: skip
"""Type of a text -> sizes that configs with images leave out where they are transformers' defaults."""
