"""A whole step as the simulator sees it: the first round, one of the rounds that add to its gradients, the update.

Where the CPU updates, that goes on under the next step's first round, so the update comes first; without clipping it
begins in the last round, and what is left of it comes first. So it does for several ranks, which are simulated
together.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from flexengine.hardware.profile import HardwareProfile
from flexengine.models.spec import ModelSpec
from flexengine.plan import Plan
from flexengine.planner.cost.cost_model import CostModel
from flexengine.schedule.layout import Layout
from flexengine.schedule.ranks.simulator import TimedRankRun, simulate_ranks
from flexengine.schedule.ranks.transports import layout_of
from flexengine.schedule.step_parts import StepPart, simulated_rounds, simulated_update


@dataclass(frozen=True)
class SimulatedStep:
    """The parts of a step in order, and the layout whose slots their programs name.

    Of several ranks they are rank 0's; `others` has those of the others.
    """

    plan: Plan
    layout: Layout
    profile: HardwareProfile
    parts: tuple[StepPart, ...]
    others: tuple[tuple[TimedRankRun, ...], ...] = ()

    @cached_property
    def total_s(self) -> float:
        """Seconds of the step."""
        return sum(part.repeats * part.timing.total_s for part in self.parts)

    @cached_property
    def shown_s(self) -> float:
        """Seconds when every part is drawn once."""
        return sum(part.timing.total_s for part in self.parts)

    @cached_property
    def starts_s(self) -> tuple[float, ...]:
        """When each part starts if every part is drawn once."""
        starts, now = [], 0.0
        for part in self.parts:
            starts.append(now)
            now += part.timing.total_s
        return tuple(starts)

    @property
    def told(self) -> tuple[StepPart, ...]:
        """The parts of the rank whose busy seconds predictions tell: of several, the last one's."""
        return tuple(map(_part, self.others[-1])) if self.others else self.parts

    @property
    def last_round(self) -> StepPart:
        """The round before the update."""
        return self.parts[-1] if self.plan.updates_on_cpu or self.others else self.parts[-2]

    @property
    def about(self) -> str:
        """Which parts are drawn, in words."""
        drawn = [p.name if p.repeats == 1 else f"{p.name} (1 of {p.repeats} alike)" for p in self.parts]
        whose = f"rank 0 of {1 + len(self.others)}: " if self.others else ""
        return whose + ", ".join(drawn)


def simulate_step(plan: Plan, model: ModelSpec, profile: HardwareProfile) -> SimulatedStep:
    """Lower and simulate a full step of a plan."""
    layout = layout_of(model, plan)
    rates = CostModel.of(plan.request, profile, plan.chunk_tokens).rates()
    if plan.shares_node:
        first, *others = simulate_ranks(layout, rates).ranks
        return SimulatedStep(plan, layout, profile, tuple(map(_part, first)), tuple(map(tuple, others)))
    parts = simulated_rounds(layout, rates)
    if not plan.updates_on_cpu:
        parts.append(simulated_update(layout, rates))
    return SimulatedStep(plan, layout, profile, tuple(parts))


def _part(timed: TimedRankRun) -> StepPart:
    """A run of one of several ranks as a part of a step."""
    run = timed.run
    if run.updates:
        name = "update of the step before"
    else:
        what = "rounds" if run.rounds else "round"
        number = f"wave {run.number + 1}" if run.rounds else f"round {run.number + 1} of all"
        name = f"first {what}" if run.number == 0 else f"accumulating {what} ({number})"
    return StepPart(name, timed.repeats, run.program, timed.until_gpu_ends)
