"""KTO: learns from single answers that are said to be wanted or unwanted."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexengine.objectives.objective import Judged, Objective, Records


@dataclass(frozen=True)
class KTO(Objective):
    """weight * (1 - sigmoid(beta * (ratio - z))) of a wanted answer, of z - ratio for an unwanted one.

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
