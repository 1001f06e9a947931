"""How the ranks of a node share weights and gradients: relayed through the host, or split over all links and GPUs.

The planner searches as if ranks relayed. What it finds is laid out again as a split plan, which takes other slots of
the GPU; where these have no room, it searches once more with as much less memory as they take.
"""

from __future__ import annotations

from dataclasses import replace

from flexengine.hardware.profile import HardwareProfile
from flexengine.metrics import format_bytes
from flexengine.models.spec import ModelSpec
from flexengine.plan import Plan, PlanError, PlanReason, Request
from flexengine.planner.cost.memory import excess_bytes
from flexengine.planner.planner import find_plan
from flexengine.schedule.layout import Layout

MOST_SEARCHES = 3
"""Each search leaves more room for the slots of a split plan than the one before found missing."""
MARGIN_BYTES = 128 * 2**20
"""Left beside what was missing, since another plan has other slots."""


def may_split(request: Request, profile: HardwareProfile) -> bool:
    """Whether a split plan is to be tried."""
    wanted = request.transport == "split" or (request.transport == "auto" and profile.peer_bytes_per_s > 0)
    return wanted and request.ranks > 1


def as_split(model: ModelSpec, plan: Plan, request: Request, profile: HardwareProfile) -> Plan | None:
    """The split plan of one rank that is nearest to `plan`; None if none fits, unless the request asks for one.

    plan: of one rank, with relays. request: what one rank is asked. profile: of one rank. Raises: PlanError.
    """
    asked, excess = request, (0, 0)
    for search in range(1 + MOST_SEARCHES):
        found = find_plan(model, asked, profile) if search else plan
        if found is None:
            break
        split = replace(found, request=request, transport="split", touched_only=False)
        excess = excess_bytes(Layout(model, split), request, profile)
        if max(excess) <= 0:
            return split
        left = (asked.max_gpu_bytes - _with_margin(excess[0]), asked.max_host_bytes - _with_margin(excess[1]))
        if plan.deals_states or min(left) <= 0:
            break
        asked = replace(asked, max_gpu_bytes=left[0], max_host_bytes=left[1])
    if request.transport != "split":
        return None
    more = format_bytes(max(excess))
    raise PlanError(
        PlanReason.INSUFFICIENT_DEVICE_MEMORY if excess[0] > 0 else PlanReason.INSUFFICIENT_HOST_MEMORY,
        f"found no plan with the split transport, whose slots need {more} more than those of relays\n"
        "  works with: --transport relay",
    )


def _with_margin(missing_bytes: int) -> int:
    return missing_bytes + MARGIN_BYTES if missing_bytes > 0 else 0
