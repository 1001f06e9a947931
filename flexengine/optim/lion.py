"""Lion: the sign of an average of gradients, with one state. Decay is decoupled, as in AdamW.

Source: Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", https://arxiv.org/abs/2302.06675.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexengine.optim.adamw import AdamWFactors
from flexengine.optim.momentum import STATE, check_settings, momentum_update, native_call
from flexengine.optim.rule import NativeCall, Rule, StatePlane, Update


@dataclass(frozen=True)
class Lion:
    """Settings of Lion. Learning rates are a third to a tenth of AdamW's, since every element moves by all of it.

    Raises: ValueError when a value lies outside its range.
    """

    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_settings("Lion", self.lr, self.weight_decay, beta1=self.betas[0], beta2=self.betas[1])


def lion_rule(state_dtype: str) -> Rule:
    """Lion with its momentum in one dtype."""
    return Rule("Lion", (StatePlane(STATE, state_dtype),), _update, native=_native)


def lion_factors(lr: float, betas: tuple[float, float], weight_decay: float) -> AdamWFactors:
    """The numbers of a step, in the fields of AdamW's with the same meaning; the others are 0."""
    return AdamWFactors(1.0 - lr * weight_decay, 1.0 - betas[0], 0.0, 1.0 - betas[1], 0.0, 0.0, lr)


def lion_values(master: Tensor, momentum: Tensor, grad: Tensor, factors: AdamWFactors) -> tuple[Tensor, Tensor]:
    """The formula: new master and new momentum, one rounding per operator.

    The sign of 0 is 0; of what is not finite it is NaN, so that overflow shows.
    """
    difference = grad - momentum
    direction = momentum + difference * factors.one_minus_beta1
    sign = torch.where(direction == 0, 0.0, torch.copysign(torch.ones_like(direction), direction))
    sign = sign + (direction - direction)
    return master * factors.decay - sign * factors.step_size, momentum + difference * factors.one_minus_beta2


def _update(update: Update) -> None:
    momentum_update("lion", update, _factors(update), lion_values)


def _native(update: Update) -> NativeCall:
    return native_call("lion", update, _factors(update))


def _factors(update: Update) -> AdamWFactors:
    return lion_factors(update.lr, update.settings.betas, update.weight_decay)
