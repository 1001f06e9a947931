"""Which types of transformers' causal and image-text models train here, and do they compute what transformers computes?

python -m bench.coverage [--only TYPE ...] [--json FILE]

A tiny random model of every type is trained for a step beside transformers in float32 on the CPU: its loss and the
gradient of every parameter must be within BOUND (relative), of types that run as opaque blocks within OPAQUE_BOUND. Of
what is refused the message must name what is missing. The exit status is 1 where one of them is not so. `untried` are
types of which no tiny model is made here. Needs transformers; takes a few minutes.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as IMAGES,
)

from bench.environment import write_json
from bench.widened import widen
from flexengine import from_pretrained
from flexengine.models.checkpoints import own_names
from flexengine.models.registry import FAMILIES, build_model, open_model
from flexengine.models.unknown import MISSING_IN_TYPES, is_encoder

BOUND, OPAQUE_BOUND = 3e-5, 1e-4
MOST_PARAMETERS = 1 << 24
TOO_LARGE = "parameters with the sizes that are known here"
NAMED = ("as opaque blocks", "tokens see later ones", "a description of its block")
"""Parts of messages that name what is missing of types beside MISSING_IN_TYPES."""
STATES = ("native", "opaque", "refused", "refused without a reason", "untried", "differs", "fails")
KINDS_OF_LAYERS = ("layer_types", "mlp_layer_types")
NOT_ARGUMENTS = ("model_type", "dtype", "transformers_version")
IDS = [[5, 17, 3, 29, 11, 7, 2, 41, 19, 23, 31, 8, 13, 37], [7, 3, 60], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
TINY = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 64, "sliding_window": 4,
    "initializer_range": 0.2, "attention_dropout": 0.0, "residual_dropout": 0.0, "embedding_dropout": 0.0,
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_topk": 2, "moe_k": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "n_group": 1,
    "topk_group": 1, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "n_embd": 32, "n_head": 4, "n_layer": 4, "n_positions": 64, "attn_pdrop": 0.0,
    "embd_pdrop": 0.0, "resid_pdrop": 0.0, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
    "index_n_heads": 2, "index_head_dim": 8, "is_decoder": True, "d_model": 32, "ffn_dim": 48, "attention_heads": 4,
    "num_layers": 2, "decoder_layers": 2, "encoder_layers": 2, "decoder_ffn_dim": 48, "encoder_ffn_dim": 48,
    "decoder_attention_heads": 4, "encoder_attention_heads": 4, "num_decoder_layers": 2, "num_encoder_layers": 2,
    "num_decoder_attention_heads": 4, "num_encoder_attention_heads": 4, "max_target_positions": 64,
    "embedding_size": 16, "input_embedding_size": 16, "output_embedding_size": 24, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "dropout": 0.0, "activation_dropout": 0.0, "init_std": 0.2,
}  # fmt: skip
"""Sizes of the tiny models, as far as a type has the field."""
ROUNDED = (
    "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe", "minicpm_ocr", "minicpmv4_6",
    "minicpmv4_7",
)  # fmt: skip
"""Types with linear attention, whose gradients both sides round by 1e-4 in float32: they are compared in float64."""
LATENT_TYPES = (
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "sarvam_mla", "youtu", "minicpm3",
    "axk1", "axk2", "mistral4", "longcat_flash", "bailing_hybrid",
)  # fmt: skip
PADDED = (
    "emu3", "emu3_text_model", "modernbert-decoder", "camembert", "data2vec-text", "roberta", "roberta-prelayernorm",
    "xlm-roberta", "xlm-roberta-xl", "prophetnet",
)  # fmt: skip
"""Types that do not run without a padding token."""
MAMBA2 = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2,
    "mamba_chunk_size": 8,
}  # fmt: skip
OF_TYPE: dict[str, dict[str, Any]] = {
    **{kind: {"num_key_value_heads": 4, "head_dim": 4} for kind in LATENT_TYPES},
    "dots1": {"n_shared_experts": 1},
    **{kind: {"rotary_dim": 4} for kind in ("gptj", "codegen")},
    **{kind: MAMBA2 for kind in ("bamba", "granitemoehybrid")},
    "kimi_linear": {"num_key_value_heads": 4, "head_dim": 8, "num_experts_per_token": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "conv"], "num_dense_layers": 2},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
    "longcat_flash": {"num_layers": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "zero_expert_num": 2},
    "gemma4_text": {"hidden_size_per_layer_input": 0, "enable_moe_block": True, "top_k_experts": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "zaya": {"num_experts_per_tok": 1},
    **{kind: {"pad_token_id": 0} for kind in PADDED},
    "xmod": {"pad_token_id": 0, "default_language": "en_XX", "adapter_reduction_factor": 2},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "expand": 2, "chunk_size": 8},
}


TOWER = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8,
    "num_key_value_heads": 2, "image_size": 28, "patch_size": 14, "depth": 1, "num_heads": 2, "embed_dim": 16,
    "out_hidden_size": 32, "num_position_embeddings": 16, "output_channels": 16, "mlp_dim": 24, "d_model": 16,
    "global_attn_indexes": [0], "fullatt_block_indexes": [0], "deepstack_visual_indexes": [0], "encoder_layers": 1,
    "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "num_mel_bins": 16, "n_window": 4, "output_dim": 32,
    "max_source_positions": 20, "resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 2,
    "resampler_head_dim": 8, "init_pos_emb_height": 4, "init_pos_emb_width": 4, "max_position_embeddings": 64,
    "max_image_size": 28, "alignment_intermediate_size": 24,
}  # fmt: skip
"""Sizes of what stands beside a text, as far as a type has the field."""
TOKENS = {
    "image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93,
    "image_token_index": 90, "boi_token_index": 94, "eoi_token_index": 95, "video_token_index": 91,
}  # fmt: skip
"""Tokens that stand for images and sound; the batch has none of them."""
AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
OF_TEXT: dict[str, dict[str, Any]] = {
    **{
        kind: {"per_layer_config": {1: {"head_dim": 16}}, "pad_token_id": 0}
        for kind in ("gemma4_text", "gemma4_unified_text")
    },
    **{
        kind: {"rope_parameters": AXES}
        for kind in ("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "glm4v_text", "glm_ocr_text",
                     "paddleocr_vl_text")
    },
    "qwen3_omni_moe_text": {"rope_parameters": AXES},
    "qwen3_vl_text": {"rope_parameters": AXES},
    "glm4v_moe_text": {"rope_parameters": {**AXES, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}},
    "hunyuan_vl_text": {
        "rope_parameters": {**AXES, "rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0, "mrope_section": [1] * 4}
    },
}  # fmt: skip
"""Options of texts that rotate by positions in several axes, or have layers of several sizes."""
SAVED_OTHERWISE = {"kimi_k25": (".blocks.", ".layers."), "qianfan_ocr": ("model.encoder.layers.", "model.layers.")}
"""Types whose text transformers 5.24 saves under names that no published checkpoint has: part of the name -> part."""


def tiny_config(kind: str) -> Any:
    """A config of a type with tiny sizes, also in its parts on text and images."""
    config = shrunk(transformers.AutoConfig.for_model(kind), {**TINY, **OF_TYPE.get(kind, {})})
    for name in getattr(type(config), "sub_configs", {}):
        part = getattr(config, name, None)
        if part is not None:
            own = {**TINY, **OF_TYPE.get(part.model_type, {}), **OF_TEXT.get(part.model_type, {})}
            setattr(config, name, shrunk(part, {**own, "num_hidden_layers": 2} if name == "text_config" else TOWER))
    for name, token in TOKENS.items():
        if hasattr(config, name):
            setattr(config, name, token)
    return config


def shrunk(config: Any, sizes: dict[str, Any]) -> Any:
    """The config of the same type with other sizes, as far as it has the fields."""
    if "text_config" in getattr(type(config), "sub_configs", {}):
        return config
    known = config.to_dict()
    changed = {name: value for name, value in sizes.items() if name in known}
    kinds = {name: known[name][: sizes.get("num_hidden_layers", 1)] for name in KINDS_OF_LAYERS if known.get(name)}
    if changed.get("num_hidden_layers") == TINY["num_hidden_layers"]:
        kinds = {}  # the default of the type, which goes with the number of layers
    stated = {} if not kinds else {name: value for name, value in known.items() if name not in NOT_ARGUMENTS}
    return type(config)(**{**stated, **changed, **kinds})


def tiny_model(kind: str, config: Any = None) -> Any:
    """A random model of a type, in float32; norms and biases are random, too. config: of its class, else a tiny one."""
    torch.manual_seed(7)
    loader = transformers.AutoModelForCausalLM if kind in CAUSAL else transformers.AutoModelForImageTextToText
    config = tiny_config(kind) if config is None else config
    with torch.device("meta"):
        size = loader.from_config(config).num_parameters()
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size} {TOO_LARGE}")
    model = loader.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            assert parameter.isfinite().all(), name
    return model


def compared(
    kind: str, dtype: Literal["float32", "float64"] = "float32", least_share: float = 0.0, config: Any = None
) -> dict[str, float]:
    """The relative errors of loss and gradients of one step of a tiny model; config: as of `tiny_model`.

    least_share: gradients below this share of the largest one's norm are compared with that.
    """
    model = tiny_model(kind, config)
    if dtype == "float64":
        model = widen(model)
    total = sum(_loss(model, row) for row in IDS) / sum(len(row) - 1 for row in IDS)
    with tempfile.TemporaryDirectory() as folder:
        _save(model, kind, Path(folder))
        total.backward()
        named = model.named_parameters(remove_duplicate=False)
        gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named}
        stored = _renamed(revert_weight_conversion(model, gradients), kind)
        names = own_names(open_model(folder).spec, stored)
        wanted = {names[name]: gradient for name, gradient in stored.items()}
        options = {"max_seq_len": 16, "max_global_batch_tokens": 64, "hardware": "cpu-test", "device": "cpu"}
        with from_pretrained(folder, dtype=dtype, **options) as engine:
            loss, found = engine.fwd_bwd(input_ids=IDS).loss, engine.gradients()
    missing = sorted(set(found) - set(wanted))
    assert not missing, f"transformers has no gradient of {missing[:3]}"
    floor = least_share * max(gradient.norm().item() for gradient in wanted.values())
    errors = [_error(grad, wanted[name], floor) for name, grad in found.items()]
    worst = {"loss_error": abs(loss / total.item() - 1), "gradient_error": max(errors)}
    return {name: float(f"{error:.1e}") for name, error in worst.items()}


def _save(model: Any, kind: str, folder: Path) -> None:
    """Save a model with the names that published checkpoints have."""
    model.save_pretrained(folder)
    if kind in SAVED_OTHERWISE:
        path = folder / "model.safetensors"
        save_file(_renamed(load_file(path), kind), path, {"format": "pt"})


def _renamed(tensors: dict[str, Any], kind: str) -> dict[str, Any]:
    old, new = SAVED_OTHERWISE.get(kind, ("", ""))
    of_text = "language_model.model."
    return {name.replace(old, new) if old and name.startswith(of_text) else name: t for name, t in tensors.items()}


def _loss(model: Any, row: Sequence[int]) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([row]), use_cache=False).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(row[1:]), reduction="sum")


def _error(found: torch.Tensor, wanted: torch.Tensor, floor: float) -> float:
    """The relative error; of a gradient that is all but zero, as of biases of keys, relative to `floor`."""
    return ((found - wanted).norm() / wanted.norm().clamp(min=max(floor, 1e-12))).item()


def row_of(kind: str) -> dict[str, Any]:
    """What is found of one type: native or opaque with its errors, or refused because something is missing."""
    if kind in FAMILIES:
        errors = compared(kind)
        if max(errors.values()) > BOUND and kind in ROUNDED:
            errors = {"dtype": "float64", **compared(kind, "float64")}
        return {
            "state": "native" if max(errors["loss_error"], errors["gradient_error"]) <= BOUND else "differs",
            **errors,
        }
    return _not_native(kind)


def _not_native(kind: str) -> dict[str, Any]:
    listed = [feature for feature, types in MISSING_IN_TYPES.items() if kind in types.split()]
    try:
        model = tiny_model(kind)
        _loss(model, IDS[0])
        config = model.config.to_dict()
    except Exception as error:
        if not is_encoder({"model_type": kind}):
            return {"state": "untried", "error": f"transformers: {_short(error)}"}
        config = {"model_type": kind}
    try:
        build_model(kind, config)
    except ValueError as error:
        named = (bool(listed) and listed[0] in str(error)) or any(part in str(error) for part in NAMED)
        said = listed if listed and named else [_short(error)]
        return {"state": "refused" if named else "refused without a reason", "missing": said}
    errors = compared(kind, least_share=1e-3)
    return {"state": "opaque" if max(errors.values()) <= OPAQUE_BOUND else "differs", **errors}


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    text = re.sub(r"\S*\btmp\w+", "DIR", text.partition("; nor does it run as opaque blocks: ")[2] or text)
    return text[:90]


def _write(path: Path, rows: dict[str, dict[str, Any]]) -> None:
    """Write what was found of types beside what the file says of others."""
    known = json.loads(path.read_text()) if path.exists() else {}
    found = {kind: (state, told) for state in STATES for kind, told in known.get(state, {}).items()}
    for kind, row in rows.items():
        errors = [row[name] for name in ("loss_error", "gradient_error") if name in row]
        found[kind] = row["state"], errors or ", ".join(row.get("missing", ())) or row["error"]
    counts = {
        "causal": Counter(state for kind, (state, _) in found.items() if kind in CAUSAL),
        "image_text": Counter(state for kind, (state, _) in found.items() if kind not in CAUSAL),
    }
    by_state = {
        state: {kind: told for kind, (other, told) in sorted(found.items()) if other == state}
        for state in sorted({state for state, _ in found.values()})
    }
    write_json(str(path), {"counts": counts, **by_state})


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row for each type; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=sorted({*CAUSAL, *IMAGES}), help="types to try; all by default")
    parser.add_argument(
        "--json",
        type=Path,
        help="write to this file: by state, errors of loss and gradients, or what is missing; types that are not tried"
        " stay in it as they are",
    )
    arguments = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    rows: dict[str, dict[str, Any]] = {}
    for kind in arguments.only:
        try:
            rows[kind] = row_of(kind)
        except Exception as error:  # the row of a type that fails shall not cost the others'
            named, large = any(part in str(error) for part in NAMED), TOO_LARGE in str(error)
            state = "refused" if named else "untried" if large else "fails"
            rows[kind] = {"state": state, "error": f"{type(error).__name__}: {_short(error)}"}
        print(kind, *(f"{key}={value}" for key, value in rows[kind].items()), flush=True)
    if arguments.json is not None:
        _write(arguments.json, rows)
    counts = Counter(row["state"] for row in rows.values())
    print(", ".join(f"{state}: {count}" for state, count in counts.most_common()))
    return int(bool(set(counts) - {"native", "opaque", "refused", "untried"}))


if __name__ == "__main__":
    raise SystemExit(main())
