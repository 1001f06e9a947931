"""Seconds of rounds of many placements: by the native library, or by the batched simulator in its place.

Both give the same bits.
"""

from __future__ import annotations

import numpy as np

from flexengine.native.rounds import RoundsCall, estimate_rounds, estimator
from flexengine.planner.batched_simulator import BatchedSimulator
from flexengine.planner.round_costs import Batch, LinkRates, RoundCosts
from flexengine.schedule.simulator import LEAST_CPU_SHARE


def round_seconds_of(costs: RoundCosts, batch: Batch, link: LinkRates) -> tuple[np.ndarray, np.ndarray]:
    """Seconds [P] of forward, head and backward, and by block [L, P] of the CPU's updates that are left then."""
    alone = len(batch.choices) == 1 and batch.updating.any()  # numpy adds up a single column in another order
    if estimator() is None or alone or batch.slots.min(initial=1) < 1:
        return BatchedSimulator(costs, batch, link).run()
    return _native(costs, batch, link)


def _native(costs: RoundCosts, batch: Batch, link: LinkRates) -> tuple[np.ndarray, np.ndarray]:
    num_placements, num_layers = batch.choices.shape
    end, work = np.zeros(num_placements), np.zeros((num_layers, num_placements))
    call = RoundsCall(
        num_placements, num_layers, costs.forward_s.shape[1], *batch.columns.shape[1:], refill=int(costs.refill),
        forward_only=costs.forward_only,
    )  # fmt: skip
    edges = batch.embedding, batch.head
    call.edge_seconds[:] = [float(seconds) for edge in edges for seconds in edge[:5]]
    call.rates[:] = (*link, LEAST_CPU_SHARE)
    flags = (
        batch.share_edge_slots, batch.grads_over_weights, batch.refilled, batch.grads_share, batch.accumulating,
        batch.updating,
    )  # fmt: skip
    arrays = {
        "choices": batch.choices, "kinds": batch.kind_of, "costs": batch.columns, "slots": batch.slots,
        "flags": np.array(flags, dtype=bool), "edges": [np.array(edge[5:], dtype=float) for edge in edges],
        "pending": batch.pending_s, "left": batch.pending_s.sum(axis=0), "done": batch.done_s,
        "forward": costs.forward_s, "backward": costs.backward_s, "finish": costs.finish_s,
        "in_parts": costs.in_parts, "end_out": end, "work_out": work,
    }  # fmt: skip
    estimate_rounds(call, arrays)
    return end, work
