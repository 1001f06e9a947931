"""ORPO: learns the chosen answer as fine-tuning does, and raises its odds over those of the rejected one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexengine.objectives.objective import Judged, Objective, Records, log_sigmoid


@dataclass(frozen=True)
class ORPO(Objective):
    """Mean loss of the chosen text - beta * log sigmoid(log odds of chosen - log odds of rejected).

    odds(p) = p / (1 - p), with p the geometric mean of an answer's probabilities of tokens. The first loss is over the
    tokens of prompt and answer, as in the authors' code and TRL.
    Source: Hong et al. 2024, "ORPO: Monolithic Preference Optimization without Reference Model", equations 6 and 7.
    """

    trains_prompts = True

    def judge(self, records: Records) -> Judged:
        """See `Objective.judge`."""
        first, second = records.first, records.second
        text_loss = -first.text_log_probs.sum() / first.num_text_tokens.sum()
        log_odds = first.means - second.means - _log_complement(first.means) + _log_complement(second.means)
        loss = text_loss - self.beta * log_sigmoid(log_odds).mean()
        return Judged(loss, self.beta * first.means, self.beta * second.means)


def _log_complement(log_p: Tensor) -> Tensor:
    """log(1 - p) of log p < 0, accurate at both ends."""
    return torch.log(-torch.expm1(log_p))
