"""Several ranks on one host copy: the semaphores by which commands of ranks wait for each other.

Under relays rank `number % size` runs a round of a step. A stored gradient is relayed
through the node's memory: the rank of a round fetches what the round before left there, and leaves the sum. So it is
added up in the order of rounds, whatever the number of ranks. After the last round each rank updates its share.
"""

from __future__ import annotations

from itertools import accumulate

from flexengine.schedule.commands import Signal
from flexengine.schedule.layout import Layout


class Semaphores:
    """Numbers of those that ranks raise: pieces of gradients relayed, groups updated, the norm's squares stored.

    Of several nodes also groups that are stored, exchanged and gathered."""

    def __init__(self, layout: Layout) -> None:
        relays = layout.places.relays_pieces
        self._pieces = layout.pieces if relays else ((),) * len(layout.groups)
        self._first_pieces = [0, *accumulate(sum(map(len, parts)) for parts in self._pieces)]
        self._num_groups = len(layout.groups)
        self._num_speculated = 0 if relays else self._num_groups  # also of plans that do not speculate
        self._num_stored = self._num_groups if layout.plan.request.nodes > 1 and not relays else 0
        self._divided = frozenset(layout.node_states)  # groups of which nodes divide the optimizer states
        self._num_gathered = self._num_groups if self._divided else 0
        self._speculative = [home.speculative and layout.plan.speculates for home in layout.plan.groups]

    @property
    def count(self) -> int:
        """How many semaphores there are."""
        return self._first_exchanged + self._num_stored

    @property
    def _first_exchanged(self) -> int:
        return self._norm + 1 + self._num_speculated + self._num_stored + self._num_gathered

    @property
    def _norm(self) -> int:
        return self._first_pieces[-1] + self._num_groups

    def _of_piece(self, group: int, part: int, piece: int) -> int:
        return self._first_pieces[group] + sum(map(len, self._pieces[group][:part])) + piece

    def stored(self, group: int) -> Signal | None:
        """This rank has stored all that it stores of a group's gradient in this round; None where nobody waits for
        that, or for pieces alone."""
        return Signal(self._of_stored(group), "own", "round") if self._num_stored else None

    def stored_by_node(self, group: int) -> tuple[Signal, ...]:
        """The node's last round has stored a group's gradient."""
        if self._num_stored:
            return (Signal(self._of_stored(group), "all", "round"),)
        pieces = range(self._first_pieces[group], self._first_pieces[group + 1])
        return tuple(Signal(semaphore, "last", "round") for semaphore in pieces)

    def _of_stored(self, group: int) -> int:
        return self._norm + 1 + self._num_speculated + group

    def exchanged(self, group: int) -> Signal:
        """This rank's pieces of a speculative group hold the sums of all nodes."""
        return Signal(self._first_exchanged + group, "own", "update")

    def exchanged_by_node(self, group: int) -> tuple[Signal, ...]:
        """The node's gradient of a speculative group is the sum of all nodes; nothing for one node."""
        return (self.exchanged(group)._replace(of="all"),) if self._num_stored else ()

    def relayed(self, group: int, part: int, piece: int) -> Signal:
        """This rank has stored a piece of a part's gradient in this round."""
        return Signal(self._of_piece(group, part, piece), "own", "round")

    def relayed_before(self, group: int, part: int, piece: int) -> Signal:
        """The rank of the round before has stored a piece of a part's gradient."""
        return Signal(self._of_piece(group, part, piece), "previous", "round", lag=1)

    def updated(self, group: int) -> Signal:
        """This rank has updated its share of a group."""
        return Signal(self._first_pieces[-1] + group, "own", "update")

    def updated_before(self, group: int) -> tuple[Signal, ...]:
        """All ranks have updated a group in the step before, and have what other nodes updated of it."""
        if group in self._divided:
            return (self.gathered(group)._replace(of="all", lag=1),)
        semaphores = [
            self._first_pieces[-1] + group,
            *([self._of_speculation(group)] if self._speculative[group] else []),
        ]
        return tuple(Signal(semaphore, "all", "update", lag=1) for semaphore in semaphores)

    def updated_by_node(self, group: int) -> tuple[Signal, ...]:
        """All ranks of the node have updated their shares of a group in this step."""
        return (self.updated(group)._replace(of="all"),)

    def gathered(self, group: int) -> Signal:
        """This rank has brought what other nodes have updated of its pieces of a group."""
        return Signal(self._norm + 1 + self._num_speculated + self._num_stored + group, "own", "update")

    def speculated(self, group: int) -> Signal:
        """This rank has updated its part of a speculative group, before or after the norm was known.

        Who reads the weights also awaits `updated`, which tells whether what came before counts.
        """
        return Signal(self._of_speculation(group), "own", "update")

    def is_speculative(self, group: int) -> bool:
        """Whether a group has a semaphore of `speculated`."""
        return self._speculative[group]

    def _of_speculation(self, group: int) -> int:
        return self._norm + 1 + group

    def norm(self) -> Signal:
        """This rank, which ran the last round, has stored the sums of squares."""
        return Signal(self._norm, "own", "update")

    def norm_of_last(self) -> Signal:
        """The rank of the last round has stored the sums of squares."""
        return Signal(self._norm, "last", "update")
