"""A wide oracle: millions of placements of a small model, the most promising simulated as real programs.

Every block independently keeps one of several save sets of the frontier, all of it on the GPU or all on the host, its
input on either side, and holds its parameters at one of the levels of residency; embedding and head are streamed,
resident but for states or resident, with slots of their own or shared ones; every count of slots up to a limit. How
fine the choices are depends on the number of blocks (WIDTHS), so that all combinations can be looked at.

All that fit both budgets are estimated by the surrogate, in batches, and simulated from the best estimate on, until
the estimate is MARGIN above the fastest simulated or MOST_SIMULATED are. So every placement is looked at, but which is
the fastest is proven only as far as the surrogate does not hide it: bytes and estimates are the planner's, the verdict
is the simulator's. The same is done for all placements whose blocks are alike, with every save set and split there is.
The fastest of both is changed in one block at a time, to every option and level there is, as long as that makes it
faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import NamedTuple

import numpy as np

from flexengine.hardware.profile import HardwareProfile
from flexengine.models.spec import ModelSpec
from flexengine.plan import Request
from flexengine.planner.candidates import CandidateMemory, Candidates
from flexengine.planner.cost.cost_model import CostModel, StepPricer
from flexengine.planner.cost.save_sets import SaveSets, frontier
from flexengine.planner.cost.stream_loads import GPU_RESIDENCIES, RESIDENT, RESIDENT_BOTH, STREAMED
from flexengine.planner.problem import Problem
from flexengine.planner.shared_buffers import SharedBuffers
from flexengine.planner.size_tables import NUM_RESIDENCIES, SizeTables
from flexengine.planner.sizes import chunk_sizes
from flexengine.planner.surrogate import Surrogate
from flexengine.schedule.group_storage import DTYPE_BYTES
from flexengine.schedule.layout import Layout
from flexengine.schedule.packing import full_round

MARGIN = 1.1
"""Plans with estimates up to this factor of the fastest simulated are simulated themselves."""
MOST_SIMULATED = 600
"""At one size: so many from the best estimate on."""
MOST_UNIFORM = 200
"""Of those whose blocks are all alike."""
MOST_CHANGES = 60
"""Changes of one block that are simulated at a time."""
BATCH = 1 << 14
KEPT_PER_BATCH = 200
"""Of every batch of placements the best estimates that are remembered."""


MOST_FITTING = 4_000_000
"""Placements that are estimated at one size."""


class Width(NamedTuple):
    """Save sets of the frontier, in how many ways each is split between both sides (2: wholly on one of them), levels
    of residency of blocks, and the most slots of each kind."""

    num_sets: int
    splits: int
    levels: tuple[int, ...]
    slots: int


ALL_LEVELS = GPU_RESIDENCIES
THREE_LEVELS = (STREAMED, RESIDENT_BOTH, RESIDENT)
WIDTHS = {
    1: (Width(24, 5, ALL_LEVELS, 3),),
    2: (
        Width(12, 5, ALL_LEVELS, 3),
        Width(8, 3, ALL_LEVELS, 3),
        Width(6, 2, ALL_LEVELS, 3),
        Width(4, 2, ALL_LEVELS, 2),
    ),
    3: (
        Width(5, 3, ALL_LEVELS, 2),
        Width(4, 3, THREE_LEVELS, 2),
        Width(3, 2, ALL_LEVELS, 2),
        Width(3, 2, THREE_LEVELS, 2),
        Width(2, 2, THREE_LEVELS, 2),
    ),
    4: (Width(3, 2, THREE_LEVELS, 2), Width(2, 2, THREE_LEVELS, 2), Width(2, 2, THREE_LEVELS, 1)),
}
"""By number of blocks, widest first: the first (or the last) that leaves no more than MOST_FITTING placements."""


@dataclass
class Verdict:
    """The fastest plan's seconds, and how many placements there were, fitted both budgets and were simulated."""

    best_s: float = float("inf")
    placements: int = 0
    fitting: int = 0
    simulated: int = 0
    seen: dict[str, float] = field(default_factory=dict)


