"""SGD with momentum: a sum of gradients that fades, with one state. Decay is decoupled, as in AdamW.

Source: Polyak 1964, as torch.optim.SGD without dampening; decay as in Loshchilov and Hutter 2019,
https://arxiv.org/abs/1711.05101, algorithm 1 (SGDW).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flexengine.optim.adamw import AdamWFactors
from flexengine.optim.momentum import STATE, check_settings, momentum_update, native_call
from flexengine.optim.rule import NativeCall, Rule, StatePlane, Update


@dataclass(frozen=True)
class SGD:
    """Settings of SGD with momentum. Raises: ValueError when a value lies outside its range."""

    lr: float = 1e-2
    momentum: float = 0.9
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_settings("SGD", self.lr, self.weight_decay, momentum=self.momentum)


def sgd_rule(state_dtype: str) -> Rule:
    """SGD with its momentum in one dtype."""
    return Rule("SGD", (StatePlane(STATE, state_dtype),), _update, native=_native)


def sgd_factors(lr: float, momentum: float, weight_decay: float) -> AdamWFactors:
    """The numbers of a step in the fields that kernels read: the momentum's factor is `beta2`; unused ones are 0."""
    return AdamWFactors(1.0 - lr * weight_decay, 0.0, momentum, 0.0, 0.0, 0.0, lr)


def sgd_values(master: Tensor, momentum: Tensor, grad: Tensor, factors: AdamWFactors) -> tuple[Tensor, Tensor]:
    """The formula: new master and new momentum, one rounding per operator."""
    momentum = momentum * factors.beta2 + grad
    return master * factors.decay - momentum * factors.step_size, momentum


def _update(update: Update) -> None:
    momentum_update("sgd", update, _factors(update), sgd_values)


def _native(update: Update) -> NativeCall:
    return native_call("sgd", update, _factors(update))


def _factors(update: Update) -> AdamWFactors:
    return sgd_factors(update.lr, update.settings.momentum, update.weight_decay)
