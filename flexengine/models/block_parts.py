"""What blocks of every kind are put together from: norms, the ends of their branches, linear layers."""

from __future__ import annotations

from typing import Literal

from flexengine.models.block_shape import AnyNorm, BlockShape
from flexengine.models.spec import ParamSpec, WeightSource
from flexengine.ops.base import Op
from flexengine.ops.layernorm import LayerNorm
from flexengine.ops.linear import Linear
from flexengine.ops.rmsnorm import NormStyle, RMSNorm
from flexengine.ops.scaled_sum import ScaledSum


def weight_names(name: str, bias: bool) -> tuple[str, str | None]:
    """Name the weight of a linear layer, and its bias if it has one."""
    return f"{name}.weight", f"{name}.bias" if bias else None


def norm_op(name: str, x: str, y: str, width: int, style: AnyNorm) -> Op:
    """Give the norm of rows of this width, whose parameters are called `name`.weight and `name`.bias."""
    weight, bias = weight_names(name, True)
    if isinstance(style, NormStyle):
        return RMSNorm(name, x, y, width, weight, style)
    own = (weight if style.weight else None, bias if style.bias else None)
    return LayerNorm(name, x, y, width, *own, style.eps, style.offset)


def norm_params(name: str, source: str, width: int, style: AnyNorm) -> list[ParamSpec]:
    """Describe the parameters of a norm. It multiplies by 1 at first, so with an offset of 1 it is stored as 0."""

    def vector(end: str, init: Literal["ones", "zeros"]) -> ParamSpec:
        return ParamSpec(f"{name}.{end}", (width,), (WeightSource(f"{source}.{end}", (width,)),), "vector", init)

    weight, bias = vector("weight", "zeros" if style.offset else "ones"), vector("bias", "zeros")
    if isinstance(style, NormStyle):
        return [weight]
    return [*([weight] if style.weight else []), *([bias] if style.bias else [])]


def opening_norm(s: BlockShape, name: str, x: str, y: str) -> tuple[list[Op], str]:
    """Give the norm before a branch, if the block has one, and the name of the tensor that the branch reads."""
    if s.norms == "post":
        return [], x
    return [norm_op(name, x, y, s.hidden_size, s.norm)], y


def closing(s: BlockShape, linear: tuple[str, str, int, bool], norm: str, residual: str, y: str) -> list[Op]:
    """Give the projection that ends a branch, the norm after it if the block has one, and the sum with the residual.

    linear: name, input, input width and bias of the projection.
    """
    name, x, width, bias = linear
    weights, d = weight_names(name, bias), s.hidden_size
    # The last op of the branch adds the residual: a product takes the sum in its accumulator and rounds it once.
    if s.norms == "pre" and s.residual_scale == 1.0:
        return [Linear(name, x, y, width, d, *weights, residual=residual)]
    ops: list[Op] = [Linear(name, x, f"{name}_out", width, d, *weights)]
    if s.norms == "pre":
        return [*ops, ScaledSum(f"{name}_sum", f"{name}_out", y, d, s.residual_scale, residual)]
    assert isinstance(s.norm, NormStyle), "no family has LayerNorm after its branches"
    if s.residual_scale == 1.0:
        return [*ops, RMSNorm(norm, f"{name}_out", y, d, f"{norm}.weight", s.norm, residual=residual)]
    ops.append(RMSNorm(norm, f"{name}_out", f"{name}_normed", d, f"{norm}.weight", s.norm))
    return [*ops, ScaledSum(f"{name}_sum", f"{name}_normed", y, d, s.residual_scale, residual)]


def parts(sources: list[str], rows: tuple[int, ...]) -> list[tuple[str, int]]:
    """Pair modules with their rows; a single module is fused in the checkpoint and has all rows."""
    return [(sources[0], sum(rows))] if len(sources) == 1 else list(zip(sources, rows, strict=True))


def stacked(name: str, parts: list[tuple[str, int]], columns: int, bias: bool) -> list[ParamSpec]:
    """Describe a linear layer, its weight and its bias if it has one, from modules that are stacked by rows."""
    # One product for modules that read the same rows (queries, keys and values; gate and up) is faster than several.
    rows = sum(r for _, r in parts)
    weights = tuple(WeightSource(f"{part}.weight", (r, columns)) for part, r in parts)
    params = [ParamSpec(f"{name}.weight", (rows, columns), weights)]
    if bias:
        biases = tuple(WeightSource(f"{part}.bias", (r,)) for part, r in parts)
        params.append(ParamSpec(f"{name}.bias", (rows,), biases, kind="vector", init="zeros"))
    return params
