"""Plans of nodes that divide the optimizer states, where the host memory of one is too small for all of them."""

from __future__ import annotations

from dataclasses import replace

from flexengine.models.spec import ModelSpec
from flexengine.plan import GroupPlan, Plan, Request
from flexengine.planner.planner import find_plan
from flexengine.planner.problem import Problem
from flexengine.planner.ranks.fitted import fitted
from flexengine.planner.ranks.price import bytes_planned
from flexengine.schedule.group_storage import group_storage
from flexengine.schedule.layer_program import align
from flexengine.schedule.node_states import NodeStates, why_no_node_states


def with_node_states(problem: Problem) -> Plan | None:
    """A plan of one rank whose optimizer states nodes divide, as far as their CPUs can update them; None for one node
    and if none fits.

    The search knows nothing of it: it is given the host memory that this frees, and updates are the CPU's afterwards.
    """
    divided, spared = states_of_nodes(problem.model, problem.request)
    if not divided:
        return None

    def made(found: Plan) -> Plan:
        home = GroupPlan(update="cpu", states="nodes")
        homes = (home if i in divided else old for i, old in enumerate(found.groups))
        return replace(found, request=problem.request, groups=tuple(homes))

    asked = replace(problem.request, max_host_bytes=problem.request.max_host_bytes + spared)
    plan = fitted(problem, asked, lambda request: find_plan(replace(problem, request=request)), made).plan
    if plan is None:
        return None
    return replace(plan, predicted=bytes_planned(problem.layout(plan), plan.predicted, problem.profile))


def states_of_nodes(model: ModelSpec, request: Request) -> tuple[list[int], int]:
    """The groups whose states nodes can divide, and the bytes that a rank's share of the host no longer has then."""
    divided, spared = list[int](), 0
    for index, group in enumerate(model.groups if request.nodes > 1 else ()):
        stored = group_storage(group, request.numerics)
        if not group.frozen and stored.state_kinds and not why_no_node_states(stored):
            states = NodeStates(stored, request.nodes)
            spared += sum(align(stored.plane_bytes[k]) - align(states.num_bytes(k)) for k in stored.state_kinds)
            divided.append(index)
    return divided, max(0, spared) // request.ranks
