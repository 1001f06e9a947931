"""Fewer GPUs of a node that take the same step faster than all of them, where some do."""

from __future__ import annotations

from dataclasses import replace

from flexengine.hardware.profile import HardwareProfile
from flexengine.models.spec import ModelSpec
from flexengine.plan import Plan, PlanError
from flexengine.planner.bound.speed_of_light import speed_of_light_s
from flexengine.planner.planner import find_plan
from flexengine.planner.problem import Problem
from flexengine.planner.ranks.plan import plan_for_ranks


def beside_fewer_gpus(model: ModelSpec, plan: Plan, profile: HardwareProfile) -> Plan:
    """Add to a plan how few GPUs of a node, with all of its host memory, take the same step faster, where some do.

    One GPU is planned only where its bound is below the plan's seconds; half as many and so on only where they could
    compute as fast.
    """
    if not plan.request.shares_node:
        return plan
    gpus, least_s, told = plan.request.ranks // 2, plan.predicted.step_s, plan.predicted
    while gpus >= 1:
        found = _on_gpus(gpus, model, plan, profile)
        if found is not None and found.predicted.step_s < least_s:
            least_s = found.predicted.step_s
            told = replace(told, fewer_gpus=gpus, fewer_gpus_step_s=least_s)
        gpus //= 2
    return replace(plan, predicted=told)


def _on_gpus(gpus: int, model: ModelSpec, plan: Plan, profile: HardwareProfile) -> Plan | None:
    """The plan of the same step on fewer GPUs of one node; None where none fits or none can be faster."""
    predicted = plan.predicted
    if gpus == 1:
        request = plan.request.on_one_gpu
        bound_s = speed_of_light_s(model, request, profile)
        return find_plan(Problem(model, request, profile)) if 0 < bound_s < predicted.step_s else None
    at_work = plan.request.max_global_batch_tokens / plan.request.of_rank.max_global_batch_tokens
    if predicted.once_s * at_work >= gpus * predicted.step_s:
        return None
    try:
        return plan_for_ranks(model, replace(plan.request, ranks=gpus, nodes=1), profile)
    except PlanError:
        return None
