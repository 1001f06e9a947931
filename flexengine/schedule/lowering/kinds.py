"""What programs are asked for: the kind of a round, and the kind of an update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from flexengine.schedule.shares import ALONE, Share

RoundUpdates = Literal["none", "in_round", "speculative", "norm", "clipped"]
"""What is updated inside a round: nothing; all that need not wait, as nothing is clipped; what the plan says, into
second planes, before it is known whether that counts; nothing, as it runs for the norm of its gradients alone and
leaves none; or all that need not wait, with the factors that such a run has left."""
UpdateWay = Literal["after_norm", "in_round", "committed", "rolled_back"]
"""What the last round of a step has left to its update: all, as nothing could be updated before the norm was known; all
but what the CPU updates, as it did so in that round; the same of what it did speculatively and which counts; or all, as
that does not count."""


class Wave(NamedTuple):
    """One of `size` ranks that run `rounds` rounds together. last_before: the rank that ran the last round of the wave
    before in the step."""

    rank: int
    size: int
    rounds: int
    last_before: int = 0


class RoundKind(NamedTuple):
    """What a round does beside forward.

    train: it has a backward pass. first: no gradients are stored yet in this step. updates: it is the last round of the
    step unless they are none. wave: where ranks walk the layers together; None = each by itself, or
    in prices rank 0 of a full wave.
    """

    train: bool = True
    first: bool = True
    updates: RoundUpdates = "none"
    wave: Wave | None = None


EVALUATION = RoundKind(train=False)


class UpdateKind(NamedTuple):
    """What an optimizer step's own program does.

    share: what this one of several ranks updates. last: this rank ran the last round of the step, so that its sums of
    squares are those of all gradients. left: for prices, groups that the CPU has begun in the round before, with the
    share of their work that is left; it ends these first.
    """

    way: UpdateWay = "after_norm"
    share: Share = ALONE
    last: bool = True
    left: Mapping[int, float] | None = None

    @property
    def norm_known(self) -> bool:
        """Whether the round before has told the host the norm of all gradients, with which it ended."""
        return self.way in ("committed", "rolled_back")


WHOLE_UPDATE = UpdateKind()
