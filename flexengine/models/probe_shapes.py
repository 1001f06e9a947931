"""What linear layers, attention and experts a model has, for the probe that measures them."""

from __future__ import annotations

import math
from collections import Counter

from flexengine.models.spec import ModelSpec
from flexengine.ops.attention.attention import CausalAttention
from flexengine.ops.attention.style import AttentionShape
from flexengine.ops.cross_entropy import LMHeadLoss
from flexengine.ops.experts.experts import GroupedLinear
from flexengine.ops.experts.shape import ExpertShape
from flexengine.ops.linear import Linear
from flexengine.ops.linear_shape import HeadShape, LinearShape


def expert_shapes(spec: ModelSpec) -> tuple[ExpertShape, ...]:
    """Shapes of the matrices that a model's experts have, each once."""
    ops = (op for layer in spec.blocks for op in layer.ops)
    return tuple(dict.fromkeys(op.shape for op in ops if isinstance(op, GroupedLinear)))


def attention_shapes(spec: ModelSpec) -> tuple[tuple[AttentionShape, int], ...]:
    """Shapes of a model's attention, with the query heads that all its blocks have of each; most heads first."""
    heads = Counter[AttentionShape]()
    for layer in spec.blocks:
        for op in layer.ops:
            if isinstance(op, CausalAttention):
                heads[op.shape] += op.num_heads
    return tuple(heads.most_common())


def linear_shapes(spec: ModelSpec) -> tuple[LinearShape, ...]:
    """Linear layers of a model's blocks, each shape once, under a name of its own and with its part of their number.

    Parts have no common divisor, so that models that differ in the number of alike blocks alone have equal ones.
    """
    shapes = [op.shape for layer in spec.blocks for op in layer.ops if isinstance(op, Linear)]
    names: dict[LinearShape, str] = {}
    for shape in shapes:
        names.setdefault(shape._replace(name=""), shape.name)
    counts = Counter(shape._replace(name="") for shape in shapes)
    common, times = math.gcd(*counts.values()), Counter(names.values())
    found = []
    for shape, name in names.items():
        full = name
        if times[name] > 1:
            full += f" {shape.in_features} x {shape.out_features}" + " added" * shape.adds
        found.append(shape._replace(name=full, count=counts[shape] // common))
    return tuple(found)


def head_shape(spec: ModelSpec) -> HeadShape | None:
    """The LM head of a model; None where it has none."""
    return next((op.shape for layer in spec.layers for op in layer.ops if isinstance(op, LMHeadLoss)), None)
