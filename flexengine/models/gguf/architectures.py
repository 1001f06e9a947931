"""What GGUF files call the fields of a config and the tensors of a model, and where they hold other numbers.

Both directions share it: a file is read by what writing it would have made of the model.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; names of tensors are those of the package `gguf`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

REMEDY = "pip install 'flexengine-train[gguf]'"
ROPE_FACTORS = "rope_freqs.weight"
"""Tensor of what each frequency is divided by; files of Llama 3.1 and later have it in place of llama3 scaling."""
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What all published models with llama3 scaling have beside its factor."""
SCALINGS = ("linear", "yarn")
"""Kinds of scaled frequencies that llama.cpp has by the same formula."""


class Architecture(NamedTuple):
    """A family as llama.cpp knows it.

    name: `general.architecture`. paired_rows: queries and keys are rotated in neighbouring pairs, so their rows lie in
    another order. shifted_norms: norms hold weights around one. big_layers: number of layers of the one model whose
    queries are scaled by model width over heads. implied: fields of a config that no key tells.
    """

    name: str
    paired_rows: bool = False
    shifted_norms: bool = False
    big_layers: int = 0
    implied: Mapping[str, Any] = {}


ARCHITECTURES = {
    "llama": Architecture("llama", paired_rows=True),
    "mistral": Architecture("llama", paired_rows=True, implied={"sliding_window": None}),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen2_moe": Architecture("qwen2moe"),
    "qwen3_moe": Architecture("qwen3moe", implied={"norm_topk_prob": True}),
    "gemma2": Architecture("gemma2", shifted_norms=True, big_layers=46),
    "gemma3_text": Architecture("gemma3", shifted_norms=True, big_layers=62),
    "olmo2": Architecture("olmo2"),
    "olmoe": Architecture("olmoe"),
}
"""Model type -> architecture; of two with one architecture files are read as the first."""

FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "rope.freq_base": "rope_theta",
}
"""Key of a file, after its architecture -> field of config.json. A window is Gemma's alone: `_window`."""
WINDOW = "attention.sliding_window"
NEUTRAL = {"vocab_size", "attention.value_length", "rope.dimension_count"}
"""Keys that repeat what tensors and other keys say; widths of heads are compared."""
TOKENS = ("bos", "eos", "padding")


