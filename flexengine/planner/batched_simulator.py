"""A quick estimate of rounds, many placements at a time: the lowered program's main waits, layer by layer and chunk by
chunk, with one number per placement in every array.

It knows weight, gradient and offload slots, the ring of hidden states, shared edge slots, the host that issues commands
one after another, and that a direction of the link is slower while the other is busy (as it was one layer ago).
The simulator on the real program has the last word.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flexengine.planner.round_costs import Batch, ChoiceCosts, EdgeCosts, LinkRates, RoundCosts
from flexengine.schedule.simulator import LEAST_CPU_SHARE


class _Pick(NamedTuple):
    """Which placements take a ring's next slot, as what `take` and `give` add to its indices."""

    take: np.ndarray
    give: np.ndarray


class _Ring:
    """Slots handed out in turn, per placement: when the next is free, and that one is in use until then.

    Slot k of placement p lies at k * P + p of a flat array. Behind the slots lie as many zeros, which the placements
    read that do not take one, and as many numbers that nobody reads, where they write; from there no index advances.
    """

    def __init__(self, counts: np.ndarray) -> None:
        stride = len(counts)
        self.size = int(counts.max()) * stride
        self.free = np.zeros(3 * self.size)
        slots = np.arange(self.size)
        end = np.tile(counts * stride, int(counts.max()))
        following = np.where(slots + stride < end, slots + stride, slots + stride - end)
        self.after = np.concatenate((following, slots, slots))
        self.taken, self.given = np.arange(stride), np.arange(stride)

    def pick(self, mask: np.ndarray) -> _Pick:
        """The placements of a mask."""
        outside = ~mask * self.size
        return _Pick(outside, 2 * outside)

    def take(self, pick: _Pick) -> np.ndarray:
        """When the next slot is free, 0 outside the pick."""
        index = self.taken + pick.take
        self.taken = self.after.take(index)
        return self.free.take(index)

    def give(self, until: np.ndarray, pick: _Pick) -> None:
        """The slot taken first of those not given back is in use until then."""
        index = self.given + pick.give
        self.given = self.after.take(index)
        self.free.put(index, until)


class _Layer:
    """One layer's rows [P], its compute by chunk, which of its copies exist, and so which slots it takes."""

    def __init__(self, number: int, simulator: BatchedSimulator) -> None:
        costs, rounds = ChoiceCosts(*(column[number] for column in simulator.rows)), simulator.costs
        self.number, self.costs, self.in_parts = number, costs, bool(rounds.in_parts[number])
        self.forward_s, self.backward_s = rounds.forward_s[number].tolist(), rounds.backward_s[number].tolist()
        self.finish_s = float(rounds.finish_s[number])
        self.weights, self.grads = costs.weights_h2d_s > 0, costs.grad_d2h_s > 0
        self.inputs, saves = costs.input_d2h_s > 0, costs.save_d2h_s > 0
        self.saves, self.any_input, self.any_save = saves, bool(self.inputs.any()), bool(saves.any())
        self.weight_slots, self.grad_slots = simulator.weights.pick(self.weights), simulator.grads.pick(self.grads)
        self.hidden_slots, self.save_slots = simulator.hidden.pick(self.inputs), simulator.saves.pick(saves)