def judge(model: ModelSpec, request: Request, profile: HardwareProfile) -> Verdict:
    """The fastest of all placements at all chunk and round sizes of the request, updates at every time it allows."""
    verdict, ways = Verdict(), ("auto", "in_round", "unstored") if request.may_update_in_round else ("auto",)
    for asked in (replace(request, gpu_updates=way) for way in ways):
        buffers = SharedBuffers(Problem(model, asked, profile))
        for chunk, chunks in chunk_sizes(asked):
            problem = SizeTables(buffers, chunk, chunks, all_sets(model, asked, profile, chunk))
            _Size(problem, StepPricer(profile), verdict).judge()
    return verdict


def all_sets(model: ModelSpec, request: Request, profile: HardwareProfile, chunk: int) -> SaveSets:
    """The frontier at a chunk size, from nothing to everything, of a model whose blocks are alike."""
    cost = CostModel(profile, DTYPE_BYTES[request.numerics.compute], chunk, request.max_seq_len)
    shape = full_round(request, chunk, max(1, -(-request.max_seq_len // chunk)))
    return (tuple(s.ops for s in frontier(model.blocks[0], shape, cost)),)


class _Size:
    """All placements at one chunk and round size."""

    def __init__(self, problem: SizeTables, pricer: StepPricer, verdict: Verdict) -> None:
        self.problem, self.pricer, self.verdict = problem, pricer, verdict
        self.memory = CandidateMemory(problem)
        self.surrogate = Surrogate(self.memory)
        self.best_s, self.best = float("inf"), self.memory.none

    def judge(self) -> None:
        """Estimate all, simulate the best, then change the fastest one block at a time; the same from uniform ones."""
        for batches, most in ((self.batches(), MOST_SIMULATED), (self.uniform(), MOST_UNIFORM)):
            self.best_s, self.best = float("inf"), self.memory.none
            ranked = [self.ranked(self.fitting(candidates), KEPT_PER_BATCH) for candidates in batches]
            if ranked:
                seconds, candidates = np.concatenate([s for s, _ in ranked]), Candidates.joined([d for _, d in ranked])
                order = np.argsort(seconds, kind="stable")
                self.simulate(seconds[order], candidates.take(order), most)
                self.descend()

    def descend(self) -> None:
        """Change the fastest in one respect at a time, as long as that makes it faster."""
        before = float("inf")
        while self.best_s < before:
            before = self.best_s
            self.simulate(*self.ranked(self.fitting(self.changed()), MOST_CHANGES), MOST_CHANGES)

    def fitting(self, candidates: Candidates) -> Candidates:
        """Those within both budgets."""
        fitting = candidates.take(np.flatnonzero(self.memory.fits(candidates)))
        self.verdict.fitting += len(fitting.choices)
        return fitting

    def ranked(self, candidates: Candidates, count: int) -> tuple[np.ndarray, Candidates]:
        """The best estimates and their placements."""
        seconds = self.surrogate.step_s(candidates)
        best = np.argsort(seconds, kind="stable")[:count]
        return seconds[best], candidates.take(best)

    def simulate(self, seconds: np.ndarray, candidates: Candidates, most: int) -> None:
        """Simulate at most so many placements in order of their estimates."""
        simulated = 0
        for index in range(len(seconds)):
            if seconds[index] > MARGIN * self.best_s or simulated >= most:
                break
            plan = self.memory.plan(candidates, index)
            key = plan.to_json()
            if key in self.verdict.seen:
                self.keep(self.verdict.seen[key], candidates, index)
                continue
            layout = Layout(self.problem.model, plan)
            if not Problem(self.problem.model, self.problem.request, self.problem.buffers.profile).fits(layout):
                continue
            step_s = self.verdict.seen[key] = self.pricer.step(layout).step_s
            simulated += 1
            self.verdict.simulated += 1
            self.keep(step_s, candidates, index)
        self.verdict.best_s = min(self.verdict.best_s, self.best_s)

    def keep(self, step_s: float, candidates: Candidates, index: int) -> None:
        """Remember a placement if it is the fastest."""
        if step_s < self.best_s:
            self.best_s, self.best = step_s, candidates.take(np.array([index]))

    # -- placements --------------------------------------------------------------------------------------------------

    def rows(self, width: Width) -> np.ndarray:
        """Rows of some save sets, split in some ways."""
        options = self.problem.kinds[0].options
        sets = len(options.programs)
        picked = {round(i * (sets - 1) / max(1, width.num_sets - 1)) for i in range(width.num_sets)}
        chosen: list[int] = []
        for set_of in sorted(picked):
            for home in ("gpu", "host"):
                alike = [i for i, p in enumerate(options.plans) if options.set_of[i] == set_of and p.input_home == home]
                alike.sort(key=lambda i: int(options.gpu_bytes[i]))
                some = {round(k * (len(alike) - 1) / (width.splits - 1)) for k in range(width.splits)}
                chosen += [alike[k] for k in sorted(some)]
        return np.array([option * NUM_RESIDENCIES + level for option in chosen for level in width.levels])

    def dealt(self, rows: np.ndarray) -> np.ndarray:
        """Rows [P, blocks] of all placements whose blocks do not take too much by themselves."""
        problem, parts = self.problem, self.problem.activations
        dealt = np.stack([r.ravel() for r in np.meshgrid(*[rows] * problem.num_blocks, indexing="ij")], axis=1)
        fixed = parts.fixed_gpu_bytes + parts.round_gpu_bytes + parts.scratch_floor
        fixed += problem.buffers.accumulator_bytes
        within = problem.choice_gpu.at(dealt).sum(axis=1) + fixed <= problem.request.max_gpu_bytes
        within &= problem.choice_host.at(dealt).sum(axis=1) + parts.host_bytes <= problem.request.max_host_bytes
        return dealt[within]

    def batches(self) -> Iterator[Candidates]:
        """All placements, some at a time."""
        structures, widths = range(len(self.memory.edge_choices)), WIDTHS[self.problem.num_blocks]
        for width in widths:
            rows = self.rows(width)
            dealt, counts = self.dealt(rows), np.array(list(product(range(1, width.slots + 1), repeat=3)))
            around = np.array(list(product(structures, range(len(counts)))))
            if len(dealt) * len(around) <= MOST_FITTING or width is widths[-1]:
                break
        self.verdict.placements += len(rows) ** self.problem.num_blocks * len(around)
        step = max(1, BATCH // len(around))
        for start in range(0, len(dealt), step):
            some = dealt[start : start + step]
            structure, slots = np.tile(around, (len(some), 1)).T
            yield Candidates(np.repeat(some, len(around), axis=0), structure, counts[slots])

    @property
    def all_rows(self) -> np.ndarray:
        """Every option with every level that the machine has."""
        return np.flatnonzero(np.isin(self.problem.choice_residency, self.problem.buffers.residencies))

    def uniform(self) -> Iterator[Candidates]:
        """All blocks alike, with every option and level, structure and up to three slots of each kind."""
        around = list(product(range(len(self.memory.edge_choices)), product((1, 2, 3), repeat=3)))
        structures, slots = np.array([s for s, _ in around]), np.array([c for _, c in around])
        rows = self.all_rows
        self.verdict.placements += len(rows) * len(around)
        for start in range(0, len(rows), BATCH // len(around)):
            some = rows[start : start + BATCH // len(around)]
            alike = np.repeat(some, len(around))[:, None] + np.zeros(self.problem.num_blocks, dtype=np.int64)
            yield Candidates(alike, np.tile(structures, len(some)), np.tile(slots, (len(some), 1)))

    def changed(self) -> Candidates:
        """The fastest with one block changed to any row, or with other slots or another structure."""
        rows, structure, slots = self.best.choices[0], self.best.edges[0], self.best.slots[0]
        blocks, others = len(rows), self.all_rows
        many = len(others)
        single = np.tile(rows, (blocks * many, 1))
        single[np.arange(blocks * many), np.repeat(np.arange(blocks), many)] = np.tile(others, blocks)
        around = list(product(range(len(self.memory.edge_choices)), product((1, 2, 3), repeat=3)))
        return Candidates(
            np.concatenate((single, np.tile(rows, (len(around), 1)))),
            np.concatenate((np.full(len(single), structure), [s for s, _ in around])),
            np.concatenate((np.tile(slots, (len(single), 1)), [c for _, c in around])),
        )
