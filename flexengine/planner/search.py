"""Chooses a plan: chunk and round sizes outside, mixes and placements inside, the simulator as judge.

Every (chunk, round) size is judged by mixes of what blocks may do, on a coarse grid. Those that come near the best are
searched more and more closely, by the sketch; placements of the last few become plans whose exact bytes are checked and
whose real programs are simulated. All limits are counts, never clocks, so a request has one answer.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from flexengine.hardware.profile import HardwareProfile
from flexengine.models.in_parts import in_parts, may_be_in_parts
from flexengine.models.matmul_dtype import check_matmul_dtype
from flexengine.models.spec import ModelSpec
from flexengine.plan import Plan, Prediction, Request
from flexengine.planner.bound.speed_of_light import speed_of_light_s
from flexengine.planner.cost.cost_model import CostModel, StepEstimate, StepPricer, round_shape
from flexengine.planner.cost.limiter import limiter
from flexengine.planner.cost.memory import (
    excess_bytes,
    gpu_categories,
    gpu_required_bytes,
    host_categories,
    host_required_bytes,
)
from flexengine.planner.feasibility.shortage import Feasibility, shortage
from flexengine.planner.frontier import frontier
from flexengine.planner.kinds import Sets, side_by_side
from flexengine.planner.size_search import FEW_BLOCKS, SizeSearch
from flexengine.planner.sizes import chunk_sizes
from flexengine.planner.solver import RoundProblem
from flexengine.planner.templates import Templates
from flexengine.schedule.expert_fetch import least_touched_share
from flexengine.schedule.group_storage import DTYPE_BYTES
from flexengine.schedule.layout import Layout

MAX_CHUNK_LAYERS = 1024
"""Largest chunks_per_round * blocks that is simulated, where sizes allow a choice."""
COARSE_NEAR, QUICK_NEAR, FINE_NEAR, POLISH_NEAR = 1.15, 1.08, 1.02, 1.012
"""Sizes within these factors of the best so far are dealt out, refined, taken for the last round, and polished."""
MANY_BLOCKS_COARSE_NEAR, MANY_BLOCKS_NUM_NEAR = 1.07, 6
"""COARSE_NEAR and NUM_NEAR for models of more than few blocks, whose coarse mixes say more."""
FEW_BLOCKS_NEAR = 1.12
"""QUICK_NEAR for models of few blocks, of which first placements say less."""
MIX_SHARE = 1.01
"""A placement takes hardly less than this share of what its mix was estimated to take."""
FIRST_POLISH = 2
"""Steps of polishing before the last sizes are chosen: mixes alone say too little about sizes with short rounds."""
NUM_NEAR, NUM_REFINED, NUM_POLISHED = 10, 4, 3
"""How many sizes at the most."""
NUM_FINALISTS = 24
"""Placements of one size that may be simulated."""
NUM_LAST_RESORTS = 2
"""Plans simulated where the search itself finds nothing."""
SIMULATED_COMMANDS = 2_500
"""Plans are simulated until there were so many commands."""
FAR_SIZES = 2
"""After so many sizes in a row whose placements are far from the best, no more are dealt out."""
WHOLE_ENOUGH = 0.8
"""Share of the speed of light from which on blocks whose experts may be in parts stay whole: what parts cost, in
tensors made anew, they hardly win back then."""
MOST_TOUCHED = 0.9
"""Of the experts, that a round may be expected to touch where a plan is tried that fetches only these."""
LONGER_ROUNDS = 2
"""After so many longer rounds in a row that are slower, no longer ones are looked at."""


def make_plan(model: ModelSpec, request: Request, profile: HardwareProfile) -> Plan:
    """The fastest plan found for a request on a machine. Experts in parts are looked at only where whole blocks do not
    fit or are far from the speed of light, or where rounds are so short that they touch only some experts.

    Deterministic; takes seconds, needs no GPU. Raises PlanError when nothing fits, saying what would.
    """
    with collector_paused():
        plan = Search(model, request, profile).run()
        parts = in_parts(model)
        if may_be_in_parts(model) and (plan is None or not _is_good_whole(plan, parts)):
            found = (plan, Search(model, request, profile, parts).run())
            plan = min((p for p in found if p is not None), key=lambda p: p.predicted.step_s, default=None)
        if plan is None:
            raise shortage(parts, request, profile)
        return plan


def _is_good_whole(plan: Plan, parts: ModelSpec) -> bool:
    """Whether a plan with whole blocks is hardly improved by parts, or recomputes nothing, as asked: parts must."""
    if plan.request.recompute == "none":
        return True
    near_light = plan.predicted.speed_of_light_s / plan.predicted.step_s >= WHOLE_ENOUGH
    tokens = round_shape(plan.request, plan.chunk_tokens, plan.chunks_per_round).num_tokens
    return near_light and least_touched_share(parts, tokens) >= MOST_TOUCHED


@contextmanager
def collector_paused() -> Iterator[None]:
    """Python's search for cyclic garbage, which takes a tenth of a plan's time and finds next to nothing, waits."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Search:
    """One request's search: sizes, what was found for each, and the final choice.

    arranged: the model as plans stream it, where that is not as it was given.
    """

    def __init__(
        self, model: ModelSpec, request: Request, profile: HardwareProfile, arranged: ModelSpec | None = None
    ) -> None:
        check_matmul_dtype(model, request.numerics.matmul)
        self.given, self.request, self.profile = model, request, profile
        self.model = model = model if arranged is None else arranged
        self.templates = Templates(model, request, profile)
        self.pricer = StepPricer(profile)
        self.sets: Sets | None = None
        self.few_blocks = len(model.blocks) <= FEW_BLOCKS
        self.coarse_near = COARSE_NEAR if self.few_blocks else MANY_BLOCKS_COARSE_NEAR
        self.num_near = NUM_NEAR if self.few_blocks else MANY_BLOCKS_NUM_NEAR

    def run(self) -> Plan | None:
        """Rank sizes, look closer and closer at the best, simulate, choose; None where nothing fits."""
        sizes = self.dealt(self.near_sizes())
        quick_near = FEW_BLOCKS_NEAR if self.few_blocks else QUICK_NEAR
        sizes = near(sizes, quick_near, NUM_REFINED)
        for size in sizes:
            if size.best_s <= quick_near * min(s.best_s for s in sizes):
                size.refine()
                size.polish(steps=FIRST_POLISH)
        sizes = near(sizes, FINE_NEAR, NUM_POLISHED)
        for size in sizes:
            if size.best_s <= POLISH_NEAR * min(s.best_s for s in sizes):
                size.polish()
                size.exchange()
        finalists = sorted((c for size in sizes for c in size.candidates(NUM_FINALISTS)), key=lambda c: c.key)
        plans = (c.problem.plan(c.placement) for c in finalists)
        best = self.simulated_best(plans) or self.simulated_best(self.last_resort())
        return None if best is None else self.predicted(*self.touched_only(*best))

    # -- sizes -------------------------------------------------------------------------------------------------------

    def near_sizes(self) -> list[SizeSearch]:
        """The most promising sizes for which something fits, in order of estimated time."""
        found: list[tuple[float, SizeSearch]] = []
        best_s = float("inf")
        for problems in self.problems():
            chunk_best_s, slower = float("inf"), 0
            for problem in problems:
                if problem.compute_s > self.coarse_near * best_s or slower == LONGER_ROUNDS:
                    break
                size = SizeSearch(problem, (self.request.max_gpu_bytes, self.request.max_host_bytes))
                seconds = size.estimate_s(best_s)
                slower = slower + 1 if chunk_best_s < seconds else 0
                best_s, chunk_best_s = min(best_s, seconds), min(chunk_best_s, seconds)
                found.append((seconds, size))
        near_best = [size for seconds, size in found if size.coarse and seconds <= self.coarse_near * best_s]
        return sorted(near_best, key=lambda size: size.coarse[0][0])[: self.num_near]

    def dealt(self, sizes: list[SizeSearch]) -> list[SizeSearch]:
        """Sizes with their first placements; those whose best mix is slower than a placement found before are left."""
        ranked = sorted(((size.improved_s(), i, size) for i, size in enumerate(sizes)), key=lambda entry: entry[:2])
        best_s, far, found = float("inf"), 0, []
        for seconds, _, size in ranked:
            if seconds <= best_s * MIX_SHARE:
                size.quick()
                far = far + 1 if size.best_s > FEW_BLOCKS_NEAR * best_s else 0
                best_s = min(best_s, size.best_s)
                found.append(size)
            if far == FAR_SIZES:
                break
        return found

    def problems(self) -> Iterator[list[RoundProblem]]:
        """All sizes by chunk, from the largest to the smallest, short rounds first; only those that can be simulated in
        reasonable time, where there are such."""
        sizes, blocks = chunk_sizes(self.request), len(self.model.blocks)
        limit = max(MAX_CHUNK_LAYERS, min(n for _, n in sizes) * blocks)
        for chunk in sorted({chunk for chunk, _ in sizes}, reverse=True):
            counts = sorted(n for c, n in sizes if c == chunk and n * blocks <= limit)
            yield [RoundProblem(self.templates, chunk, n, self._save_sets(chunk)) for n in counts]

    def _save_sets(self, chunk: int) -> Sets:
        """Save sets on the frontier; found at one chunk size, as they hardly depend on it."""
        if self.sets is None:
            dtype_bytes = DTYPE_BYTES[self.request.numerics.compute]
            cost = CostModel(self.profile, dtype_bytes, chunk, self.request.max_seq_len)
            shape = round_shape(self.request, chunk, max(1, -(-self.request.max_seq_len // chunk)))
            counts = np.bincount(self.templates.kind_of)
            self.sets = side_by_side(self.templates.kinds, counts, lambda layer: frontier(layer, shape, cost))
        return self.sets

    def last_resort(self) -> list[Plan]:
        """Plans of little host memory that fit where the search found none: the largest chunks in short rounds; where
        there is none either, the one of the least GPU memory, which may fit."""
        feasibility = Feasibility(self.model, self.request, self.profile)
        return list(feasibility.fitting())[-NUM_LAST_RESORTS:] or [feasibility.least_gpu().plan]

    # -- the answer --------------------------------------------------------------------------------------------------

    def simulated_best(self, finalists: Iterable[Plan]) -> tuple[Plan, StepEstimate] | None:
        """The fastest finalist by simulation of its real programs; None when none fits."""
        best: tuple[Plan, StepEstimate] | None = None
        for plan in finalists:
            layout = Layout(self.model, plan)
            if max(excess_bytes(layout, self.request, self.profile)) > 0:
                continue
            estimate = self.pricer.step(layout)
            if best is None or estimate.step_s < best[1].step_s:
                best = (plan, estimate)
            if self.pricer.simulated_commands > SIMULATED_COMMANDS:
                break
        return best

    def touched_only(self, plan: Plan, estimate: StepEstimate) -> tuple[Plan, StepEstimate]:
        """The plan, or where a full round leaves experts in parts untouched and it is faster, the same plan that does
        not fetch these. Memory is the same."""
        shape = round_shape(self.request, plan.chunk_tokens, plan.chunks_per_round)
        if least_touched_share(self.model, shape.num_tokens) >= MOST_TOUCHED:
            return plan, estimate
        sparing = replace(plan, touched_only=True)
        found = self.pricer.step(Layout(self.model, sparing))
        return (sparing, found) if found.step_s < estimate.step_s else (plan, estimate)

    def predicted(self, plan: Plan, estimate: StepEstimate) -> Plan:
        """The plan with its prediction. The bound is of plans that fetch all experts."""
        layout = Layout(self.model, plan)
        light_s = speed_of_light_s(self.given, self.request, self.profile)
        prediction = Prediction(
            step_s=estimate.step_s,
            speed_of_light_s=min(light_s, estimate.step_s) if plan.touched_only else light_s,
            busy_s=estimate.busy_s,
            recompute_share=estimate.recompute_s / max(estimate.busy_s["compute"], 1e-30),
            gpu_bytes=gpu_required_bytes(layout, self.profile),
            host_bytes=host_required_bytes(layout, self.profile),
            gpu_categories=gpu_categories(layout, self.profile),
            host_categories=host_categories(layout, self.profile),
            limiter=limiter(estimate),
        )
        return replace(plan, predicted=prediction)


def near(sizes: list[SizeSearch], factor: float, count: int) -> list[SizeSearch]:
    """The best sizes, at most `count`, with seconds within a factor of the best."""
    ranked = sorted((size for size in sizes if len(size.seconds)), key=lambda size: size.best_s)
    return [size for size in ranked if size.best_s <= factor * ranked[0].best_s][:count]
