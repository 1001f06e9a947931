"""Distillation: the student is to have the teacher's distribution of the next token at every target token.

The teacher runs forward alone, before the student is loaded. What is kept of it are its likeliest tokens with their
log-probabilities, and the log-probability of all others together; the student is compared over the same parts, so that
nothing is left out. With as many tokens as the vocabulary has the divergence is that of the whole distributions.
Source: Agarwal et al. 2023, "On-Policy Distillation of Language Models", equation 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexengine.objectives.positions import target_numbers
from flexengine.ops.custom_loss import LogitsBlock, LossFunction
from flexengine.runtime.engine import Engine

Columns = Mapping[str, Any]
"""input_ids and labels of a batch, and what an engine reads beside them."""


class TeacherRows(NamedTuple):
    """What a teacher says of N target tokens, in the order of sequences and tokens.

    tokens: int32 [N, k], the likeliest. log_probs: float32 [N, k + 1], theirs and that of all others together.
    """

    tokens: Tensor
    log_probs: Tensor


@dataclass(frozen=True)
class Distillation:
    """Divergence of student and teacher + cross_entropy_weight * cross-entropy, as a mean over target tokens.

    beta: 0 is the forward divergence KL(teacher | student), 1 the reverse one, KL(student | teacher); between them the
    generalized Jensen-Shannon divergence. temperature: divides the logits of both, in the divergence alone.
    """

    beta: float = 0.5
    temperature: float = 1.0
    cross_entropy_weight: float = 0.0

    def loss(self, columns: Columns, teacher: TeacherRows, device: torch.device) -> LossFunction:
        """The loss of a batch as `Engine.fwd_bwd` takes it. columns: input_ids and labels."""
        numbers = target_numbers(columns["labels"])

        def divergence(block: LogitsBlock) -> Tensor:
            rows = numbers[block.sequences.cpu(), block.positions.cpu()]
            tokens, wanted = (column[rows].to(device) for column in teacher)
            found = over_parts(block.logits / self.temperature, tokens.long())
            loss = self._divergence(found, wanted[:, : found.shape[1]].to(found.dtype)).sum()
            if self.cross_entropy_weight:
                plain = torch.nn.functional.cross_entropy(block.logits, block.labels, reduction="sum")
                loss = loss + self.cross_entropy_weight * plain
            return loss

        return divergence

    def _divergence(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Of log-probabilities of the same parts."""
        if self.beta in (0.0, 1.0):
            return _kl(teacher, student) if self.beta == 0.0 else _kl(student, teacher)
        shares = torch.stack([student + math.log1p(-self.beta), teacher + math.log(self.beta)])
        mixture = shares.logsumexp(0)
        return self.beta * _kl(teacher, mixture) + (1 - self.beta) * _kl(student, mixture)


def _kl(of: Tensor, from_: Tensor) -> Tensor:
    """KL(of | from_) by parts."""
    return of.exp() * (of - from_)


def over_parts(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities [B, k + 1] of tokens [B, k] and of all others together; [B, V] where there are no others."""
    whole = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(1, tokens) - whole
    if tokens.shape[1] == logits.shape[1]:
        return own
    others = logits.scatter(1, tokens, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat((own, others - whole), dim=1)


def likeliest(engine: Engine, columns: Columns, count: int, temperature: float) -> TeacherRows:
    """Ask a teacher, whose logits are divided by `temperature`, for the `count` likeliest tokens at every target.

    Several ranks share the rounds, and all of them get all rows.
    """
    numbers = target_numbers(columns["labels"])
    count = min(count, engine.model.vocab_size)
    rows = int(numbers.max()) + 1
    found = TeacherRows(torch.zeros(rows, count, dtype=torch.int32), torch.zeros(rows, count + 1))

    def keep(block: LogitsBlock) -> Tensor:
        logits = block.logits.detach() / temperature
        tokens = logits.topk(count).indices
        parts = over_parts(logits, tokens)
        at = numbers[block.sequences.cpu(), block.positions.cpu()]
        found.tokens[at] = tokens.int().cpu()
        found.log_probs[at, : parts.shape[1]] = parts.float().cpu()
        return block.logits.sum() * 0.0

    engine.evaluate(columns, loss=keep)
    engine.context.join_rows([found.tokens.view(-1)])
    engine.context.join_rows([found.log_probs.view(-1)])
    return found
