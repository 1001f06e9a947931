"""When nothing fits: what the smallest plan needs, what takes most of it, and what would fit, checked by planning."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np

from flexengine.hardware.profile import HardwareProfile
from flexengine.metrics import format_bytes
from flexengine.models.spec import ModelSpec
from flexengine.plan import Plan, PlanError, PlanReason, Request
from flexengine.planner.cost import loads
from flexengine.planner.cost.memory import (
    gpu_categories,
    gpu_required_bytes,
    host_categories,
    host_required_bytes,
)
from flexengine.planner.feasibility.machine_size import remedy_note
from flexengine.planner.feasibility.remedies import Least, Remedy, Try, gib_text, remedies
from flexengine.planner.kinds import Sets, ever_smaller_sets
from flexengine.planner.sizes import chunk_sizes
from flexengine.planner.solver import Caps, Goal, Placement, RoundProblem
from flexengine.planner.templates import SlotCounts, Templates
from flexengine.schedule.layer_program import align
from flexengine.schedule.layout import Layout

LEAST_SLOTS = SlotCounts(1, 1, 1, 1)
LEAST_HOST = Goal(weights=(0.0,) * loads.NUM_LOADS, host_s_per_byte=1.0)
NUM_SHOWN = 4


class Needs(NamedTuple):
    """A plan's exact bytes in both memories."""

    plan: Plan
    gpu_bytes: int
    host_bytes: int
    gpu_categories: dict[str, int]
    host_categories: dict[str, int]


class ShortageError(PlanError):
    """No plan fits. `needs` is the smallest plan, `remedies` are changes that were seen to fit."""

    def __init__(
        self, reason: PlanReason, message: str, request: Request, needs: Needs, remedies: tuple[Remedy, ...]
    ) -> None:
        on_gpu = reason is PlanReason.INSUFFICIENT_DEVICE_MEMORY
        required = needs.gpu_bytes if on_gpu else needs.host_bytes
        super().__init__(reason, message, required, request.max_gpu_bytes if on_gpu else request.max_host_bytes)
        self.request, self.needs, self.remedies = request, needs, remedies


class Feasibility:
    """Smallest plans of one model and request, without regard to speed."""

    def __init__(self, model: ModelSpec, request: Request, profile: HardwareProfile) -> None:
        self.model, self.request, self.profile = model, request, profile
        self.sizes = _shortest_rounds(chunk_sizes(request))
        self._problems: list[RoundProblem] = []

    @cached_property
    def _templates(self) -> Templates:
        return Templates(self.model, self.request, self.profile)

    @cached_property
    def _sets(self) -> Sets:
        return ever_smaller_sets(self._templates.kinds)

    def problems(self) -> Iterator[RoundProblem]:
        """A problem for every chunk size, smallest first, made when it is first asked for."""
        for i, (chunk, chunks) in enumerate(self.sizes):
            if i == len(self._problems):
                self._problems.append(RoundProblem(self._templates, chunk, chunks, self._sets))
            yield self._problems[i]

    def least_gpu(self) -> Needs:
        """The plan that takes the least GPU memory, whatever it takes on the host."""
        found = [(problem.gpu_bytes(p), i, p) for i, problem in enumerate(self.problems()) for p in _uniform(problem)]
        _, index, placement = min(found, key=lambda x: (x[0], x[1]))
        return self._needs(self._problems[index].plan(placement))

    def least_host(self) -> Needs | None:
        """Of the plans within the GPU budget one that takes the least host memory; None when none is."""
        return min(self._least_host_plans(), key=lambda n: n.host_bytes, default=None)

    def fits(self) -> bool:
        """Whether there is a plan within both budgets."""
        return next(self.fitting(), None) is not None

    def fitting(self) -> Iterator[Plan]:
        """Plans within both budgets, those of small chunks first."""
        within = (n for n in self._least_host_plans() if n.host_bytes <= self.request.max_host_bytes)
        return (needs.plan for needs in within)

    def _least_host_plans(self) -> Iterator[Needs]:
        """For every chunk size plans within the GPU budget that take little host memory."""
        for problem in self.problems():
            for caps in (Caps(0, problem.widest_caps.scratch_bytes), problem.widest_caps):
                solution = problem.solve(LEAST_HOST, LEAST_SLOTS, self.request.max_gpu_bytes, caps)
                if solution is not None:
                    placement = problem.normalised(Placement(solution.structure, solution.slots, solution.rows))
                    needs = self._needs(problem.plan(placement))
                    if needs.gpu_bytes <= self.request.max_gpu_bytes:
                        yield needs

    def _needs(self, plan: Plan) -> Needs:
        layout = Layout(self.model, plan)
        return Needs(
            plan,
            gpu_required_bytes(layout, self.profile),
            host_required_bytes(layout, self.profile),
            gpu_categories(layout, self.profile),
            host_categories(layout, self.profile),
        )


