"""GRPO: completions that earned more than others after the same prompt become likelier.

The loss is a function of the log-probabilities of tokens, so its derivatives by these are the weights of a plain step.
Names and formulas are those of TRL's GRPOTrainer.
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
from flexengine.runtime.outputs import FwdBwdOutput, StepOutput

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


class TokenLosses(NamedTuple):
    """Losses of tokens, differentiable by their log-probabilities, their divergences, and whether they are clipped."""

    losses: Tensor
    kl: Tensor
    clipped: Tensor


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

    def of_tokens(self, new: Tensor, old: Tensor, gains: Tensor, reference: Tensor | None) -> TokenLosses:
        """Compute the loss of each token from its log-probabilities. gains: the advantages of their completions."""
        ratio = (new - old).exp()
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        losses, kl = -torch.minimum(ratio * gains, ratio.clamp(1 - self.epsilon, 1 + high) * gains), None
        if reference is not None:
            ahead = reference - new
            kl = ahead.exp() - ahead - 1
            losses = losses + self.beta * kl
        clipped = ((ratio < 1 - self.epsilon) & (gains < 0)) | ((ratio > 1 + high) & (gains > 0))
        return TokenLosses(losses, torch.zeros_like(losses) if kl is None else kl.detach(), clipped)


# ---- an update -----------------------------------------------------------------------------------------------------


class GroupUpdate(NamedTuple):
    """An optimizer step on groups: the loss before it, and means over all tokens of what `TokenLosses` has.

    log_probs: those of all tokens before it, [T] on the CPU; None where nothing asked for them.
    """

    loss: float
    kl: float
    clipped: float
    log_probs: Tensor | None
    out: FwdBwdOutput
    update: StepOutput


class WeighedGroups(NamedTuple):
    """A batch of completions as a weighted step: the loss, its tokens, and weights, a row for each sequence.

    log_probs: of all tokens, [T] on the CPU; None where the gradient does not depend on them.
    """

    loss: float
    tokens: TokenLosses
    weights: list[Tensor]
    log_probs: Tensor | None


def update_groups(
    engine: Engine, objective: GRPO, groups: Groups, lr: float | None = None, keep: bool = False
) -> GroupUpdate:
    """Take one optimizer step. keep: find log_probs, with which later updates on the same completions compare.

    Logits over a temperature have a gradient that no weights of tokens give, and where no token has a weight there is
    nothing to weigh: these take the loss of logits.
    """
    if objective.temperature == 1.0:
        found = weighed_groups(engine, objective, groups, keep)
        if any(bool(row.any()) for row in found.weights):
            out, update = engine.train_step(groups.columns, weights=found.weights, lr=lr, divisor=1)
            kl, clipped = (float(values.double().mean()) for values in found.tokens[1:])
            return GroupUpdate(found.loss, kl, clipped, found.log_probs, out, update)
    loss = GroupLoss(objective, groups, engine.device)
    out, update = engine.train_step(groups.columns, loss=loss, lr=lr, divisor=1)
    engine.context.join_rows([loss.log_probs, loss.kl, loss.clipped])
    kl, clipped = (float(values.double().mean()) for values in (loss.kl, loss.clipped))
    return GroupUpdate(out.loss * out.num_target_tokens, kl, clipped, loss.log_probs, out, update)


def weighed_groups(engine: Engine, objective: GRPO, groups: Groups, keep: bool = False) -> WeighedGroups:
    """Differentiate the loss by the log-probabilities of tokens, at temperature 1.

    `fwd_bwd(columns, weights=weights)` then adds its gradient, undivided. A forward pass finds the log-probabilities,
    where `keep` asks for them or the gradient depends on them: the model that wrote the completions itself has only
    ratios of 1.
    """
    numbers, own = target_numbers(groups.columns["labels"]), None
    if keep or groups.old is not None or groups.reference is not None:
        own = token_log_probs(engine, groups.columns)
    lengths = (numbers >= 0).sum(1)
    new = torch.zeros(int(lengths.sum()), dtype=torch.float64) if own is None else own.double()
    old = new if groups.old is None else groups.old.double()
    reference = None if groups.reference is None else groups.reference.double()
    gains = groups.advantages.double().repeat_interleave(lengths)
    new = new.clone().requires_grad_()
    tokens = objective.of_tokens(new, old, gains, reference)
    loss = (tokens.losses * objective.weights(lengths).repeat_interleave(lengths)).sum()
    (slopes,) = torch.autograd.grad(loss, new)
    rows = torch.cat((-slopes, slopes.new_zeros(1)))[numbers]  # number -1: of a token without a loss
    labels = groups.columns["labels"]
    return WeighedGroups(loss.item(), tokens, [row[: len(of)] for row, of in zip(rows, labels, strict=True)], own)


class GroupLoss:
    """The loss of a batch as `Engine.fwd_bwd` takes it; divisor: 1.

    log_probs, kl, clipped: of all tokens, [T] float32 on the CPU, 0 where another rank has them. log_probs are
    `Groups.old` of updates after this; kl is the divergence from the reference, clipped 1 where the ratio was.
    """

    def __init__(self, objective: GRPO, groups: Groups, device: torch.device) -> None:
        self._objective, self._groups, self._device = objective, groups, device
        self._numbers = target_numbers(groups.columns["labels"])
        lengths = (self._numbers >= 0).sum(1)
        self._weights = objective.weights(lengths)
        self.log_probs, self.kl, self.clipped = torch.zeros(3, int(lengths.sum())).unbind()

    def __call__(self, block: LogitsBlock) -> Tensor:
        """The sum of the losses of a block's tokens."""
        mine, groups, sequences = self._objective, self._groups, block.sequences.cpu()
        numbers, dtype = self._numbers[sequences, block.positions.cpu()], block.logits.dtype

        def taken(values: Tensor, at: Tensor) -> Tensor:
            return values[at].to(self._device, dtype)

        new = chosen(block, mine.temperature)
        old = new.detach() if groups.old is None else taken(groups.old, numbers)
        reference = None if groups.reference is None else taken(groups.reference, numbers)
        tokens = mine.of_tokens(new, old, taken(groups.advantages, sequences), reference)
        for kept, values in ((self.log_probs, new.detach()), (self.kl, tokens.kl), (self.clipped, tokens.clipped)):
            kept[numbers] = values.float().cpu()
        return (tokens.losses * taken(self._weights, sequences)).sum()


