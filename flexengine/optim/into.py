"""Updates whose results go to other tensors than they read, so that the old values are still there.

The bits are those of the update in place: the native path stores past the caches, so that no line is read only
to be overwritten; elsewhere old values are copied to where the new ones go and updated there.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from flexengine.native import update as native
from flexengine.optim.rule import Rule, Update


def update_into(rule: Rule, update: Update, targets: Mapping[str, Tensor]) -> None:
    """One update of elements on the CPU into `targets`, by the names of the planes; all but `grad` have one.

    The factor on the gradient must be finite: where it is not, an update in place changes nothing, and this one might
    leave nothing.
    Raises: ValueError for a rule that has no such update.
    """
    if rule.native is None:
        raise ValueError(f"{rule.name} has no update into other tensors")
    name, call = rule.native(update)
    if native.supports_into(call):
        states = tuple(targets[state.kind] for state in rule.states)
        native.update_into(name, call, native.Targets(targets["weights"], targets.get("remainder"), states))
        return
    for kind, target in targets.items():
        target.copy_(update.planes[kind])
    rule.update(update._replace(planes={**targets, "grad": update.planes["grad"]}))
