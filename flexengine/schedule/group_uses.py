"""How often a round reads the weights of each parameter group, and adds to its gradient."""

from __future__ import annotations

from typing import NamedTuple

from flexengine.models.spec import ModelSpec


class GroupUse(NamedTuple):
    """How often a round reads a group's weights: by layers forward, and by layers backward (the head counts there).

    gradients: how many layers add to its gradient, each of which stores it (2 for a tied embedding; 0 where frozen).
    """

    forward: int
    backward: int
    gradients: int


def group_uses(model: ModelSpec) -> list[GroupUse]:
    """Uses of every parameter group. The embedding's backward does not read its weights; layers below all that is
    trained have none."""
    forward, backward = [0] * len(model.groups), [0] * len(model.groups)
    for layer in model.layers:
        for group in layer.groups:
            forward[group] += layer.kind != "head"
            backward[group] += group in layer.backward_groups and layer.has_backward
    gradients = [
        0 if spec.frozen else sum(group in layer.groups for layer in model.layers)
        for group, spec in enumerate(model.groups)
    ]
    return [GroupUse(*use) for use in zip(forward, backward, gradients, strict=True)]
