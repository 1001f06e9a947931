"""The loss that balances experts: a token's probability for an expert costs more, the more rows the expert got.

Source: Fedus et al. 2021, "Switch Transformers", section 2.2, for K experts of each token and all layers at once, as
transformers computes it: coefficient * E * sum over experts of f_e * P_e, with f_e the rows that expert e was given,
and P_e the sum of its probabilities, each over all layers and tokens and divided by their number N. What rows were
given has no gradient; that of a probability is coefficient * E * f_e / N, the same for all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Balancing(NamedTuple):
    """How a model balances: the loss's coefficient, the number of experts, and how many layers have a router."""

    coefficient: float
    num_experts: int
    num_routers: int


@dataclass
class ExpertBalance:
    """Adds up each expert's rows and probabilities [E], in float64, over all layers and tokens of a batch.

    factor: of the loss as a sum over target tokens, factor * sum of rows * probabilities. collecting: forward adds to
    both; else they are known from an earlier forward of the whole batch. grad_factor: as of a chunk.
    """

    rows: Tensor
    probabilities: Tensor
    factor: float
    collecting: bool = True
    grad_factor: float = 1.0

    @staticmethod
    def of_batch(balancing: Balancing, num_tokens: int, loss_weight: float, device: torch.device) -> ExpertBalance:
        """Begin a batch of `num_tokens` tokens. loss_weight: what the sum of its losses is divided by."""
        zeros = torch.zeros(2, balancing.num_experts, dtype=torch.float64, device=device)
        per_token = balancing.coefficient * balancing.num_experts / (balancing.num_routers * num_tokens) ** 2
        return ExpertBalance(zeros[0], zeros[1], per_token * loss_weight)

    def collect(self, rows: Tensor, probabilities: Tensor) -> None:
        """Add a chunk's rows of each expert [E] and its probabilities [T, E]."""
        self.rows.add_(rows)
        self.probabilities.add_(probabilities.sum(0, dtype=torch.float64))

    def gradient(self) -> Tensor:
        """Gradient [E] of every token's probabilities, once all rows are known."""
        return self.factor * self.grad_factor * self.rows

    def loss(self) -> Tensor:
        """The loss times target tokens [], in float64, as sums over tokens are."""
        return self.factor * (self.rows @ self.probabilities)
