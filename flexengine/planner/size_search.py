"""The search at one chunk and round size: its lower bound, first candidates, and local search from them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from flexengine.plan import Plan
from flexengine.planner.bound.relaxation import Bound
from flexengine.planner.candidates import CandidateMemory
from flexengine.planner.local_search import LocalSearch
from flexengine.planner.seeds import LINKS, SLOT_CHOICES, Relaxed, Seed, Seeder
from flexengine.planner.size_tables import NUM_RESIDENCIES, SizeTables
from flexengine.planner.surrogate import Surrogate


class SizeSearch:
    """What is known of one size.

    relaxed_s: the step of the relaxed counts; infinite where they do not fit, and once local search from all seeds
    knows more.
    """

    def __init__(self, tables: SizeTables, bound: Bound) -> None:
        self.tables, self.bound = tables, bound
        self.relaxed_s, self._all_seeds = np.inf, False

    @cached_property
    def surrogate(self) -> Surrogate:
        """The estimator of this size's candidates."""
        return Surrogate(CandidateMemory(self.tables))

    @cached_property
    def seeder(self) -> Seeder:
        """The maker of this size's first candidates."""
        return Seeder(self.surrogate)

    @cached_property
    def search(self) -> LocalSearch:
        """The candidates found."""
        return LocalSearch(self.surrogate, self.seeder.promising_options)

    @property
    def best_s(self) -> float:
        """Estimated seconds of the best candidate, infinite before there is one."""
        return self.search.best_s

    def rank_s(self, shorter: float = 1.0) -> float:
        """Until local search from all seeds halfway from the relaxed step to the best: short rounds improve most.

        shorter: share of the relaxed step that one may take.
        """
        return (min(shorter * self.relaxed_s, self.best_s) + self.best_s) / 2

    @property
    def best_plan(self) -> Plan:
        """The best plan found so far. It may not fit, as the search counts some bytes only nearly."""
        return self.search.memory.plan(self.search.found, self.search.finalists(1)[0])

    @property
    def name(self) -> tuple[int, int]:
        """Chunk tokens and chunks per round."""
        return self.tables.chunk_tokens, self.tables.chunks_per_round

    def start(self) -> None:
        """Try uniform candidates and one relaxation's rounded counts, or where budgets are tight the least memory."""
        limits = self.seeder.staged_limits
        found = self.seeder.relaxed(self._edges(streamed=True), limits[len(limits) // 2])
        options = self._uniform_options()
        seeds = self.seeder.uniform(options)
        if found is not None:
            self.relaxed_s = found.seconds
            seeds += self._under_all_edges(found)
        self.search.try_seeds(seeds)
        if found is None or not len(self.search.seconds):
            self.search.try_seeds(list(self.seeder.least_memory(options)))

    def seed_more(self) -> None:
        """Try the relaxations of every size of offload slots, and the dynamic programme at their prices."""
        self._all_seeds = True
        for staged_bytes in self.seeder.staged_limits:
            found = self.seeder.relaxed(self._edges(streamed=False), staged_bytes)
            found = found or self.seeder.relaxed(self._edges(streamed=True), staged_bytes)
            if found is not None:
                prices = found.prices.copy()
                prices[LINKS] = np.maximum(prices[LINKS], self.tables.limits.link_price)
                seeds = self._under_all_edges(found)
                choices = self.seeder.staging(staged_bytes)
                seeds += self.seeder.priced(prices, found.cpu_price, found.host_price, choices)
                self.search.try_seeds(seeds)
                if staged_bytes == self.seeder.staged_limits[-1]:  # one keep option for all blocks
                    homes, of_found = self.tables.buffers.residencies, (prices, found.cpu_price, found.host_price)
                    alike = (option * NUM_RESIDENCIES + homes for option in self._uniform_options())
                    self.search.try_seeds([seed for own in alike for seed in self.seeder.priced(*of_found, own)])

    def run(self, blocks: int, most_steps: int) -> None:
        """Search around the best candidates: see `LocalSearch.run`."""
        self.search.run(blocks, most_steps)
        if self._all_seeds:
            self.relaxed_s = np.inf

    def _under_all_edges(self, found: Relaxed) -> list[Seed]:
        """Rounded counts under every edge choice; those that do not fit are left out when they are tried."""
        edges = range(len(self.surrogate.memory.edge_choices))
        return [
            (choices, edge, slots)
            for choices in self.seeder.rounded(found.counts)
            for edge in edges
            for slots in SLOT_CHOICES
        ]

    def _uniform_options(self) -> list[int]:
        """Promising options first, then others, as many as an expansion of local search may simulate."""
        tables, promising = self.tables, self.seeder.promising_options
        ordered = dict.fromkeys((*promising, *range(tables.num_options)))
        blocks = tables.num_blocks * tables.chunks_per_round * len(tables.buffers.residencies)
        return list(ordered)[: max(len(promising), tables.limits.expansion_blocks // blocks)]

    def _edges(self, streamed: bool) -> int:
        """The edge choice that streams the edges through the blocks' slots, which takes the least GPU memory, or that
        holds them on the GPU altogether, which moves the least."""
        memory = self.surrogate.memory
        wanted = memory.edge_residencies.min() if streamed else memory.edge_residencies.max()
        whole = (memory.edge_residencies == wanted).all(axis=1) & memory.share & ~memory.grads_over_weights
        return int(whole.argmax())


def near_best(sizes: Sequence[SizeSearch], near: float) -> list[SizeSearch]:
    """Sizes that may be within this factor of the best, by their ranks, best first.

    Where phases overlap, steps are shorter than relaxed ones. All sizes are taken to be near the best that would be if
    theirs were so by as much as that of the size whose best candidate shows most of it.
    """
    ranked = sorted(sizes, key=lambda size: size.rank_s())
    shorter = min((size.best_s / size.relaxed_s for size in sizes if size.relaxed_s < np.inf), default=1.0)
    return [size for size in ranked if size.rank_s(min(shorter, 1.0)) <= near * ranked[0].rank_s()]
