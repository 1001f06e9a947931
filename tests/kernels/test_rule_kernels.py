"""The fused kernels of Lion, SGD and 8-bit AdamW give the bits of plain torch."""

from unittest.mock import patch

import pytest

from flexengine.kernels.adamw_blocks import Moments, adamw_in_blocks_
from flexengine.kernels.momentum import Planes, momentum_update_
from flexengine.native import library
from flexengine.optim.adamw import adamw_factors
from flexengine.optim.blockwise import codebook
from flexengine.optim.lion import lion_factors
from flexengine.optim.sgd import sgd_factors
from flexengine.random_bits import stream_keys
from tests.rule_helpers import MASTERS, STATES, assert_same_bits, copied, random_update


def by_kernel(optimizer, update):
    """Launch the kernel of a rule on an update."""
    planes, settings = update.planes, update.settings
    keys = [stream_keys(update.seed, update.step, stream) for stream in range(3)]
    weight, remainder, grad = planes["weights"], planes.get("remainder"), planes["grad"]
    if optimizer == "adamw":
        factors = adamw_factors(update.lr, settings.betas, settings.eps, update.weight_decay, update.step)
        moments = Moments(*(planes[name] for name in Moments._fields))
        books = [(b.values, b.steps) for b in (codebook(True, weight.device), codebook(False, weight.device))]
        adamw_in_blocks_(
            (weight, remainder), moments, books, grad, update.grad_scale, factors, keys[0], update.element_offset
        )
        return
    factors = (
        lion_factors(update.lr, settings.betas, update.weight_decay)
        if optimizer == "lion"
        else sgd_factors(update.lr, settings.momentum, update.weight_decay)
    )
    planes = Planes(weight, remainder, planes["momentum"], grad)
    momentum_update_(optimizer, planes, update.grad_scale, factors, keys, update.element_offset)


@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.parametrize(("optimizer", "state"), STATES)
def test_bits_of_plain_torch(optimizer, state, master, device):
    rule, update = random_update(optimizer, state, master, 2500, element_offset=2**32 - 1000)
    actual, expected = copied(update, device), copied(update)
    by_kernel(optimizer, actual)
    with patch.object(library, "load", lambda: None):
        rule.update(expected)
    assert_same_bits(actual, expected)


@pytest.mark.parametrize(("optimizer", "state"), STATES)
def test_a_scale_that_is_not_finite_changes_nothing(optimizer, state, device):
    _, update = random_update(optimizer, state, "split", 600, scale=float("nan"))
    actual = copied(update, device)
    by_kernel(optimizer, actual)
    assert_same_bits(actual, update)


@pytest.mark.gpu
@pytest.mark.parametrize(("optimizer", "state"), STATES)
def test_large_segments(optimizer, state, gpu):
    rule, update = random_update(optimizer, state, "split", 5_000_001)
    actual, expected = copied(update, gpu), copied(update)
    rule.update(actual)
    rule.update(expected)
    assert_same_bits(actual, expected)
