"""8-bit states: the published codebook, exact nearest codes, and moments that stay near float32's."""

from bisect import bisect_left
from fractions import Fraction

import pytest
import torch

from flexengine.optim import AdamW
from flexengine.optim.blockwise import (
    BLOCK,
    LAST_BUCKET,
    LEAST_BUCKET,
    RANK_SHIFT,
    TIE_SHIFT,
    ZERO_CODE,
    codebook,
    decode_blocks,
    encode_blocks,
)
from flexengine.optim.rule import Update
from flexengine.optim.rules import rule_of


def published_codebook(signed):
    """The dynamic codebook by its definition, in exact arithmetic: sign, decade, and a fraction of what bits remain."""
    found = {Fraction(0), Fraction(1)}
    for decade in range(7):
        count = 2 ** (decade + (0 if signed else 1))
        for i in range(count):
            fraction = Fraction(1, 10) + Fraction(9, 10) * Fraction(2 * i + 1, 2 * count)
            value = fraction / 10 ** (6 - decade)
            found |= {value, -value} if signed else {value}
    return sorted(found)


def nearest(value, values):
    """The index of the nearest of ascending values, the higher of two as near."""
    above = min(bisect_left(values, value), len(values) - 1)
    below = max(above - 1, 0)
    return above if abs(values[above] - value) <= abs(value - values[below]) else below


@pytest.mark.parametrize("signed", [True, False])
def test_the_codebook_is_the_published_one(signed):
    values = published_codebook(signed)
    assert len(values) == 256
    assert codebook(signed).values.tolist() == torch.tensor([float(v) for v in values]).tolist()


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_the_nearest(signed):
    torch.manual_seed(0)
    book = codebook(signed)
    x = torch.randn(2 * BLOCK + 77) * 10 ** torch.empty(2 * BLOCK + 77).uniform_(-7, 0)
    x[3 * 64 : 4 * 64 : 2] = book.values[64:96]
    if not signed:
        x = x.abs()
    codes, scales = encode_blocks(x, book)
    values = [Fraction(v) for v in book.values.tolist()]
    for i, value in enumerate(x.tolist()):
        block = x[i // BLOCK * BLOCK : (i // BLOCK + 1) * BLOCK]
        assert scales[i // BLOCK] == block.abs().max()
        quotient = torch.tensor(value) / scales[i // BLOCK]
        assert int(codes[i]) == nearest(Fraction(float(quotient)), values)
    decoded = decode_blocks(codes, scales, book)
    assert torch.equal(decoded, book.values[codes.long()] * scales.repeat_interleave(BLOCK)[: len(x)])


@pytest.mark.parametrize("signed", [True, False])
def test_steps_find_the_code(signed):
    """Checked at both ends of every bucket of float32 up to 1, and on both sides of every threshold."""
    book = codebook(signed)
    upper = torch.arange(LAST_BUCKET + 1)
    magnitudes = torch.cat([upper << 16, upper << 16 | 0xFFFF]).to(torch.int32).view(torch.float32)
    x = torch.cat([magnitudes, -magnitudes, torch.tensor([torch.nan, -torch.nan])])
    away = torch.tensor(torch.inf)
    x = torch.cat([x, *(torch.nextafter(book.thresholds, way) for way in (away, -away)), book.thresholds])
    x = x[~(x.abs() > 1) & (signed | ~(x < 0))]
    bits = x.view(torch.int32)
    step = book.steps[((bits & 0x7FFF_FFFF) >> 16).clamp(LEAST_BUCKET, LAST_BUCKET) - LEAST_BUCKET]
    negative = (bits < 0).int()
    magnitude = (bits & 0xFFFF) - (negative & step >> TIE_SHIFT if signed else 0)
    rank = (step >> RANK_SHIFT) + (magnitude >= step & (1 << TIE_SHIFT) - 1)
    codes = (ZERO_CODE + torch.where(negative == 1, -rank, rank)).clamp(min=0) if signed else rank
    expected = torch.searchsorted(book.thresholds, x, right=True)
    assert torch.equal(torch.where(x.isnan(), 0, codes), torch.where(x.isnan(), 0, expected))


def test_a_block_of_zeros_stays_zero():
    codes, scales = encode_blocks(torch.zeros(BLOCK + 1), codebook(True))
    assert scales.tolist() == [0.0, 0.0]
    assert decode_blocks(codes, scales, codebook(True)).count_nonzero() == 0


def moments_after(gradients, state):
    """AdamW's moments and weights after steps on these gradients, with states in some dtype."""
    rule, settings, count = rule_of("adamw", "matrix", state, "float32"), AdamW(lr=1e-3), len(gradients[0])
    dtypes = {"float32": torch.float32, "uint8": torch.uint8}
    planes = {p.kind: torch.zeros(-(-count // p.block), dtype=dtypes[p.dtype]) for p in rule.states}
    planes["weights"] = torch.zeros(count)
    for step, grad in enumerate(gradients, start=1):
        update = Update({**planes, "grad": grad}, torch.ones(1), settings, 1e-3, 0.0, step, 0, 0)
        rule.update(update)
    if state == "float32":
        return planes["exp_avg"], planes["exp_avg_sq"], planes["weights"]
    moments = [
        decode_blocks(planes[name], planes[f"{name}_scale"], codebook(name == "exp_avg"))
        for name in ("exp_avg", "exp_avg_sq")
    ]
    return *moments, planes["weights"]


def test_moments_stay_near_those_of_float32_when_gradients_fall_a_hundredfold():
    torch.manual_seed(0)
    count = 8 * BLOCK
    gradients = [torch.randn(count) for _ in range(40)] + [torch.randn(count) / 100 for _ in range(120)]
    exact, rounded = moments_after(gradients, "float32"), moments_after(gradients, "int8")
    for name, expected, actual, most in zip(("mean", "square"), exact, rounded, (0.08, 0.10), strict=False):
        error = float((actual - expected).norm() / expected.norm())
        assert error <= most, f"{name}: {error}"
    assert float((rounded[2] - exact[2]).norm() / exact[2].norm()) <= 0.05
