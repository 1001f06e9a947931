"""bf16 roundings: exactness of the split, exact expectation of the stochastic one, independence of tiling."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexengine.optim.rounding import join_fp32, round_bf16_ties_away, split_fp32, stochastic_round_bf16
from flexengine.random_bits import random_bits16, stream_keys

CPU = torch.device("cpu")
PINNED_KEYS = (2149365497, 2492623918)
PINNED_BITS = [20301, 52558, 40242, 32678]


def float32(bits: int) -> torch.Tensor:
    return torch.tensor([bits - (1 << 32) if bits >= 1 << 31 else bits], dtype=torch.int32).view(torch.float32)


def round_trip(master):
    weight, remainder = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16)
    split_fp32(master, weight, remainder)
    return weight, join_fp32(weight, remainder)


def same_bits(a, b):
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@given(st.integers(0, 2**32 - 1).filter(lambda bits: (bits & 0x7FFF_FFFF) <= 0x7F80_0000))
def test_split_is_exact_for_every_number(bits):
    master = float32(bits)
    assert same_bits(round_trip(master)[1], master)


@pytest.mark.parametrize("upper", [0x0000, 0x8000, 0x0001, 0x3F80, 0xBF81, 0x7F7F, 0xFF7F, 0x007F])
def test_split_is_exact_for_all_low_patterns(upper):
    """Beside ordinary numbers: both zeros, subnormals, and the largest values, whose weight half is infinite."""
    bits = (torch.arange(2**16, dtype=torch.int64) | upper << 16).to(torch.int32)
    master = bits.view(torch.float32)
    weight, joined = round_trip(master)
    assert same_bits(joined, master)
    expected = torch.where(torch.arange(2**16) >= 0x8000, upper + 1, upper).to(torch.int16)
    assert torch.equal(weight.view(torch.int16), expected)


def test_weight_half_is_the_nearest_bf16():
    x = torch.randn(10_000)
    error = (round_bf16_ties_away(x).double() - x.double()).abs()
    assert torch.equal(error, (x.bfloat16().double() - x.double()).abs())
    ties = torch.tensor([1 + 2**-8, -1 - 2**-8, 1 + 3 * 2**-8])
    assert round_bf16_ties_away(ties).tolist() == [1 + 2**-7, -1 - 2**-7, 1 + 2 * 2**-7]


@pytest.mark.parametrize("bits", [0x7F80_0001, 0x7FFF_FFFF, 0xFF80_0001, 0xFFFF_FFFF, 0x7FC0_0000])
def test_nan_stays_nan(bits):
    weight, joined = round_trip(float32(bits))
    for value in (weight, joined, round_bf16_ties_away(float32(bits)), stochastic_round_bf16(float32(bits), 1, 1, 0)):
        assert torch.isnan(value).all()


def test_infinities_and_bf16_values_pass_unchanged():
    x = torch.tensor([float("inf"), -float("inf"), 0.0, -0.0, 1.5, -(2.0**-126), 2.0**-133])
    rounded = stochastic_round_bf16(x, 3, 4, 5)
    assert torch.equal(rounded.view(torch.int16), x.bfloat16().view(torch.int16))


@pytest.mark.parametrize("value", [1 + 2**-9, -1 - 2**-10, 0.1, -3.3, 1e-39])
def test_stochastic_rounding_is_unbiased(value):
    """Mean over 2**18 draws within 4.5 standard deviations of the value; only the two neighbours appear."""
    draws = 2**18
    x = torch.full((draws,), value, dtype=torch.float32)
    rounded = stochastic_round_bf16(x, seed=1, step=2, element_offset=2**33).double()
    neighbours = rounded.unique()
    assert len(neighbours) == 2
    gap = float(neighbours[1] - neighbours[0])
    assert neighbours[0] < float(x[0]) < neighbours[1]
    assert abs(float(rounded.mean()) - float(x[0])) < 4.5 * 0.5 * gap / draws**0.5


def test_random_bits_are_uniform_and_streams_unrelated():
    """Bit frequencies, byte histograms (chi square) and correlations of neighbours, steps, streams and seeds."""
    n = 2**18
    base = random_bits16(n, CPU, 7, 1, 0, 0).double()
    bits = (base.long()[:, None] >> torch.arange(16)) & 1
    assert (bits.double().mean(0) - 0.5).abs().max() < 4.5 * 0.5 / n**0.5
    for byte in (base.long() >> 8, base.long() & 0xFF):
        counts = torch.bincount(byte, minlength=256).double()
        assert ((counts - n / 256).square() / (n / 256)).sum() < 255 + 5 * (2 * 255) ** 0.5
    others = [
        base.roll(1),
        *(random_bits16(n, CPU, *key).double() for key in [(7, 2, 0, 0), (7, 1, 0, 1), (8, 1, 0, 0), (7, 1, 2**32, 0)]),
    ]
    for other in others:
        correlation = torch.corrcoef(torch.stack((base, other)))[0, 1]
        assert correlation.abs() < 4.5 / n**0.5


@given(st.integers(0, 2**64 - 1), st.integers(1, 2**40), st.integers(0, 2**45), st.integers(1, 99))
def test_tiling_does_not_change_a_bit(seed, step, element_offset, cut):
    x = torch.linspace(-3, 3, 100)
    whole = stochastic_round_bf16(x, seed, step, element_offset)
    parts = (
        stochastic_round_bf16(x[:cut], seed, step, element_offset),
        stochastic_round_bf16(x[cut:], seed, step, element_offset + cut),
    )
    assert torch.equal(whole, torch.cat(parts))


def test_the_hash_is_pinned():
    """Checkpoints resumed by a later version must draw the same bits: a change of the hash shows here."""
    assert stream_keys(0, 1, 0) == PINNED_KEYS
    assert random_bits16(4, CPU, 1234, 5, 2**32 - 2, 1).tolist() == PINNED_BITS


def test_refuses_other_dtypes():
    with pytest.raises(ValueError, match=r"x_f32 must be torch.float32, got torch.float64"):
        round_bf16_ties_away(torch.zeros(1, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"remainder_int16 must be torch.int16"):
        join_fp32(torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int32))
