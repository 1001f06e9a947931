"""What a measured step says about the profile: every stream's rates scaled by measured over predicted seconds.

The planner prices commands from rates that a probe measured on synthetic work. After a few steps the real commands
have been timed; one factor for compute, for each direction of the link and for the CPU make the profile agree with
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from flexengine.hardware.parts import POINT_FIELDS
from flexengine.hardware.profile import HardwareProfile
from flexengine.metrics import format_seconds
from flexengine.models.spec import ModelSpec
from flexengine.plan import Plan, Prediction
from flexengine.planner.bound.speed_of_light import speed_of_light_s
from flexengine.planner.cost.cost_model import CostModel, step_seconds
from flexengine.schedule.command_totals import CommandClass, CommandTotal, add_totals
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering.kinds import UpdateKind
from flexengine.schedule.packing import full_round
from flexengine.schedule.programs import lower_update
from flexengine.schedule.simulator import simulate
from flexengine.schedule.step_parts import limiter, lower_last_round, way_of

MAX_FACTOR = 10.0
"""Factors are held between this and its inverse: a stream further off was not measured, but disturbed."""
UNKNOWN_BYTES = ("fetch_experts",)
"""Kinds of commands of which the routing decides how many bytes they move: they say nothing about a link's rate."""


class Factors(NamedTuple):
    """Measured over predicted seconds of the same commands, by stream; 1 where nothing was measured."""

    compute: float = 1.0
    h2d: float = 1.0
    d2h: float = 1.0
    cpu: float = 1.0


@dataclass(frozen=True)
class Review:
    """A plan after its first steps: predicted and measured seconds of a step, factors, and what follows from them.

    profile: the corrected one; expected: what it predicts of the plan.
    """

    predicted_s: float
    measured_s: float
    expected: Prediction
    factors: Factors
    profile: HardwareProfile

    def describe(self) -> str:
        """Predicted against measured, in one line."""
        off = 100 * (self.measured_s / self.predicted_s - 1)
        streams = ", ".join(f"{name} x{value:.2f}" for name, value in self.factors._asdict().items())
        return (
            f"measured {format_seconds(self.measured_s)} per step, predicted {format_seconds(self.predicted_s)}"
            f" ({off:+.0f}%); commands took, of what was predicted: {streams};"
            f" corrected prediction {format_seconds(self.expected.step_s)}"
        )


def review(
    plan: Plan,
    model: ModelSpec,
    profile: HardwareProfile,
    measured: Mapping[CommandClass, CommandTotal],
    measured_step_s: float,
    chunk_share: float = 1.0,
) -> Review:
    """Compare a plan with the commands of a step that ran under it.

    chunk_share: compute of the step's chunks, over that of the plan's.
    """
    layout = Layout(model, plan)
    factors = stream_factors(measured, of_chunks(predicted_totals(layout, profile), chunk_share))
    corrected = corrected_profile(profile, factors)
    predicted_s = step_seconds(layout, profile).step_s
    return Review(predicted_s, measured_step_s, corrected_prediction(layout, corrected), factors, corrected)


def of_chunks(predicted: Mapping[CommandClass, CommandTotal], chunk_share: float) -> dict[CommandClass, CommandTotal]:
    """Totals whose layers take so many times the seconds: their chunks have fewer tokens than was planned for."""
    planned = dict[CommandClass, CommandTotal]()
    for key, total in predicted.items():
        of_layer = key[0] == "compute" and key[2]
        planned[key] = total._replace(seconds=total.seconds * chunk_share) if of_layer else total
    return planned


def corrected_prediction(layout: Layout, profile: HardwareProfile) -> Prediction:
    """What another profile predicts of a plan's step; its memory stays."""
    plan, estimate = layout.plan, step_seconds(layout, profile)
    bound_s = speed_of_light_s(layout.given, plan.request, profile) if plan.is_bounded else 0.0
    clipped = step_seconds(Layout(layout.given, plan.after_clipping()), profile).step_s if plan.speculates else 0.0
    unclipped = step_seconds(Layout(layout.given, plan.unclipped()), profile).step_s if plan.request.norm_first else 0.0
    return replace(
        plan.predicted,
        step_s=estimate.step_s,
        speed_of_light_s=min(estimate.step_s, bound_s),
        busy_s=estimate.busy_s,
        recompute_share=estimate.recompute_s / max(estimate.busy_s["compute"], 1e-30),
        limiter=limiter(estimate),
        after_clipping_s=clipped,
        unclipped_s=unclipped,
    )


def predicted_totals(layout: Layout, profile: HardwareProfile) -> dict[CommandClass, CommandTotal]:
    """Predicted seconds of a step's last round, which adds to earlier gradients or is the only one, and of what is left
    to update after it, by class."""
    plan = layout.plan
    cost = CostModel.of(plan.request, profile, plan.chunk_tokens)
    shape = full_round(plan.request, plan.chunk_tokens, plan.chunks_per_round)
    totals: dict[CommandClass, CommandTotal] = {}
    last = lower_last_round(layout, shape, first=plan.num_rounds == 1)
    for program in (last, lower_update(layout, UpdateKind(way_of(plan)))):
        timing = simulate(program, cost.rates())
        add_totals(totals, program, zip(timing.start_s, timing.end_s, strict=True), layout.model)
    return totals


def stream_factors(
    measured: Mapping[CommandClass, CommandTotal], predicted: Mapping[CommandClass, CommandTotal]
) -> Factors:
    """Measured over predicted seconds per stream, over classes of commands that both have.

    Compute commands are compared by their mean, as a step may have more rounds or fewer chunks than was planned for;
    copies by their seconds per byte.
    """
    factors = {}
    for stream in Factors._fields:  # those of relays have no rates of their own
        took = expected = 0.0
        for key in sorted(measured.keys() & predicted.keys()):
            real, planned = measured[key], predicted[key]
            if key[0] != stream or key[1] in UNKNOWN_BYTES or not planned.seconds or not real.count:
                continue
            scale = planned.num_bytes / real.num_bytes if real.num_bytes else planned.count / real.count
            took += real.seconds * scale
            expected += planned.seconds
        factor = took / expected if expected and took else 1.0
        factors[stream] = min(MAX_FACTOR, max(1 / MAX_FACTOR, factor))
    return Factors(**factors)


def mended_profile(profile: HardwareProfile, factors: Factors) -> HardwareProfile:
    """The profile with the rates of streams that were faster than it says, its peak included; slower ones stay."""
    faster = Factors(*(min(1.0, factor) for factor in factors))
    mended = corrected_profile(profile, faster)
    return mended.changed(peak_matmul_flops_per_s=profile.matmul.peak_flops_per_s / faster.compute)


def corrected_profile(profile: HardwareProfile, factors: Factors) -> HardwareProfile:
    """The profile with every rate of a stream divided by its factor; memory sizes stay."""

    values = profile.values()
    computed = {key: tuple((x, rate / factors.compute) for x, rate in values[key]) for key in POINT_FIELDS}
    copied = {key: values[key] / getattr(factors, key[:3]) for key in values if key.startswith(("h2d_", "d2h_"))}
    return profile.changed(
        **computed,
        **copied,
        memory_bytes_per_s=profile.memory.bytes_per_s / factors.compute,
        launch_s=profile.host.launch_s * factors.compute,
        cpu_adamw_parameters_per_s=tuple((name, r / factors.cpu) for name, r in profile.host.adamw_parameters_per_s),
    )