def architecture_of(model_type: str) -> Architecture:
    """Find what llama.cpp calls a family. Raises: ValueError for one that it lacks, or that was never compared."""
    if model_type not in ARCHITECTURES:
        raise ValueError(f"no GGUF file is written of {model_type} models, only of {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[model_type]


class Place(NamedTuple):
    """Where a file holds a tensor of a Hugging Face checkpoint: by name, and of stacked experts by number."""

    name: str
    expert: int | None = None


def places(architecture: Architecture, num_layers: int) -> Callable[[str], Place | None]:
    """Make the function from a tensor's name in a checkpoint to its place in a file; None where it has none."""
    import gguf  # noqa: PLC0415, an extra

    number = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[architecture.name]
    names = gguf.get_tensor_name_map(number, num_layers)

    def place(name: str) -> Place | None:
        expert = re.search(r"\.experts\.(\d+)\.", name)
        found = names.get_name(re.sub(r"\.experts\.\d+\.", ".experts.", name), try_suffixes=(".weight", ".bias"))
        return None if found is None else Place(found, int(expert[1]) if expert else None)

    return place


def paired(architecture: Architecture, name: str, config: Mapping[str, Any], invert: bool = False) -> Any:
    """Order the rows of queries or keys as llama.cpp rotates them; None for tensors whose rows stay.

    name: in the file. invert: the order of a checkpoint's rows in a file. Returns row numbers [rows].
    """
    kind = re.search(r"attn_([qk])\.", name)
    if not architecture.paired_rows or kind is None:
        return None
    heads = config["num_attention_heads" if kind[1] == "q" else "num_key_value_heads"]
    width = config["head_dim"]
    order = np.arange(heads * width).reshape(heads, 2, width // 2).swapaxes(1, 2).reshape(-1)
    return np.argsort(order) if invert else order


def shift(architecture: Architecture, name: str) -> float:
    """What a file adds to a tensor of the checkpoint. name: in the file."""
    return 1.0 if architecture.shifted_norms and name.endswith("norm.weight") else 0.0


def keys_of(config: Any, architecture: Architecture) -> dict[str, Any]:
    """Say a config in the keys of a file. config: an object of transformers, whose defaults are filled in."""
    rope = dict(config.rope_parameters or {})
    rope = rope.get("full_attention", rope)
    own = {"rope_theta": rope.get("rope_theta"), "head_dim": head_dim_of(config)}
    fields = {field: own.get(field, getattr(config, field, None)) for field in FIELDS.values()}
    fields["num_key_value_heads"] = fields["num_key_value_heads"] or fields["num_attention_heads"]
    keys = {key: fields[field] for key, field in FIELDS.items() if fields[field] is not None}
    keys |= {"attention.value_length": fields["head_dim"], "rope.dimension_count": fields["head_dim"]}
    keys["vocab_size"] = config.vocab_size
    if architecture.shifted_norms:
        keys[WINDOW] = config.sliding_window
    if (kind := rope.get("rope_type", "default")) in SCALINGS:
        keys |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
        if kind == "yarn":
            longest = rope.get("original_max_position_embeddings") or config.max_position_embeddings
            keys["rope.scaling.original_context_length"] = longest
    return keys


def config_of(model_type: str, keys: Mapping[str, Any], shapes: Mapping[str, Any], factors: Any = None) -> dict:
    """Make config.json of the keys of a file. keys: without the architecture before them.

    shapes: of each tensor in the file. factors: of ROPE_FACTORS where there are some.
    Raises: ValueError naming keys that ask for what is not known.
    """
    architecture = ARCHITECTURES[model_type]
    windows = {WINDOW} if architecture.shifted_norms else set()
    known = {*FIELDS, *NEUTRAL, *windows, *(key for key in keys if key.startswith("rope.scaling."))}
    if unknown := sorted(keys.keys() - known):
        raise ValueError(f"nothing here reads its keys {', '.join(unknown)}, without which another model would run")
    config = {field: keys[key] for key, field in FIELDS.items() if key in keys}
    width = config["head_dim"] = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.get(key, width) != width:
            raise ValueError(f"its {key} is {keys[key]}, and heads of {width} alone are read")
    biases = {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"}
    config |= {field: True for field, end in biases.items() if model_type != "qwen2" and f"blk.0.{end}" in shapes}
    if windows:
        wide = config["num_hidden_layers"] == architecture.big_layers
        scalar = config["hidden_size"] // config["num_attention_heads"] if wide else width
        config |= {"sliding_window": keys[WINDOW], "query_pre_attn_scalar": scalar}
    if (scaling := _scaling(keys, config, factors)) is not None:
        config["rope_scaling"] = scaling
    return {
        "model_type": model_type,
        **config,
        **architecture.implied,
        "vocab_size": shapes["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in shapes,
    }


def head_dim_of(config: Any) -> int:
    """Width of a head, which older families leave to the widths of the model."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def llama3_factors(theta: float, width: int, scaling: Mapping[str, Any]) -> np.ndarray:
    """What llama3 scaling divides each frequency by. Shapes: [width / 2], float32.

    Source: the formula of Llama 3.1, https://github.com/meta-llama/llama-models (apply_scaling).
    """
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * theta ** (-np.arange(0, width, 2) / width) / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / scaling["factor"] + smooth)).astype(np.float32)


def _scaling(keys: Mapping[str, Any], config: Mapping[str, Any], factors: Any) -> dict[str, Any] | None:
    """Say how frequencies are scaled, as config.json does. Raises: ValueError for a way that is not known."""
    kind = keys.get("rope.scaling.type", "none")
    sizes = {key.removeprefix("rope.scaling."): value for key, value in keys.items() if key.startswith("rope.scaling.")}
    if factors is not None:
        scaling = {"rope_type": "llama3", "factor": float(np.max(factors)), **LLAMA3}
        if not np.allclose(factors, llama3_factors(config["rope_theta"], config["head_dim"], scaling), rtol=1e-4):
            raise ValueError(f"its {ROPE_FACTORS} holds no factors of llama3 scaling, and no others are read")
        return scaling
    if kind == "none":
        return None
    longest = sizes.get("original_context_length")
    if kind not in SCALINGS or sizes.keys() - {"type", "factor", "original_context_length", "finetuned"}:
        raise ValueError(f"it scales frequencies as {sizes}, and {' or '.join(SCALINGS)} by a factor alone is read")
    return {
        "rope_type": kind,
        "factor": sizes["factor"],
        **({"original_max_position_embeddings": longest} if longest and kind == "yarn" else {}),
    }
