"""Local search on the surrogate at one size: single changes, pairs of them, and other slots, edges and orders.

A step expands the best candidate that has not been expanded. Single changes give some blocks another keep option or
residency. Of those that exceed a budget, the most useful are paired with changes that free as much; so a block may keep
more when another keeps less.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np

from flexengine.planner.candidates import Candidates
from flexengine.planner.seeds import Seed
from flexengine.planner.size_tables import NUM_RESIDENCIES
from flexengine.planner.surrogate import Surrogate


class Expanded(NamedTuple):
    """The candidates made from one, with seconds [P] and bytes [P] on both sides; `start` has a row for the one."""

    start: Candidates
    start_s: float
    made: Candidates
    seconds: np.ndarray
    num_bytes: np.ndarray


class LocalSearch:
    """The best candidates found at one size, fastest first."""

    def __init__(self, surrogate: Surrogate, options: list[int]) -> None:
        """options: those that are tried first, beside the best candidates' own."""
        self.surrogate, self.memory, self.tables = surrogate, surrogate.memory, surrogate.tables
        self.limits, self.options = self.tables.limits, options
        self.found, self.seconds = self.memory.none, np.zeros(0)
        self.expanded: set[bytes] = set()
        self.simulated_blocks = 0

    @property
    def best_s(self) -> float:
        """Estimated seconds of the best candidate, infinite before there is one."""
        return float(self.seconds[0]) if len(self.seconds) else np.inf

    def try_seeds(self, seeds: list[Seed]) -> None:
        """Add those seeds that fit."""
        if seeds:
            self.try_candidates(Candidates.of(seeds).distinct())

    def run(self, blocks: int, most_steps: int) -> None:
        """Expand candidates until so many blocks times chunks were simulated, or so many steps were taken."""
        until = self.simulated_blocks + blocks
        for _ in range(most_steps):
            index = self._next()
            if index is None or self.simulated_blocks >= until:
                break
            self._expand(index)

    def finalists(self, count: int) -> list[int]:
        """The best candidate, then the best of those that differ from all before in many blocks or in their edges.

        The surrogate errs alike on candidates that are alike, so a few unlike ones are worth more than many like ones.
        """
        near = int(np.searchsorted(self.seconds, self.limits.finalist_near * self.best_s, side="right"))
        choices, edges, rest = self.found.choices[:near], self.found.edges[:near], np.ones(near, dtype=bool)
        alike = max(1, choices.shape[1] // self.limits.finalist_difference)
        chosen: list[int] = []
        while rest.any() and len(chosen) < count:
            index = int(rest.argmax())
            chosen.append(index)
            rest &= ((choices != choices[index]).sum(axis=1) > alike) | (edges != edges[index])
        return chosen

    # -- what was found ----------------------------------------------------------------------------------------------

    def try_candidates(self, candidates: Candidates) -> None:
        """Estimate candidates that fit, and remember them."""
        fitting = candidates.take(np.flatnonzero(self.memory.fits(candidates)))
        if len(fitting.choices):
            self._add(fitting, self._step_s(fitting))

    def _step_s(self, candidates: Candidates) -> np.ndarray:
        self.simulated_blocks += candidates.choices.size * self.tables.chunks_per_round
        return self.surrogate.step_s(candidates)

    def _add(self, candidates: Candidates, seconds: np.ndarray) -> None:
        """Remember candidates that fit, fastest first."""
        seconds = np.concatenate((self.seconds, seconds))
        order = np.argsort(seconds, kind="stable")[: self.limits.remembered]
        self.found, self.seconds = Candidates.joined([self.found, candidates]).take(order), seconds[order]

    def _next(self) -> int | None:
        """The best candidate near the best of all that was not expanded yet."""
        near = int(np.searchsorted(self.seconds, self.limits.near * self.best_s, side="right"))
        return next((i for i in range(near) if self._key(i) not in self.expanded), None)

    def _key(self, index: int) -> bytes:
        return b"".join(column[index].tobytes() for column in self.found)

    # -- steps -------------------------------------------------------------------------------------------------------

    def _expand(self, index: int) -> None:
        """Estimate the candidates near one, whether they fit or not, then pairs of changes that fit together."""
        self.expanded.add(self._key(index))
        start, start_s = self.found.take(np.array([index])), float(self.seconds[index])
        made = Candidates.joined([self._singles(start), self._varied(start)])
        seconds = self._step_s(made)
        num_bytes = self.memory.num_bytes(made)
        fitting = np.flatnonzero((num_bytes <= self.memory.budgets[:, None]).all(axis=0))
        pairs = self._pairs(Expanded(start, start_s, made, seconds, num_bytes))
        self._add(made.take(fitting), seconds[fitting])
        self.try_candidates(pairs)

    def _singles(self, start: Candidates) -> Candidates:
        """Give some or all blocks of the same choice another option or residency: first, last or spread ones."""
        choices = start.choices[0]
        used = np.unique(choices)
        options = self._options(len(used))
        made = []
        for choice in used.tolist():
            places = np.flatnonzero(choices == choice)
            targets = self._targets(choice, options)
            for where in _some(places, self.limits.count_ratio):
                for target in targets:
                    changed = choices.copy()
                    changed[where] = target
                    made.append(changed)
        rows, count = np.array(made, choices.dtype).reshape(-1, len(choices)), len(made)
        return Candidates(rows, np.tile(start.edges, count), np.tile(start.slots, (count, 1)))

    def _options(self, num_used: int) -> np.ndarray:
        """Options to try: those of the best candidates, then promising ones, then others, as far as time allows."""
        elite = np.unique(self.found.choices[: self.limits.elite] // NUM_RESIDENCIES)
        ordered = dict.fromkeys((*elite.tolist(), *self.options, *range(self.tables.num_options)))
        blocks = self.tables.num_blocks
        changes = num_used * min(6, 2 * blocks)  # of about so many groups of blocks
        count = self.limits.expansion_blocks // (changes * blocks * self.tables.chunks_per_round)
        return np.array(list(ordered)[: max(len(elite), count)])

    def _targets(self, choice: int, options: np.ndarray) -> list[int]:
        """Choices that differ from one in their option or in their residency."""
        option, home = divmod(choice, NUM_RESIDENCIES)
        others = [int(o) * NUM_RESIDENCIES + home for o in options if o != option]
        homes = self.tables.buffers.residencies
        return others + [option * NUM_RESIDENCIES + int(v) for v in homes if v != home]

    def _varied(self, start: Candidates) -> Candidates:
        """One slot more or less, other edges, or two neighbouring blocks swapped."""
        choices, edge, slots = start.choices[0], int(start.edges[0]), start.slots[0]
        made = []
        for kind, change in product(range(len(slots)), (1, -1)):
            changed = slots.copy()
            changed[kind] += change
            if 1 <= changed[kind] <= self.limits.slots:
                made.append((choices, edge, changed))
        made += [(choices, other, slots) for other in range(len(self.memory.edge_choices)) if other != edge]
        borders = np.flatnonzero(choices[1:] != choices[:-1])
        spread = np.unique(np.linspace(0, len(borders) - 1, self.limits.swaps).astype(int)) if len(borders) else []
        for border in borders[spread].tolist():
            swapped = choices.copy()
            swapped[[border, border + 1]] = choices[[border + 1, border]]
            made.append((swapped, edge, slots))
        return Candidates.of(made)

    def _pairs(self, around: Expanded) -> Candidates:
        """Join a change that gains but exceeds a budget with one that frees enough, by the sum of what they gain."""
        gain = around.start_s - around.seconds
        over = (around.num_bytes > self.memory.budgets[:, None]).any(axis=0)
        same_frame = (around.made.edges == around.start.edges) & (around.made.slots == around.start.slots).all(axis=1)
        spending, freeing = np.flatnonzero(over & (gain > 0) & same_frame), np.flatnonzero(~over)
        spending = spending[np.argsort(-gain[spending], kind="stable")][: self.limits.pairs]
        if not len(spending) or not len(freeing):
            return self.memory.none
        before = self.memory.num_bytes(around.start)[:, :, None]
        together = around.num_bytes[:, spending, None] + around.num_bytes[:, None, freeing] - before
        fits = (together <= self.memory.budgets[:, None, None]).all(axis=0)
        total = np.where(fits, gain[spending][:, None] + gain[freeing][None, :], -np.inf).ravel()
        return self._joined(around, spending, freeing, total)

    def _joined(self, around: Expanded, spending: np.ndarray, freeing: np.ndarray, total: np.ndarray) -> Candidates:
        """The best pairs by `total` [spending * freeing] whose changes do not touch the same blocks."""
        choices, seeds = around.start.choices[0], list[Seed]()
        for pair in np.argsort(-total, kind="stable")[: 4 * self.limits.pairs]:
            if not total[pair] > 0 or len(seeds) == self.limits.pairs:
                break
            one, other = divmod(int(pair), len(freeing))
            first, second = around.made.choices[spending[one]], around.made.choices[freeing[other]]
            if not ((first != choices) & (second != choices)).any():
                edge = int(around.made.edges[freeing[other]])
                weight, grad, save = around.made.slots[freeing[other]].tolist()
                seeds.append((np.where(second != choices, second, first), edge, (weight, grad, save)))
        return Candidates.of(seeds) if seeds else self.memory.none


def _some(places: np.ndarray, ratio: int) -> list[np.ndarray]:
    """All places, and 1, `ratio`, its square, ... of them: the first, the last, and evenly spread ones."""
    found, count = [places], 1
    while count < len(places):
        found += [places[:count], places[len(places) - count :]]
        if count > 1:
            found.append(places[(np.arange(count) * 2 + 1) * len(places) // (2 * count)])
        count *= ratio
    return found
