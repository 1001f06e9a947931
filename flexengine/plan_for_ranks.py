"""A plan of several ranks: that of one rank's share of a step, with everything that ranks share on the host.

The planner prices one rank that reads all weights, relays all gradients and runs its share of the rounds, which is what
each of several ranks does. It also prices a whole update, of which a rank makes its share, so predictions are cautious.
"""

from __future__ import annotations

from dataclasses import replace

from flexengine.hardware.profile import HardwareProfile
from flexengine.metrics import format_bytes
from flexengine.models.spec import ModelSpec
from flexengine.plan import GroupPlan, Plan, PlanError, PlanReason, Prediction, Request
from flexengine.planner.cost.memory import gpu_categories, gpu_required_bytes, host_categories, host_required_bytes
from flexengine.planner.planner import make_plan
from flexengine.schedule.layout import Layout

_TRIES = 12  # each takes what a plan needs too much from the budgets of the next


def plan_for_ranks(model: ModelSpec, request: Request, profile: HardwareProfile) -> Plan:
    """Find a fast plan for a request of one or of several ranks.

    max_gpu_bytes of the request is each rank's, max_host_bytes all ranks' of the node together. Raises: PlanError when
    nothing fits.
    """
    if request.ranks == 1:
        return make_plan(model, request, profile)
    share_tokens = -(-request.max_global_batch_tokens // request.ranks)
    share = replace(
        request, ranks=1, round_multiple=None, max_global_batch_tokens=max(request.max_seq_len, share_tokens)
    )
    for _ in range(_TRIES):
        alone = make_plan(model, share, profile)
        plan = on_host(alone, request)
        layout = Layout(model, plan)
        excess_gpu = gpu_required_bytes(layout, profile) - request.max_gpu_bytes
        excess_host = node_required_bytes(layout, profile) - request.max_host_bytes
        if excess_gpu <= 0 and excess_host <= 0:
            return with_bytes(plan, layout, profile)
        # what is too much of the host lies on every rank: a rank's part of it has to go
        gpu_bytes = _tighter(share.max_gpu_bytes, alone.predicted.gpu_bytes, excess_gpu)
        host_bytes = _tighter(share.max_host_bytes, alone.predicted.host_bytes, -(-excess_host // request.ranks))
        if min(gpu_bytes, host_bytes) <= 0:
            break
        share = replace(share, max_gpu_bytes=gpu_bytes, max_host_bytes=host_bytes)
    raise _too_small(request)


def on_host(plan: Plan, request: Request) -> Plan:
    """Move what ranks share to the host, and make it a plan for `request`."""
    groups = tuple(GroupPlan(update=home.update) if home.trained else home for home in plan.groups)
    return replace(plan, groups=groups, request=request)


def node_required_bytes(layout: Layout, profile: HardwareProfile) -> int:
    """Resident host bytes of all ranks of a node at their peak; what they share counts once."""
    return layout.node_bytes + layout.plan.request.ranks * host_required_bytes(layout, profile)


def with_bytes(plan: Plan, layout: Layout, profile: HardwareProfile) -> Plan:
    """Say what a plan takes of a GPU and of the node."""
    ranks = plan.request.ranks
    private = {name: ranks * num_bytes for name, num_bytes in host_categories(layout, profile).items()}
    shared = layout.categories("node")
    predicted: Prediction = replace(
        plan.predicted,
        gpu_bytes=gpu_required_bytes(layout, profile),
        host_bytes=node_required_bytes(layout, profile),
        gpu_categories=gpu_categories(layout, profile),
        host_categories={name: shared.get(name, 0) + private.get(name, 0) for name in {**shared, **private}},
    )
    return replace(plan, predicted=predicted)


def _tighter(budget_bytes: int, used_bytes: int, excess_bytes: int) -> int:
    """The budget under which a plan that used so much has to do with less by the excess."""
    return budget_bytes if excess_bytes <= 0 else min(budget_bytes, used_bytes) - excess_bytes


def _too_small(request: Request) -> PlanError:
    return PlanError(
        PlanReason.INSUFFICIENT_HOST_MEMORY,
        f"found no plan of {request.ranks} GPUs with {format_bytes(request.max_gpu_bytes)} each and"
        f" {format_bytes(request.max_host_bytes)} of host memory for all; raise the budgets or take fewer GPUs",
        budget_bytes=request.max_host_bytes,
    )
