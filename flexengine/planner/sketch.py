"""A quick estimate of a round: the lowered program's main waits in one pass over layers and chunks.

About a hundred times quicker than lowering and simulating, so that the search can look at many placements; the
simulator on the real program has the last word. It knows weight, gradient and offload slots, the ring of hidden
states and shared edge slots, and prices both directions of the link as if both were busy.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple


class RowCosts(NamedTuple):
    """One (keep option, level) of a block: seconds per chunk and per layer on each stream.

    recompute_s, input_d2h_s, save_d2h_s, input_h2d_s, save_h2d_s: per chunk; weights_h2d_s, grad_h2d_s, grad_d2h_s: per
    layer, 0 where resident.
    """

    recompute_s: float
    input_d2h_s: float
    save_d2h_s: float
    input_h2d_s: float
    save_h2d_s: float
    weights_h2d_s: float
    grad_h2d_s: float
    grad_d2h_s: float


class EdgeCosts(NamedTuple):
    """Embedding or head: seconds of a round; zero copies where resident."""

    forward_s: float
    backward_s: float
    finish_s: float
    weights_h2d_s: float
    grad_h2d_s: float
    grad_d2h_s: float


@dataclass(frozen=True)
class BlockCosts:
    """Compute of a block per chunk (forward, backward without recomputation) and of rounding its gradient.

    refill: sliced sequences fetch every chunk's kept tensors once more to rebuild the key/value window.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    finish_s: float
    refill: bool


class _Ring:
    """Slots handed out in turn; each remembers when it is free again."""

    def __init__(self, count: int) -> None:
        self.free: deque[float] = deque([0.0] * count)

    def take(self) -> float:
        """When the next slot is free."""
        return self.free.popleft()

    def give(self, free_s: float) -> None:
        """It is in use until then."""
        self.free.append(free_s)


class Sketch:
    """The clock of one round: three streams and the slots between them. `run` returns the round's seconds."""

    def __init__(
        self,
        block: BlockCosts,
        rows: list[RowCosts],
        edges: tuple[EdgeCosts, EdgeCosts],
        slots: tuple[int, int, int],
        share_edge_slots: bool,
        accumulating: bool,
    ) -> None:
        self.block, self.rows, self.edges = block, rows, edges
        self.share, self.accumulating = share_edge_slots, accumulating
        self.weights, self.grads, self.saves = _Ring(slots[0]), _Ring(slots[1]), _Ring(slots[2])
        self.hidden = _Ring(len(block.forward_s) + 2)
        self.compute = self.h2d = self.d2h = 0.0
        self.held = 0

    def run(self) -> float:
        """Forward, head, backward."""
        embed, head = self.edges
        self.h2d = embed.weights_h2d_s
        self.compute = self.h2d + embed.forward_s
        floor = self.compute if self.share and embed.weights_h2d_s else 0.0
        for row in self.rows:
            self._forward(row, floor)
        self._edge_backward(head, head.weights_h2d_s)
        floor = max(self.compute, self.d2h if head.grad_d2h_s else 0.0) if self.share else 0.0
        self.held = 0 if self.share else len(self.weights.free)  # the last blocks' weights are still there
        for row in reversed(self.rows):
            self._backward(row, floor)
        if self.share:
            self.compute = max(self.compute, self.d2h if self.rows[0].grad_d2h_s else 0.0)
        self._edge_backward(embed, 0.0)
        return max(self.compute, self.h2d, self.d2h)

    def _fetch_weights(self, row: RowCosts, floor: float) -> float:
        """When the weights are there."""
        if not row.weights_h2d_s:
            return 0.0
        self.h2d = max(self.h2d, self.weights.take(), floor) + row.weights_h2d_s
        return self.h2d

    def _forward(self, row: RowCosts, floor: float) -> None:
        ready = self._fetch_weights(row, floor)
        for seconds in self.block.forward_s:
            start = max(self.compute, ready)
            if row.save_d2h_s:
                start = max(start, self.saves.take())
            if row.input_d2h_s:
                start = max(start, self.hidden.take())
            self.compute = start + seconds
            if row.input_d2h_s:
                self.d2h = max(self.d2h, self.compute) + row.input_d2h_s
                self.hidden.give(self.d2h)
            if row.save_d2h_s:
                self.d2h = max(self.d2h, self.compute) + row.save_d2h_s
                self.saves.give(self.d2h)
        if row.weights_h2d_s:
            self.weights.give(self.compute)

    def _backward(self, row: RowCosts, floor: float) -> None:
        ready = 0.0
        if row.weights_h2d_s and self.held:
            self.held -= 1
            self.weights.take()
        else:
            ready = self._fetch_weights(row, floor)
        if self.block.refill:
            for _ in self.block.backward_s:
                self._fetch_saved(row, ready, 0.0)
        for seconds in reversed(self.block.backward_s):
            self._fetch_saved(row, ready, seconds + row.recompute_s)
        if row.weights_h2d_s:
            self.weights.give(self.compute)
        self._finish(row, self.block.finish_s)

    def _fetch_saved(self, row: RowCosts, ready: float, seconds: float) -> None:
        """Bring back what one chunk kept, then compute for `seconds`."""
        if row.input_h2d_s:
            self.h2d = max(self.h2d, self.hidden.take()) + row.input_h2d_s
            ready = max(ready, self.h2d)
        if row.save_h2d_s:
            self.h2d = max(self.h2d, self.saves.take()) + row.save_h2d_s
            ready = max(ready, self.h2d)
        self.compute = max(self.compute, ready) + seconds
        if row.input_h2d_s:
            self.hidden.give(self.compute)
        if row.save_h2d_s:
            self.saves.give(self.compute)

    def _finish(self, row: RowCosts | EdgeCosts, finish_s: float, ring: _Ring | None = None) -> None:
        """Round the gradient, adding what earlier rounds left, and send it home."""
        ring = self.grads if ring is None else ring
        if not row.grad_d2h_s:
            self.compute += finish_s
            return
        free = ring.take()
        if self.accumulating:
            self.h2d = free = max(self.h2d, free) + row.grad_h2d_s
        self.compute = max(self.compute, free) + finish_s
        self.d2h = max(self.d2h, self.compute) + row.grad_d2h_s
        ring.give(self.d2h)

    def _edge_backward(self, edge: EdgeCosts, weights_s: float) -> None:
        if weights_s:
            self.h2d = max(self.h2d, self.compute if self.share else 0.0) + weights_s
            self.compute = max(self.compute, self.h2d)
        self.compute += edge.backward_s
        self._finish(edge, edge.finish_s, _Ring(1))
