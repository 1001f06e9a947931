"""Describes a model with parameter groups that are not trained.

Everything else follows from the description: a frozen group has weights alone, the ops of its layer have no weight
half, and ops of layers with nothing to train at or below them have no backward at all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from flexengine.models.spec import LayerSpec, ModelSpec
from flexengine.ops.base import Op
from flexengine.ops.given_rows import PlaceRows
from flexengine.ops.opaque import OpaqueBlock
from flexengine.wording import did_you_mean, shown

ALL_BLOCKS = "blocks"
_BLOCKS = re.compile(r"block\.(\d+)(?:-(\d+))?")


def with_frozen(model: ModelSpec, names: Sequence[str]) -> ModelSpec:
    """Freeze the named groups of `model`.

    names: a group's name (embed, block.3, head), blocks (all of them), a range such as block.0-15, or a pattern such
    as block.1?. Layers that shared their ops share the new ones if they are treated equally.
    Raises: ValueError for a name that no group has, or when nothing is left to train.
    """
    names = [names] if isinstance(names, str) else names
    if not names:
        return model
    found = {group for name in names for group in groups_named(model, name)}
    if len(found) == len(model.groups):
        raise ValueError(
            f"freeze={' '.join(names)}: that is all of {model.name}, and nothing is left to train; leave out what is to"
            f" be trained: {_what_there_is(model)}"
        )
    return freeze_groups(model, found)


def freeze_groups(model: ModelSpec, found: set[int]) -> ModelSpec:
    """Freeze groups of `model` by their indices."""
    groups = tuple(replace(group, frozen=i in found) for i, group in enumerate(model.groups))
    # Backward ends here: nothing below this layer has anything to train.
    lowest = min(i for i, layer in enumerate(model.layers) if set(layer.groups) - found)
    known: dict[tuple[tuple[Op, ...], tuple[str, ...] | None], tuple[Op, ...]] = {}

    def treated(index: int, layer: LayerSpec) -> LayerSpec:
        untrained = tuple(local for local, group, _ in layer.params if group in found)
        # Equal blocks must go on sharing one tuple of ops: everything derived from ops is cached by it.
        key = (layer.ops, untrained if index >= lowest else None)
        if key not in known:
            known[key] = tuple(_treated(op, untrained, backward=index >= lowest) for op in layer.ops)
        return replace(layer, ops=known[key])

    layers = tuple(treated(i, layer) for i, layer in enumerate(model.layers))
    return replace(model, groups=groups, layers=layers)


def forward_only(model: ModelSpec) -> ModelSpec:
    """Freeze all of a model, so that it has no backward. Layers that shared their ops go on sharing them."""
    frozen = tuple(replace(group, frozen=True) for group in model.groups)
    return replace(model.with_ops(lambda op: op.forward_only()), groups=frozen)


def _treated(op: Op, untrained: Sequence[str], backward: bool) -> Op:
    if not backward:
        return op.forward_only()
    if isinstance(op, OpaqueBlock | PlaceRows):  # one call of autograd gives the gradients of any of its parameters
        return op.training(tuple(name for name in op.params if name not in untrained))
    # Parameters of one op stream and update together, so an op has one answer.
    frozen = [name in untrained for name in op.params]
    assert all(frozen) or not any(frozen), f"{op.name} has parameters of several groups, of which some are frozen"
    return op.untrained() if any(frozen) else op


def groups_named(model: ModelSpec, name: str, option: str = "freeze") -> list[int]:
    """Find the groups that a name stands for. Raises ValueError, naming the option, for one that no group has."""
    names = [group.name for group in model.groups]
    blocks = _BLOCKS.fullmatch(name)
    if name == ALL_BLOCKS:
        return [i for i, group in enumerate(names) if _BLOCKS.fullmatch(group)]
    if blocks and blocks[2] is not None:
        # Clipped to the number of groups: a range such as block.0-999999999999 must not fill memory with names.
        found = [f"block.{i}" for i in range(int(blocks[1]), min(int(blocks[2]), len(names)) + 1)]
        wanted = int(blocks[2]) - int(blocks[1]) + 1
        if wanted > 0 and len(found) == wanted and set(found) <= set(names):
            return [names.index(block) for block in found]
    elif name in names:
        return [names.index(name)]
    elif matching := [i for i, group in enumerate(names) if fnmatchcase(group, name)]:
        return matching
    guess = did_you_mean(name, [ALL_BLOCKS, *names])
    raise ValueError(
        f"{option}={shown(name)}: {model.name} has no such parameters{guess}; there are {_what_there_is(model)}"
    )


def _what_there_is(model: ModelSpec) -> str:
    """List the names that may be frozen, for messages."""
    blocks = [group.name for group in model.groups if _BLOCKS.fullmatch(group.name)]
    others = [group.name for group in model.groups if not _BLOCKS.fullmatch(group.name)]
    last = blocks[-1].partition(".")[2]
    return f"{', '.join(others)}, {ALL_BLOCKS} (all of them), block.0 to block.{last}, and ranges as block.0-{last}"
