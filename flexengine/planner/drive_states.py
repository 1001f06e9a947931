"""Which groups keep their optimizer states on a drive: as few as the host's budget allows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from flexengine.plan import GroupPlan, Plan
from flexengine.planner.problem import Problem
from flexengine.schedule.drive import drive_bytes
from flexengine.schedule.group_storage import group_storage
from flexengine.schedule.layer_program import align


def state_bytes(problem: Problem) -> int:
    """Bytes of all optimizer states that may lie on a drive: not of adapters, nor of what the GPU alone updates."""
    model, numerics = problem.model, problem.request.numerics
    stored = [group_storage(g, numerics) for g in model.groups if not (g.frozen or g.adapter)]
    return 0 if any(group.on_gpu_only for group in stored) else sum(map(drive_bytes, stored))


def states_on_host(problem: Problem, plan: Plan, groups: Iterable[int]) -> Plan:
    """The plan with states of some groups, in this order, on the host instead of a drive, as far as it has room."""
    if not plan.uses_drive:
        return plan
    layout, homes = problem.layout(plan), list(plan.groups)
    room = problem.room(layout).host_bytes
    for group in groups:
        if homes[group].states != "drive":
            continue
        planes = layout.groups[group].plane_bytes
        num_bytes = sum(align(planes[kind]) for kind in layout.groups[group].state_kinds)
        if num_bytes <= room:
            homes[group], room = GroupPlan(update="cpu"), room - num_bytes
    fewer = replace(plan, groups=tuple(homes))
    return fewer if fewer != plan and problem.fits(problem.layout(fewer)) else plan
