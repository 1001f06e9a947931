"""Chooses a plan: chunk and round sizes outside, the dynamic programme over layers inside, the simulator as judge.

Every (chunk, round) size gets an estimate from the dynamic programme; the promising ones become plans whose exact bytes are checked and
whose programs are simulated; the best is polished by local search. All limits are counts, so a request has one answer.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from flexengine.hardware.profile import HardwareProfile
from flexengine.models.spec import ModelSpec
from flexengine.plan import Plan, PlanError, PlanReason, Prediction, Request
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
from flexengine.planner.solver import Caps, Goal, RoundProblem, SlotCounts, Solution
from flexengine.schedule.layout import DTYPE_BYTES, Layout

CHUNK_TOKENS = tuple(1 << i for i in range(8, 15))
CHUNKS_PER_ROUND = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
MAX_CHUNK_LAYERS = 1024
"""Largest chunks_per_round * layers that is simulated."""
SLOT_CHOICES = (SlotCounts(3, 2, 3), SlotCounts(2, 2, 2), SlotCounts(2, 1, 2), SlotCounts(1, 1, 1, 2), SlotCounts(1, 1, 1, 1))


@dataclass(frozen=True)
class Candidate:
    """A plan that fits, with its predicted step."""

    plan: Plan
    estimate: StepEstimate
    problem: RoundProblem
    solution: Solution

    @property
    def key(self) -> tuple[float, int]:
        """Order of preference: less time to four digits, then less memory."""
        return self.estimate.step_s, len(self.plan.layers)


def make_plan(model: ModelSpec, request: Request, profile: HardwareProfile) -> Plan:
    """The fastest plan found for a request on a machine.

    Deterministic; takes seconds, needs no GPU. Raises PlanError when nothing fits, saying what would.
    """
    return Search(model, request, profile).run()


def chunk_sizes(request: Request) -> list[tuple[int, int]]:
    """(chunk_tokens, chunks_per_round) worth a look. Raises PlanError when pinned sizes contradict each other."""
    _check_pinned(request)
    batch, longest = request.max_global_batch_tokens, request.max_seq_len
    sizes = []
    for chunk in _chunk_choices(request):
        slices = max(1, -(-longest // chunk))
        if request.round_tokens is not None:
            counts = [request.round_tokens // chunk] if request.round_tokens % chunk == 0 else []
        else:
            most = -(-batch // chunk)
            counts = sorted({n * slices for n in CHUNKS_PER_ROUND if n * slices <= max(most, slices)})
        sizes += [(chunk, n) for n in counts if n >= slices]
    return sizes


def _chunk_choices(request: Request) -> list[int]:
    if request.chunk_tokens is not None:
        return [request.chunk_tokens]
    limit = request.round_tokens or request.max_global_batch_tokens
    choices = {c for c in CHUNK_TOKENS if c <= limit}
    for exact in (limit, request.max_seq_len):
        if exact < 2 * CHUNK_TOKENS[0] or request.round_tokens is not None and exact <= CHUNK_TOKENS[-1]:
            choices.add(exact)
    return sorted(choices) or [limit]


def _check_pinned(request: Request) -> None:
    chunk, tokens = request.chunk_tokens, request.round_tokens
    if tokens is None:
        return
    if chunk is not None and tokens % chunk:
        raise PlanError(
            PlanReason.INVALID_REQUEST,
            f"round_tokens={tokens} is not a multiple of chunk_tokens={chunk}\n"
            f"  works with: --round-tokens {-(-tokens // chunk) * chunk}, or --chunk-tokens {tokens}",
        )
    if tokens < request.max_seq_len:
        raise PlanError(
            PlanReason.INVALID_REQUEST,
            f"round_tokens={tokens} is less than max_seq_len={request.max_seq_len}: a sequence passes all layers in one"
            f" round\n  works with: --round-tokens {request.max_seq_len}, or --max-seq-len {tokens}",
        )


class Search:
    def __init__(self, model: ModelSpec, request: Request, profile: HardwareProfile) -> None:
        self.model, self.request, self.profile = model, request, profile
        self.pricer = StepPricer(profile)
        self.problems: dict[tuple[int, int], RoundProblem] = {}
        self.sets: tuple[tuple[str, ...], ...] | None = None

    def run(self) -> Plan:
        sizes = self._simulable(chunk_sizes(self.request))
        ranked = self.rank(sizes)
        found: list[Candidate] = []
        for _, problem in ranked[:6]:
            found += self.candidates(problem)
        if not found:
            raise PlanError(PlanReason.INSUFFICIENT_DEVICE_MEMORY, "TODO")
        best = min(found, key=lambda c: c.key)
        return self.finished(best)

    def _simulable(self, sizes: list[tuple[int, int]]) -> list[tuple[int, int]]:
        blocks = len(self.model.blocks)
        limit = max(MAX_CHUNK_LAYERS, min(n for _, n in sizes) * blocks)
        return [(c, n) for c, n in sizes if n * blocks <= limit]

    def problem(self, chunk: int, chunks: int) -> RoundProblem:
        if (chunk, chunks) not in self.problems:
            sets = self._save_sets(chunk)
            self.problems[chunk, chunks] = RoundProblem(self.model, self.request, self.profile, chunk, chunks, sets)
        return self.problems[chunk, chunks]

    def _save_sets(self, chunk: int) -> tuple[tuple[str, ...], ...]:
        """Save sets on the frontier; found at one chunk size, as they hardly depend on it."""
        if self.sets is None:
            cost = CostModel(self.profile, DTYPE_BYTES[self.request.numerics.compute], chunk)
            shape = round_shape(self.request, chunk, max(1, -(-self.request.max_seq_len // chunk)))
            self.sets = tuple(s.ops for s in frontier(self.model.blocks[0], shape, cost))
        return self.sets

    def rank(self, sizes: list[tuple[int, int]]) -> list[tuple[float, RoundProblem]]:
        """Problems in order of the time that the dynamic programme expects."""
        ranked = []
        for chunk, chunks in sizes:
            problem = self.problem(chunk, chunks)
            for slots in (SLOT_CHOICES[1], SLOT_CHOICES[-1]):
                solution = self.solve(problem, Goal(), slots)
                if solution is not None:
                    ranked.append((self.expected_s(problem, solution), problem))
                    break
        return sorted(ranked, key=lambda r: (r[0], r[1].chunk_tokens * r[1].chunks_per_round))

    def expected_s(self, problem: RoundProblem, solution: Solution) -> float:
        """Between perfect overlap across layers and none."""
        perfect = float(loads.phase_seconds(solution.total_loads))
        layers = sum(
            count * float(loads.phase_seconds(problem.row_loads[row])) for row, count in solution.counts.items()
        )
        edges = [problem.edge_loads[i][v] for i, v in enumerate(solution.structure.edge_levels)]
        layers += float(loads.phase_seconds(np.array([*edges, problem.edge_compute])).sum())
        return 0.5 * (perfect + layers)

    # -- one size ----------------------------------------------------------------------------------------------------

    def solve(self, problem: RoundProblem, goal: Goal, slots: SlotCounts, gpu_budget: int | None = None) -> Solution | None:
        """The best solution within both budgets, over caps on shared buffers."""
        budget = gpu_budget if gpu_budget is not None else self.request.max_gpu_bytes
        best = None
        for caps in self._cap_choices(problem):
            solution = self._solve_host(problem, goal, slots, budget, caps)
            for _ in range(2):
                if solution is None:
                    break
                if best is None or solution.objective < best.objective * (1 - 1e-9):
                    best = solution
                tight = problem.caps_of(solution.counts)
                if tight == caps:
                    break
                caps = tight
                solution = self._solve_host(problem, goal, slots, budget, caps)
        return best

    def _cap_choices(self, problem: RoundProblem) -> list[Caps]:
        widest = problem.widest_caps
        staged = sorted({int(s) for s in problem.row_staged})
        picked = sorted({staged[(len(staged) - 1) * i // 4] for i in range(4)})
        return [Caps(s, widest.scratch_bytes) for s in picked]

    def _solve_host(
        self, problem: RoundProblem, goal: Goal, slots: SlotCounts, budget: int, caps: Caps
    ) -> Solution | None:
        """Solve; while host memory is exceeded, raise its price by bisection."""
        solution = problem.solve(goal, slots, budget, caps)
        if solution is None or self._host_excess(problem, solution) <= 0:
            return solution
        low, high, best = 0.0, 1e-6, None
        for _ in range(10):
            price = high if best is None else (low + high) / 2
            solution = problem.solve(replace(goal, host_s_per_byte=price), slots, budget, caps)
            if solution is not None and self._host_excess(problem, solution) <= 0:
                best, high = solution, price
            elif best is None:
                return None
            else:
                low = price
        return best

    def _host_excess(self, problem: RoundProblem, solution: Solution) -> int:
        host = sum(count * int(problem.row_host[row]) for row, count in solution.counts.items())
        for group, level in zip(problem.edge_groups, solution.structure.edge_levels, strict=True):
            host += loads.streamed_bytes(problem.group_layouts[group], loads.LEVELS[level])
        slack = problem.host_overhead_bytes
        return host + slack - self.request.max_host_bytes

    def candidates(self, problem: RoundProblem) -> list[Candidate]:
        found = []
        for slots in SLOT_CHOICES[:2] if True else ():
            for goal in (Goal(),):
                found += self.realise(problem, goal, slots)
        if not found:
            for slots in SLOT_CHOICES[2:]:
                found += self.realise(problem, Goal(), slots)
        return found

    def realise(self, problem: RoundProblem, goal: Goal, slots: SlotCounts) -> list[Candidate]:
        """Plans of the best solution that exactly fits."""
        budget = self.request.max_gpu_bytes
        for _ in range(4):
            solution = self.solve(problem, goal, slots, budget)
            if solution is None:
                return []
            plans = [problem.plan(solution.structure, slots, rows) for rows in orders(problem, solution.counts)]
            layout = Layout(self.model, plans[0])
            gpu, host = excess_bytes(layout, self.request, self.profile)
            if gpu <= 0 and host <= 0:
                return [self.candidate(plan, problem, solution) for plan in plans]
            if gpu <= 0:
                return []
            budget -= gpu
        return []

    def candidate(self, plan: Plan, problem: RoundProblem, solution: Solution) -> Candidate:
        return Candidate(plan, self.pricer.step(Layout(self.model, plan)), problem, solution)

    # -- the answer --------------------------------------------------------------------------------------------------

    def finished(self, best: Candidate) -> Plan:
        """The plan with its prediction."""
        layout, estimate = Layout(self.model, best.plan), best.estimate
        prediction = Prediction(
            step_s=estimate.step_s,
            speed_of_light_s=min(estimate.step_s, unavoidable_compute_s(layout, self.profile)),
            busy_s=estimate.busy_s,
            recompute_share=estimate.recompute_s / max(estimate.busy_s["compute"], 1e-30),
            gpu_bytes=gpu_required_bytes(layout, self.profile),
            host_bytes=host_required_bytes(layout, self.profile),
            gpu_categories=gpu_categories(layout, self.profile),
            host_categories=host_categories(layout, self.profile),
        )
        return replace(best.plan, predicted=prediction)


def orders(problem: RoundProblem, counts: Counter[int]) -> list[list[int]]:
    """Ways to deal the chosen rows out to the blocks: those that offload most first, and evenly spread."""
    sending = sorted(counts.elements(), key=lambda row: (-int(problem.row_host[row]), row))
    if len(counts) == 1:
        return [sending]
    return [sending, spread(counts)]


def spread(counts: Counter[int]) -> list[int]:
    """Rows dealt out evenly: each position goes to the row that is furthest behind its share."""
    total, given, result = sum(counts.values()), Counter(), []
    for position in range(total):
        row = max(sorted(counts), key=lambda r: counts[r] * (position + 1) / total - given[r])
        given[row] += 1
        result.append(row)
    return result
