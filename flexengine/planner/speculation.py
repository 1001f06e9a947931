"""Adds speculative updates to a plan: as many groups as spare host memory has second planes for, if that is faster.

They are tried on the best plans of several sizes, of which the search makes some as if nothing were clipped. Groups
that the CPU updates are taken in the order in which the last backward pass completes their gradients: what comes first
has most time to be updated before the norm is known. The step is simulated as if the speculation held.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from flexengine.models.spec import ModelSpec
from flexengine.plan import GroupPlan, Plan
from flexengine.planner.cost.cost_model import StepPricer
from flexengine.planner.feasibility.shortage import Feasibility
from flexengine.planner.problem import Problem
from flexengine.schedule.layout import Layout
from flexengine.schedule.second_planes import second_drive_bytes, second_plane_bytes
from flexengine.schedule.step_parts import StepEstimate

FIRST_SHARES, OTHER_SHARES = (1.0, 0.75), (0.5, 0.25)
"""Shares of what fits that are tried of all plans, and of the fastest then. Fewer groups leave host memory and the link
alone while backward runs."""
AFTER_CLIPPING = 0.25
"""Share of steps that are taken to follow one that was clipped: they wait for their norm. Without them plans would give
up any amount of these steps' speed for some of the others'."""
MOST_LOSS = 1.15
"""How much longer than with the fastest plan a step that waits for its norm may take: where all are clipped, all do."""
LEAST_GAIN = 0.998
"""Speculate only where the step takes less than this share of its time: a clipped step takes longer with it."""

Priced = tuple[Plan, StepEstimate]


def size_of(plan: Plan) -> tuple[int, int]:
    """The tokens of a chunk and the chunks of a round."""
    return plan.chunk_tokens, plan.chunks_per_round


class Speculation:
    """Finds the fastest speculating plan of some plans, by simulation.

    waiting: a plan without speculation and its estimate. best: the fastest so far, at first that plan.
    """

    def __init__(self, problem: Problem, pricer: StepPricer, waiting: Priced) -> None:
        self._problem, self._pricer = problem, pricer
        self.waiting = self.best = waiting
        self._waiting_s = waiting[1].step_s  # of the best one, in a step after one that was clipped
        self._layout: Layout | None = None  # of the best one without speculation; None before one is faster
        self._fewer: Layout | None = None  # of which fewer groups were tried

    @property
    def chosen(self) -> Priced:
        """The best plan, where speculating is worth it; else the one that waits."""
        return self.best if self.mean_s < LEAST_GAIN * self.waiting[1].step_s else self.waiting

    def try_plans(self, plans: Iterable[Plan]) -> None:
        """Try FIRST_SHARES of what the plans have room for; plans that do not fit themselves are left out."""
        most_commands = self._pricer.simulated_commands + self._problem.limits.speculated_commands
        for layout in (self._problem.layout(plan) for plan in plans if plan.updates_on_cpu):
            if self._pricer.simulated_commands > most_commands:
                return
            if self._problem.fits(layout):
                self._try(layout, FIRST_SHARES)

    def try_fewer_groups(self) -> None:
        """Try OTHER_SHARES of what the best one's plan has room for, once."""
        if self._layout is not None and self._layout is not self._fewer:
            self._fewer = self._layout
            self._try(self._layout, OTHER_SHARES)

    def has_room(self, plan: Plan) -> bool:
        """Whether memory is left for the second planes of all that a plan has the CPU update."""
        layout = self._problem.layout(plan)
        room = self._problem.room(layout)
        return has_second_planes(layout, room.host_bytes, room.drive_bytes)

    def may_find_room(self, smallest: Feasibility) -> bool:
        """Whether any plan may have second planes of a group: where the one that waits leaves too little for those of
        the smallest, what takes the least host memory. A drive may always have some."""
        layout = self._problem.layout(self.waiting[0])
        each = (second_plane_bytes(stored, GroupPlan(update="cpu")) for stored in layout.groups)
        least_bytes = min(filter(None, each), default=0)
        if self._problem.on_drive or self._problem.room(layout).host_bytes >= least_bytes:
            return True
        least = smallest.least_host()
        return least is None or least.host_bytes + least_bytes <= self._problem.request.max_host_bytes

    @property
    def mean_s(self) -> float:
        """Seconds of the best plan's steps, over those that speculate and those that wait."""
        return mean_s(self.best[1].step_s, self._waiting_s)

    def _try(self, layout: Layout, shares: Sequence[float]) -> None:
        room = self._problem.room(layout)
        waiting_s = self._waiting_s if layout is self._layout else None
        for plan in speculating_plans(layout, room.host_bytes, shares, room.drive_bytes):
            estimate = self._pricer.step(self._problem.layout(plan))
            if estimate.step_s > self._problem.limits.far * self.best[1].step_s:  # fewer groups gain no more than that
                break
            if estimate.step_s >= self.mean_s:
                continue
            waiting_s = waiting_s or self._waiting_step_s(layout)
            if waiting_s > MOST_LOSS * self.waiting[1].step_s:
                break
            if mean_s(estimate.step_s, waiting_s) < self.mean_s:
                self.best, self._layout, self._waiting_s = (plan, estimate), layout, waiting_s

    def _waiting_step_s(self, layout: Layout) -> float:
        """Seconds of a step after one that was clipped: of a plan without speculation."""
        plan, estimate = self.waiting
        return estimate.step_s if layout.plan is plan else self._pricer.step(layout).step_s


