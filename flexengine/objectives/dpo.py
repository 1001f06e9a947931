"""DPO: the chosen answer is to gain on the rejected one, measured from the reference."""

from __future__ import annotations

from dataclasses import dataclass

from flexengine.objectives.objective import Judged, Objective, Records, log_sigmoid


@dataclass(frozen=True)
class DPO(Objective):
    """-log sigmoid(beta * (ratio of chosen - ratio of rejected)).

    label_smoothing: the share of pairs that are taken to be the wrong way round, below 0.5.
    Source: Rafailov et al. 2023, "Direct Preference Optimization", equation 7.
    """

    label_smoothing: float = 0.0
    needs_reference = True

    def judge(self, records: Records) -> Judged:
        """See `Objective.judge`."""
        chosen, rejected = self.beta * records.first.ratios, self.beta * records.second.ratios
        return Judged(-log_sigmoid(chosen - rejected, self.label_smoothing).mean(), chosen, rejected)
