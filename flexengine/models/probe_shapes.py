"""What attention and experts a model has, for the probe that measures them."""

from __future__ import annotations

from collections import Counter

from flexengine.models.spec import ModelSpec
from flexengine.ops.attention import CausalAttention
from flexengine.ops.attention_style import AttentionShape
from flexengine.ops.expert_shape import ExpertShape
from flexengine.ops.experts import GroupedLinear


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
