"""The fused kernels of Muon give the bits of plain torch before and after the matrix products."""

import pytest
import torch

from flexengine.kernels.muon import apply_, take_momentum_
from flexengine.optim.muon import muon_values
from flexengine.optim.rounding import stochastic_round_bf16
from flexengine.optim.rule import Update
from flexengine.optim.stored import read_master, write_master
from flexengine.random_bits import stream_keys
from tests.rule_helpers import MASTERS, assert_same_bits, copied, random_update

COUNT, OFFSET = 2500, 2**32 - 1000


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=str)
def test_momentum_and_direction(state, compute, device):
    grad, momentum = torch.randn(COUNT).bfloat16(), torch.randn(COUNT).to(state)
    scale, x = torch.tensor([0.37]), torch.full((COUNT,), float("nan"), dtype=compute, device=device)
    actual = momentum.clone().to(device)
    take_momentum_(actual, grad.to(device), x, scale.to(device), 0.95, stream_keys(11, 3, 1), OFFSET)
    kept, direction = muon_values(momentum.float(), grad.float() * scale, 0.95)
    assert torch.equal(x.cpu(), direction.to(compute))
    if state == torch.bfloat16:
        kept = stochastic_round_bf16(kept, 11, 3, OFFSET, 1)
    assert torch.equal(actual.cpu(), kept)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("master", MASTERS)
def test_masters(master, compute, device):
    _, update = random_update("sgd", "float32", master, COUNT, element_offset=OFFSET)
    x = torch.randn(COUNT).to(compute)
    actual: Update = copied(update, device)
    masters = actual.planes["weights"], actual.planes.get("remainder")
    apply_(masters, x.to(device), actual.grad_scale, 0.999, 0.3, stream_keys(11, 3, 0), OFFSET)
    write_master(update, read_master(update) * 0.999 - x.float() * 0.3)
    assert_same_bits(actual, update)


def test_a_scale_that_is_not_finite_changes_nothing(device):
    _, update = random_update("sgd", "bfloat16", "split", COUNT, scale=float("nan"))
    actual = copied(update, device)
    planes, x = actual.planes, torch.randn(COUNT, device=device).bfloat16()
    take_momentum_(planes["momentum"], planes["grad"], x.clone(), actual.grad_scale, 0.95, (1, 2), 0)
    apply_((planes["weights"], planes["remainder"]), x, actual.grad_scale, 0.9, 0.3, (1, 2), 0)
    assert_same_bits(actual, update)
