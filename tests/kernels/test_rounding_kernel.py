"""The Triton twins of the roundings give the bits of the plain-torch ones."""

import torch
import triton
import triton.language as tl

from flexengine.kernels import rounding as device_rounding
from flexengine.optim import rounding
from flexengine.random_bits import stream_keys

_round_to = device_rounding.round_to
_stochastic_pattern = device_rounding.stochastic_pattern
_canonical_bits, _upper_half, _low_half = (
    device_rounding.canonical_bits,
    device_rounding.upper_half,
    device_rounding.low_half,
)
_join = device_rounding.join


@triton.jit(do_not_specialize=("key_low", "key_high", "element_offset"))
def _roundings_kernel(x_ptr, nearest_ptr, random_ptr, weight_ptr, remainder_ptr, joined_ptr, n, key_low, key_high,
                      element_offset, BLOCK: tl.constexpr):  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    tl.store(nearest_ptr + offsets, _round_to(x, tl.bfloat16), mask=mask)
    tl.store(random_ptr + offsets, _stochastic_pattern(x, offsets + element_offset, key_low, key_high), mask=mask)
    bits = _canonical_bits(x)
    weight, remainder = _upper_half(bits + 0x8000), _low_half(bits)
    tl.store(weight_ptr + offsets, weight, mask=mask)
    tl.store(remainder_ptr + offsets, remainder, mask=mask)
    tl.store(joined_ptr + offsets, _join(weight, remainder), mask=mask)


def launch(x, seed, step, element_offset, stream):
    nearest = torch.empty_like(x, dtype=torch.bfloat16)
    random, weight, remainder = (torch.empty_like(x, dtype=torch.int16) for _ in range(3))
    joined = torch.empty_like(x)
    keys = [key - (1 << 32) if key >= 1 << 31 else key for key in stream_keys(seed, step, stream)]
    grid = (triton.cdiv(x.numel(), 1024),)
    _roundings_kernel[grid](
        x, nearest, random, weight, remainder, joined, x.numel(), *keys, element_offset, BLOCK=1024
    )  # fmt: skip
    return nearest, random.view(torch.bfloat16), weight.view(torch.bfloat16), remainder, joined


def special_values(device):
    """Random bit patterns of every kind, and the ones at the borders."""
    bits = torch.randint(-(2**31), 2**31, (3000,), device=device).to(torch.int32)
    bits = torch.where((bits & 0x7F80_0000) == 0, bits | 0x0080_0000, bits)  # subnormals have their own test
    x = bits.view(torch.float32)
    edges = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3.4028234663852886e38, -3.4028234663852886e38, 1.0]
    return torch.cat((x, torch.tensor(edges, device=device)))


def same_bits(a, b):
    pattern = torch.int32 if a.dtype == torch.float32 else torch.int16
    return torch.equal(a.view(pattern), b.view(pattern))


def test_bits_of_all_roundings(device):
    x = special_values(device)
    for seed, step, element_offset, stream in [(0, 1, 0, 0), (2**63 + 7, 12345, 2**32 - 1500, 1), (5, 9, 2**40 + 3, 2)]:
        nearest, random, weight, remainder, joined = launch(x, seed, step, element_offset, stream)
        finite = torch.isfinite(x)
        assert torch.equal(nearest[finite], x[finite].bfloat16())
        assert torch.equal(torch.isnan(nearest), torch.isnan(x))
        assert same_bits(random, rounding.stochastic_round_bf16(x, seed, step, element_offset, stream))
        expected_weight, expected_remainder = torch.empty_like(weight), torch.empty_like(remainder)
        rounding.split_fp32(x, expected_weight, expected_remainder)
        assert same_bits(weight, expected_weight)
        assert torch.equal(remainder, expected_remainder)
        assert same_bits(joined[finite], x[finite])


def test_bits_of_subnormals(device):
    x = torch.randint(1, 0x80_0000, (1000,), dtype=torch.int32, device=device).view(torch.float32)
    _, random, weight, _, joined = launch(x, 1, 2, 3, 0)
    assert same_bits(random, rounding.stochastic_round_bf16(x, 1, 2, 3, 0))
    assert same_bits(joined, x)
    assert same_bits(weight, rounding.round_bf16_ties_away(x))
