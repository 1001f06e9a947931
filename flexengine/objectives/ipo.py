"""IPO: the chosen answer is to be ahead of the rejected one by a fixed margin, and no further."""

from __future__ import annotations

from dataclasses import dataclass

from flexengine.objectives.objective import Judged, Objective, Records


@dataclass(frozen=True)
class IPO(Objective):
    """(mean ratio of chosen - mean ratio of rejected - 1 / (2 * beta)) ** 2, with ratios per token.

    Source: Azar et al. 2023, "A General Theoretical Paradigm to Understand Learning from Human Preferences", equation
    17, with the ratios divided by the answers' lengths, as its authors and TRL do.
    """

    needs_reference = True

    def judge(self, records: Records) -> Judged:
        """See `Objective.judge`."""
        first, second = records.first, records.second
        ahead = first.ratios / first.num_tokens - second.ratios / second.num_tokens
        loss = ((ahead - 1 / (2 * self.beta)) ** 2).mean()
        return Judged(loss, self.beta * first.ratios, self.beta * second.ratios)
