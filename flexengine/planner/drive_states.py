"""Which groups keep their optimizer states on a drive: as few as the host's budget allows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from flexengine.models.spec import BLOCK_CLASSES, GroupSpec
from flexengine.plan import GroupPlan, Plan
from flexengine.planner.cost.stream_loads import STREAMED, UPDATED_BY_CPU
from flexengine.planner.problem import Problem
from flexengine.schedule.drive import BLOCK_BYTES, drive_bytes, staged_offsets
from flexengine.schedule.group_storage import GroupStorage, group_storage
from flexengine.schedule.layer_program import align

TILES_ON_DRIVE, LEAST_DRIVE_TILE = 256, 1 << 18
"""Tiles of all states on a drive, of which some are on the host at once, and the least elements of one: a drive wants
requests of MiBs."""


def numbers_on_drive(group: GroupSpec, on_drive: bool) -> tuple[int, ...]:
    """The numbers of homes that mean a drive: of edges the one of what streams, as they have none by the CPU."""
    if group.adapter or not on_drive:
        return ()
    return (UPDATED_BY_CPU,) if group.slot_class in BLOCK_CLASSES else (STREAMED, UPDATED_BY_CPU)


def drive_tile(num_parameters: int) -> int:
    """Elements of a tile from a drive: of large models as many as are useful, of small ones a small part of all."""
    return min(Plan.drive_tile, max(LEAST_DRIVE_TILE, num_parameters // TILES_ON_DRIVE))


def staged_bytes(stored: Iterable[GroupStorage], num_parameters: int) -> int:
    """Host bytes that states take on their way from and to a drive, at the most."""
    return Plan.drive_slots * (staged_offsets(stored, drive_tile(num_parameters))["end"] + BLOCK_BYTES)


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
