"""Which groups keep planes on a drive, optimizer states or frozen weights: as few as the host's budget allows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from flexengine.models.spec import BLOCK_CLASSES, GroupSpec, ModelSpec
from flexengine.plan import Numerics, Plan
from flexengine.planner.cost.stream_loads import FROZEN_RESIDENCIES, STREAMED, UPDATED_BY_CPU
from flexengine.planner.problem import Problem
from flexengine.schedule.arena_slots import STAGED_WEIGHTS, home_of_plane
from flexengine.schedule.drive import BLOCK_BYTES, drive_bytes, in_blocks, staged_offsets, staged_weight_bytes
from flexengine.schedule.group_storage import GroupStorage, group_storage
from flexengine.schedule.layer_program import align

TILES_ON_DRIVE, LEAST_DRIVE_TILE = 256, 1 << 18
"""Tiles of all states on a drive, of which some are on the host at once, and the least elements of one: a drive wants
requests of MiBs."""


def numbers_on_drive(group: GroupSpec, on_drive: bool) -> tuple[int, ...]:
    """The numbers of homes that mean a drive: of edges the one of what streams, as they have none by the CPU. Of what
    is frozen, all blocks that stream."""
    if group.adapter or not on_drive:
        return ()
    if group.frozen:
        streams = tuple(n for n, home in enumerate(FROZEN_RESIDENCIES) if home.weights == "host")
        return streams if group.slot_class in BLOCK_CLASSES else ()
    return (UPDATED_BY_CPU,) if group.slot_class in BLOCK_CLASSES else (STREAMED, UPDATED_BY_CPU)


def drive_tile(num_parameters: int) -> int:
    """Elements of a tile from a drive: of large models as many as are useful, of small ones a small part of all."""
    return min(Plan.drive_tile, max(LEAST_DRIVE_TILE, num_parameters // TILES_ON_DRIVE))


def staged_bytes(stored: Iterable[GroupStorage], num_parameters: int) -> int:
    """Host bytes that states take on their way from and to a drive, at the most."""
    return Plan.drive_slots * (staged_offsets(stored, drive_tile(num_parameters))["end"] + BLOCK_BYTES)


def staged_weights(groups: Iterable[GroupStorage]) -> int:
    """Host bytes that weights of those of some groups that are frozen take on their way from a drive, at the most."""
    largest = max((staged_weight_bytes(group) for group in groups if not group.state_kinds), default=0)
    return STAGED_WEIGHTS * (largest + BLOCK_BYTES) if largest else 0


def bytes_for_drive(problem: Problem) -> int:
    """Bytes of all that may lie on a drive: optimizer states but of adapters and of what the GPU alone updates, and
    weights of frozen blocks."""
    model, numerics = problem.model, problem.request.numerics
    stored = [group_storage(g, numerics) for g in model.groups if not (g.frozen or g.adapter)]
    if any(group.on_gpu_only for group in stored):
        return 0
    return sum(map(drive_bytes, stored)) + frozen_bytes(model, problem.request.numerics)


def frozen_bytes(model: ModelSpec, numerics: Numerics) -> int:
    """Bytes of weights that may lie on a drive, as they are frozen."""
    frozen = (group for group in model.groups if group.frozen and numbers_on_drive(group, on_drive=True))
    return sum(in_blocks(group_storage(group, numerics).plane_bytes["weights"]) for group in frozen)


def planes_on_host(problem: Problem, plan: Plan, groups: Iterable[int]) -> Plan:
    """The plan with planes of some groups, in this order, on the host instead of a drive, as far as it has room."""
    if not plan.uses_drive:
        return plan
    layout, homes = problem.layout(plan), list(plan.groups)
    room = problem.room(layout).host_bytes
    for group in groups:
        home, planes = homes[group], layout.groups[group].plane_bytes
        on_drive = [kind for kind in planes if home_of_plane(kind, home) == "drive"] if home.uses_drive else []
        num_bytes = sum(align(planes[kind]) for kind in on_drive)
        if on_drive and num_bytes <= room:
            homes[group], room = home.off_the_drive(), room - num_bytes
    fewer = replace(plan, groups=tuple(homes))
    return fewer if fewer != plan and problem.fits(problem.layout(fewer)) else plan
