"""Losses of preferences: functions of the log-probabilities, or the scores, of answers that are compared or rated."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexengine.objectives.objective import Judged, Objective, Records, log_sigmoid


@dataclass(frozen=True)
class DPO(Objective):
    """The chosen answer is to gain on the rejected one, measured from the reference.

    -log sigmoid(beta * (ratio of chosen - ratio of rejected)).

    label_smoothing: the share of pairs that are taken to be the wrong way round, below 0.5.
    Source: Rafailov et al. 2023, "Direct Preference Optimization", equation 7.
    """

    label_smoothing: float = 0.0
    needs_reference = True

    def judge(self, records: Records) -> Judged:
        """See `Objective.judge`."""
        chosen, rejected = self.beta * records.first.ratios, self.beta * records.second.ratios
        return Judged(-log_sigmoid(chosen - rejected, self.label_smoothing).mean(), chosen, rejected)


@dataclass(frozen=True)
class IPO(Objective):
    """The chosen answer is to be ahead of the rejected one by a fixed margin, and no further.

    (mean ratio of chosen - mean ratio of rejected - 1 / (2 * beta)) ** 2, with ratios per token.

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


@dataclass(frozen=True)
class KTO(Objective):
    """Learns from single answers that are said to be wanted or unwanted.

    weight * (1 - sigmoid(beta * (ratio - z))) of a wanted answer, of z - ratio for an unwanted one.

    z, which has no gradient, is the mean ratio of the batch's second answers: those of other records after the same
    prompts. It is at least 0, and estimates how far the model has moved from the reference. desirable_weight,
    undesirable_weight: factors on the losses of wanted and unwanted answers.
    Source: Ethayarajh et al. 2024, "KTO: Model Alignment as Prospect Theoretic Optimization", equations 7 and 8.
    """

    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    records = "rated"
    needs_reference = True
    trains_second = False

    def judge(self, records: Records) -> Judged:
        """See `Objective.judge`."""
        ratios, wanted = records.first.ratios, records.wanted
        moved = records.second.ratios.mean().clamp(min=0).detach()
        gain = torch.where(wanted, ratios - moved, moved - ratios)
        weight = self.desirable_weight * wanted.double() + self.undesirable_weight * (~wanted).double()
        loss = (weight * (1 - torch.sigmoid(self.beta * gain))).mean()
        return Judged(loss, self.beta * ratios[wanted], self.beta * ratios[~wanted])


@dataclass(frozen=True)
class ORPO(Objective):
    """Learns the chosen answer as fine-tuning does, and raises its odds over those of the rejected one.

    Mean loss of the chosen text - beta * log sigmoid(log odds of chosen - log odds of rejected).

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


@dataclass(frozen=True)
class SimPO(Objective):
    """The chosen answer is to be likelier per token than the rejected one, by a margin, without a reference.

    -log sigmoid(beta * (mean log-probability of chosen - of rejected) - gamma).

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


@dataclass(frozen=True)
class Reward(Objective):
    """The chosen answer is to have a higher score than the rejected one, as Bradley and Terry have it.

    -log sigmoid(score of chosen - score of rejected - margin), with scores of a head with one output.

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


def _log_complement(log_p: Tensor) -> Tensor:
    """log(1 - p) of log p < 0, accurate at both ends."""
    return torch.log(-torch.expm1(log_p))
