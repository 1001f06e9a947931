"""Computes once what all reports of a plan need: the simulated step, memory over time, the bound."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from flexengine.hardware.nodes import rank_profile
from flexengine.hardware.profile import HardwareProfile
from flexengine.models.spec import ModelSpec
from flexengine.plan import Plan
from flexengine.planner.bound.speed_of_light import Bound, speed_of_light
from flexengine.reports.memory_over_time import MemorySeries, step_memory
from flexengine.reports.simulated_step import SimulatedStep, simulate_step
from flexengine.schedule.step_parts import ISSUE, stalls


@dataclass(frozen=True)
class Picture:
    """A plan with its model and machine, and the figures that follow from them."""

    plan: Plan
    model: ModelSpec
    profile: HardwareProfile

    @cached_property
    def step(self) -> SimulatedStep:
        """The step as the simulator runs it."""
        return simulate_step(self.plan, self.model, self.profile)

    @cached_property
    def bound(self) -> Bound | None:
        """The ideal step behind the plan's lower bound; None where no bound is known of plans like this."""
        request = self.plan.request
        if not self.plan.predicted.speed_of_light_s:
            return None
        return speed_of_light(self.model, request.of_rank, rank_profile(self.profile, request.ranks))

    @cached_property
    def gpu(self) -> MemorySeries:
        """GPU bytes in use over the step."""
        return step_memory(self.step, "gpu")

    @cached_property
    def host(self) -> MemorySeries:
        """Host bytes in use over the step, of all ranks together."""
        series, ranks = step_memory(self.step, "host"), self.plan.request.ranks
        return series._replace(num_bytes=series.num_bytes * ranks)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of a full step over its predicted seconds."""
        return self.plan.request.max_global_batch_tokens / self.plan.predicted.step_s

    @property
    def effective_flops_per_s(self) -> float:
        """Model FLOPs (forward and backward, no recomputation) of sequences of the longest length, over the step."""
        request = self.plan.request
        flops_per_token = self.model.model_flops([request.max_seq_len]) / request.max_seq_len
        return flops_per_token * self.tokens_per_s

    @property
    def light_share(self) -> float | None:
        """Lower bound of the step time over the predicted time: 1 is a step that no plan could make faster.

        None where no bound is known.
        """
        return self.plan.predicted.speed_of_light_s / self.plan.predicted.step_s or None

    @cached_property
    def seconds_by_cause(self) -> dict[str, float]:
        """Seconds of the compute stream by cause: work, recomputation, and waits; they add up to the step."""
        predicted = self.plan.predicted
        busy = predicted.busy_s["compute"]
        recompute_s = predicted.recompute_share * busy
        found = {"forward, backward and update": busy - recompute_s, "recomputation": recompute_s}
        if predicted.exchange_wait_s:
            found["waiting for gradients of other nodes"] = predicted.exchange_wait_s
        # A part is drawn once but runs `repeats` times.
        waits: dict[str, float] = {}
        for part in self.step.told:
            for (cause, phase), seconds in stalls(part.program, part.timing).items():
                name = f"waiting for {CAUSE_WORDS[cause]} during {phase}"
                waits[name] = waits.get(name, 0.0) + part.repeats * seconds
        least_s = NEGLIGIBLE_SHARE * predicted.step_s
        found |= {name: s for name, s in sorted(waits.items(), key=lambda item: -item[1]) if s > least_s}
        # Small waits were left out above; together they may still be worth a line.
        rest = predicted.step_s - sum(found.values())
        if rest > least_s:
            found["other waits"] = rest
        return found


NEGLIGIBLE_SHARE = 1e-4
"""Waits of less than this share of a step are told together, as they would only lengthen the list."""
CAUSE_WORDS = {
    "h2d": "the host-to-device link",
    "d2h": "the device-to-host link",
    "compute": "compute",
    "cpu": "the CPU",
    "relay_in": "what other ranks hand over",
    "relay_out": "what is handed to other ranks",
    "drive_in": "the drive, for updates",
    "drive_out": "the drive, which is written,",
    "drive_fetch": "the drive, for what the GPU reads",
    "drive_store": "the drive, for what the GPU leaves",
    "comm": "exchanges between GPUs",
    ISSUE: "the host to issue commands",
}