def _shortest_rounds(sizes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """For every chunk size its shortest round, which takes the least of both memories."""
    return sorted({chunk: min(n for c, n in sizes if c == chunk) for chunk, _ in sizes}.items())


def _uniform(problem: RoundProblem) -> Iterator[Placement]:
    """Placements that treat all blocks alike, with the fewest slots: for every level of residency and structure the row
    that takes the fewest bytes."""
    floor = problem.activations.scratch_floor
    shared = np.array([align(max(floor, int(b))) for b in problem.row_scratch])
    shared += np.array([align(int(b)) for b in problem.row_staged])
    totals = problem.row_gpu.total + shared
    for level in loads.GPU_LEVELS:
        candidates = np.flatnonzero(problem.row_level == level)
        rows = (int(candidates[totals[candidates].argmin()]),) * problem.num_blocks
        for structure in problem.templates.structures(len(problem.edge_host), loads.STREAMED):
            yield problem.normalised(Placement(structure, LEAST_SLOTS, rows))


# ---- the error -------------------------------------------------------------------------------------------------


def shortage(model: ModelSpec, request: Request, profile: HardwareProfile) -> ShortageError:
    """The error that explains why there is no plan."""
    known: dict[Request, Feasibility] = {}

    def feasibility(changed: Request) -> Feasibility:
        if changed not in known:
            known[changed] = Feasibility(model, changed, profile)
        return known[changed]

    def least_bytes(changed: Request) -> Least:
        on_host = feasibility(changed).least_host()
        return Least(feasibility(changed).least_gpu().gpu_bytes, None if on_host is None else on_host.host_bytes)

    least_gpu, least_host = feasibility(request).least_gpu(), feasibility(request).least_host()
    least = Least(least_gpu.gpu_bytes, None if least_host is None else least_host.host_bytes)
    fitting = remedies(request, least, Try(lambda r: feasibility(r).fits(), least_bytes))
    found = tuple(remedy._replace(note=remedy_note(remedy.request, request, profile)) for remedy in fitting)
    reason = PlanReason.INSUFFICIENT_DEVICE_MEMORY if least_host is None else PlanReason.INSUFFICIENT_HOST_MEMORY
    needs = least_host or least_gpu
    return ShortageError(reason, _message(request, needs, found), request, needs, found)


def _message(request: Request, needs: Needs, found: tuple[Remedy, ...]) -> str:
    places = [
        ("GPU", needs.gpu_bytes, request.max_gpu_bytes, needs.gpu_categories),
        ("host", needs.host_bytes, request.max_host_bytes, needs.host_categories),
    ]
    lines = []
    for place, required, budget, categories in places:
        if required > budget:
            start = "  and" if lines else "smallest plan needs"
            missing = f"budget is {gib_text(budget)} GiB, {gib_text(required - budget)} GiB are missing."
            lines.append(f"{start} {gib_text(required)} GiB of {place} memory, {missing}")
            lines.append(f"  largest: {_largest(categories)}")
    lines.append(f"  fits with: {', or '.join(map(str, found))}" if found else "  no change that was tried fits")
    return "\n".join(lines)


def _largest(categories: dict[str, int]) -> str:
    shown = sorted(categories.items(), key=lambda item: -item[1])[:NUM_SHOWN]
    return ", ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in shown)
