"""Split plans among the candidates of a search for one rank that relays.

Where ranks split, a link moves a share of the weights and gradients that it moves whole with relays: candidates that
wait for it no less than others are then faster, as they keep more on the host and recompute less. All candidates that
the search remembers are estimated again with these copies, and local search goes on from them.
"""

from __future__ import annotations

from copy import copy

from flexengine.plan import Plan
from flexengine.planner.local_search import LocalSearch
from flexengine.planner.problem import Problem
from flexengine.planner.ranks.split import laid_out_as_split
from flexengine.planner.search import Search
from flexengine.planner.size_search import SizeSearch
from flexengine.planner.surrogate import Surrogate

MOST_SIZES, NEAR = 3, 1.1
"""Sizes from which local search goes on, the best by their estimates, and within which factor of the best of all."""
BLOCKS, STEPS = 80_000, 16
"""How far it goes, as a round of the race does."""
SPARE_BYTES = 32 * 2**20
"""Left free beside what a plan lacked, as the next best one may have left less."""


def link_share(of_rank: Problem) -> float:
    """Seconds that weights and gradients take on their way where ranks split them, of those with relays.

    A rank's link moves an equal part of them, and GPUs exchange the rest.
    """
    link, ranks = of_rank.profile.link, of_rank.request.ranks
    if not link.peer_bytes_per_s:
        return 1.0
    return max(1.0 / ranks, (1.0 - 1.0 / ranks) * link.h2d_duplex_bytes_per_s / link.peer_bytes_per_s)


def best_again(of_rank: Problem, search: Search) -> Plan | None:
    """The best split plan by its estimate that fits; None where there is none, or links would move no less."""
    share = link_share(of_rank)
    sizes = [] if share >= 1.0 else [size for size in search.sizes if len(size.search.seconds)]
    ranked = sorted(((_estimated(size, share), size) for size in sizes), key=lambda pair: pair[0].best_s)
    near = [pair for pair in ranked if pair[0].best_s <= NEAR * ranked[0][0].best_s][:MOST_SIZES]
    found = [best for again, size in near if (best := _best(of_rank, size, share, again)) is not None]
    return min(found, key=lambda pair: pair[0], default=(0.0, None))[1]


def _estimated(size: SizeSearch, share: float, lacks: tuple[int, int] = (0, 0)) -> LocalSearch:
    """What the search of a size remembers, with the copies of a split; lacks: bytes to leave of both budgets."""
    memory = copy(size.search.memory)
    memory.budgets = memory.budgets - lacks
    found = LocalSearch(Surrogate(memory, share), size.search.options)
    found.try_candidates(size.search.found)
    return found


def _best(of_rank: Problem, size: SizeSearch, share: float, search: LocalSearch) -> tuple[float, Plan] | None:
    """The best plan of a size whose slots, as ranks that split have them, fit, with its estimated seconds.

    search: what is remembered of the size, estimated with whole budgets.
    """
    lacks = (0, 0)
    for _ in range(of_rank.limits.searches):
        if any(lacks):
            search = _estimated(size, share, lacks)
        search.run(BLOCKS, STEPS)
        if not len(search.seconds):
            return None
        plan = laid_out_as_split(of_rank, search.memory.plan(search.found, 0))
        room = of_rank.room(of_rank.layout(plan))
        if room.fits:
            return search.best_s, plan
        gpu, host = room.lacks(SPARE_BYTES)
        lacks = lacks[0] + gpu, lacks[1] + host
    return None
