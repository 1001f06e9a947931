"""Chooses a plan in four steps: bound, seed, local search, simulate.

Every (chunk, round) size has a lower bound. Sizes are started in order of their bounds, until the bound reaches what
was found already; a race gives the best of them more and more seeds and local search on the surrogate; the finalists
are lowered and simulated as real programs, and the fastest is the plan. All limits are counts, never clocks, so a
request has one answer. docs/planner.md explains each step with an example.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from math import inf
from typing import NamedTuple

import numpy as np

from flexengine.hardware.profile import HardwareProfile
from flexengine.models.base_dtype import check_base_dtype
from flexengine.models.in_parts import in_parts, may_be_in_parts
from flexengine.models.keep_dtype import check_keep_dtype
from flexengine.models.matmul_dtype import check_matmul_dtype
from flexengine.models.spec import ModelSpec
from flexengine.plan import Plan, Prediction, Request
from flexengine.planner.bound.speed_of_light import SizeBounds, size_bounds, speed_of_light_s
from flexengine.planner.collector import collector_paused
from flexengine.planner.cost.cost_model import CostModel, StepPricer
from flexengine.planner.cost.memory import (
    excess_bytes,
    gpu_categories,
    gpu_required_bytes,
    host_categories,
    host_required_bytes,
)
from flexengine.planner.cost.save_sets import SaveSets, frontier, side_by_side
from flexengine.planner.feasibility.shortage import Feasibility, shortage
from flexengine.planner.graphs import GAIN as GRAPHS_GAIN
from flexengine.planner.graphs import graphs_may_pay
from flexengine.planner.shared_buffers import SharedBuffers
from flexengine.planner.size_search import SizeSearch
from flexengine.planner.size_tables import SizeTables
from flexengine.planner.speculation import (
    ALIKE,
    MOST_CHUNK_LAYERS,
    NOT_FAR,
    OTHER_SIZES,
    Priced,
    Speculation,
    size_of,
)
from flexengine.schedule.expert_fetch import least_touched_share
from flexengine.schedule.layout import Layout
from flexengine.schedule.packing import full_round
from flexengine.schedule.step_parts import StepEstimate, limiter


class Race(NamedTuple):
    """A round of the race: the most sizes that run it, within which factor of the best, and how far each goes.

    seeds: whether all seeds are tried first.
    """

    num_sizes: int
    near: float
    blocks: int
    steps: int
    seeds: bool = False


RACE = (Race(8, 1.1, 1, 1), Race(4, 1.1, 1, 1, seeds=True), Race(3, 1.03, 80_000, 16), Race(2, 1.02, 200_000, 16))
"""Blocks times chunks that local search simulates per size, in at most so many steps. Twice as many take a third
longer and give plans that are 0.1% faster on average."""
PATIENCE, FAR = 8, 1.05
"""After so many sizes in a row with seeds above this factor of the best, no more are started."""
NUM_FINALISTS, SIMULATED_COMMANDS = 12, 6_000
"""Candidates of a size that may be simulated, and commands after which no more are; a second has about 20,000."""
SAME = 1e-9
"""Part of their seconds by which plans of one speed differ, as sums of the same terms in another order do."""
UPDATING_IN_BACKWARD, LEAST_HIDDEN, LEAST_IDLE, LEAST_LEFT = 8, 0.99, 0.1, 0.98
"""Plans of a search for updates inside backward that are tried with speculation. The search takes as long as the one
before it; it is made where a step whose updates need not wait takes at most this share, or where compute waits for this
share of a step: a plan that waits for its norm may keep too much on the host to gain by not waiting. It is made once
more, with second planes counted, where they have no room and would bring the best plan's seconds below the last of
these shares."""
MAX_CHUNK_LAYERS = 1024
"""Largest chunks per round times blocks that is planned for, where sizes allow a choice: programs grow with it."""
WHOLE_ENOUGH = 0.8
"""Do not try experts in parts when the plan with whole experts reaches this share of the bound: parts cost
recomputation, which they hardly win back then."""
MOST_TOUCHED = 0.9
"""Try `touched_only` when a full round is expected to touch less than this share of the experts."""


def make_plan(model: ModelSpec, request: Request, profile: HardwareProfile) -> Plan:
    """Find the fastest plan for a request on a machine.

    Experts in parts are tried only where whole experts do not fit or are far from the bound, or where rounds are so
    short that they touch only some experts. Deterministic; takes seconds, needs no GPU.
    Of several ranks it plans one: the request has its tokens, and its share of the host's memory.
    Raises: PlanError when nothing fits, saying what would; ValueError for products that the model cannot do in FP8.
    """
    plan = find_plan(model, request, profile)
    if plan is None:
        raise shortage(in_parts(model), request, profile)
    return plan


def find_plan(model: ModelSpec, request: Request, profile: HardwareProfile) -> Plan | None:
    """The same; None when nothing fits, without looking for what would."""
    with collector_paused():
        found = _find_with_graphs_as_asked(model, request, profile)
        if found is None:
            return None
        planner, plan = found
        if request.graphs == "auto" and graphs_may_pay(planner.model, plan, profile):
            replayed = _find_with_graphs_as_asked(model, replace(request, graphs="always"), profile)
            if replayed is not None and replayed[1].predicted.step_s <= GRAPHS_GAIN * plan.predicted.step_s:
                planner, plan = replayed
        return planner.refined(plan)


def _find_with_graphs_as_asked(
    model: ModelSpec, request: Request, profile: HardwareProfile
) -> tuple[Planner, Plan] | None:
    """The fastest plan with CUDA graphs where the request says always, else without, and the planner that found it."""
    whole, parts = Planner(model, request, profile), in_parts(model)
    plan = whole.found()
    found = [] if plan is None else [(whole, plan)]
    if may_be_in_parts(model) and (plan is None or not _is_good_whole(plan, parts)):
        arranged = Planner(model, request, profile, parts)
        in_parts_plan = arranged.found()
        found += [] if in_parts_plan is None else [(arranged, in_parts_plan)]
    return min(found, key=lambda pair: pair[1].predicted.step_s, default=None)


def _is_good_whole(plan: Plan, parts: ModelSpec) -> bool:
    """Whether parts can hardly improve a plan with whole experts, or would recompute where none was asked for."""
    if plan.request.recompute == "none":
        return True
    near_bound = plan.predicted.speed_of_light_s / plan.predicted.step_s >= WHOLE_ENOUGH
    tokens = full_round(plan.request, plan.chunk_tokens, plan.chunks_per_round).num_tokens
    return near_bound and least_touched_share(parts, tokens) >= MOST_TOUCHED


class Planner:
    """Plans one request."""

    def __init__(
        self,
        model: ModelSpec,
        request: Request,
        profile: HardwareProfile,
        arranged: ModelSpec | None = None,
        second_planes: bool = False,
    ) -> None:
        """arranged: the model with experts in parts, where plans shall stream it so. second_planes: see
        `SharedBuffers`."""
        check_matmul_dtype(model, request.numerics.matmul)
        check_keep_dtype(model, request.numerics.keep)
        check_base_dtype(model, request.numerics.base)
        self.given, self.model = model, model if arranged is None else arranged
        self.request, self.profile = request, profile
        self.buffers = SharedBuffers(self.model, request, profile, second_planes)
        self.pricer = StepPricer(profile)
        self.timed: list[Priced] = []  # plans that fit, by simulation
        self.bold: Speculation | None = None  # from the fastest of them

    def plan(self) -> Plan | None:
        """Bound, seed, search, simulate and refine; None where nothing fits."""
        plan = self.found()
        return None if plan is None else self.refined(plan)

    def found(self) -> Plan | None:
        """Bound, seed, search and simulate; None where nothing fits."""
        started = self.started(self.bounded())
        best = self.searched(started) or self.simulated(self.last_resort())
        if best is None:
            return None
        waiting = self.touched_only(*best)
        self.bold = Speculation(self.model, self.request, self.profile, self.pricer, waiting)
        if waiting[0].may_speculate:
            self.speculate(self.bold, started)
        return self.predicted(*self.bold.chosen)

    def refined(self, plan: Plan) -> Plan:
        """Search once more as if nothing were clipped, where updates that need not wait for the norm may shorten the
        step: what is found is tried with speculation. plan: that of `found`, which comes first."""
        bold = self.bold
        if bold is None or not plan.may_speculate or not self._may_gain_in_backward(*bold.waiting):
            return plan
        best, chosen = bold.best, bold.chosen
        inside, least_s = self._updating_in_backward()
        bold.try_plans(inside)
        if least_s < LEAST_LEFT * bold.mean_s and not bold.has_room(inside[0]):
            bold.try_plans(self._updating_in_backward(second_planes=True)[0])
        if bold.best is not best:
            bold.try_fewer_groups()
        return plan if bold.chosen is chosen else self.predicted(*bold.chosen)

    def searched(self, started: list[SizeSearch]) -> Priced | None:
        """The fastest finalist by simulation; None where none fits."""
        return self.simulated(self.finalists(self.race(started)))

    # -- sizes -------------------------------------------------------------------------------------------------------

    def bounded(self) -> Iterator[SizeSearch]:
        """Sizes that may fit, the lowest bound first; only those of small programs, where there are such."""
        sizes, blocks = self.bounds.sizes, len(self.model.blocks)
        limit = max(MAX_CHUNK_LAYERS, min((chunks for _, chunks in sizes), default=0) * blocks)
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
            if size.bound.seconds >= best_s or far == PATIENCE:
                break
            size.start()
            if np.isfinite(size.best_s):
                started.append(size)
                far = far + 1 if size.best_s > FAR * best_s else 0
                best_s = min(best_s, size.best_s)
        return started

    def race(self, sizes: list[SizeSearch]) -> list[SizeSearch]:
        """Search the best sizes further and further; fewer are left after every round."""
        for race in RACE:
            ranked = sorted(sizes, key=lambda size: size.rank_s)
            sizes = [size for size in ranked if size.rank_s <= race.near * ranked[0].rank_s][: race.num_sizes]
            for size in sizes:
                if race.seeds:
                    size.seed_more()
                size.run(race.blocks, race.steps)
        return sizes

    @cached_property
    def save_sets(self) -> SaveSets:
        """Save sets that no other beats in bytes and recompute seconds. They hardly depend on the chunk size."""
        chunk, longest = max(chunk for chunk, _ in self.bounds.sizes), self.request.max_seq_len
        cost = CostModel.of(self.request, self.profile, chunk)
        shape = full_round(self.request, chunk, max(1, -(-longest // chunk)))
        counts = np.bincount(self.buffers.kind_of)
        return side_by_side(
            [kind.layer for kind in self.buffers.kinds], counts, lambda layer: frontier(layer, shape, cost)
        )

    # -- the answer --------------------------------------------------------------------------------------------------

    def finalists(self, sizes: list[SizeSearch]) -> Iterator[Plan]:
        """The best candidate of every size, then others by their estimates."""
        found = [
            (place, float(size.search.seconds[index]), number, index)
            for number, size in enumerate(sizes)
            for place, index in enumerate(size.search.finalists(NUM_FINALISTS))
        ]
        for _, _, number, index in sorted(found, key=lambda entry: (entry[0] > 0, *entry[1:])):
            search = sizes[number].search
            yield search.memory.plan(search.found, index)

    def last_resort(self) -> list[Plan]:
        """Plans where the search found none: the largest chunks that fit, else that of least GPU memory, which may."""
        feasibility = Feasibility(self.model, self.request, self.profile)
        return list(feasibility.fitting())[-2:] or [feasibility.least_gpu().plan]

    def simulated(self, plans: Iterable[Plan]) -> Priced | None:
        """The fastest plan by simulation of its real programs, of those of one speed that of the least host memory;
        None when none fits."""
        best: Priced | None = None
        host_bytes = 0
        for plan in plans:
            layout = Layout(self.model, plan)
            if max(excess_bytes(layout, self.request, self.profile)) > 0:
                continue
            estimate = self.pricer.step(layout)
            self.timed.append((plan, estimate))
            known_s = inf if best is None else best[1].step_s
            sparing = estimate.step_s <= (1.0 + SAME) * known_s and layout.host_bytes < host_bytes
            if sparing or estimate.step_s < (1.0 - SAME) * known_s:
                best, host_bytes = (plan, estimate), layout.host_bytes
            if self.pricer.simulated_commands > SIMULATED_COMMANDS:
                break
        return best

    def touched_only(self, plan: Plan, estimate: StepEstimate) -> Priced:
        """Fetch only touched experts where that is faster and a full round leaves some untouched."""
        shape = full_round(self.request, plan.chunk_tokens, plan.chunks_per_round)
        if least_touched_share(self.model, shape.num_tokens) >= MOST_TOUCHED:
            return plan, estimate
        sparing = replace(plan, touched_only=True)
        found = self.pricer.step(Layout(self.model, sparing))
        return (sparing, found) if found.step_s < estimate.step_s else (plan, estimate)

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

    def _may_gain_in_backward(self, plan: Plan, estimate: StepEstimate) -> bool:
        """Whether updates inside backward may make the step of a plan, which waits for its norm, shorter."""
        if self.request.shares_node or not plan.updates_on_cpu:
            return False
        if estimate.step_s - estimate.busy_s["compute"] >= LEAST_IDLE * estimate.step_s:
            return True
        inside_s = self.pricer.step(Layout(self.model, replace(plan, request=self._unclipped))).step_s
        return inside_s <= LEAST_HIDDEN * estimate.step_s

    def _updating_in_backward(self, second_planes: bool = False) -> tuple[list[Plan], float]:
        """The best plans of a search in which all that the CPU updates is updated inside backward, fastest first, and
        the seconds that the first takes so, infinite where none fits. second_planes: with room for all of them."""
        other = Planner(self.given, self._unclipped, self.profile, self.model, second_planes)
        fastest = other.searched(other.started(other.bounded()))
        best = [replace(found, request=self.request) for found in other._fastest_first()[:UPDATING_IN_BACKWARD]]
        return best, inf if fastest is None else fastest[1].step_s

    def _of_other_sizes(self, started: Iterable[SizeSearch], plan: Plan) -> list[Plan]:
        """The best plan of each of the best sizes but that of `plan`; by simulation, where there was one.

        Where updates no longer end the step, shorter chunks may be faster, whose last backward pass gives the first
        gradients sooner.
        """
        simulated = {size_of(one): one for one in reversed(self._fastest_first())}
        most_chunks = MOST_CHUNK_LAYERS // len(self.model.blocks)
        others = (size for size in started if size.name != size_of(plan) and size.name[1] <= most_chunks)
        ranked = sorted(others, key=lambda size: size.best_s)
        near = [size for size in ranked if size.best_s <= NOT_FAR * ranked[0].best_s][:OTHER_SIZES]
        return [simulated.get(size.name) or size.best_plan for size in near]

    def _alike(self, plan: Plan) -> list[Plan]:
        """The next best plans of a plan's size, by simulation."""
        return [one for one in self._fastest_first() if size_of(one) == size_of(plan)][1 : 1 + ALIKE]

    def _fastest_first(self) -> list[Plan]:
        return [plan for plan, _ in sorted(self.timed, key=lambda pair: pair[1].step_s)]

    def _after_clipping_s(self, plan: Plan) -> float:
        return self.pricer.step(Layout(self.model, plan.after_clipping())).step_s if plan.speculates else 0.0

    def predicted(self, plan: Plan, estimate: StepEstimate) -> Plan:
        """Add the prediction to a plan."""
        layout = Layout(self.model, plan)
        prediction = Prediction(
            step_s=estimate.step_s,
            speed_of_light_s=speed_of_light_s(self.given, self.request, self.profile) if plan.is_bounded else 0.0,
            busy_s=estimate.busy_s,
            recompute_share=estimate.recompute_s / max(estimate.busy_s["compute"], 1e-30),
            gpu_bytes=gpu_required_bytes(layout, self.profile),
            host_bytes=host_required_bytes(layout, self.profile),
            gpu_categories=gpu_categories(layout, self.profile),
            host_categories=host_categories(layout, self.profile),
            limiter=limiter(estimate),
            after_clipping_s=self._after_clipping_s(plan),
        )
        return replace(plan, predicted=prediction)
