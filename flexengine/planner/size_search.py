"""The search at one chunk and round size: mixes first, then placements by the sketch, then their neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from math import log

import numpy as np

from flexengine.planner.dealing import alike, all_but_one, changed, deal, moved, varied
from flexengine.planner.drafts import Drafting, Drafts
from flexengine.planner.mixes import COARSE_SHARES, FINE_SHARES, Mix, Mixing
from flexengine.planner.solver import Placement, RoundProblem

USUAL_SLOTS, LEAST_SLOTS = (2, 2, 2), (1, 1, 1)
COARSE_SLOTS = (USUAL_SLOTS, LEAST_SLOTS, (1, 1, 2))
OTHER_SLOTS = (*COARSE_SLOTS, (2, 1, 2), (3, 2, 3))
"""Weight, gradient and offload slots beside the usual ones that are tried from the start."""
NUM_QUICK, NUM_SEEDS = 2, 6
"""Mixes, of different structures, that descend from a coarse and from a fine crossing."""
NUM_IMPROVED = 3
"""Of those, how many are dealt out and tried with other slots."""
NUM_MOVES = 80
"""Mixes near a placement that polishing deals out."""
FEW_BLOCKS, NUM_BEAMS = 4, 3
"""With so few blocks more placements are tried: every change of one block, to so many placements at a time."""
CHEAP_CHUNK_LAYERS = 128
"""Up to so many chunks * blocks, two placements are polished at a time."""
LADDER = 1.25
"""Ratio of the smaller budgets that are looked at."""
MAX_POLISH, LEAST_GAIN = 8, 5e-4
"""Steps of polishing, each of which must gain this share."""


@dataclass(frozen=True)
class Candidate:
    """A placement for one size with its estimated step. turn: 0 for the best of a size, 1 of a family of structures."""

    problem: RoundProblem
    placement: Placement
    sketched_s: float
    turn: int

    @property
    def key(self) -> tuple[int, float, int, int]:
        """Order in which they are simulated, as the sketch errs most about sizes and then about families: by turn, then
        less time, then smaller rounds and chunks."""
        return (
            self.turn,
            self.sketched_s,
            self.problem.chunk_tokens * self.problem.chunks_per_round,
            self.problem.chunk_tokens,
        )


class SizeSearch:
    """What is found at one size within (GPU, host) budgets in bytes: placements with their seconds, fastest first."""

    def __init__(self, problem: RoundProblem, budgets: tuple[int, int]) -> None:
        self.problem, self.budgets = problem, budgets
        self.drafting = Drafting(problem)
        self.mixing = Mixing(self.drafting)
        self.coarse: list[tuple[float, Mix]] = []
        self.improved: list[tuple[float, Mix]] = []
        self.found, self.seconds = self.drafting.none, np.zeros(0)
        self.few = problem.num_blocks <= FEW_BLOCKS
        cheap = problem.num_blocks * problem.chunks_per_round <= CHEAP_CHUNK_LAYERS
        self.num_beams = NUM_BEAMS if self.few else 2 if cheap else 1

    @property
    def best_s(self) -> float:
        """Estimated seconds of the best placement, infinite before there is one."""
        return float(self.seconds[0]) if len(self.seconds) else np.inf

    def estimate_s(self, near_s: float) -> float:
        """About the seconds of the best mix on a coarse grid; infinite where none comes near `near_s`."""
        self.coarse = self.mixing.crossed(COARSE_SHARES, COARSE_SLOTS, *self.budgets, near_s)
        return self.coarse[0][0] if self.coarse else np.inf

    def improved_s(self) -> float:
        """About the seconds of what the best coarse mixes lead to."""
        best = {mix.slots: mix for _, mix in reversed(self.coarse)}
        self.improved = self._improved([*best.values(), *self._diverse(self.coarse)[1 : 1 + NUM_QUICK - len(best)]])
        return self.improved[0][0] if self.improved else np.inf

    def quick(self) -> None:
        """Deal out what the best coarse mixes lead to."""
        self._deal(self.improved)

    def refine(self) -> None:
        """Deal out what the best fine mixes lead to, with several slot counts."""
        usual = self.coarse[0][1].slots
        crossed = self.mixing.crossed(FINE_SHARES, (usual,), *self.budgets, self.coarse[0][0])
        best = self._improved(self._diverse(crossed or self.coarse)[:NUM_SEEDS])[:NUM_IMPROVED]
        for slots in OTHER_SLOTS:
            if slots != usual:
                best += self._improved([mix._replace(slots=slots) for _, mix in best[:NUM_IMPROVED]])
        best += self._rungs()
        if self.few:
            near_best = self._diverse(crossed)[:NUM_BEAMS] + [mix for _, mix in crossed]
            best += [(0.0, mix._replace(slots=slots)) for mix in near_best for slots in (usual, *OTHER_SLOTS)]
        self._deal(best)

    def _rungs(self) -> list[tuple[float, Mix]]:
        """Where descent leads under smaller budgets on a fixed grid: other ends, that a larger budget has as well."""
        found = []
        for budgets in smaller_budgets(*self.budgets):
            coarse = self.mixing.crossed(COARSE_SHARES, COARSE_SLOTS, *budgets, np.inf)
            best = {mix.slots: mix for _, mix in reversed(coarse)}
            found += self._improved(list(best.values()), budgets)
        return found

    def _improved(self, mixes: list[Mix], budgets: tuple[int, int] | None = None) -> list[tuple[float, Mix]]:
        """Where descent leads from each, fastest first."""
        found = [self.mixing.improve(mix, *(budgets or self.budgets)) for mix in mixes]
        return sorted((pair for pair in found if np.isfinite(pair[0])), key=lambda pair: pair[0])

    def _diverse(self, crossed: list[tuple[float, Mix]]) -> list[Mix]:
        """The best mix of every family of structures and slots, fastest first."""
        first: dict[tuple[int, tuple[int, int, int]], Mix] = {}
        for _, mix in crossed:
            first.setdefault((self.drafting.families[mix.structure], mix.slots), mix)
        return list(first.values())

    def _deal(self, mixes: list[tuple[float, Mix]]) -> None:
        if mixes:
            self.add(Drafts.joined([deal(self.drafting, mix) for _, mix in mixes]))

    def add(self, drafts: Drafts) -> None:
        """Estimate placements and keep those that fit, in order of seconds."""
        drafts = self.drafting.fitting(drafts, *self.budgets).distinct()
        if len(drafts.rows):
            found = Drafts.joined([self.found, drafts])
            seconds = np.concatenate((self.seconds, self.drafting.step_s(drafts)))
            order = np.argsort(seconds, kind="stable")
            self.found, self.seconds = found.take(order), seconds[order]

    def polish(self, steps: int = MAX_POLISH) -> None:
        """Change the best placements in one respect while the sketch gets faster."""
        for _ in range(steps):
            beams = self._beams(self.num_beams)
            before = self.seconds[beams].sum()
            self.add(Drafts.joined([drafts for index in beams for drafts in self._near(index)]))
            if not self.seconds[self._beams(len(beams))].sum() < before * (1 - LEAST_GAIN):
                break

    def exchange(self) -> None:
        """Of few blocks, change all to any one option, and one of them to any other."""
        if self.few:
            for drafts in [self.found.take(np.array([index])) for index in self._beams(self.num_beams)]:
                self.add(all_but_one(self.drafting, drafts, 0))

    def _beams(self, count: int) -> list[int]:
        """The best placements of different families of structures or slots, fastest first."""
        first: dict[tuple[int, ...], int] = {}
        for index in range(len(self.seconds)):
            placement = self.drafting.placement(self.found, index)
            key = (self.drafting.families[self.found.structures[index]], *self.problem.used_slots(placement))
            first.setdefault(key, index)
            if len(first) == count:
                break
        return list(first.values())

    def _near(self, index: int) -> list[Drafts]:
        """Placements that differ from one in one respect."""
        near = self.mixing.nearest(self.drafting.mix(self.found, index), *self.budgets, NUM_MOVES)
        parts = [varied(self.drafting, self.found, index), *([moved(self.found, index, near)] if near else [])]
        if self.few:
            parts += [make(self.drafting, self.found, index) for make in (changed, alike)]
        return parts

    def candidates(self, count: int) -> list[Candidate]:
        """The best placements of different seconds, and the best of every family of structures, fastest first."""
        _, first = np.unique(self.seconds.round(12), return_index=True)
        families = np.array(self.drafting.families)[self.found.structures]
        _, best = np.unique(families, return_index=True)
        chosen = sorted({*(int(i) for i in first[:count]), *(int(i) for i in best)})
        return [self._candidate(i, 0 if i == 0 else 1 if i in best else 2) for i in chosen]

    def _candidate(self, index: int, turn: int) -> Candidate:
        return Candidate(self.problem, self.drafting.placement(self.found, index), float(self.seconds[index]), turn)


def smaller_budgets(gpu_bytes: int, host_bytes: int) -> list[tuple[int, int]]:
    """One of both budgets lowered to the grid of powers of LADDER, and once more."""
    gpu, host = ([int(LADDER ** (int(log(b, LADDER)) - i)) for i in range(2)] for b in (gpu_bytes, host_bytes))
    return [(lower, host_bytes) for lower in gpu] + [(gpu_bytes, lower) for lower in host]
