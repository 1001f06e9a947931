"""The search for a plan of one kind in four steps: bound, seed, local search, simulate.

Every (chunk, round) size has a lower bound. Sizes are started in order of their bounds, until the bound reaches what
was found already; a race gives the best of them more and more seeds and local search on the surrogate; the finalists
are lowered and simulated as real programs, and the fastest is the plan. All limits are counts, never clocks, so a
request has one answer. docs/planner.md explains each step with an example.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from itertools import product
from math import inf
from typing import NamedTuple

import numpy as np

from flexengine.models.base_dtype import check_base_dtype
from flexengine.models.delta_dtype import check_delta_dtype
from flexengine.models.keep_dtype import check_keep_dtype
from flexengine.models.matmul_dtype import check_matmul_dtype
from flexengine.models.spec import ModelSpec
from flexengine.plan import Plan, Prediction, Request
from flexengine.planner.adapter_groups import updated_by_cpu
from flexengine.planner.bound.speed_of_light import SizeBounds, size_bounds, speed_of_light_s
from flexengine.planner.cost.cost_model import CostModel, StepPricer
from flexengine.planner.cost.memory import process_bytes
from flexengine.planner.cost.save_sets import SaveSets, frontier, side_by_side
from flexengine.planner.feasibility.shortage import Feasibility
from flexengine.planner.on_drive import orders_of_kinds, planes_on_host
from flexengine.planner.problem import Problem
from flexengine.planner.shared_buffers import SharedBuffers
from flexengine.planner.size_search import SizeSearch, near_best
from flexengine.planner.size_tables import SizeTables
from flexengine.planner.speculation import Priced, Speculation, size_of
from flexengine.schedule.expert_fetch import least_touched_share
from flexengine.schedule.packing import full_round
from flexengine.schedule.step_parts import StepEstimate, limiter

SAME = 1e-9
"""Part of their seconds by which plans of one speed differ, as sums of the same terms in another order do."""
MOST_TOUCHED = 0.9
"""Try `touched_only` when a full round is expected to touch less than this share of the experts."""
LEAST_HIDDEN, LEAST_IDLE = 0.99, 0.1
"""A search as if nothing were clipped takes as long as the one before it. It may pay where a step whose updates need
not wait takes at most this share, or where compute waits for this share of a step: a plan that waits for its norm may
keep too much on the host to gain by not waiting."""
NEAR_SIZES = 1.2
"""How much slower than the best of them other sizes' plans that are tried with speculation may be without it: it may
gain a quarter."""


class Unclipped(NamedTuple):
    """What a search as if nothing were clipped has found: its best plans, fastest first, and the seconds of the first,
    infinite where none fits."""

    plans: list[Plan]
    least_s: float


class Search:
    """Searches one kind of plans of a request: with whole experts or in parts, with or without CUDA graphs."""

    def __init__(self, problem: Problem, arranged: ModelSpec | None = None, second_planes: bool = False) -> None:
        """arranged: the model with experts in parts, where plans shall stream it so. second_planes: see
        `SharedBuffers`."""
        check_matmul_dtype(problem.model, problem.request.numerics.matmul)
        check_keep_dtype(problem.model, problem.request.numerics.keep)
        check_delta_dtype(problem.model, problem.request.numerics.delta)
        check_base_dtype(problem.model, problem.request.numerics.base)
        self.given = problem
        self.problem = problem if arranged is None else replace(problem, model=arranged)
        self.model, self.request, self.profile = self.problem.model, problem.request, problem.profile
        self.limits, self.buffers = problem.limits, SharedBuffers(self.problem, second_planes)
        self.pricer = StepPricer(self.profile)
        self.timed: list[Priced] = []  # plans that fit, by simulation
        self.bold: Speculation | None = None  # from the fastest of them
        self.unclipped = Unclipped([], inf)  # found by `without_clipping`
        self.of_other_sizes: list[Plan] = []  # of one of several ranks, which may speculate together
        self.sizes: list[SizeSearch] = []  # that were started, of one of several ranks

    def plan(self) -> Plan | None:
        """Bound, seed, search and simulate; None where nothing fits."""
        started = self.started(self.bounded())
        self.sizes = started if self.request.shares_node else []
        best = self.searched(started) or self.simulated(self.last_resort())
        if best is None:
            return None
        waiting = self.off_the_drive(*self.adapters_by_cpu(*self.touched_only(*best)))
        self.bold = Speculation(self.problem, self.pricer, waiting)
        if waiting[0].may_speculate:
            self.speculate(self.bold, started)
        elif self.request.shares_node and self.request.waits_for_norm:
            self.of_other_sizes = self._of_other_sizes(started, waiting[0])
        return self.predicted(*self.bold.chosen)

    def without_clipping(self, second_planes: bool = False) -> Plan | None:
        """Try speculation on what a search finds as if nothing were clipped; None where no such plan is better.

        second_planes: of plans with room for all of them. Order: `plan` comes first.
        """
        bold = self.bold
        assert bold is not None, "there is a plan whose updates wait"
        chosen = bold.chosen
        self.unclipped = self._updating_in_backward(second_planes)
        bold.try_plans(self.unclipped.plans)
        bold.try_fewer_groups()
        return None if bold.chosen is chosen else self.predicted(*bold.chosen)

    def searched(self, started: list[SizeSearch]) -> Priced | None:
        """The fastest finalist by simulation; None where none fits."""
        return self.simulated(self.finalists(self.race(started)))

    # -- sizes -------------------------------------------------------------------------------------------------------

    def bounded(self) -> Iterator[SizeSearch]:
        """Sizes that may fit, the lowest bound first; only those of small programs, where there are such."""
        sizes, blocks = self.bounds.sizes, len(self.model.blocks)
        limit = max(self.limits.chunk_layers, min((chunks for _, chunks in sizes), default=0) * blocks)
        for size, bound in self.bounds.ascending(size for size in sizes if size[1] * blocks <= limit):
            yield SizeSearch(SizeTables(self.buffers, *size, self.save_sets), bound)

    @cached_property
    def bounds(self) -> SizeBounds:
        """The bound of every size."""
        return size_bounds(self.model, self.request, self.profile)

    def started(self, sizes: Iterable[SizeSearch]) -> list[SizeSearch]:
        """Start sizes until the bound of the next one reaches the best seed, or too many in a row are far from it."""
        started: list[SizeSearch] = []
        best_s, far = float("inf"), 0
        for size in sizes:
            if size.bound.seconds >= best_s or far == self.limits.patience:
                break
            size.start()
            if np.isfinite(size.best_s):
                started.append(size)
                far = far + 1 if size.best_s > self.limits.far * best_s else 0
                best_s = min(best_s, size.best_s)
            elif not started and not self._smallest.fits():  # nothing fits in any size
                break
        return started

    @cached_property
    def _smallest(self) -> Feasibility:
        return Feasibility(self.problem, as_given=True)

    def race(self, sizes: list[SizeSearch]) -> list[SizeSearch]:
        """Search the best sizes further and further; fewer are left after every round."""
        for race in self.limits.race:
            sizes = near_best(sizes, race.near)[: race.num_sizes]
            for size in sizes:
                if race.seeds:
                    size.seed_more()
                size.run(race.blocks, race.steps)
        return sizes

    @cached_property
    def save_sets(self) -> SaveSets:
        """Save sets that no other beats in bytes and recompute seconds. They hardly depend on the chunk size."""
        chunk = max(chunk for chunk, _ in self.bounds.sizes)
        cost = CostModel.of(self.request, self.profile, chunk)
        shape = full_round(self.request, chunk, self.request.slices(chunk))
        counts = np.bincount(self.buffers.kind_of)
        layers = [kind.layer for kind in self.buffers.kinds]
        return side_by_side(layers, counts, lambda layer: frontier(layer, shape, cost), self.limits.sets)

    # -- the answer --------------------------------------------------------------------------------------------------

    def finalists(self, sizes: list[SizeSearch]) -> Iterator[Plan]:
        """The best candidate of every size, then others by their estimates."""
        found = [
            (place, float(size.search.seconds[index]), number, index)
            for number, size in enumerate(sizes)
            for place, index in enumerate(size.search.finalists(self.limits.finalists))
        ]
        for _, _, number, index in sorted(found, key=lambda entry: (entry[0] > 0, *entry[1:])):
            search = sizes[number].search
            yield search.memory.plan(search.found, index)

    def last_resort(self) -> list[Plan]:
        """Plans where the search found none: the largest chunks that fit, else that of least GPU memory, which may."""
        return list(self._smallest.fitting())[-2:] or [self._smallest.least_gpu().plan]

    def simulated(self, plans: Iterable[Plan]) -> Priced | None:
        """The fastest plan by simulation of its real programs, of those of one speed that of the least host memory;
        None when none fits."""
        best: Priced | None = None
        host_bytes = 0
        for plan in plans:
            layout = self.problem.layout(plan)
            if not self.problem.fits(layout):
                continue
            estimate = self.pricer.step(layout)
            self.timed.append((plan, estimate))
            known_s = inf if best is None else best[1].step_s
            sparing = estimate.step_s <= (1.0 + SAME) * known_s and layout.host_bytes < host_bytes
            if sparing or estimate.step_s < (1.0 - SAME) * known_s:
                best, host_bytes = (plan, estimate), layout.host_bytes
            if self.pricer.simulated_commands > self.limits.commands:
                break
        return best

    def touched_only(self, plan: Plan, estimate: StepEstimate) -> Priced:
        """Fetch only touched experts where that is faster and a full round leaves some untouched."""
        shape = full_round(self.request, plan.chunk_tokens, plan.chunks_per_round)
        if plan.reads_weights or least_touched_share(self.model, shape.num_tokens) >= MOST_TOUCHED:
            return plan, estimate
        sparing = replace(plan, touched_only=True)
        found = self.pricer.step(self.problem.layout(sparing))
        return (sparing, found) if found.step_s < estimate.step_s else (plan, estimate)

    def adapters_by_cpu(self, plan: Plan, estimate: StepEstimate) -> Priced:
        """Have the CPU update adapters that live on the host where that is faster: the GPU need not fetch them then."""
        if self.profile.device_type != "cuda" or self.request.shares_node:
            return plan, estimate
        by_cpu = replace(plan, groups=updated_by_cpu(plan.groups, self.buffers.adapters))
        layout = self.problem.layout(by_cpu)
        if by_cpu.groups == plan.groups or not self.problem.fits(layout):
            return plan, estimate
        found = self.pricer.step(layout)
        return (by_cpu, found) if found.step_s < estimate.step_s else (plan, estimate)

    def off_the_drive(self, plan: Plan, estimate: StepEstimate) -> Priced:
        """Keep what the host has room for there: of what forward needs first, or of what backward ends; weights first,
        or other kinds."""
        best = (plan, estimate)
        for last_first, kinds in product((False, True), orders_of_kinds(plan)):
            fewer = planes_on_host(self.problem, plan, kinds, last_first=last_first)
            if fewer is not plan:
                found = self.pricer.step(self.problem.layout(fewer))
                best = (fewer, found) if found.step_s < best[1].step_s else best
        return best

    def speculate(self, bold: Speculation, started: Iterable[SizeSearch]) -> None:
        """Update groups before the norm is known, where that is faster and host memory is left for second planes."""
        plan = bold.waiting[0]
        bold.try_plans([plan, *self._of_other_sizes(started, plan)])
        if bold.best is not bold.waiting:
            bold.try_plans(self._alike(bold.best[0]))
        bold.try_fewer_groups()

    @property
    def _unclipped(self) -> Request:
        """The request for steps in which nothing is clipped."""
        return replace(self.request, clipping=False)

    @property
    def may_gain_in_backward(self) -> bool:
        """Whether updates inside backward may make the step of the plan that waits for its norm shorter."""
        if self.bold is None or self.request.shares_node:
            return False
        plan, estimate = self.bold.waiting
        if not plan.may_speculate or not plan.updates_on_cpu or not self.bold.may_find_room(self._smallest):
            return False
        if estimate.step_s - estimate.busy_s["compute"] >= LEAST_IDLE * estimate.step_s:
            return True
        inside_s = self.pricer.step(self.problem.layout(replace(plan, request=self._unclipped))).step_s
        return inside_s <= LEAST_HIDDEN * estimate.step_s

    def _updating_in_backward(self, second_planes: bool) -> Unclipped:
        """Search as if all that the CPU updates were updated inside backward."""
        other = Search(replace(self.given, request=self._unclipped), self.model, second_planes)
        fastest = other.searched(other.started(other.bounded()))
        best = [replace(found, request=self.request) for found in other._fastest_first()[: self.limits.inside]]
        return Unclipped(best, inf if fastest is None else fastest[1].step_s)

    def _of_other_sizes(self, started: Iterable[SizeSearch], plan: Plan) -> list[Plan]:
        """The best plan of each of the best sizes but that of `plan`; by simulation, where there was one.

        Where updates no longer end the step, shorter chunks may be faster, whose last backward pass gives the first
        gradients sooner.
        """
        simulated = {size_of(one): one for one in reversed(self._fastest_first())}
        most_chunks = self.limits.chunk_layers // 4 // len(self.model.blocks)
        others = (size for size in started if size.name != size_of(plan) and size.name[1] <= most_chunks)
        ranked = sorted(others, key=lambda size: size.best_s)
        near = [size for size in ranked if size.best_s <= NEAR_SIZES * ranked[0].best_s][: self.limits.other_sizes]
        return [simulated.get(size.name) or size.best_plan for size in near]

    def _alike(self, plan: Plan) -> list[Plan]:
        """The next best plans of a plan's size, by simulation."""
        return [one for one in self._fastest_first() if size_of(one) == size_of(plan)][1 : 1 + self.limits.alike]

    def _fastest_first(self) -> list[Plan]:
        return [plan for plan, _ in sorted(self.timed, key=lambda pair: pair[1].step_s)]

    def _after_clipping_s(self, plan: Plan) -> float:
        return self.pricer.step(self.problem.layout(plan.after_clipping())).step_s if plan.speculates else 0.0

    def _unclipped_s(self, plan: Plan) -> float:
        return self.pricer.step(self.problem.layout(plan.unclipped())).step_s if plan.request.norm_first else 0.0

    def predicted(self, plan: Plan, estimate: StepEstimate) -> Plan:
        """Add the prediction to a plan."""
        bound_s = speed_of_light_s(self.given.model, self.request, self.profile) if plan.is_bounded else 0.0
        layout = self.problem.layout(plan)
        prediction = Prediction(
            step_s=estimate.step_s,
            speed_of_light_s=bound_s,
            busy_s=estimate.busy_s,
            recompute_share=estimate.recompute_s / max(estimate.busy_s["compute"], 1e-30),
            limiter=limiter(estimate),
            after_clipping_s=self._after_clipping_s(plan),
            unclipped_s=self._unclipped_s(plan),
            drive_bytes=layout.drive_bytes,
            drive_written_bytes=layout.drive_written_bytes,
            **process_bytes(layout, self.profile)._asdict(),
        )
        return replace(plan, predicted=prediction)
