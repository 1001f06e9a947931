"""Describes models whose checkpoint holds matrices quantised: what config.json says of it, and which of it is read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flexengine.models.fields import Fields
from flexengine.models.spec import GroupSpec, ModelSpec, ParamSpec, WeightSource
from flexengine.wording import shown

KEYS = ("quantization_config", "compression_config")
"""Fields of a config, or of its part on the text, that say how weights are quantised."""
BITSANDBYTES = "bitsandbytes"
BLOCK_SIZE = [128, 128]
"""The block size of FP8 that checkpoint/quantised.py reads."""
NOTICE = "weights are read from {}, and exported in bfloat16 without a quantization_config"


def without_quantisation(config: dict) -> dict:
    """Leave out what a config says about quantised weights, also in its part on the text."""
    rest = {name: value for name, value in config.items() if name not in KEYS}
    text = rest.get("text_config")
    return {**rest, "text_config": without_quantisation(text)} if isinstance(text, dict) else rest


def quantised_by(name: str, config: dict, readable: tuple[str, ...]) -> str:
    """Give the method by which a config says that weights are quantised, empty for none.

    readable: methods that the family has beside NF4 of bitsandbytes. Raises ValueError for one that is not read.
    """
    text = config.get("text_config")
    for part, known in ((config, (*readable, BITSANDBYTES)), (text if isinstance(text, dict) else {}, ())):
        for key in KEYS:
            options = part.get(key)
            method = options.get("quant_method") if isinstance(options, dict) else options
            switched_off = {"quant_method": BITSANDBYTES, "load_in_4bit": False, "load_in_8bit": False}
            if isinstance(options, dict) and switched_off.items() <= options.items():
                continue
            if options and (method not in known or key != KEYS[0]):
                raise ValueError(
                    f"{name}: config.json has a {key} (method {shown(method)}): its weights are quantised. Give the "
                    "checkpoint in 16 or 32 bits that it was made from"
                )
            if options:
                return str(method)
    return ""


def as_quantised(model: ModelSpec, config: dict, method: str, plain: tuple[str, ...]) -> ModelSpec:
    """Mark the weights of `model` that its checkpoint holds in FP8 or NF4, by what its config says.

    plain: parts of the names of modules that are not quantised, beside those that the config lists. Where the names of
    the checkpoint's tensors are known, they have the last word (`ModelSpec.named_as`). Raises ValueError for forms of a
    method that are not read.
    """
    options = Fields(model.name, config).nested(KEYS[0])
    if method == BITSANDBYTES:
        decoder = "nf4" if _check_nf4(model.name, options).get("bnb_4bit_use_double_quant") else "nf4_float32"
        marked = _marked(model, decoder, _named(options, "llm_int8_skip_modules"))
        return replace(marked, notice="; ".join(filter(None, (model.notice, NOTICE.format("NF4")))))
    if method != "fp8":
        return model
    size, scheme = options.get("weight_block_size"), options.get("activation_scheme", "dynamic")
    if size != BLOCK_SIZE or scheme != "dynamic":
        raise ValueError(
            f"{model.name}: quantization_config in config.json has weight_block_size={shown(size)} and "
            f"activation_scheme={shown(scheme)}; FP8 weights are read in blocks of {BLOCK_SIZE} with 'dynamic'. Give "
            "the checkpoint in 16 bits that it was made from"
        )
    marked = _marked(model, "fp8", (*plain, *_named(options, "modules_to_not_convert")))
    return replace(marked, notice="; ".join(filter(None, (model.notice, NOTICE.format("FP8")))))


def _check_nf4(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Raise ValueError for options of bitsandbytes that ask for anything but NF4; returns them."""
    wanted = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    for key, value in wanted.items():
        if options.get(key) != value:
            raise ValueError(
                f"{name}: quantization_config in config.json has {key}={shown(options.get(key))}; of {BITSANDBYTES},"
                " NF4 is read (load_in_4bit, bnb_4bit_quant_type nf4). Give the checkpoint in 16 bits that it was made"
                " from"
            )
    return options


def _named(options: dict[str, Any], field: str) -> tuple[str, ...]:
    named = options.get(field)
    return tuple(part for part in named if isinstance(part, str)) if isinstance(named, list) else ()


def _marked(model: ModelSpec, decoder: str, kept: tuple[str, ...]) -> ModelSpec:
    """Name the decoder of the blocks' matrices, but for those of modules whose names have a part among `kept`."""

    def decoded(source: WeightSource) -> WeightSource:
        # Dots on both sides compare whole modules: `mlp.gate` must not match `mlp.gate_proj`.
        in_16_bits = len(source.shape) != 2 or any(f".{part}." in f".{source.name}" for part in kept)
        return source if in_16_bits else replace(source, decode=decoder)

    def of_param(param: ParamSpec) -> ParamSpec:
        return replace(param, sources=tuple(map(decoded, param.sources))) if param.kind == "matrix" else param

    def of_group(group: GroupSpec) -> GroupSpec:
        return replace(group, params=tuple(map(of_param, group.params))) if group.slot_class == "block" else group

    return replace(model, groups=tuple(map(of_group, model.groups)))
