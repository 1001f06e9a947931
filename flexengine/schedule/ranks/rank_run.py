"""A run of a program on a rank, among those of all ranks that are checked or simulated together."""

from __future__ import annotations

from typing import NamedTuple

from flexengine.schedule.commands import Program


class RankRun(NamedTuple):
    """One run of a program on a rank.

    step: from 0. number: of the turn in the step; of its last one in an update, and in what nodes exchange before it.
    rounds: of the node's in the step, those that ranks run together in that turn; of an update all of them. drops:
    what it updates speculatively is thrown away, and may read what others update again. exchanges: it is what nodes
    exchange. gathers: it is what they give each other of weights after an update.
    """

    program: Program
    step: int
    number: int
    updates: bool
    rounds: range = range(0)
    drops: bool = False
    exchanges: bool = False
    gathers: bool = False

    @property
    def is_of_nodes(self) -> bool:
        """Whether it moves bytes between nodes, on a thread beside the rounds."""
        return self.exchanges or self.gathers
