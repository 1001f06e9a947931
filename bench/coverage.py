"""Which types of transformers' causal language models train here, and do they compute what transformers computes?

python -m bench.coverage [--only TEXT] [--json FILE]

A tiny random model of every type is trained for a step beside transformers in float32 on the CPU: its loss and the
gradient of every parameter must be within BOUND (relative), of types that run as opaque blocks within OPAQUE_BOUND. Of
what is refused the message must name what is missing. The exit status is 1 where one of them is not so. `untried` are
types of which no tiny model is made here. Needs transformers; takes a few minutes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

from bench.environment import write_json
from flexengine import from_pretrained
from flexengine.models.registry import FAMILIES, build_model
from flexengine.models.unknown import MISSING_IN_TYPES, is_encoder

BOUND, OPAQUE_BOUND = 3e-5, 1e-4
MOST_PARAMETERS = 1 << 23
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
}  # fmt: skip
"""Sizes of the tiny models, as far as a type has the field."""
OF_TYPE: dict[str, dict[str, Any]] = {
    **{
        kind: {"num_key_value_heads": 4, "head_dim": 4}
        for kind in (
            "deepseek_v2",
            "deepseek_v3",
            "deepseek_v32",
            "glm4_moe_lite",
            "sarvam_mla",
            "youtu",
            "axk1",
            "axk2",
            "minicpm3",
            "mistral4",
            "longcat_flash",
            "bailing_hybrid",
        )
    },
    "dots1": {"n_shared_experts": 1},
    **{kind: {"rotary_dim": 4} for kind in ("gptj", "codegen")},
    **{
        kind: {
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 8,
            "mamba_n_groups": 1,
            "mamba_expand": 2,
            "mamba_chunk_size": 8,
        }
        for kind in ("bamba", "granitemoehybrid")
    },
    "kimi_linear": {"num_key_value_heads": 4, "head_dim": 8, "num_experts_per_token": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "conv"], "num_dense_layers": 2},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "expand": 2, "chunk_size": 8},
    # a larger eps: the norm of what a first token gives magnifies the rounding of transformers a thousandfold
    **{
        kind: {"rms_norm_eps": 1e-1, "initializer_range": 0.3}
        for kind in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
    },
}


def tiny_config(kind: str) -> Any:
    """A config of a type with small sizes."""
    known = transformers.AutoConfig.for_model(kind).to_dict()
    sizes = {**{name: value for name, value in TINY.items() if name in known}, **OF_TYPE.get(kind, {})}
    return transformers.AutoConfig.for_model(kind, **sizes)


def tiny_model(kind: str) -> Any:
    """A random model of a type, in float32; norms and biases are random, too."""
    torch.manual_seed(7)
    config = tiny_config(kind)
    with torch.device("meta"):
        size = transformers.AutoModelForCausalLM.from_config(config).num_parameters()
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size} parameters with the sizes that are known here")
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            assert parameter.isfinite().all(), name
    return model


def compared(kind: str) -> dict[str, float]:
    """The relative errors of loss and gradients of one step of a tiny model."""
    model = tiny_model(kind)
    total = sum(_loss(model, row) for row in IDS) / sum(len(row) - 1 for row in IDS)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        total.backward()
        wanted = revert_weight_conversion(model, {name: p.grad for name, p in model.named_parameters()})
        options = {"max_seq_len": 16, "max_global_batch_tokens": 64, "hardware": "cpu-test", "device": "cpu"}
        with from_pretrained(folder, dtype="float32", **options) as engine:
            loss, found = engine.fwd_bwd(input_ids=IDS).loss, engine.gradients()
    floor = 1e-3 * max(grad.norm().item() for grad in wanted.values() if grad is not None)
    nothing = torch.zeros(())  # what no token reached has no gradient in transformers
    errors = [
        _error(grad, nothing if wanted.get(name) is None else wanted[name], floor) for name, grad in found.items()
    ]
    return {"loss_error": abs(loss / total.item() - 1), "gradient_error": max(errors)}


def _loss(model: Any, row: Sequence[int]) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([row]), use_cache=False).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(row[1:]), reduction="sum")


def _error(found: torch.Tensor, wanted: torch.Tensor, floor: float) -> float:
    """The relative error; of a gradient that is all but zero, as of biases of keys, relative to `floor`."""
    return ((found - wanted).norm() / wanted.norm().clamp(min=floor)).item()


def row_of(kind: str) -> dict[str, Any]:
    """What is found of one type: native or opaque with its errors, or refused because something is missing."""
    if kind in FAMILIES:
        if "text_config" in transformers.AutoConfig.for_model(kind).to_dict():
            return {"state": "native", "as": "the text of a model with images"}
        errors = compared(kind)
        return {"state": "native" if max(errors.values()) <= BOUND else "differs", **errors}
    return _not_native(kind)


def _not_native(kind: str) -> dict[str, Any]:
    listed = [feature for feature, types in MISSING_IN_TYPES.items() if kind in types.split()]
    config: dict[str, Any] = {"model_type": kind}
    if not is_encoder(kind):
        try:
            _loss(tiny_model(kind), IDS[0])
            config = tiny_config(kind).to_dict()
        except Exception as error:
            return {"state": "untried", "error": f"transformers: {_short(error)}"}
    try:
        build_model(kind, config)
    except ValueError as error:
        named = (bool(listed) and listed[0] in str(error)) or "as opaque blocks" in str(error)
        return {"state": "refused" if named else "refused without a reason", "missing": listed, "error": _short(error)}
    errors = compared(kind)
    return {"state": "opaque" if max(errors.values()) <= OPAQUE_BOUND else "differs", **errors}


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text.partition("; nor does it run as opaque blocks: ")[2][:200] or text[:200]


def _write(path: Path | None, rows: dict[str, dict[str, Any]]) -> None:
    if path is not None:
        counts = Counter(row["state"] for row in rows.values())
        write_json(str(path), {"counts": counts, "types": dict(sorted(rows.items()))})


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row for each type; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="types whose name contains this")
    parser.add_argument("--json", type=Path, help="write the rows to this file, and go on after those that it has")
    arguments = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    found = arguments.json is not None and arguments.json.exists()
    rows: dict[str, dict[str, Any]] = json.loads(arguments.json.read_text())["types"] if found else {}
    for kind in sorted(kind for kind in CAUSAL if arguments.only in kind and kind not in rows):
        try:
            rows[kind] = row_of(kind)
        except Exception as error:  # the row of a type that fails shall not cost the others'
            rows[kind] = {"state": "fails", "error": f"{type(error).__name__}: {str(error)[:200]}"}
        print(kind, *(f"{key}={value}" for key, value in rows[kind].items()), flush=True)
        _write(arguments.json, rows)
    counts = Counter(row["state"] for row in rows.values())
    print(", ".join(f"{state}: {count}" for state, count in counts.most_common()))
    return int(bool(set(counts) - {"native", "opaque", "refused", "untried"}))


if __name__ == "__main__":
    raise SystemExit(main())
