"""The lower bound of a step, the speed of light: no exact synchronous step of the sizes considered is faster.

A linear relaxation of the planner's problem, solved for every chunk and round size. docs/speed_of_light.md lists its
variables and rows, and why its least step is below that of every plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from flexengine.hardware.profile import HardwareProfile
from flexengine.models.in_parts import in_parts, may_be_in_parts
from flexengine.models.spec import ModelSpec
from flexengine.plan import Request
from flexengine.planner.bound.relaxation import Bound, Relaxation
from flexengine.planner.bound.unavoidable import SizeWork, Unavoidable
from flexengine.planner.sizes import chunk_sizes


def speed_of_light(model: ModelSpec, request: Request, profile: HardwareProfile) -> Bound | None:
    """Bound a step over all chunk and round sizes of a request, with experts whole or in parts.

    On one rank clipping does not count: a speculative update may begin inside backward, too.
    Returns None when not even the relaxation fits the budgets. Raises: PlanError when pinned sizes contradict.
    """
    models = [model, in_parts(model)] if may_be_in_parts(model) else [model]
    bounded = replace(request, clipping=request.clipping and request.shares_node)
    found = [bound for one in models for bound in size_bounds(one, bounded, profile).values()]
    return min((bound for bound in found if bound is not None), key=lambda bound: bound.seconds, default=None)


def speed_of_light_s(model: ModelSpec, request: Request, profile: HardwareProfile) -> float:
    """Seconds of the bound; 0 where not even the relaxation fits."""
    bound = speed_of_light(model, request, profile)
    return 0.0 if bound is None else bound.seconds


@lru_cache(maxsize=4)
def size_bounds(model: ModelSpec, request: Request, profile: HardwareProfile) -> Mapping[tuple[int, int], Bound | None]:
    """Bound a step at every (chunk tokens, chunks per round) size; None where the relaxation does not fit.

    Sizes with the same chunks and number of rounds have the same rows, so one of them is solved.
    """
    step, known = Unavoidable(model, request, profile), dict[tuple[int, int], Bound | None]()
    found = {}
    for chunk, chunks in sorted(chunk_sizes(request)):
        size = SizeWork(step, chunk, chunks)
        key = (chunk, size.rounds)
        if key not in known:
            known[key] = Relaxation(step, size).bound()
        found[chunk, chunks] = known[key]
    return found
