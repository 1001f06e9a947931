"""Prices a plan of several ranks: all of them are simulated together. Compares it with what one of them measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flexengine.hardware.nodes import NETWORK_BYTES_PER_S, rank_profile
from flexengine.hardware.profile import HardwareProfile
from flexengine.metrics import format_seconds
from flexengine.models.spec import ModelSpec
from flexengine.plan import Plan, Prediction
from flexengine.planner.correction import Review, corrected_profile, of_chunks, review, stream_factors
from flexengine.planner.cost.cost_model import CostModel, price
from flexengine.planner.cost.memory import process_bytes
from flexengine.planner.problem import Problem
from flexengine.schedule.command_totals import CommandClass, CommandTotal, add_totals
from flexengine.schedule.layout import Layout
from flexengine.schedule.packing import full_round
from flexengine.schedule.ranks.runs import step_of_rank
from flexengine.schedule.ranks.simulator import simulate_ranks
from flexengine.schedule.ranks.transports import layout_of
from flexengine.schedule.simulator import simulate
from flexengine.schedule.step_parts import limiter, summed

SPLIT_RANKS = 2
"""Ranks of a split plan that are simulated: all do the same at the same time, and fewer tell 0.2% less."""


def bytes_planned(layout: Layout, predicted: Prediction, profile: HardwareProfile) -> Prediction:
    """A rank's prediction with the bytes of another layout."""
    return replace(predicted, **process_bytes(layout, profile)._asdict())


def if_it_fits(of_rank: Problem, plan: Plan) -> Plan | None:
    """The plan of one rank with its own bytes; None where it does not fit."""
    layout = of_rank.layout(plan)
    if not of_rank.fits(layout):
        return None
    return replace(plan, predicted=bytes_planned(layout, plan.predicted, of_rank.profile))


def predicted_together(
    layout: Layout, of_rank: Prediction, profile: HardwareProfile, network_bytes_per_s: float
) -> Prediction:
    """The prediction of all ranks of a node, from that of one."""
    ranks = layout.plan.request.ranks
    together = replace(
        of_rank,
        host_bytes=ranks * of_rank.host_bytes,
        host_categories=times(ranks, of_rank.host_categories),
        shared_host_bytes=layout.node_bytes,
    )
    return priced_together(layout, together, profile, network_bytes_per_s)


def times(ranks: int, categories: Mapping[str, int]) -> dict[str, int]:
    """Bytes by category of so many ranks."""
    return {name: ranks * num_bytes for name, num_bytes in categories.items()}


def priced_together(
    layout: Layout, of_rank: Prediction, profile: HardwareProfile, network_bytes_per_s: float = NETWORK_BYTES_PER_S
) -> Prediction:
    """Replace a rank's seconds by those of all ranks together. Busy seconds are those of the rank of the last round."""
    request, cost = layout.plan.request, CostModel.of(layout.plan.request, profile, layout.plan.chunk_tokens)
    rates = cost.rates()._replace(network_bytes_per_s=network_bytes_per_s / request.ranks)
    step = simulate_ranks(layout, rates, SPLIT_RANKS)
    parts = [(price(t.run.program, cost, t.until_gpu_ends, t.shape), t.repeats) for t in step.ranks[-1]]
    estimate = summed(parts)
    predicted = replace(
        of_rank,
        step_s=step.step_s,
        busy_s=estimate.busy_s,
        recompute_share=estimate.recompute_s / max(estimate.busy_s["compute"], 1e-30),
        limiter=limiter(replace(estimate, step_s=step.step_s)),  # a rank may end before the others
        exchange_s=step.exchange_s,
        exchange_wait_s=step.exchange_wait_s,
    )
    if not layout.plan.is_bounded:
        predicted = replace(predicted, speed_of_light_s=0.0)
    if step.exchange_wait_s > predicted.step_s / 2:
        exchange = f"the network, over which nodes add up gradients for {format_seconds(step.exchange_s)}"
        predicted = replace(predicted, limiter=exchange)
    return predicted


def review_for_ranks(
    plan: Plan,
    model: ModelSpec,
    profile: HardwareProfile,
    measured: Mapping[CommandClass, CommandTotal],
    measured_step_s: float,
    chunk_share: float = 1.0,
) -> Review:
    """Compare a plan of one or of several ranks with a step, as `review` does.

    measured: of several ranks, what one of them ran. It is compared with one rank of the plan whose link has its share
    of the host memory; what follows is expected of all ranks together.
    """
    request = plan.request
    if not request.shares_node:
        return review(plan, model, profile, measured, measured_step_s, chunk_share)
    if plan.owns_blocks:
        return _review_in_stages(plan, model, profile, measured, measured_step_s, chunk_share)
    of_rank = replace(plan, request=request.of_rank)
    found = review(of_rank, model, rank_profile(profile, request.ranks), measured, measured_step_s, chunk_share)
    corrected = corrected_profile(profile, found.factors)
    expected = priced_together(Layout(model, plan), found.expected, corrected)
    return replace(found, profile=corrected, expected=expected)


def _review_in_stages(
    plan: Plan, model: ModelSpec, profile: HardwareProfile, measured: Mapping[CommandClass, CommandTotal],
    measured_step_s: float, chunk_share: float,
) -> Review:  # fmt: skip
    """The same in stages: what rank 0 ran is compared with its own wave and update."""
    layout, ranks = layout_of(model, plan), plan.request.ranks
    cost = CostModel.of(plan.request, rank_profile(profile, ranks), plan.chunk_tokens)
    shape = full_round(plan.request, plan.chunk_tokens, plan.chunks_per_round)
    totals: dict[CommandClass, CommandTotal] = {}
    *waves, update = step_of_rank(layout, 0, [shape] * ranks * 2)
    for program in (waves[-1].program, update.program):
        timing = simulate(program, cost.rates())
        add_totals(totals, program, zip(timing.start_s, timing.end_s, strict=True), layout.model)
    factors = stream_factors(measured, of_chunks(totals, chunk_share))
    corrected = corrected_profile(profile, factors)
    expected = priced_together(layout, plan.predicted, corrected)
    return Review(plan.predicted.step_s, measured_step_s, expected, factors, corrected)
