"""Describes the text of models with images or sound: a decoder of a known type, whose names of tensors begin otherwise.

The text alone is trained. Tensors beside it, such as towers and projectors, are no part of the description, so that an
export has them as they came. Positions in three axes (Qwen2-VL and later) are equal for text, and rotate it as one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from flexengine.models import deepseek, gemma4, gpt_oss, llama, moe, qwen_next, variants
from flexengine.models.checkpoints import HEADS
from flexengine.models.fields import Fields
from flexengine.models.sizes import with_class_defaults
from flexengine.models.spec import LayerSpec, ModelSpec, ParamSpec, WeightSource
from flexengine.models.variant_rows import VARIANTS
from flexengine.models.wrappers import SIZES, TEXTS, WRAPPERS, Wrapper
from flexengine.wording import shown

BESIDE = "the tensors beside it are exported unchanged"
NOTICE = f"the text part is trained; {BESIDE} (vision tower, projector)"
AXES = {"mrope": "default", "xdrope": "dynamic"}
"""Rotations by positions in several axes -> what they are where these are equal."""
LAID_EITHER_WAY = (moe.WITH_IMAGES,)
"""Types of texts whose experts lie input by output, or the other way."""
BUILDERS: dict[str, Callable[[str, dict], ModelSpec]] = {
    "llama": llama.build, "qwen3_moe": moe.build, moe.WITH_IMAGES: moe.build,
    "gemma4_text": gemma4.build, "gemma4_unified_text": gemma4.build,
    "qwen3_5_text": qwen_next.build, "qwen3_5_moe_text": qwen_next.build, "deepseek_v3": deepseek.build,
    "gpt_oss": gpt_oss.build, **dict.fromkeys(VARIANTS, variants.build),
}  # fmt: skip
"""Type of a text -> what describes it."""


def build(name: str, config: dict) -> ModelSpec:
    """Describe the text of a config of a type of WRAPPERS. Raises ValueError as the others do."""
    family = config["model_type"]
    row, fields = WRAPPERS[family], Fields(name, config)
    text = _text(name, config, row)
    text["tie_word_embeddings"] = fields.switch("tie_word_embeddings", row.tied)
    spec = BUILDERS[text["model_type"]](name, text)
    return replace(
        _renamed(spec, row.prefix, row.head), family=family, notice="; ".join(filter(None, (NOTICE, spec.notice)))
    )


def leaves_open(config: Any) -> bool:
    """Tell whether a config is of a model with images and does not say whether the head is tied, or how experts lie."""
    # transformers gives such configs a default that published checkpoints do not follow
    kind = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(kind, str) or kind not in WRAPPERS:
        return False
    return "tie_word_embeddings" not in config or WRAPPERS[kind].text in LAID_EITHER_WAY


def as_stored(config: dict, shapes: Mapping[str, tuple[int, ...]]) -> dict:
    """State what a checkpoint of tensors of these shapes tells.

    That is whether the head is tied: where there is none; and whether experts lie output by input, as transformers
    writes those of types that were published input by output.
    """
    if "tie_word_embeddings" not in config:
        config = {**config, "tie_word_embeddings": not any(name.startswith(HEADS) for name in shapes)}
    text = config.get("text_config")
    if WRAPPERS[config["model_type"]].text not in LAID_EITHER_WAY or not isinstance(text, dict):
        return config
    downs = (shape for name, shape in shapes.items() if name.endswith("mlp.experts.down_proj"))
    sizes = text.get("hidden_size"), text.get("moe_intermediate_size")
    return {**config, "text_config": {**text, moe.OUTPUT_BY_INPUT: next(downs, ())[1:] == sizes}}


def _text(name: str, config: dict, row: Wrapper) -> dict:
    """Give the config of the text, which early configs hold among the fields of the whole, with its type's defaults."""
    text = Fields(name, config).nested("text_config") or {**config, "model_type": row.text}
    stated = text.get("model_type", row.text)
    kind, defaults = TEXTS.get(stated, (stated, {})) if isinstance(stated, str) else (stated, {})
    if kind not in BUILDERS:
        raise ValueError(
            f"{name}: model_type={shown(stated)} in the text_config of config.json: a text of this type is not trained "
            f"in a {config['model_type']} model. Give a model whose text is of another type"
        )
    ropes = {place: _one_axis(text[place]) for place in ("rope_parameters", "rope_scaling") if place in text}
    inside = [options for options in ropes.values() if isinstance(options, dict)]
    defaults = {key: value for key, value in defaults.items() if not any(key in options for options in inside)}
    own = {**SIZES.get(kind, {}), **defaults, **text, **ropes, **row.fixed, "model_type": kind}
    return with_class_defaults(kind, own)


def _one_axis(options: Any) -> Any:
    """Name the rotations of text where rope options are for positions in several axes."""
    if not isinstance(options, dict):
        return options
    kinds = {key: AXES[value] for key, value in options.items() if key in ("type", "rope_type") and value in AXES}
    return {**options, **kinds}


def _renamed(spec: ModelSpec, prefix: str, head: str) -> ModelSpec:
    """Call the sources of a text as a model with images does."""

    def named(source: WeightSource) -> WeightSource:
        own = head if source.name == spec.head_source else f"{prefix}.{source.name.removeprefix(spec.prefix)}"
        return replace(source, name=own)

    def of_param(param: ParamSpec) -> ParamSpec:
        fused = param.fused and named(param.fused)
        return replace(param, sources=tuple(map(named, param.sources)), fused=fused)

    def of_layer(layer: LayerSpec) -> LayerSpec:
        return replace(layer, buffers=tuple((own, named(source)) for own, source in layer.buffers))

    layers = tuple(map(of_layer, spec.layers))
    return replace(spec.with_params(of_param), layers=layers, prefix=f"{prefix}.", head_source=head)
