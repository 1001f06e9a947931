"""Describes a model whose gated delta rules store what lies between their kernels in another type than float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from flexengine.models.spec import LayerSpec, ModelSpec
from flexengine.ops.base import Op
from flexengine.ops.delta.delta_rule import DeltaRule


def check_delta_dtype(model: ModelSpec, delta: str) -> None:
    """Raise ValueError unless the delta rules store what numerics say: `float32` or `bfloat16`."""
    # A plan priced for one must not run with the other: its seconds and bytes would be wrong.
    found = _stored(model) or {"float32"}
    if found != {delta}:
        names = " and ".join(sorted(found))
        raise ValueError(f"{model.name} has delta rules that store {names}, but numerics ask for {delta}")


def with_delta_dtype(model: ModelSpec, delta: Literal["float32", "bfloat16"]) -> ModelSpec:
    """Let the delta rules of the model's blocks store `delta` between their kernels.

    Blocks that shared their ops share the new ones. Raises: ValueError for a model without delta rules.
    """
    if delta == "float32":
        return model
    if not _stored(model):
        raise ValueError(
            f"delta_dtype={delta} is for gated delta rules, as of Qwen3-Next and Qwen3.5, and {model.name} has none;"
            " leave --delta-dtype out"
        )
    known: dict[tuple[Op, ...], tuple[Op, ...]] = {}

    def stored(layer: LayerSpec) -> LayerSpec:
        if layer.ops not in known:
            known[layer.ops] = tuple(op.storing(delta) if isinstance(op, DeltaRule) else op for op in layer.ops)
        return replace(layer, ops=known[layer.ops])

    return replace(model, layers=tuple(stored(layer) for layer in model.layers))


def _stored(model: ModelSpec) -> set[str]:
    return {op.stores for layer in model.blocks for op in layer.ops if isinstance(op, DeltaRule)}
