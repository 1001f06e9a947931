"""A plan of several ranks: the planner plans one of them, with its tokens of a step and its share of the host's memory.

What ranks share on the host counts once for the node: every rank counts an equal part of it.
"""

from __future__ import annotations

from dataclasses import replace

from flexengine.hardware.profile import HardwareProfile
from flexengine.metrics import format_bytes
from flexengine.models.spec import ModelSpec
from flexengine.plan import Plan, PlanError, Request
from flexengine.planner.planner import make_plan


def plan_for_ranks(model: ModelSpec, request: Request, profile: HardwareProfile) -> Plan:
    """Find the fastest plan for a request of one or of several ranks.

    max_gpu_bytes of the request is each rank's, max_host_bytes all ranks' of the node together; predicted bytes are
    told alike. Raises: PlanError when nothing fits.
    """
    ranks = request.ranks
    if not request.shares_node:
        return make_plan(model, request, profile)
    try:
        plan = make_plan(model, request.of_rank, profile)
    except PlanError as error:
        budgets = f"{format_bytes(request.max_gpu_bytes)} of GPU memory each and {format_bytes(request.max_host_bytes)}"
        raise PlanError(
            error.reason,
            f"found no plan of {ranks} GPUs with {budgets} of host memory for all; of one GPU and its share of the"
            f" host:\n{error}",
            error.required_bytes,
            error.budget_bytes,
        ) from None
    predicted = plan.predicted
    node = {name: ranks * num_bytes for name, num_bytes in predicted.host_categories.items()}
    return replace(
        plan,
        request=request,
        predicted=replace(predicted, host_bytes=ranks * predicted.host_bytes, host_categories=node),
    )
