"""Chooses a plan: chunk and round sizes outside, the dynamic programme over layers inside, the simulator as judge.

Every (chunk, round) size gets placements from the dynamic programme under several goals and prefetch depths,
estimated by the sketch; the best few are polished by local search, become plans whose exact bytes are checked, and
are simulated on their real programs. All limits are counts, never clocks, so a request has one answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from flexengine.hardware.profile import HardwareProfile
from flexengine.models.spec import ModelSpec
from flexengine.plan import Plan, Prediction, Request
from flexengine.planner import loads
from flexengine.planner.cost_model import CostModel, StepEstimate, StepPricer, round_shape, unavoidable_compute_s
from flexengine.planner.frontier import frontier
from flexengine.planner.memory import (
    excess_bytes,
    gpu_categories,
    gpu_required_bytes,
    host_categories,
    host_required_bytes,
)
from flexengine.planner.report import limiter
from flexengine.planner.shortage import LEAST_HOST, LEAST_SLOTS, shortage
from flexengine.planner.sizes import chunk_sizes
from flexengine.planner.solver import Caps, Goal, Placement, RoundProblem, Solution
from flexengine.planner.templates import SlotCounts, Templates
from flexengine.schedule.layout import DTYPE_BYTES, Layout

MAX_CHUNK_LAYERS = 1024
"""Largest chunks_per_round * blocks that is simulated, where sizes allow a choice."""
USUAL_SLOTS = SlotCounts()
SLOT_CHOICES = (SlotCounts(), SlotCounts(3, 2, 3), SlotCounts(2, 1, 2), SlotCounts(1, 1, 1))
NUM_PROBLEMS, NEAR_SHARE = 4, 1.05
"""Sizes that are looked at closely: at most so many, estimated within this factor of the best."""
NUM_GOALS = 4
"""Weightings of the streams tried per size and slot counts."""
HOPELESS_SHARE = 1.0
"""Sizes whose compute alone takes longer than the best found so far are skipped."""
SMALLER_BUDGETS = (0.9, 0.75)
"""Shares of the GPU budget solved for too, so that more memory offers the plans that a little less did."""
NUM_POLISHED, NUM_SIMULATED = 3, 3
SKETCHED_CHUNK_LAYERS = 24_000
"""Chunk-layers that the polish of one placement may sketch."""
SIMPLICITY_SHARE = 0.02
"""A plan that keeps everything on the GPU is preferred unless streaming is faster by more than this share."""


@dataclass(frozen=True)
class Candidate:
    """A placement for one size with its estimated step, and with its plan once that is simulated."""

    problem: RoundProblem
    placement: Placement
    sketched_s: float

    @property
    def key(self) -> tuple[float, int, int]:
        """Order of preference: less time, then smaller rounds and chunks."""
        return self.sketched_s, self.problem.chunk_tokens * self.problem.chunks_per_round, self.problem.chunk_tokens


def make_plan(model: ModelSpec, request: Request, profile: HardwareProfile) -> Plan:
    """The fastest plan found for a request on a machine.

    Deterministic; takes seconds, needs no GPU. Raises PlanError when nothing fits, saying what would.
    """
    return Search(model, request, profile).run()


class Search:
    """One request's search: problems by size, what was found for each, and the final choice."""

    def __init__(self, model: ModelSpec, request: Request, profile: HardwareProfile) -> None:
        self.model, self.request, self.profile = model, request, profile
        self.templates = Templates(model, request, profile)
        self.pricer = StepPricer(profile)
        self.sets: tuple[tuple[str, ...], ...] | None = None

    def run(self) -> Plan:
        """Rank sizes, look closely at the best, polish, simulate, choose."""
        ranked = self.ranked_problems()
        if not ranked:
            raise shortage(self.model, self.request, self.profile)
        found = [c for problem in ranked for c in self.candidates(problem)]
        found.sort(key=lambda c: c.key)
        polished = [self.polish(c) for c in one_per_problem(found)[:NUM_POLISHED]]
        finalists = distinct([*sorted(polished, key=lambda c: c.key), *found])
        return self.simulated_best(finalists)

    # -- sizes -------------------------------------------------------------------------------------------------------

    def ranked_problems(self) -> list[RoundProblem]:
        """The most promising sizes for which something fits, in order of estimated time."""
        ranked: list[Candidate] = []
        for chunk, chunks in reversed(self._simulable(chunk_sizes(self.request))):
            problem = RoundProblem(self.templates, chunk, chunks, self._save_sets(chunk))
            if ranked and problem.compute_s > HOPELESS_SHARE * min(c.sketched_s for c in ranked):
                continue
            found = self.estimates(problem)
            if found:
                ranked.append(min(found, key=lambda c: c.key))
        ranked.sort(key=lambda c: c.key)
        return [c.problem for c in ranked[:NUM_PROBLEMS] if c.sketched_s <= NEAR_SHARE * ranked[0].sketched_s]

    def estimates(self, problem: RoundProblem) -> list[Candidate]:
        """A few quick placements for one size."""
        for slots in (USUAL_SLOTS, SLOT_CHOICES[-1], LEAST_SLOTS):
            solutions = islice(self.solutions(problem, slots, self.request.max_gpu_bytes), 2)
            found = [c for solution in solutions for c in self.dealt(problem, solution)]
            if found:
                return found
        return []

    def _simulable(self, sizes: list[tuple[int, int]]) -> list[tuple[int, int]]:
        blocks = len(self.model.blocks)
        limit = max(MAX_CHUNK_LAYERS, min(n for _, n in sizes) * blocks)
        return [(c, n) for c, n in sizes if n * blocks <= limit]

    def _save_sets(self, chunk: int) -> tuple[tuple[str, ...], ...]:
        """Save sets on the frontier; found at one chunk size, as they hardly depend on it."""
        if self.sets is None:
            cost = CostModel(self.profile, DTYPE_BYTES[self.request.numerics.compute], chunk, self.request.max_seq_len)
            shape = round_shape(self.request, chunk, max(1, -(-self.request.max_seq_len // chunk)))
            self.sets = tuple(s.ops for s in frontier(self.model.blocks[0], shape, cost))
        return self.sets

    # -- one size ----------------------------------------------------------------------------------------------------

    def candidates(self, problem: RoundProblem) -> list[Candidate]:
        """Placements under several goals, slot counts and budgets, best first."""
        budget, found = self.request.max_gpu_bytes, list[Candidate]()
        for slots in SLOT_CHOICES:
            for solution in self.solutions(problem, slots, budget):
                found += self.dealt(problem, solution)
                if problem.is_resident(solution):
                    return found
        for share in SMALLER_BUDGETS:
            found += self.dealt(problem, self.solve(problem, Goal(), USUAL_SLOTS, int(share * budget)))
        if not found:
            found = self.dealt(problem, self.solve(problem, Goal(), LEAST_SLOTS, budget))
        return distinct(sorted(found, key=lambda c: c.key))

    def solutions(self, problem: RoundProblem, slots: SlotCounts, budget: int) -> Iterator[Solution]:
        """First for layers that overlap within themselves only, then for streams weighted by how busy they were:
        multiplicative weights towards the least largest load of each phase."""
        solution = self.solve(problem, Goal(), slots, budget)
        weights = np.full(loads.NUM_LOADS, 1.0 / 3)
        for _ in range(NUM_GOALS):
            if solution is None:
                return
            yield solution
            if problem.is_resident(solution):
                return
            phases = problem.total_loads(solution.structure, solution.counts).reshape(3, 3)
            pull = np.exp(8.0 * (phases / np.maximum(phases.max(axis=1, keepdims=True), 1e-30) - 1.0))
            pull /= pull.sum(axis=1, keepdims=True)
            weights = 0.5 * weights + 0.5 * pull.ravel()
            solution = self.solve(problem, Goal(tuple(weights.tolist())), slots, budget)

    def solve(self, problem: RoundProblem, goal: Goal, slots: SlotCounts, budget: int) -> Solution | None:
        """The best solution within both budgets, over caps on shared buffers that tighten to what is used."""
        best = None
        for choice in self._cap_choices(problem):
            caps = choice
            for _ in range(2):
                solution = self._solve_host(problem, goal, slots, budget, caps)
                if solution is None:
                    break
                if best is None or solution.objective < best.objective * (1 - 1e-9):
                    best = solution
                tight = problem.caps_of(list(solution.counts))
                if tight == caps:
                    break
                caps = tight
        return best

    def _cap_choices(self, problem: RoundProblem) -> list[Caps]:
        """Offload slots of no bytes, and up to a quarter, half and three quarters of the distinct sizes."""
        staged = sorted({int(s) for s in problem.row_staged})
        picked = sorted({staged[len(staged) * i // 4] for i in range(4)})
        return [Caps(s, problem.widest_caps.scratch_bytes) for s in picked]

    def _solve_host(
        self, problem: RoundProblem, goal: Goal, slots: SlotCounts, budget: int, caps: Caps
    ) -> Solution | None:
        """Solve; while host memory is exceeded, raise its price by bisection."""
        solution = problem.solve(goal, slots, budget, caps)
        if solution is None or self._host_fits(problem, solution):
            return solution
        low, high, best = 0.0, 1e-6, None  # 1 s per MB outweighs any transfer
        for _ in range(8):
            price = high if best is None else (low + high) / 2
            solution = problem.solve(replace(goal, host_s_per_byte=price), slots, budget, caps)
            if solution is not None and self._host_fits(problem, solution):
                best, high = solution, price
            elif best is None:
                solution = problem.solve(LEAST_HOST, slots, budget, caps)
                return solution if solution is not None and self._host_fits(problem, solution) else None
            else:
                low = price
        return best

    def _host_fits(self, problem: RoundProblem, solution: Solution) -> bool:
        return problem.host_bytes(solution.structure, solution.counts) <= self.request.max_host_bytes

    def dealt(self, problem: RoundProblem, solution: Solution | None) -> list[Candidate]:
        """A solution's rows dealt out to the blocks in a few orders."""
        if solution is None:
            return []
        placements = [Placement(solution.structure, solution.slots, rows) for rows in orders(problem, solution.counts)]
        return [Candidate(problem, p, problem.sketch_s(p)) for p in placements]

    # -- local search ------------------------------------------------------------------------------------------------

    def polish(self, start: Candidate) -> Candidate:
        """Change one thing at a time while the sketch gets faster and the bytes fit."""
        best = start
        left = SKETCHED_CHUNK_LAYERS // (start.problem.num_blocks * start.problem.chunks_per_round)
        improved = True
        while improved and left > 0:
            improved = False
            for placement in neighbours(best.problem, best.placement):
                if left <= 0:
                    break
                if not self.fits(best.problem, placement):
                    continue
                left -= 1
                sketched_s = best.problem.sketch_s(placement)
                if sketched_s < best.sketched_s * (1 - 1e-6):
                    best, improved = Candidate(best.problem, placement, sketched_s), True
                    break
        return best

    def fits(self, problem: RoundProblem, placement: Placement) -> bool:
        """Whether a placement is within both budgets by the solver's arithmetic."""
        if problem.gpu_bytes(placement) > self.request.max_gpu_bytes:
            return False
        return problem.host_bytes(placement.structure, Counter(placement.rows)) <= self.request.max_host_bytes

    # -- the answer --------------------------------------------------------------------------------------------------

    def simulated_best(self, finalists: list[Candidate]) -> Plan:
        """The fastest finalist by simulation of its real programs; near ties go to what stays on the GPU."""
        best: tuple[float, Plan, StepEstimate] | None = None
        simulated = 0
        for candidate in finalists:
            plan = candidate.problem.plan(candidate.placement)
            layout = Layout(self.model, plan)
            if max(excess_bytes(layout, self.request, self.profile)) > 0:
                continue
            estimate = self.pricer.step(layout)
            streams = estimate.busy_s["d2h"] > 0
            key = estimate.step_s * (1 + SIMPLICITY_SHARE * streams)
            if best is None or key < best[0]:
                best = (key, plan, estimate)
            simulated += 1
            if simulated == NUM_SIMULATED:
                break
        if best is None:
            raise shortage(self.model, self.request, self.profile)
        return self.predicted(best[1], best[2])

    def predicted(self, plan: Plan, estimate: StepEstimate) -> Plan:
        """The plan with its prediction."""
        layout = Layout(self.model, plan)
        prediction = Prediction(
            step_s=estimate.step_s,
            speed_of_light_s=min(estimate.step_s, unavoidable_compute_s(layout, self.profile)),
            busy_s=estimate.busy_s,
            recompute_share=estimate.recompute_s / max(estimate.busy_s["compute"], 1e-30),
            gpu_bytes=gpu_required_bytes(layout, self.profile),
            host_bytes=host_required_bytes(layout, self.profile),
            gpu_categories=gpu_categories(layout, self.profile),
            host_categories=host_categories(layout, self.profile),
            limiter=limiter(estimate),
        )
        return replace(plan, predicted=prediction)


def orders(problem: RoundProblem, counts: Counter[int]) -> list[tuple[int, ...]]:
    """Ways to deal the chosen rows out to the blocks: those that offload most first, and evenly spread."""
    sending = sorted(counts.elements(), key=lambda row: (-int(problem.row_host[row]), row))
    if len(counts) == 1:
        return [tuple(sending)]
    return [tuple(sending), spread(counts)]


def spread(counts: Counter[int]) -> tuple[int, ...]:
    """Rows dealt out evenly: each position goes to the row that is furthest behind its share."""
    total, given, result = sum(counts.values()), Counter(), []
    for position in range(total):
        row = max(sorted(counts), key=lambda r: counts[r] * (position + 1) / total - given[r])
        given[row] += 1
        result.append(row)
    return tuple(result)


def neighbours(problem: RoundProblem, placement: Placement) -> Iterator[Placement]:
    """Placements that differ in one thing: slot counts, structure, one block's row, or two blocks swapped."""
    structure, slots, rows = placement
    for field in slots._fields:
        for change in (1, -1):
            count = getattr(slots, field) + change
            if 1 <= count <= 4:
                yield Placement(structure, slots._replace(**{field: count}), rows)
    for other in problem.templates.structures(len(structure.edge_levels), structure.blocks_hold):
        if other != structure:
            yield Placement(other, slots, rows)
    used = sorted(set(rows))
    near = nearby_rows(problem, used)
    for i in range(len(rows)):
        for row in (*used, *near):
            if row != rows[i] and (i == 0 or rows[i - 1] != rows[i] or i == len(rows) - 1):
                yield Placement(structure, slots, (*rows[:i], row, *rows[i + 1 :]))
    for i in range(len(rows) - 1):
        if rows[i] != rows[i + 1]:
            yield Placement(structure, slots, (*rows[:i], rows[i + 1], rows[i], *rows[i + 2 :]))


def nearby_rows(problem: RoundProblem, used: list[int]) -> list[int]:
    """Rows of the table that a block might take instead: every option at the levels in use, every level of the used
    options."""
    levels = {problem.row_pairs[row][1] for row in used}
    kept = {problem.row_pairs[row][0] for row in used}
    return [r for r, (o, v) in enumerate(problem.row_pairs) if (v in levels or o in kept) and r not in used]


def one_per_problem(found: list[Candidate]) -> list[Candidate]:
    """The first candidate of every size."""
    first: dict[tuple[int, int], Candidate] = {}
    for candidate in found:
        first.setdefault((candidate.problem.chunk_tokens, candidate.problem.chunks_per_round), candidate)
    return list(first.values())


def distinct(found: list[Candidate]) -> list[Candidate]:
    """Without repetitions, order kept."""
    seen: dict[tuple, Candidate] = {}
    for c in found:
        seen.setdefault((c.problem.chunk_tokens, c.problem.chunks_per_round, c.placement), c)
    return list(seen.values())
