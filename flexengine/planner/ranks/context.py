"""Plans in which every rank runs some chunks of each round: one long sequence on all GPUs of a node.

The planner searches as if one rank ran whole rounds, with host memory for its part of what is kept. What it finds is
laid out as ranks run it, which takes other slots; where these have no room, it searches once more with as much less
memory as they take. Shorter chunks divide more evenly, so some are tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from flexengine.models.spec import ModelSpec
from flexengine.plan import Plan, Request
from flexengine.planner.cost.memory import host_required_bytes
from flexengine.planner.problem import Problem
from flexengine.planner.ranks.price import bytes_planned
from flexengine.planner.variants import OF_WHOLE_EXPERTS, fastest
from flexengine.schedule.ranks.chunk_shares import why_no_context
from flexengine.schedule.ranks.transports import layout_of

CHUNKS_OF_RANK = (4, 16)
"""Chunks of the longest sequence for each rank that are tried, unless sizes are pinned. More balance work better and
take longer to plan; fewer attend with more queries at once."""
WINDOW_SLOTS = (2, 1)
"""Slots for what layers carry along sequences, the first number that has room. With two, what other ranks hand over of
the next layer comes while this one computes."""


def why_not(model: ModelSpec, request: Request) -> str:
    """Why ranks cannot cut rounds as is asked, in words; empty where they can."""
    if request.ranks == 1:
        return "there is one GPU" if request.nodes == 1 else "each node has one GPU"
    if request.nodes > 1:
        return "there are several nodes"
    return why_no_context(model, in_parts=False)


def may_cut(model: ModelSpec, request: Request, best: Plan | None) -> bool:
    """Whether to try cutting rounds beside `best`: sequences are cut, and a step has too few for all ranks."""
    if request.transport == "context":
        return True
    if request.transport != "auto" or why_not(model, request):
        return False
    few = request.max_global_batch_tokens < 2 * request.ranks * request.max_seq_len
    return few and (best is None or (best.slices_sequences and not best.deals_states))


def plans_in_context(of_rank: Problem, request: Request) -> Iterator[Plan]:
    """Plans that fit, with the bytes of one rank, for several sizes of chunks. of_rank: one rank that relays."""
    for chunk_tokens in _sizes(request):
        asked = replace(of_rank, request=replace(of_rank.request, chunk_tokens=chunk_tokens))
        plan = _fitted(asked, request)
        if plan is not None:
            yield plan


def _sizes(request: Request) -> list[int | None]:
    if request.chunk_tokens is not None or request.max_seq_len < 2 * request.ranks:
        return [request.chunk_tokens]
    return [-(-request.max_seq_len // (request.ranks * chunks)) for chunks in CHUNKS_OF_RANK]


def _fitted(of_rank: Problem, request: Request) -> Plan | None:
    """The plan of ranks that is nearest to one rank's with whole rounds, and fits; None where none was found."""
    own = of_rank.request
    asked = replace(
        own, max_global_batch_tokens=request.max_global_batch_tokens, max_host_bytes=request.max_host_bytes,
        round_multiple=request.round_multiple or 1,
    )  # fmt: skip
    for _ in range(of_rank.limits.searches):
        found = fastest(OF_WHOLE_EXPERTS, replace(of_rank, request=asked))
        if found is None:
            return None
        for window_slots in WINDOW_SLOTS:
            changes = {"transport": "context", "touched_only": False, "window_slots": window_slots}
            plan = replace(found.plan, request=request, **changes)
            layout = layout_of(of_rank.model, plan)
            room = of_rank.room(layout)
            if room.fits:
                return replace(plan, predicted=bytes_planned(layout, plan.predicted, of_rank.profile))
        gpu, host = room.lacks(of_rank.limits.spare_bytes)
        kept = plan.num_chunks / layout.kept_chunks  # of a round, over those of a rank
        whole = host_required_bytes(of_rank.layout(replace(found.plan, request=own)), of_rank.profile)
        left = asked.max_gpu_bytes - gpu, whole - math.ceil(host * kept) if host else asked.max_host_bytes
        if min(left) <= 0:
            return None
        asked = replace(asked, max_gpu_bytes=left[0], max_host_bytes=left[1])
    return None
