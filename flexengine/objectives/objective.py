"""What every objective of preferences is: a loss of the log-probabilities of answers, two of them to a record.

The loss is a function of sums over tokens, so its gradient is that of a weighted sum of the tokens' log-probabilities:
the head computes them in a first pass, and in a second one their derivatives are its weights (`two_passes.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

RecordKind = Literal["pair", "ranked", "rated"]
"""pair: a prompt with a chosen and a rejected answer. ranked: the same with a margin, where there is one. rated: an
answer, said to be wanted or not, and after the same prompt the answer of another record."""


class Answers(NamedTuple):
    """One answer of each of N records, as vectors [N] in float64.

    log_probs: log-probability of the answer after its prompt. num_tokens: tokens of the answer. text_log_probs,
    num_text_tokens: of prompt and answer together, where the objective trains prompts. reference: log_probs in the
    model before training, None for objectives without one.
    """

    log_probs: Tensor
    num_tokens: Tensor
    text_log_probs: Tensor
    num_text_tokens: Tensor
    reference: Tensor | None = None

    @property
    def ratios(self) -> Tensor:
        """How much likelier each answer is than in the reference, as a logarithm."""
        assert self.reference is not None, "an objective without a reference asks for none"
        return self.log_probs - self.reference

    @property
    def means(self) -> Tensor:
        """Log-probability of each answer per token."""
        return self.log_probs / self.num_tokens


class Records(NamedTuple):
    """A batch of N records. wanted: bool [N], whether `first` is a good answer; always so in pairs.

    margins: float64 [N], by how much it is to be ahead; None for 0.
    """

    first: Answers
    second: Answers
    wanted: Tensor
    margins: Tensor | None = None


class Judged(NamedTuple):
    """A batch under an objective: the mean loss [] over records, and the reward of wanted and unwanted answers."""

    loss: Tensor
    wanted_rewards: Tensor
    unwanted_rewards: Tensor


@dataclass(frozen=True)
class Objective(ABC):
    """A loss of preferences. beta: how strongly it pulls, with the meaning that the objective's source gives it."""

    beta: float = 0.1

    records: ClassVar[RecordKind] = "pair"
    needs_reference: ClassVar[bool] = False
    trains_prompts: ClassVar[bool] = False
    """Whether the prompts before first answers have a loss, too."""
    scores: ClassVar[bool] = False
    """Whether it is a loss of scores, which a head with one output gives and stand for log-probabilities."""
    trains_second: ClassVar[bool] = True
    """Whether second answers have gradients; if not, the second pass leaves them out."""

    @abstractmethod
    def judge(self, records: Records) -> Judged:
        """Compute the loss of a batch, differentiable by the log-probabilities."""


def log_sigmoid(x: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """log sigmoid(x), or its mean with log sigmoid(-x) where that share of the labels is taken to be wrong.

    Source: Mitchell, "A note on DPO with noisy preferences", 2023, equation 3.
    """
    right = torch.nn.functional.logsigmoid(x)
    if not label_smoothing:
        return right
    return (1 - label_smoothing) * right + label_smoothing * torch.nn.functional.logsigmoid(-x)
