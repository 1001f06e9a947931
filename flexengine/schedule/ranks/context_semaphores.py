"""Context transport: by which semaphores ranks tell each other what of a layer they have left, and taken."""

from __future__ import annotations

from typing import Literal, NamedTuple

from flexengine.schedule.commands import Signal
from flexengine.schedule.layout import Layout
from flexengine.schedule.ranks.semaphores import Semaphores


class HandedOn(NamedTuple):
    """Arguments of a copy to or from a place in the node's memory where a layer's neighbours find what they go on from.

    what: rows of its window, their gradients, or an accumulator. giver: the rank that leaves it.
    """

    what: Literal["window", "grads", "sums"]
    layer: int
    giver: int
    taken: bool


class ContextSemaphores(Semaphores):
    """Beside those of relays: what is left and taken of each layer in a round, and that a rank has begun the round."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._first = super().count
        self._kinds = 3 + 2 * max(len(layer.groups) for layer in layout.model.layers)
        self._num_layers = len(layout.model.layers)

    @property
    def count(self) -> int:
        return self._begun + 1

    @property
    def _begun(self) -> int:
        return self._first + self._num_layers * self._kinds

    def begun(self) -> Signal:
        """This rank has begun the round, and so ended the one before."""
        return Signal(self._begun, "own", "round")

    def all_have_begun(self) -> Signal:
        """All ranks have."""
        return self.begun()._replace(of="all")

    def handed(self, what: HandedOn, number: int = 0) -> Signal:
        """This rank has left, or taken, all of what it hands on of a layer. number: of the layer's accumulators."""
        kind = {"window": 0, "grads": 1 + what.taken, "sums": 3 + 2 * number + what.taken}[what.what]
        return Signal(self._first + what.layer * self._kinds + kind, "own", "round")

    def all_norms(self) -> tuple[Signal, ...]:
        """The first rank, on which all gradients end, has stored their sums of squares."""
        return (self.norm()._replace(of=0),)
