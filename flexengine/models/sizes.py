"""Reads what the configs of most decoders have in common: sizes, the activation, windows by layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flexengine.models.block_shape import AnyNorm, BlockShape, PlainActivation
from flexengine.models.fields import Fields
from flexengine.ops.glu import Activation
from flexengine.wording import shown

SLIDING, FULL, LINEAR, MLP = "sliding_attention", "full_attention", "linear_attention", "mlp"
LAYER_TYPES = (SLIDING, FULL, LINEAR)
ACTIVATIONS: dict[str, Activation | PlainActivation] = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "relu2": "relu2",
    "xielu": "xielu",
}  # fmt: skip
"""Activations by their names in configs. Plain "gelu" is another function, and is not supported."""

GEMMA4: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
}
CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mixtral": {"num_key_value_heads": 8, "max_position_embeddings": 131072},
    "qwen2_moe": {"num_key_value_heads": 16, "max_position_embeddings": 32768},
    "qwen3_moe": {"num_key_value_heads": 4, "max_position_embeddings": 32768},
    "olmoe": {"max_position_embeddings": 4096},
    "gemma4_text": {**GEMMA4, "max_position_embeddings": 131072, "sliding_window": 512},
    "gemma4_unified_text": {**GEMMA4, "max_position_embeddings": 262144, "sliding_window": 1024},
    "qwen3_next": {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 48,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 32768,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    },
    "qwen3_5_text": {
        "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 32768,
    },
    "qwen3_5_moe_text": {
        "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 32768,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    },
    "deepseek_v2": {
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_shared_experts": 2, "moe_intermediate_size": 1407, "max_position_embeddings": 2048,
    },
    "deepseek_v3": {
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_shared_experts": 1, "moe_intermediate_size": 2048, "num_experts_per_tok": 8,
        "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3, "norm_topk_prob": True,
        "max_position_embeddings": 4096,
    },
    "gpt_oss": {
        "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072, "sliding_window": 128,
    },
}  # fmt: skip
"""Values that transformers gives to fields that a config leaves out; null is not left out, and turns a feature off."""


def with_class_defaults(family: str, config: dict) -> dict:
    """Add the fields that a config leaves out."""
    return {**CLASS_DEFAULTS.get(family, {}), **config}


@dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder, checked against each other."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int

    def block(self, norm: AnyNorm, **options: Any) -> BlockShape:
        """Describe a block of these sizes with the options of `BlockShape`."""
        return BlockShape(
            self.hidden_size,
            self.intermediate_size,
            self.num_attention_heads,
            self.num_key_value_heads,
            self.head_dim,
            norm,
            **options,
        )


def read_sizes(fields: Fields) -> Sizes:
    """Read the sizes of a config. Raises ValueError if one is absent, out of range or does not go with the others."""
    heads, hidden = fields.whole("num_attention_heads"), fields.whole("hidden_size")
    kv_heads = fields.whole("num_key_value_heads", heads)
    width = _head_dim(fields, heads, hidden)
    # Query heads share key heads in equal numbers.
    if heads % kv_heads:
        raise ValueError(
            f"{fields.model}: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}; one of "
            "them is wrong in config.json: fetch the published one again"
        )
    return Sizes(
        hidden_size=hidden,
        intermediate_size=fields.whole("intermediate_size"),
        num_hidden_layers=fields.whole("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=width,
        vocab_size=fields.whole("vocab_size"),
    )


def _head_dim(fields: Fields, heads: int, hidden: int) -> int:
    """Read the width of a head; by default an equal share of hidden_size."""
    head_dim = fields.whole("head_dim", None)
    if head_dim is None and hidden % heads:
        raise ValueError(
            f"{fields.model}: hidden_size={hidden} is not a multiple of num_attention_heads={heads}, and config.json "
            "has no head_dim. Correct whichever of the three is wrong, or fetch the model's config.json again"
        )
    head_dim = head_dim or hidden // heads
    if head_dim % 2:
        raise ValueError(
            f"{fields.model}: head_dim={head_dim} is odd; rotary embeddings need an even width. Correct head_dim in "
            f"config.json, or hidden_size={hidden} and num_attention_heads={heads} that it follows from"
        )
    return head_dim


def read_activation(fields: Fields, family: str, key: str = "hidden_act", default: str = "silu") -> Any:
    """Read the activation of the FFN. Raises ValueError for another than the family's."""
    expected, found = ACTIVATIONS[default], fields.text(key, default)
    if ACTIVATIONS.get(found) != expected:
        raise ValueError(
            f"{fields.model}: {key}={shown(found)} in config.json; a {family} model has {default!r}, others are not "
            "supported"
        )
    return expected


def read_rms_norm_eps(fields: Fields, default: float = 1e-6) -> float:
    """Read what RMSNorm adds to the mean square."""
    return fields.number("rms_norm_eps", default, high=1.0)


def read_window(fields: Fields) -> int:
    """Read `sliding_window`; 0 if there is none."""
    return fields.whole("sliding_window", None) or 0


def layer_types(
    fields: Fields,
    count: int,
    default: list[str],
    known: tuple[str, ...] | None = None,
    older: str | None = None,
) -> list[str]:
    """Read the kind of attention of every layer, or give the default.

    known: kinds that the family has, by default with a window where the config has one. older: the field that the
    default follows from. Raises ValueError for kinds that are not known, and where the older field says otherwise.
    """
    found = fields.values.get("layer_types")
    if found is None:
        return default
    known = known or ((SLIDING, FULL) if read_window(fields) else (FULL,))
    if not isinstance(found, list) or len(found) != count or any(kind not in known for kind in found):
        off = "" if SLIDING in known else ", as windows are switched off or not supported in this model"
        raise ValueError(
            f"{fields.model}: layer_types={shown(found)} in config.json; expected a list of num_hidden_layers={count} "
            f"entries, each {' or '.join(known)}{off}. Fetch the published config.json again"
        )
    if older and fields.values.get(older) is not None:
        fields.check_told_once("layer_types", older, found == default)
    return found
