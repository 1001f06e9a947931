"""Plans of ranks made of those of one rank, which is searched with less memory until what is made of them fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from flexengine.plan import Plan, Request
from flexengine.planner.problem import Problem, Room


class Fitted(NamedTuple):
    """A plan of ranks, None where nothing fits; the room that the last one left, and what was searched for it."""

    plan: Plan | None
    room: Room
    asked: Request


def fitted(
    of_rank: Problem, asked: Request, find: Callable[[Request], Plan | None], made: Callable[[Plan], Plan]
) -> Fitted:
    """Make a plan of what is found for one rank, which is searched with less memory until that fits.

    asked: what is searched first.
    """
    room = Room(0, 0)
    for _ in range(of_rank.limits.searches):
        found = find(asked)
        if found is None:
            break
        plan = made(found)
        room = of_rank.room(of_rank.layout(plan))
        if room.fits:
            return Fitted(plan, room, asked)
        gpu, host = room.lacks(of_rank.limits.spare_bytes)
        left = (asked.max_gpu_bytes - gpu, asked.max_host_bytes - host)
        if min(left) <= 0:
            break
        asked = replace(asked, max_gpu_bytes=left[0], max_host_bytes=left[1])
    return Fitted(None, room, asked)
