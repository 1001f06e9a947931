"""Describes a model whose experts cross the link part by part, for plans whose slots cannot hold whole blocks.

Everything else follows from the description: ops say how many calls they take, and groups in how many parts they come.
Results keep their bits.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from flexengine.models.spec import ModelSpec
from flexengine.ops.base import Op


def may_be_in_parts(model: ModelSpec) -> bool:
    """Tell whether any parameters of the model may be cut into parts."""
    return any(group.divisions > group.num_parts for group in model.groups)


def in_parts(model: ModelSpec) -> ModelSpec:
    """Cut all parameters that may be cut. Layers that shared their ops share the new ones."""
    return replace(
        model,
        groups=tuple(replace(group, num_parts=group.divisions) for group in model.groups),
        layers=tuple(replace(layer, ops=_ops_in_parts(layer.ops)) for layer in model.layers),
    )


# The cache is what keeps equal layers on one tuple of ops.
@lru_cache(maxsize=1024)
def _ops_in_parts(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    return tuple(op.in_parts() for op in ops)
