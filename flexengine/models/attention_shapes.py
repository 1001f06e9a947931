"""What attention a model has, for the probe that measures it."""

from __future__ import annotations

from collections import Counter

from flexengine.models.spec import ModelSpec
from flexengine.ops.attention import CausalAttention
from flexengine.ops.attention_style import AttentionShape


def attention_shapes(spec: ModelSpec) -> tuple[tuple[AttentionShape, int], ...]:
    """Shapes of a model's attention, with the query heads that all its blocks have of each; most heads first."""
    heads = Counter[AttentionShape]()
    for layer in spec.blocks:
        for op in layer.ops:
            if isinstance(op, CausalAttention):
                heads[op.shape] += op.num_heads
    return tuple(heads.most_common())
