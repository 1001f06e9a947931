"""Plans of ranks that divide the optimizer states over their GPUs, where the host is too small for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flexengine.models.in_parts import in_parts
from flexengine.models.spec import ModelSpec
from flexengine.plan import GroupPlan, Plan, Request
from flexengine.planner.feasibility.shortage import Feasibility
from flexengine.planner.planner import find_plan
from flexengine.planner.problem import Problem
from flexengine.planner.ranks.price import if_it_fits
from flexengine.schedule.group_storage import group_storage
from flexengine.schedule.layer_program import align
from flexengine.schedule.shares import DealtStates

DEALT_GROUPS = (1, 2)
"""Where host memory is short, ranks divide the optimizer states of every group, else of every other one. More choices
cost a search each, and leave more GPU memory to activations."""
SMALLER_TILES = (1 << 20, 1 << 16)
"""Elements of a tile of the update, where those that the search took have no room beside the states."""


def with_dealt_states(problem: Problem) -> Plan | None:
    """A plan of one rank whose optimizer states, or every other group's, ranks divide over their GPUs; None if none
    fits.

    The search knows nothing of it: it is given the host memory that this frees and lacks the GPU memory that it takes.
    """
    model, request = problem.model, problem.request
    least = Feasibility(replace(problem, model=in_parts(model))).least_host()
    if least is None:
        return None
    for dealt, on_gpu, on_host in dealt_groups(model, request):
        left = request.max_gpu_bytes - on_gpu, request.max_host_bytes + on_host
        if left[0] <= 0 or left[1] < least.host_bytes:
            continue
        found = find_plan(replace(problem, request=replace(request, max_gpu_bytes=left[0], max_host_bytes=left[1])))
        if found is None:
            continue
        homes = [GroupPlan(states="dealt") if i in dealt else home for i, home in enumerate(found.groups)]
        for tile in dict.fromkeys((found.optimizer_tile, *SMALLER_TILES)):
            plan = if_it_fits(problem, replace(found, request=request, groups=tuple(homes), optimizer_tile=tile))
            if plan is not None:
                return plan
    return None


def dealt_groups(model: ModelSpec, request: Request) -> Iterator[tuple[list[int], int, int]]:
    """Groups whose states may be divided, with the bytes that a rank's GPU takes then and its host no longer has."""
    stored = [group_storage(group, request.numerics) for group in model.groups]
    sizes = [DealtStates(group, request.ranks, Plan.optimizer_tile) for group in stored]
    for every in DEALT_GROUPS:
        dealt = [i for i, group in enumerate(model.groups) if not group.frozen and i % every == 0]
        on_gpu = sum(align(sizes[i].num_bytes(kind)) for i in dealt for kind in stored[i].rule_states)
        on_host = sum(align(stored[i].plane_bytes[kind]) for i in dealt for kind in stored[i].rule_states)
        if dealt:
            yield dealt, on_gpu, on_host // request.ranks
