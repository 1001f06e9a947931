"""A model of which parameters that may be cut cross the link part by part, for plans whose slots they exceed whole.

Whatever follows from that follows from the description: ops say how many calls they take, groups in how many parts they
come. Results keep their bits.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from flexengine.models.spec import ModelSpec
from flexengine.ops.base import Op


def may_be_in_parts(model: ModelSpec) -> bool:
    """Whether any of its parameters may be cut."""
    return any(group.divisions > group.num_parts for group in model.groups)


def in_parts(model: ModelSpec) -> ModelSpec:
    """The model with all that may be cut in parts. Layers that shared their ops share the new ones."""
    return replace(
        model,
        groups=tuple(replace(group, num_parts=group.divisions) for group in model.groups),
        layers=tuple(replace(layer, ops=_ops_in_parts(layer.ops)) for layer in model.layers),
    )


@lru_cache(maxsize=1024)
def _ops_in_parts(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    return tuple(op.in_parts() for op in ops)
