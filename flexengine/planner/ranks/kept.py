"""Plans of ranks that keep less than the search of one rank chose.

The search takes a rank to be alone with its link. The ranks of a node copy through one host memory, so that what waits
there from forward to backward may cost more than to make it again.
"""

from __future__ import annotations

from dataclasses import replace

from flexengine.plan import Plan
from flexengine.planner.problem import Problem
from flexengine.planner.ranks.price import if_it_fits


def keeping_none(of_rank: Problem, plan: Plan) -> Plan | None:
    """The plan of one rank that makes again what waits on the host; None where nothing does, or it does not fit."""
    if of_rank.request.recompute != "auto" or not any(layer.keep_host for layer in plan.layers):
        return None
    layers = tuple(replace(layer, keep_host=()) for layer in plan.layers)
    return if_it_fits(of_rank, replace(plan, request=of_rank.request, layers=layers))
