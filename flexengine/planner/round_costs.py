"""What a round costs many placements of one size, as arrays: the operands of the batched simulator."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flexengine.hardware.profile import HardwareProfile


class ChoiceCosts(NamedTuple):
    """What the rows (keep option x level) of a block cost: arrays [K], or [L, P] for placements.

    Seconds on the streams, copies at the rates of a busy link: recompute_s to save_h2d_s per chunk, weights_h2d_s to
    grad_d2h_s per layer, 0 where nothing is copied. The four issue_s are what the host takes to issue a chunk's and a
    layer's commands. cpu_update_s, and update_h2d_s to update_issue_s of the GPU: updates inside the last round.
    """

    recompute_s: np.ndarray
    input_d2h_s: np.ndarray
    save_d2h_s: np.ndarray
    input_h2d_s: np.ndarray
    save_h2d_s: np.ndarray
    weights_h2d_s: np.ndarray
    grad_h2d_s: np.ndarray
    grad_d2h_s: np.ndarray
    forward_issue_s: np.ndarray
    backward_issue_s: np.ndarray
    fetch_issue_s: np.ndarray
    finish_issue_s: np.ndarray
    cpu_update_s: np.ndarray
    update_h2d_s: np.ndarray
    update_s: np.ndarray
    update_d2h_s: np.ndarray
    update_issue_s: np.ndarray


class EdgeCosts(NamedTuple):
    """Embedding or head in a round: seconds, or arrays [P] of them; copies are 0 where resident.

    again_h2d_s: the part of grad_h2d_s that even a first round fetches (a tied embedding's, which the head stored).
    update_h2d_s, update_s, update_d2h_s: of updates by the GPU inside the last round.
    """

    forward_s: float
    backward_s: float
    finish_s: float
    forward_issue_s: float
    backward_issue_s: float
    weights_h2d_s: np.ndarray
    grad_h2d_s: np.ndarray
    grad_d2h_s: np.ndarray
    again_h2d_s: np.ndarray
    update_h2d_s: np.ndarray
    update_s: np.ndarray
    update_d2h_s: np.ndarray


class RoundCosts(NamedTuple):
    """What all placements of a round have in common.

    forward_s, backward_s: compute of the blocks [L, chunks], without recomputation; finish_s: rounding their gradients
    [L]. refill: sliced sequences fetch every chunk's kept tensors once more to rebuild the key/value window; in_parts
    [L]: blocks that fetch them once more to make anew what their parts read.
    forward_only: so many of the first blocks have no backward.
    """

    forward_s: np.ndarray
    backward_s: np.ndarray
    finish_s: np.ndarray
    refill: bool
    in_parts: np.ndarray
    forward_only: int = 0


class Batch(NamedTuple):
    """Placements [P] to estimate.

    columns: [17, C, K], fields of ChoiceCosts by kind and choice; kind_of: [L]; choices: [P, L].
    slots: [3, P] weight, gradient and offload slots. Edge slots may lie over the blocks', their gradients over their
    weights; refilled: so that weights are there in forward; grads_share: so that the head's gradient is there, too.
    accumulating: rounds that add to earlier gradients.
    """

    columns: np.ndarray
    kind_of: np.ndarray
    choices: np.ndarray
    embedding: EdgeCosts
    head: EdgeCosts
    slots: np.ndarray
    share_edge_slots: np.ndarray
    grads_over_weights: np.ndarray
    refilled: np.ndarray
    grads_share: np.ndarray
    accumulating: np.ndarray
    updating: np.ndarray
    pending_s: np.ndarray
    done_s: np.ndarray

    def rows(self) -> ChoiceCosts:
        """What the blocks of every placement cost: arrays [L, P]."""
        return ChoiceCosts(*(column[self.kind_of, self.choices].T for column in self.columns))


class LinkRates(NamedTuple):
    """How the link and the CPU slow each other down.

    h2d_gain, d2h_gain: what a direction gains over a busy link while the other is idle. h2d_beside, d2h_beside: of the
    rate of a busy link, while the CPU works. h2d_share, d2h_share: that copies take of the CPU's speed.
    """

    h2d_gain: float
    d2h_gain: float
    h2d_beside: float
    d2h_beside: float
    h2d_share: float
    d2h_share: float

    @staticmethod
    def of(profile: HardwareProfile, state_dtype: str) -> LinkRates:
        """Those of a machine, where the CPU updates states of a dtype."""
        link, host_rate = profile.link, profile.host_rate(state_dtype)
        h2d_beside = link.h2d_beside_cpu_bytes_per_s / link.h2d_duplex_bytes_per_s
        d2h_beside = link.d2h_beside_cpu_bytes_per_s / link.d2h_duplex_bytes_per_s
        return LinkRates(
            link.h2d_bytes_per_s / link.h2d_duplex_bytes_per_s - 1,
            link.d2h_bytes_per_s / link.d2h_duplex_bytes_per_s - 1,
            h2d_beside,
            d2h_beside,
            min(1.0, h2d_beside) * link.h2d_duplex_bytes_per_s / host_rate,
            min(1.0, d2h_beside) * link.d2h_duplex_bytes_per_s / host_rate,
        )
