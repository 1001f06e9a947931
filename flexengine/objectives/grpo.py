"""GRPO: completions that earned more than others after the same prompt become likelier.

The loss is one of blocks of logits, so a step takes one pass. Names and formulas are those of TRL's GRPOTrainer.
Source: Shao et al. 2024, "DeepSeekMath", equations 3 and 4; Liu et al. 2025, "Understanding R1-Zero-Like Training"
(dr_grpo); Yu et al. 2025, "DAPO", equations 8 and 12 (dapo, epsilon_high).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flexengine.objectives.distill import Columns
from flexengine.objectives.positions import target_numbers
from flexengine.ops.custom_loss import LogitsBlock
from flexengine.runtime.engine import Engine

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo"]
Scale = Literal["group", "batch", "none"]


class Groups(NamedTuple):
    """N completions. columns: input_ids and labels, which are -100 but in completions. advantages: float [N].

    old, reference: log-probabilities of the T tokens of all completions, in their order, in the model that wrote them
    and in the one before training; without `old` they are the model's own.
    """

    columns: Columns
    advantages: Tensor
    old: Tensor | None = None
    reference: Tensor | None = None


def advantages(rewards: Tensor, num_generations: int, scale: Scale = "group") -> Tensor:
    """Rewards [N] less the mean of their group, divided by a deviation of them. Groups stand one behind the other."""
    groups = rewards.view(-1, num_generations)
    centred = groups - groups.mean(1, keepdim=True)
    if scale == "none":
        return centred.flatten()
    deviation = groups.std(1, keepdim=True) if scale == "group" else rewards.std()
    return (centred / (deviation + 1e-4)).flatten()


@dataclass(frozen=True)
class GRPO:
    """Loss of a token: -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A) + beta (e^d - d - 1).

    A is the advantage of its completion, r its probability over that in the model that wrote it, d its log-probability
    in the reference less the model's. loss_type: how the tokens' losses are added: grpo, the mean over completions of
    means; bnpo and dapo, the mean over all tokens of a step, whose batches are never split here, so that they are the
    same; dr_grpo, the sum over max_completion_length tokens of each completion. temperature: divides logits.
    """

    beta: float = 0.0
    epsilon: float = 0.2
    epsilon_high: float | None = None
    loss_type: LossType = "dapo"
    temperature: float = 1.0
    max_completion_length: int = 256

    def weights(self, lengths: Tensor) -> Tensor:
        """Factors [N] on the losses of the tokens of completions of these lengths."""
        count = len(lengths)
        if self.loss_type == "grpo":
            return 1.0 / (count * lengths.clamp(min=1).double())
        total = count * self.max_completion_length if self.loss_type == "dr_grpo" else int(lengths.sum())
        return torch.full((count,), 1.0 / total, dtype=torch.float64)


class GroupLoss:
    """The loss of a batch as `Engine.fwd_bwd` takes it; divisor: 1. kl, clipped: sums over the tokens so far.

    log_probs: of all tokens, [T] float32 on the CPU, 0 where another rank has them: `Groups.old` of updates after this.
    """

    def __init__(self, objective: GRPO, groups: Groups, device: torch.device) -> None:
        self._objective, self._groups, self._device = objective, groups, device
        self._numbers = target_numbers(groups.columns["labels"])
        lengths = (self._numbers >= 0).sum(1)
        self._weights = objective.weights(lengths)
        self.num_tokens = int(lengths.sum())
        self.log_probs = torch.zeros(self.num_tokens)
        self.kl = self.clipped = 0.0

    def __call__(self, block: LogitsBlock) -> Tensor:
        """The sum of the losses of a block's tokens."""
        mine, sequences = self._objective, block.sequences.cpu()
        numbers, dtype = self._numbers[sequences, block.positions.cpu()], block.logits.dtype

        def taken(values: Tensor, at: Tensor) -> Tensor:
            return values[at].to(self._device, dtype)

        new, groups = chosen(block, mine.temperature), self._groups
        self.log_probs[numbers] = new.detach().float().cpu()
        old = new.detach() if groups.old is None else taken(groups.old, numbers)
        gain, ratio = taken(groups.advantages, sequences), (new - old).exp()
        high = mine.epsilon if mine.epsilon_high is None else mine.epsilon_high
        losses = -torch.minimum(ratio * gain, ratio.clamp(1 - mine.epsilon, 1 + high) * gain)
        if groups.reference is not None:
            ahead = taken(groups.reference, numbers) - new
            kl = ahead.exp() - ahead - 1
            losses = losses + mine.beta * kl
            self.kl += float(kl.detach().sum())
        outside = ((ratio < 1 - mine.epsilon) & (gain < 0)) | ((ratio > 1 + high) & (gain > 0))
        self.clipped += int(outside.sum())
        return (losses * taken(self._weights, sequences)).sum()


def chosen(block: LogitsBlock, temperature: float) -> Tensor:
    """Log-probabilities [B] of a block's labels, of logits divided by the temperature."""
    logits = block.logits if temperature == 1.0 else block.logits / temperature  # a copy fewer, in time and memory
    return logits.log_softmax(-1).gather(1, block.labels[:, None])[:, 0]


def token_log_probs(engine: Engine, columns: Columns, temperature: float = 1.0, adapters: bool = True) -> Tensor:
    """Log-probabilities [T] of all tokens with a loss, float32 on the CPU; adapters=False: in the model beneath.

    Several ranks share the rounds, and all get all of them.
    """
    numbers = target_numbers(columns["labels"])
    found = torch.zeros(int(numbers.max()) + 1)

    def keep(block: LogitsBlock) -> Tensor:
        found[numbers[block.sequences.cpu(), block.positions.cpu()]] = chosen(block, temperature).detach().float().cpu()
        return block.logits.sum() * 0.0

    engine.evaluate(columns, loss=keep, adapters=adapters)
    engine.context.join_rows([found])
    return found
