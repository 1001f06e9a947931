"""Gemma 4 (types `gemma4_text`, `gemma4_unified_text`): as Gemma 3, with heads of another width in layers without a
window, whose values may be their keys; normalised values; rotations of a part of the pairs; a factor on each layer; and
experts beside the dense FFN (26B-A4B).

Source: the model cards of Gemma 4 (2026); config fields and names of tensors as in Hugging Face. What layers share in
the small models (keys and values, embeddings per layer) is refused.
"""

from __future__ import annotations

import math
from typing import Any

from flexengine.models.block_shape import BlockNames, BlockShape, ExpertShape
from flexengine.models.decoder import DecoderShape, decoder_model
from flexengine.models.experts_beside import ExpertsBeside
from flexengine.models.fields import Fields
from flexengine.models.rope import typed_rope_table
from flexengine.models.sizes import (
    FULL,
    SLIDING,
    Sizes,
    layer_types,
    read_activation,
    read_rms_norm_eps,
    read_sizes,
    read_window,
)
from flexengine.models.spec import ModelSpec
from flexengine.ops.attention.style import AttentionStyle
from flexengine.ops.rmsnorm import NormStyle
from flexengine.wording import shown

NAMES = BlockNames(
    mlp_norm="pre_feedforward_layernorm", router="router.proj", experts="experts", expert_gate_up=(), expert_down=""
)
SHARED = {
    "num_kv_shared_layers": "layers that read the keys and values of other layers",
    "hidden_size_per_layer_input": "embeddings for each layer",
}
"""Fields of the small models -> what they ask for."""
THETAS = {FULL: 1e6, SLIDING: 1e4}
PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": THETAS[FULL]}


def build(name: str, config: dict) -> ModelSpec:
    """Describe the model of a config of type `gemma4_text` or `gemma4_unified_text`. Raises ValueError as others do."""
    fields, family = Fields(name, config), config["model_type"]
    _refuse_shared(fields, family)
    sizes = read_sizes(fields)
    kinds = _kinds(fields, sizes.num_hidden_layers)
    by_kind = {FULL: _full_sizes(fields, sizes, kinds), SLIDING: sizes}
    ropes = config.get("rope_parameters") or {FULL: PROPORTIONAL}
    tables = {
        kind: typed_rope_table(
            {**config, "rope_parameters": ropes}, own.head_dim, name, kind, "rope_theta", THETAS[kind]
        )
        for kind, own in by_kind.items()
        if kind in kinds
    }
    norm = NormStyle(read_rms_norm_eps(fields), wide=True)
    ffn = _experts(fields) if fields.switch("enable_moe_block", False) else None
    bias, keys = fields.switch("attention_bias", False), fields.switch("attention_k_eq_v", False)
    activation = read_activation(fields, family, "hidden_activation", "gelu_pytorch_tanh")

    def block(kind: str) -> BlockShape:
        return by_kind[kind].block(
            norm,
            norms="both",
            qkv_bias=bias,
            o_bias=bias,
            qk_norm="head",
            values="keys" if keys and kind == FULL else "normed",
            rope=tables[kind].name,
            rope_scaling=tables[kind].scaling,
            attention=AttentionStyle(1.0, read_window(fields) if kind == SLIDING else 0),
            activation=activation,
            ffn=ffn,
            scaled=True,
        )

    blocks = {kind: block(kind) for kind in tables}
    shape = DecoderShape(
        vocab_size=sizes.vocab_size,
        tie_word_embeddings=fields.switch("tie_word_embeddings", True),
        blocks=tuple(blocks[kind] for kind in kinds),
        tables=tuple(tables.values()),
        final_norm=norm,
        embedding_scale=math.sqrt(sizes.hidden_size),
        logit_soft_cap=fields.number("final_logit_softcapping", 0.0),
        names=NAMES,
    )
    return decoder_model(name, family, config, shape)


def _refuse_shared(fields: Fields, family: str) -> None:
    """Raise ValueError for a config whose layers share keys and values, or have embeddings of their own."""
    unstated = {"hidden_size_per_layer_input": 256} if family == "gemma4_text" else {}
    read = {field: fields.whole(field, unstated.get(field, 0), least=0) for field in SHARED}
    found = [f"{field}={number} ({SHARED[field]})" for field, number in read.items() if number]
    if found:
        raise ValueError(
            f"{fields.model}: {' and '.join(found)} in config.json: layers that hand on more than one tensor are not "
            "supported. Give a Gemma 4 model without them, such as 12B, 31B or 26B-A4B"
        )


def _kinds(fields: Fields, count: int) -> list[str]:
    """Read the kinds of layers: by default every sixth has no window; nor has the last, whatever the config says."""
    kinds = layer_types(fields, count, [SLIDING if (i + 1) % 6 else FULL for i in range(count)])
    return [*kinds[:-1], FULL]


def _full_sizes(fields: Fields, sizes: Sizes, kinds: list[str]) -> Sizes:
    """Read the sizes of layers without a window, which published configs state once and transformers by layer."""
    by_layer = fields.values.get("per_layer_config")
    if by_layer is None:
        own: dict[str, Any] = {"head_dim": fields.whole("global_head_dim", 512)}
        heads = fields.whole("num_global_key_value_heads", None)
        if heads is not None and fields.switch("attention_k_eq_v", False):
            own["num_key_value_heads"] = heads
    else:
        own = _same_in_full_layers(fields, by_layer, kinds)
    return read_sizes(Fields(fields.model, {**fields.values, **own}))


def _same_in_full_layers(fields: Fields, by_layer: Any, kinds: list[str]) -> dict[str, Any]:
    """Read the sizes that `per_layer_config` states, which must be those of all layers without a window."""
    full = [i for i, kind in enumerate(kinds) if kind == FULL]
    found = {int(i): own for i, own in by_layer.items() if i.isdecimal()} if isinstance(by_layer, dict) else {}
    own = found.get(full[0])
    if (
        not isinstance(own, dict)
        or own.keys() - {"head_dim", "num_key_value_heads"}
        or found != dict.fromkeys(full, own)
        or len(found) != len(by_layer)
    ):
        raise ValueError(
            f"{fields.model}: per_layer_config={shown(by_layer)} in config.json; expected head_dim and perhaps "
            f"num_key_value_heads, the same for each of the layers without a window ({', '.join(map(str, full))}). "
            "Fetch the published config.json again"
        )
    return own


def _experts(fields: Fields) -> ExpertsBeside:
    """Read the experts beside the dense FFN of every layer."""
    count, per_token = fields.whole("num_experts"), fields.whole("top_k_experts")
    return ExpertsBeside(ExpertShape(count, per_token, fields.whole("moe_intermediate_size"), normalised=True))
