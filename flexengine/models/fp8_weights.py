"""Describes models whose checkpoint holds matrices in FP8, with a scale for every block of 128 rows and columns."""

from __future__ import annotations

from dataclasses import replace

from flexengine.models.fields import Fields
from flexengine.models.spec import GroupSpec, ModelSpec, ParamSpec
from flexengine.wording import shown

BLOCK_SIZE = [128, 128]
"""The block size that checkpoint/quantised.py reads."""
NOTICE = "weights are read from FP8, and exported in bfloat16 without a quantization_config"


def fp8_weights(model: ModelSpec, config: dict, plain: tuple[str, ...]) -> ModelSpec:
    """Mark the weights of `model` that its checkpoint holds in FP8; none if the config has no quantization_config.

    plain: parts of the names of modules that are not quantised, beside those in `modules_to_not_convert`.
    Raises ValueError for blocks of another size, and for activations with scales of their own.
    """
    options = Fields(model.name, config).nested("quantization_config")
    if not options:
        return model
    size, scheme = options.get("weight_block_size"), options.get("activation_scheme", "dynamic")
    if size != BLOCK_SIZE or scheme != "dynamic":
        raise ValueError(
            f"{model.name}: quantization_config in config.json has weight_block_size={shown(size)} and "
            f"activation_scheme={shown(scheme)}; FP8 weights are read in blocks of {BLOCK_SIZE} with 'dynamic'. Give "
            "the checkpoint in 16 bits that it was made from"
        )
    named = options.get("modules_to_not_convert")
    kept = (*plain, *(named if isinstance(named, list) else ()))

    def decoded(param: ParamSpec) -> ParamSpec:
        if param.kind != "matrix":
            return param
        # Dots on both sides compare whole modules: `mlp.gate` must not match `mlp.gate_proj`.
        sources = (
            source if any(f".{part}." in f".{source.name}" for part in kept) else replace(source, decode="fp8")
            for source in param.sources
        )
        return replace(param, sources=tuple(sources))

    # Embedding and head are not quantised in these checkpoints.
    def of_group(group: GroupSpec) -> GroupSpec:
        return replace(group, params=tuple(map(decoded, group.params))) if group.slot_class == "block" else group

    return replace(model, groups=tuple(map(of_group, model.groups)), notice=NOTICE)
