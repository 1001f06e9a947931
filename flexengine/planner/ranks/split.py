"""How the ranks of a node share weights and gradients: relayed through the host, or split over all links and GPUs.

The planner searches as if ranks relayed. What it finds is laid out again as a split plan, which takes other slots of
the GPU; where these have no room, it searches again with as much less memory as they take. `split_again.py` looks
among what it has found for what is faster with the copies of a split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from flexengine.hardware.profile import HardwareProfile
from flexengine.metrics import format_bytes
from flexengine.plan import Plan, PlanError, PlanReason, Request
from flexengine.planner.planner import find_plan
from flexengine.planner.problem import Problem
from flexengine.planner.ranks.dealt import with_dealt_states
from flexengine.planner.ranks.fitted import fitted
from flexengine.planner.ranks.over_nodes import with_node_states


def may_split(request: Request, profile: HardwareProfile) -> bool:
    """Whether a split plan is to be tried."""
    wanted = request.transport == "split" or (request.transport == "auto" and profile.link.peer_bytes_per_s > 0)
    return wanted and request.ranks > 1


def laid_out_as_split(of_rank: Problem, plan: Plan) -> Plan:
    """The plan of one rank that splits what a plan relays."""
    return replace(plan, request=of_rank.request, transport="split", touched_only=False)


def as_split(of_rank: Problem, plan: Plan) -> Plan | None:
    """The split plan of one rank that is nearest to `plan`; None if none fits, unless the request asks for one.

    plan: of one rank, with relays; with less memory another one is found whose states lie with nodes, or GPUs, too.
    Raises: PlanError.
    """
    again: Callable[[Problem], Plan | None] = find_plan
    if plan.divides_states:
        again = with_node_states
    elif plan.deals_states:
        again = with_dealt_states
    request = of_rank.request

    def find(asked: Request) -> Plan | None:
        return plan if asked is request else again(replace(of_rank, request=asked))

    split, room, _ = fitted(of_rank, request, find, lambda found: laid_out_as_split(of_rank, found))
    if split is not None:
        return split
    if request.transport != "split":
        return None
    more = format_bytes(-min(room))
    raise PlanError(
        PlanReason.INSUFFICIENT_DEVICE_MEMORY if room.gpu_bytes < 0 else PlanReason.INSUFFICIENT_HOST_MEMORY,
        f"found no plan with the split transport, whose slots need {more} more than those of relays\n"
        "  works with: --transport relay",
    )