def mean_s(speculating_s: float, waiting_s: float) -> float:
    """Mean seconds of a plan's steps, of which AFTER_CLIPPING wait for their norm."""
    return speculating_s + AFTER_CLIPPING * (waiting_s - speculating_s)


def has_second_planes(layout: Layout, spare_bytes: int, drive_bytes: int = 0) -> bool:
    """Whether so many bytes hold the second planes of all that the CPU updates."""
    of = layout.groups, layout.plan.groups
    on_host, there = (sum(map(num_bytes, *of)) for num_bytes in (second_plane_bytes, second_drive_bytes))
    return on_host <= spare_bytes and there <= max(0, drive_bytes)


def speculating_plans(
    layout: Layout, spare_bytes: int, shares: Sequence[float], drive_bytes: int = 0
) -> Iterator[Plan]:
    """A layout's plan with groups updated speculatively: shares of those whose second planes fit `spare_bytes` of the
    host, or a drive's."""
    fitting = _fitting(layout, spare_bytes, drive_bytes)
    for count in dict.fromkeys(round(share * len(fitting)) for share in shares):
        chosen = set(fitting[:count])
        if chosen:
            groups = tuple(replace(home, speculative=g in chosen) for g, home in enumerate(layout.plan.groups))
            yield replace(layout.plan, groups=groups)


def _fitting(layout: Layout, spare_bytes: int, drive_bytes: int) -> list[int]:
    """Groups that may be speculative, in the order of backward, as far as their second planes fit."""
    found, drive_bytes = list[int](), 0 if layout.plan.shares_node else drive_bytes
    for group in completed_order(layout.model):
        stored = layout.groups[group]
        home = layout.plan.groups[group]
        second_bytes, there = second_plane_bytes(stored, home), second_drive_bytes(stored, home)
        if not second_bytes + there:
            continue
        spare_bytes, drive_bytes = spare_bytes - second_bytes, drive_bytes - there
        if spare_bytes < 0 or (there and drive_bytes < 0):
            break
        found.append(group)
    return found


def completed_order(model: ModelSpec) -> list[int]:
    """Groups in the order in which backward completes their gradients: each with the lowest layer that has it."""
    lowest: dict[int, int] = {}
    for index in reversed(range(len(model.layers))):
        lowest.update(dict.fromkeys(model.layers[index].groups, index))
    return sorted(lowest, key=lambda group: (-lowest[group], group))
