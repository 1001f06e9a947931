"""Adds speculative updates to a plan: as many groups as spare host memory has second planes for, if that is faster.

The search knows nothing of them. A finalist's groups that the CPU updates are taken in the order in which the last
backward pass completes their gradients: what comes first has most time to be updated before the norm is known. The
step is simulated as if the speculation held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from flexengine.models.spec import ModelSpec
from flexengine.plan import Plan
from flexengine.schedule.layer_program import align
from flexengine.schedule.layout import Layout
from flexengine.schedule.second_planes import may_speculate, second_kinds

SHARES = (1.0, 0.75, 0.5, 0.25)
"""Shares of what fits that are tried. Fewer groups leave host memory and the link alone while backward runs."""

MOST_SPECULATING, NEARLY_AS_FAST = 3, 1.05
"""Finalists that speculation is tried on, and how much slower than the fastest they may be without."""
LEAST_GAIN = 0.998
"""Speculate only where the step takes less than this share of its time: a clipped step takes longer with it."""


def speculating_plans(model: ModelSpec, plan: Plan, spare_bytes: Callable[[Layout], int]) -> Iterator[Plan]:
    """The plan with more and fewer groups updated speculatively, as far as their second planes fit.

    spare_bytes: of the host, which a layout leaves to them.
    """
    if not plan.request.clipping or plan.shares_node or not plan.updates_on_cpu:
        return
    layout = Layout(model, plan)
    fitting = _fitting(layout, spare_bytes(layout))
    for count in dict.fromkeys(round(share * len(fitting)) for share in SHARES):
        chosen = set(fitting[:count])
        if chosen:
            groups = tuple(replace(home, speculative=g in chosen) for g, home in enumerate(plan.groups))
            yield replace(plan, groups=groups)


def _fitting(layout: Layout, spare_bytes: int) -> list[int]:
    """Groups that may be speculative, in the order of backward, as far as their second planes fit."""
    found = list[int]()
    for group in completed_order(layout.model):
        stored = layout.groups[group]
        if not may_speculate(stored, layout.plan.groups[group]):
            continue
        spare_bytes -= sum(align(stored.plane_bytes[kind]) for kind in second_kinds(stored))
        if spare_bytes < 0:
            break
        found.append(group)
    return found


def completed_order(model: ModelSpec) -> list[int]:
    """Groups in the order in which backward completes their gradients: each with the lowest layer that has it."""
    lowest: dict[int, int] = {}
    for index in reversed(range(len(model.layers))):
        lowest.update(dict.fromkeys(model.layers[index].groups, index))
    return sorted(lowest, key=lambda group: (-lowest[group], group))
