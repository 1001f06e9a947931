"""Explains the config of a type that is not supported: which feature it has that no supported type has.

No other type is proposed in its place: types of like names compute different things, and some of them read each
other's checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flexengine.models.sizes import ACTIVATIONS, LAYER_TYPES
from flexengine.wording import shown

Config = dict[str, Any]

BLOCKS_OF_ENCODERS = (
    "the blocks of an encoder: norms after the residual sum, learned positions and a head of several layers"
)
MISSING_IN_TYPES: dict[str, str] = {
    "state-space layers (Mamba)": (
        "mamba mamba2 falcon_mamba jamba falcon_h1 nemotron_h_omni zamba zamba2 granite4_vision granite_docling"
    ),
    "recurrent layers": "rwkv recurrent_gemma xlstm reformer",
    "linear attention of another kind than Gated DeltaNet's": "minimax kimi_linear bailing_hybrid lara_mini",
    "Gated DeltaNet beside norms after the branches": "olmo_hybrid",
    "short convolutions": "lfm2 lfm2_moe lfm3 lfm2_vl lfm3_vl inkling_text inkling2_text inkling2_loop_text "
    "inkling_mm_model inkling2 inkling2_loop zaya",
    "an encoder": (
        "bart bigbird_pegasus blenderbot blenderbot-small marian mbart musicgen musicgen_melody mvp pegasus "
        "plbart prophetnet trocr whisper florence2 pix2struct udop t5gemma2 vision-encoder-decoder pp_formulanet "
        "kosmos-2 kosmos-2.5 blip"
    ),
    BLOCKS_OF_ENCODERS: (
        "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta "
        "roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xlnet xmod"
    ),
    "norms after the residual sum": "openai-gpt ctrl",
    "a text that reads images or sound": "git moshi",
    "ALiBi": "bloom mpt",
    "positions or embeddings of another kind beside LayerNorm": (
        "opt xglm biogpt gpt_neo gpt_bigcode cpmant blip-2 instructblip instructblipvideo"
    ),
    "rotations of queries, keys and values that one tensor holds head by head": (
        "gpt_neox gpt_neox_japanese falcon codegen persimmon fuyu"
    ),
    "a bias of the head": "phi gptj phimoe",
    "norms after the experts": "axk1",
    "norms of queries and keys without weights": "nanochat",
    "frequencies of their own in single layers": "cohere_compass_text cohere_compass",
    "latent attention with scaled queries": "mistral4",
    "a text whose block is described inside of a config for images or sound alone": (
        "cosmos3_edge cosmos3_omni deepseek_ocr2 ernie4_5_vl_moe molmo2 pi0 unlimited_ocr"
    ),
    "a tower of another library, beside which no text was compared": "fast_vlm perception_lm",
    "attention to later tokens of a prompt": "paligemma",
    "a head that classifies": "shieldgemma2",
    "a tokenizer of images and sound": "apertus1p5",
    "attention over chosen keys (an indexer)": (
        "axk2 dots3_note dots3_note_text qwen4_exp qwen4_exp_text hy_v4 hy_v4_vl glm5_next "
        "minimax_m3_vl_text minimax_m3_vl"
    ),
    "several residuals side by side": "deepseek_v4 hrm_text mistral_large4",
    "keys and values or embeddings that layers share": "gemma3n gemma3n_text gemma4_assistant gemma4_unified_assistant",
    "tokens that are predicted by diffusion": "diffusion_gemma",
    "differential attention": "diffllama",
    "attention with a mask that is learned": "doge",
    "norms before the last products of branches": "bitnet",
    "bytes in place of tokens": "blt",
    "clamped queries, keys and values, and experts in one tensor": "dbrx",
    "a mixture of attention heads": "jetmoe",
    "values wider or narrower than keys beside sinks": "mimo_v2_flash",
    "two attentions in a block": "longcat_flash",
    "attention over chunks of keys": "llama4 llama4_text",
    "LayerNorm without rotations of the usual kind": "modernbert-decoder",
    "layers that read images": "mllama idefics evolla",
    "image tokens that the model predicts": "emu3 chameleon janus",
    "experts beside norms after the branches": "flex_olmo beam kolibri1 afmoe cohere2_moe",
    "gates of heads of another kind": "dory flint laguna muse_glimmer muse_spark step3p7",
    "experts whose weights one tensor holds in another order": "phi4_multimodal",
}
"""Feature -> types of transformers that are not supported for want of it."""


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
"""Features that a type which is not listed above may have, with tests for the fields that ask for them."""


def is_encoder(config: Config) -> bool:
    """Tell whether a config is one of an encoder, whose tokens see later ones, or of a decoder beside an encoder.

    Their decoders by themselves (`BertLMHeadModel`, `BartForCausalLM`) are saved with is_decoder=true or
    is_encoder_decoder=false.
    """
    family, decodes = config.get("model_type"), config.get("is_decoder") is True
    if family in MISSING_IN_TYPES[BLOCKS_OF_ENCODERS].split():
        return not decodes
    return family in MISSING_IN_TYPES["an encoder"].split() and not (
        decodes or config.get("is_encoder_decoder") is False
    )


def missing_feature(family: str, config: Config) -> str:
    """Name what a type has that no supported one has; its whole block if nothing tells."""
    # A feature is named only if a field asks for it: absent fields say nothing about an unknown architecture.
    listed = [feature for feature, types in MISSING_IN_TYPES.items() if family in types.split()]
    asked = listed or [feature for feature, found in MISSING.items() if found(config)]
    return ", ".join(asked) or "a description of its block"


def unknown_family(model: str, family: Any, config: Config, opaque: str = "") -> ValueError:
    """Make the error for a config of a type that is not supported. opaque: why it does not run as opaque blocks."""
    listed = "flexengine models lists those that are"
    if not isinstance(family, str):
        return ValueError(f"{model}: model_type {shown(family)} in config.json is not supported; {listed}")
    why = f"; nor does it run as opaque blocks: {' '.join(opaque.split())[:200]}" if opaque else ""
    return ValueError(
        f"{model}: model_type {shown(family)} in config.json is not supported; missing: "
        f"{missing_feature(family, config)}{why}. Give a model of another type; {listed}"
    )
