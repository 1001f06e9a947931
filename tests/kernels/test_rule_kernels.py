"""The fused kernels of AdamW, Lion and SGD give the bits of plain torch, whatever their states and masters are."""

from unittest.mock import patch

import pytest
import torch

from flexengine.kernels.adamw import adamw_update_
from flexengine.kernels.adamw_blocks import Moments, adamw_in_blocks_
from flexengine.kernels.momentum import Planes, momentum_update_
from flexengine.native import library
from flexengine.optim.adamw import adamw_factors
from flexengine.optim.blockwise import codebook
from flexengine.optim.lion import lion_factors
from flexengine.optim.sgd import sgd_factors
from flexengine.random_bits import stream_keys
from tests.rule_helpers import ALL, FLOATS, MASTERS, assert_same_bits, copied, random_update


def by_kernel(optimizer, update):
    """Launch the kernel of a rule on an update."""
    planes, settings = update.planes, update.settings
    keys = [stream_keys(update.seed, update.step, stream) for stream in range(3)]
    weight, remainder, grad = planes["weights"], planes.get("remainder"), planes["grad"]
    if optimizer == "adamw":
        factors = adamw_factors(update.lr, settings.betas, settings.eps, update.weight_decay, update.step)
        if "exp_avg_scale" not in planes:
            states = planes["exp_avg"], planes["exp_avg_sq"]
            adamw_update_(weight, remainder, *states, grad, update.grad_scale, factors, keys, update.element_offset)
            return
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


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: f"grad-{dtype}")
@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.parametrize(("optimizer", "state"), ALL)
def test_bits_of_plain_torch(optimizer, state, master, grad_dtype, device):
    """The counter of random bits crosses a 32-bit border inside the segment."""
    rule, update = random_update(optimizer, state, master, 2500, grad_dtype, element_offset=2**32 - 1000)
    actual, expected = copied(update, device), copied(update)
    by_kernel(optimizer, actual)
    with patch.object(library, "load", lambda: None):
        rule.update(expected)
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.parametrize(("optimizer", "state"), FLOATS)
def test_tiling_does_not_change_a_bit(optimizer, state, master, device):
    _, update = random_update(optimizer, state, master, 1500, element_offset=100)
    whole, parts = copied(update, device), copied(update, device)
    by_kernel(optimizer, whole)
    for begin, end in [(0, 16), (16, 777), (777, 1500)]:
        planes = {name: plane[begin:end] for name, plane in parts.planes.items()}
        by_kernel(optimizer, parts._replace(planes=planes, element_offset=100 + begin))
    assert_same_bits(parts, whole)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # the interpreter computes with numpy
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.parametrize(("optimizer", "state"), ALL)
def test_a_scale_that_is_not_finite_changes_nothing(optimizer, state, master, bad, device):
    _, update = random_update(optimizer, state, master, 600, scale=bad)
    actual = copied(update, device)
    by_kernel(optimizer, actual)
    assert_same_bits(actual, update)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1 << 22, 5_000_001])
@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.parametrize(("optimizer", "state"), ALL)
def test_large_segments(optimizer, state, master, count, gpu):
    """What the rule launches by itself, on a stream of the caller's, has the bits of the CPU."""
    rule, update = random_update(optimizer, state, master, count)
    actual, expected = copied(update, gpu), copied(update)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        rule.update(actual)
    torch.cuda.synchronize()
    rule.update(expected)
    assert_same_bits(actual, expected)
