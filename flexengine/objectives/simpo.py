"""SimPO: the chosen answer is to be likelier per token than the rejected one, by a margin, without a reference."""

from __future__ import annotations

from dataclasses import dataclass

from flexengine.objectives.objective import Judged, Objective, Records, log_sigmoid


@dataclass(frozen=True)
class SimPO(Objective):
    """-log sigmoid(beta * (mean log-probability of chosen - of rejected) - gamma).

    gamma: the margin. label_smoothing: the share of pairs that are taken to be the wrong way round, below 0.5.
    Source: Meng et al. 2024, "SimPO: Simple Preference Optimization with a Reference-Free Reward", equation 6.
    """

    beta: float = 2.0
    gamma: float = 1.0
    label_smoothing: float = 0.0

    def judge(self, records: Records) -> Judged:
        """See `Objective.judge`."""
        chosen, rejected = self.beta * records.first.means, self.beta * records.second.means
        return Judged(-log_sigmoid(chosen - rejected - self.gamma, self.label_smoothing).mean(), chosen, rejected)
