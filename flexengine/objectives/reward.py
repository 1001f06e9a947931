"""Reward models: the chosen answer is to have a higher score than the rejected one, as Bradley and Terry have it."""

from __future__ import annotations

from dataclasses import dataclass

from flexengine.objectives.objective import Judged, Objective, Records, log_sigmoid


@dataclass(frozen=True)
class Reward(Objective):
    """-log sigmoid(score of chosen - score of rejected - margin), with scores of a head with one output.

    margin: that of each pair, 0 where its record has none. center_coefficient: weight of the mean square of the sum of
    both scores, which are otherwise free to move together.
    Source: Ouyang et al. 2022, "Training language models to follow instructions with human feedback", equation 1;
    margins as in Touvron et al. 2023, "Llama 2", equation 2; centers as in Eisenstein et al. 2023, "Helping or
    Herding?", equation 9, and TRL.
    """

    center_coefficient: float = 0.0
    records = "ranked"
    scores = True

    def judge(self, records: Records) -> Judged:
        """See `Objective.judge`."""
        chosen, rejected = records.first.log_probs, records.second.log_probs
        ahead = chosen - rejected if records.margins is None else chosen - rejected - records.margins
        loss = -log_sigmoid(ahead).mean() + self.center_coefficient * ((chosen + rejected) ** 2).mean()
        return Judged(loss, chosen, rejected)
