"""Dropout's kernel gives the bits of the plain-torch path, also over its operand and for counters above 2**32."""

import pytest
import torch

from flexengine.kernels.dropout import drop_
from flexengine.ops.dropout import drop_threshold
from flexengine.random_bits import random_bits16, stream_keys


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [0, 2**32 - 100])
def test_bits(device, dtype, first):
    torch.manual_seed(1)
    x, probability = torch.randn(23, 211, device=device).to(dtype), 0.3
    threshold = drop_threshold(probability)
    scale = 65536 / (65536 - threshold)
    out = torch.full_like(x, float("nan"))
    drop_(x, out, threshold, scale, stream_keys(5, 7, 11), first)
    drawn = random_bits16(x.numel(), x.device, 5, 7, first, 11).view(x.shape)
    expected = (x.float() * scale).to(dtype).masked_fill(drawn < threshold, 0.0)
    assert torch.equal(out, expected)
    assert (out == 0).float().mean().item() == pytest.approx(probability, abs=0.03)
    drop_(x, x, threshold, scale, stream_keys(5, 7, 11), first)
    assert torch.equal(x, expected)