def chosen(block: LogitsBlock, temperature: float) -> Tensor:
    """Log-probabilities [B] of a block's labels, of logits divided by the temperature."""
    logits = block.logits if temperature == 1.0 else block.logits / temperature  # a copy fewer, in time and memory
    return logits.log_softmax(-1).gather(1, block.labels[:, None])[:, 0]


def token_log_probs(engine: Engine, columns: Columns, temperature: float = 1.0, adapters: bool = True) -> Tensor:
    """Log-probabilities [T] of all tokens with a loss, float32 on the CPU; adapters=False: in the model beneath.

    Several ranks share the rounds, and all get all of them.
    """
    numbers = target_numbers(columns["labels"])
    if temperature == 1.0:
        rows = engine.evaluate(columns, per_token=True, adapters=adapters).token_log_probs
        assert rows is not None, "they were asked for"
        return torch.cat([row[own[: len(row)] >= 0] for row, own in zip(rows, numbers, strict=True)])
    found = torch.zeros(int(numbers.max()) + 1)

    def keep(block: LogitsBlock) -> Tensor:
        found[numbers[block.sequences.cpu(), block.positions.cpu()]] = chosen(block, temperature).detach().float().cpu()
        return block.logits.sum() * 0.0

    engine.evaluate(columns, loss=keep, adapters=adapters)
    engine.context.join_rows([found])
    return found