class BatchedSimulator:
    """The clocks of one batch of rounds: three streams, the host, and the slots between them."""

    def __init__(self, round_costs: RoundCosts, batch: Batch, link: LinkRates) -> None:
        self.costs, self.batch, self.link, self.rows = round_costs, batch, link, batch.rows()
        size = len(batch.share_edge_slots)
        self.compute, self.h2d, self.d2h, self.host = (np.zeros(size) for _ in range(4))
        self.h2d_busy, self.d2h_busy = np.zeros(size), np.zeros(size)
        self.h2d_rate, self.d2h_rate = np.ones(size), np.ones(size)  # of that of a busy link
        self.since = np.zeros(size)
        self.cpu, self.cpu_share = -batch.done_s, np.ones(size)
        self.left = batch.pending_s.sum(axis=0)
        self.any_pending = self.any_pending_left = bool(self.left.any())
        self.any_updating = bool(batch.updating.any())
        self.work, self.worked_until, self.worked = np.zeros(batch.pending_s.shape), np.zeros(size), np.zeros(size)
        self.chunks = round_costs.forward_s.shape[1]
        self.weights, self.grads, self.saves = (_Ring(count) for count in batch.slots)
        self.hidden = _Ring(np.full(size, self.chunks + 2))
        self.everyone = self.hidden.pick(np.ones(size, dtype=bool))
        self.layers = [_Layer(i, self) for i in range(len(self.rows.recompute_s))]
        self.offloaded: list[tuple[list[np.ndarray], list[np.ndarray]]] = []
        self.updates_on_gpu = self.any_updating and bool(self.rows.update_s.any())
        self.waiting: ChoiceCosts | None = None  # of the layer whose update by the GPU is to come

    def run(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds [P] of forward, head and backward, and by block [L, P] of the CPU's updates that are left then."""
        embedding, head, share = self.batch.embedding, self.batch.head, self.batch.share_edge_slots
        if self.any_pending:
            self._measure_cpu(np.full_like(self.since, 1e-3), self.h2d_busy, self.d2h_busy)
        self._fetch(embedding.weights_h2d_s, 0.0)
        self.host += embedding.forward_issue_s
        self.compute = np.maximum(self.h2d, self.host) + embedding.forward_s
        floor = np.where(share & (embedding.weights_h2d_s > 0), self.compute, 0.0)
        arrived = [self.compute] * self.chunks
        for _ in arrived:
            self.hidden.take(self.layers[0].hidden_slots)
        for i, layer in enumerate(self.layers):
            following = self.layers[i + 1].hidden_slots if i + 1 < len(self.layers) else self.everyone
            if self.any_pending:
                pending = self.batch.pending_s[i]
                self.cpu = self.cpu + pending / self.cpu_share
                self.left = self.left - pending
                floor = np.where(pending > 0, np.maximum(floor, self.cpu), floor)
            self._forward(layer, floor, arrived, following)
            self._measure_link()
        self._edge_backward(
            head, np.where(self.batch.refilled, self.compute, 0.0), head.weights_h2d_s, gives_hidden=True
        )
        left = np.where(self.batch.grads_share & (head.grad_d2h_s > 0), self.d2h, 0.0)
        floor = np.where(share, np.maximum(self.compute, left), 0.0)
        held = np.where(share, 0, self.batch.slots[0])  # the last blocks' weights are still there
        for i in reversed(range(self.costs.forward_only, len(self.layers))):
            self._backward(self.layers[i], floor, held, self.offloaded[i])
            self._measure_link()
        if embedding.backward_s:
            last = np.where(share & self.layers[0].grads, self.d2h, 0.0)  # the first block's gradient must have left
            self.compute = np.maximum(self.compute, last)
            self._edge_backward(embedding, self.compute, np.zeros_like(last), gives_hidden=False)
        self._update_on_gpu()
        end = np.maximum(np.maximum(self.compute, self.h2d), self.d2h)
        if self.any_updating:
            self._update(0, end)
        return end, self.work

    # -- the link ----------------------------------------------------------------------------------------------------

    def _measure_link(self) -> None:
        """Mean rate of each direction in the next layer, by how busy the other was in this one."""
        elapsed = np.maximum(self.compute - self.since, 1e-30)
        h2d_busy, d2h_busy = np.minimum(1.0, self.h2d_busy / elapsed), np.minimum(1.0, self.d2h_busy / elapsed)
        self.h2d_rate = 1 + self.link.h2d_gain * (1 - d2h_busy)
        self.d2h_rate = 1 + self.link.d2h_gain * (1 - h2d_busy)
        if self.any_updating or self.any_pending_left:
            self._measure_cpu(elapsed, h2d_busy, d2h_busy)
        self.h2d_busy, self.d2h_busy, self.since = np.zeros_like(elapsed), np.zeros_like(elapsed), self.compute

    def _measure_cpu(self, elapsed: np.ndarray, h2d_busy: np.ndarray, d2h_busy: np.ndarray) -> None:
        """Slows the link down where the CPU was at work in this layer, and the CPU where the link was."""
        ends = self.cpu + self.left / self.cpu_share - self.since
        if not self.any_updating and not (ends > 0).any():
            self.any_pending_left = False
            return
        busy = np.clip(np.maximum(ends, self.worked / self.cpu_share) / elapsed, 0.0, 1.0)
        self.worked = np.zeros_like(elapsed)
        self.h2d_rate -= busy * np.maximum(self.h2d_rate - self.link.h2d_beside, 0.0)
        self.d2h_rate -= busy * np.maximum(self.d2h_rate - self.link.d2h_beside, 0.0)
        self.cpu_share = np.maximum(
            LEAST_CPU_SHARE, 1 - h2d_busy * self.link.h2d_share - d2h_busy * self.link.d2h_share
        )

    def _update(self, first: int, until: np.ndarray) -> None:
        """Lets the CPU work on the gradients that have arrived, of blocks from `first` on, the lowest block first."""
        able = np.maximum(until - self.worked_until, 0.0) * self.cpu_share
        self.worked_until = np.maximum(self.worked_until, until)
        waiting = self.work[first:]
        if len(waiting):
            done = np.clip(able - (np.cumsum(waiting, axis=0) - waiting), 0.0, waiting)
            waiting -= done
            self.worked += done.sum(axis=0)

    def _fetch(self, seconds: np.ndarray, earliest: np.ndarray | float) -> np.ndarray:
        """A copy to the device, where it takes any time; when it has arrived (0 where there is none)."""
        mask = seconds > 0
        took = seconds / self.h2d_rate
        end = np.maximum(np.maximum(self.h2d, earliest), self.host) + took
        self.h2d = np.where(mask, end, self.h2d)
        self.h2d_busy += took
        return np.where(mask, end, 0.0)

    def _send(self, seconds: np.ndarray, earliest: np.ndarray, mask: np.ndarray) -> None:
        """A copy to the host, where the mask says so."""
        took = seconds / self.d2h_rate
        end = np.maximum(np.maximum(self.d2h, earliest), self.host) + took
        self.d2h = np.where(mask, end, self.d2h)
        self.d2h_busy += took

    # -- layers ------------------------------------------------------------------------------------------------------

    def _fetch_weights(self, layer: _Layer, mask: np.ndarray, slots: _Pick, floor: np.ndarray) -> np.ndarray:
        """When the weights are there, 0 where they were."""
        earliest = np.maximum(self.weights.take(slots), floor)
        self.host = self.host + np.where(mask, layer.costs.fetch_issue_s, 0.0)
        return self._fetch(np.where(mask, layer.costs.weights_h2d_s, 0.0), earliest)

    def _forward(self, layer: _Layer, floor: np.ndarray, arrived: list[np.ndarray], following: _Pick) -> None:
        """All chunks; `arrived` says when each chunk's input was there and is replaced by the output's."""
        costs = layer.costs
        self.compute = np.maximum(self.compute, self._fetch_weights(layer, layer.weights, layer.weight_slots, floor))
        inputs_sent, saves_sent = [], []
        for c, seconds in enumerate(layer.forward_s):
            self.host = self.host + costs.forward_issue_s
            start = np.maximum(self.compute, self.host)
            if layer.any_save:
                start = np.maximum(start, self.saves.take(layer.save_slots))
            start = np.maximum(start, self.hidden.take(following))
            self.compute = start + seconds
            if layer.any_input:
                self._send(costs.input_d2h_s, arrived[c], layer.inputs)
                inputs_sent.append(self.d2h)
                # the slot is read by this chunk's forward as well
                self.hidden.give(np.maximum(self.d2h, self.compute), layer.hidden_slots)
            if layer.any_save:
                self._send(costs.save_d2h_s, self.compute, layer.saves)
                saves_sent.append(self.d2h)
                self.saves.give(self.d2h, layer.save_slots)
            arrived[c] = self.compute
        self.weights.give(self.compute, layer.weight_slots)
        self.offloaded.append((inputs_sent, saves_sent))

    def _backward(
        self, layer: _Layer, floor: np.ndarray, held: np.ndarray, sent: tuple[list[np.ndarray], list[np.ndarray]]
    ) -> None:
        still = layer.weights & (held > 0)
        held -= still
        self.weights.take(self.weights.pick(still))
        fetched = layer.weights & ~still
        ready = self._fetch_weights(layer, fetched, self.weights.pick(fetched), floor)
        self._update_on_gpu()
        for _ in range(self.costs.refill + layer.in_parts):
            for c in range(self.chunks):
                ready = self._fetch_saved(layer, c, sent, ready, 0.0)
        for c in reversed(range(self.chunks)):
            self.host = self.host + layer.costs.backward_issue_s
            ready = self._fetch_saved(layer, c, sent, ready, layer.backward_s[c] + layer.costs.recompute_s)
        self.weights.give(self.compute, layer.weight_slots)
        free = self.grads.take(layer.grad_slots)
        again = np.where(self.batch.accumulating, layer.costs.grad_h2d_s, 0.0)
        self.host = self.host + layer.costs.finish_issue_s
        self._finish(layer.grads, free, again, layer.finish_s, layer.costs.grad_d2h_s)
        self.grads.give(self.d2h, layer.grad_slots)
        if self.any_updating:
            self._update(layer.number + 1, self.d2h)
            self.work[layer.number] = self.batch.updating * layer.costs.cpu_update_s
            self.waiting = layer.costs if self.updates_on_gpu else None

    def _update_on_gpu(self) -> None:
        """Update by the GPU the layer before: its tiles come behind this one's weights."""
        if self.waiting is not None:
            self.host = self.host + self.batch.updating * self.waiting.update_issue_s
            self._update_group_on_gpu(self.waiting.update_h2d_s, self.waiting.update_s, self.waiting.update_d2h_s)
            self.waiting = None

    def _update_group_on_gpu(self, h2d_s: np.ndarray, update_s: np.ndarray, d2h_s: np.ndarray) -> None:
        """Fetch, update and send back what a group needs, where its placement updates."""
        updating = self.batch.updating
        arrived = self._fetch(updating * h2d_s, 0.0)
        self.compute = np.maximum(self.compute, arrived) + updating * update_s
        self._send(updating * d2h_s, self.compute, updating & (d2h_s > 0))

    def _fetch_saved(
        self,
        layer: _Layer,
        c: int,
        sent: tuple[list[np.ndarray], list[np.ndarray]],
        ready: np.ndarray,
        seconds: np.ndarray | float,
    ) -> np.ndarray:
        """Bring back what chunk c kept, then compute for `seconds`; returns since when all operands are there."""
        costs = layer.costs
        if layer.any_input:
            earliest = np.maximum(self.hidden.take(layer.hidden_slots), sent[0][c])
            ready = np.maximum(ready, self._fetch(costs.input_h2d_s, earliest))
        if layer.any_save:
            earliest = np.maximum(self.saves.take(layer.save_slots), sent[1][c])
            ready = np.maximum(ready, self._fetch(costs.save_h2d_s, earliest))
        self.compute = np.maximum(np.maximum(self.compute, ready), self.host) + seconds
        if layer.any_input:
            self.hidden.give(self.compute, layer.hidden_slots)
        if layer.any_save:
            self.saves.give(self.compute, layer.save_slots)
        return ready

    def _finish(
        self, mask: np.ndarray, free: np.ndarray, again_s: np.ndarray, finish_s: float, send_s: np.ndarray
    ) -> None:
        """Round the gradient, adding what earlier rounds left, and send it home where the mask says so."""
        free = np.maximum(free, self._fetch(again_s, free))
        self.compute = np.maximum(np.maximum(self.compute, free), self.host) + finish_s
        self._send(send_s, self.compute, mask)

    def _edge_backward(self, edge: EdgeCosts, floor: np.ndarray, weights_s: np.ndarray, gives_hidden: bool) -> None:
        """Backward of embedding or head; the head frees the hidden states that it reads, chunk by chunk."""
        self.compute = np.maximum(self.compute, self._fetch(weights_s, floor))
        self.host = self.host + edge.backward_issue_s
        start = np.maximum(self.compute, self.host)
        for c in range(self.chunks if gives_hidden else 0):
            self.hidden.give(start + edge.backward_s * (c + 1) / self.chunks, self.everyone)
        self.compute = start + edge.backward_s
        again = np.where(self.batch.accumulating, edge.grad_h2d_s, edge.again_h2d_s)
        free = np.where(self.batch.grads_over_weights, self.compute, 0.0)  # which compute read until now
        self._finish(edge.grad_d2h_s > 0, free, again, edge.finish_s, edge.grad_d2h_s)
        if self.updates_on_gpu:
            self._update_group_on_gpu(edge.update_h2d_s, edge.update_s, edge.update_d2h_s)
