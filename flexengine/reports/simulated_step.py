"""A whole step as the simulator sees it: the first round, one of the rounds that add to its gradients, the update.

Where the CPU updates, that goes on under the next step's first round, so the update comes first; without clipping it
begins in the last round, and what is left of it comes first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from flexengine.hardware.profile import HardwareProfile
from flexengine.models.spec import ModelSpec
from flexengine.plan import Plan
from flexengine.planner.cost.cost_model import CostModel
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering import lower_update
from flexengine.schedule.simulator import simulate
from flexengine.schedule.step_parts import StepPart, simulated_rounds


@dataclass(frozen=True)
class SimulatedStep:
    """The parts of a step in order, and the layout whose slots their programs name."""

    plan: Plan
    layout: Layout
    profile: HardwareProfile
    parts: tuple[StepPart, ...]

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
    def last_round(self) -> StepPart:
        """The round before the update."""
        return self.parts[-1] if self.plan.updates_on_cpu else self.parts[-2]

    @property
    def about(self) -> str:
        """Which parts are drawn, in words."""
        drawn = [p.name if p.repeats == 1 else f"{p.name} (1 of {p.repeats} alike)" for p in self.parts]
        return ", ".join(drawn)


def simulate_step(plan: Plan, model: ModelSpec, profile: HardwareProfile) -> SimulatedStep:
    """Lower and simulate a full step of a plan."""
    layout = Layout(model, plan)
    rates = CostModel.of(plan.request, profile, plan.chunk_tokens).rates()
    parts = simulated_rounds(layout, rates)
    if not plan.updates_on_cpu:
        program = lower_update(layout)
        parts.append(StepPart("update", 1, program, simulate(program, rates)))
    return SimulatedStep(plan, layout, profile, tuple(parts))
