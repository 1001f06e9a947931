"""Describes a model whose blocks multiply in another type than they compute in."""

from __future__ import annotations

from dataclasses import replace

from flexengine.models.spec import LayerSpec, ModelSpec
from flexengine.ops.base import Op
from flexengine.ops.experts.experts import GroupedLinear
from flexengine.ops.fp8 import Fp8Linear
from flexengine.ops.linear import Linear


def check_matmul_dtype(model: ModelSpec, matmul: str) -> None:
    """Raise ValueError unless the blocks multiply as numerics say: `compute` or `fp8`."""
    # A plan priced for one type must not run in the other: its seconds and bytes would be wrong.
    found = "fp8" if any(_multiplies_fp8(op) for layer in model.blocks for op in layer.ops) else "compute"
    if found != matmul:
        raise ValueError(f"{model.name} has linear layers that multiply in {found}, but numerics ask for {matmul}")


def with_matmul_dtype(model: ModelSpec, matmul: str) -> ModelSpec:
    """Give the linear layers of the model's blocks the type `matmul`. Raises: ValueError as `with_fp8_linears`."""
    return with_fp8_linears(model) if matmul == "fp8" else model


def with_fp8_linears(model: ModelSpec) -> ModelSpec:
    """Replace every linear layer of the model's blocks by `Fp8Linear`, and let experts multiply FP8 operands.

    Embedding and head, where FP8 costs most accuracy and gains least time, stay as they are. Blocks that
    shared their ops share the new ones. Raises: ValueError naming a layer whose sizes FP8 cannot take.
    """
    known: dict[tuple[Op, ...], tuple[Op, ...]] = {}

    def converted(layer: LayerSpec) -> LayerSpec:
        if layer.kind != "block":
            return layer
        if layer.ops not in known:
            known[layer.ops] = tuple(_converted(op, layer.ops[i + 1 :]) for i, op in enumerate(layer.ops))
        return replace(layer, ops=known[layer.ops])

    try:
        return replace(model, layers=tuple(converted(layer) for layer in model.layers))
    except ValueError as error:
        raise ValueError(f"{model.name}: {error}") from None


def _converted(op: Op, later: tuple[Op, ...]) -> Op:
    if isinstance(op, GroupedLinear):
        return op.with_fp8()
    if not isinstance(op, Linear):
        return op
    # Where a later op reads the same input, the gradient of that is added to.
    return Fp8Linear(op, any(op.x in other.grad_inputs for other in later))


def _multiplies_fp8(op: Op) -> bool:
    return isinstance(op, Fp8Linear) or (isinstance(op, GroupedLinear) and op.fp8)
