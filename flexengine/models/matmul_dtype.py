"""Describes a model whose blocks multiply in another type than they compute in."""

from __future__ import annotations

from dataclasses import replace

from flexengine.models.spec import LayerSpec, ModelSpec
from flexengine.ops.base import Op
from flexengine.ops.experts.experts import GroupedLinear
from flexengine.ops.fp8 import SCALINGS, Fp8Linear
from flexengine.ops.fp8_glu import CodedGLU, has_whole_blocks
from flexengine.ops.glu import GLU
from flexengine.ops.linear import Linear


def check_matmul_dtype(model: ModelSpec, matmul: str) -> None:
    """Raise ValueError unless the blocks multiply as numerics say: in `compute`, or in FP8 with a scheme of scales."""
    # A plan priced for one type must not run in the other: its seconds and bytes would be wrong.
    found = {type_ for layer in model.blocks for op in layer.ops if (type_ := _matmul_dtype(op))} or {"compute"}
    if found != {matmul}:
        names = " and ".join(sorted(found))
        raise ValueError(f"{model.name} has linear layers that multiply in {names}, but numerics ask for {matmul}")


def with_matmul_dtype(model: ModelSpec, matmul: str) -> ModelSpec:
    """Give the linear layers of the model's blocks the type `matmul`. Raises: ValueError as `with_fp8_linears`."""
    return model if matmul == "compute" else with_fp8_linears(model, matmul)


def with_fp8_linears(model: ModelSpec, matmul: str = "fp8") -> ModelSpec:
    """Replace every linear layer of the model's blocks by `Fp8Linear`, and let experts multiply FP8 operands where the
    scheme is for them.

    Embedding and head, where FP8 costs most accuracy and gains least time, stay as they are. Blocks that
    shared their ops share the new ones. matmul: which scales operands have. Raises: ValueError naming a layer whose
    sizes FP8 cannot take.
    """
    known: dict[tuple[Op, ...], tuple[Op, ...]] = {}

    def converted(layer: LayerSpec) -> LayerSpec:
        if layer.kind != "block":
            return layer
        if layer.ops not in known:
            known[layer.ops] = tuple(_converted(op, layer.ops[i + 1 :], matmul) for i, op in enumerate(layer.ops))
        return replace(layer, ops=known[layer.ops])

    try:
        return replace(model, layers=tuple(converted(layer) for layer in model.layers))
    except ValueError as error:
        raise ValueError(f"{model.name}: {error}") from None


def _converted(op: Op, later: tuple[Op, ...], matmul: str) -> Op:
    if isinstance(op, GroupedLinear):
        return op.with_fp8(matmul) if SCALINGS[matmul].of_experts else op
    if type(op) is GLU and op.takes_addends and has_whole_blocks(SCALINGS[matmul], op.width):
        return CodedGLU(op)
    if not isinstance(op, Linear):
        return op
    # Where a later op reads the same input, the gradient of that is added to.
    return Fp8Linear(op, any(op.x in other.grad_inputs for other in later), SCALINGS[matmul])


def _matmul_dtype(op: Op) -> str | None:
    """What an op multiplies, where that is FP8."""
    if isinstance(op, Fp8Linear):
        return op.scaling.name
    return op.fp8 if isinstance(op, GroupedLinear) else None
