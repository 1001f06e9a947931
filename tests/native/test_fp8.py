"""FP8 codes with powers of two: the native and the torch path give the same bits, and both keep within the bounds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flexengine.native import fp8

LARGEST = 1.75 * 2.0**127


@pytest.fixture(params=["native", "torch"])
def path(request, monkeypatch):
    if request.param == "torch":
        for name in ("_encoder", "_decoder"):
            monkeypatch.setattr(fp8, name, lambda: None)
    else:
        request.getfixturevalue("native_library")


def coded(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales, and what rounding loses; all buffers hold NaN before."""
    codes = torch.full((values.numel(),), 255, dtype=torch.uint8)
    scales = torch.full((-(-values.numel() // fp8.BLOCK),), 255, dtype=torch.uint8)
    lost = values.clone()
    fp8.encode_fp8(lost, codes, scales)
    return codes, scales, lost


def decoded(codes: Tensor, scales: Tensor) -> Tensor:
    out = torch.full((codes.numel(),), torch.nan)
    fp8.decode_fp8(codes, scales, out)
    return out


def values_of(count: int, factor: float = 1.0, seed: int = 0) -> Tensor:
    """Random values of many sizes, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator) * 2.0 ** torch.randint(-20, 1, (count,), generator=generator)
    values[torch.rand(count, generator=generator) < 0.1] = 0.0
    return values * factor


@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, 5000, 40000])
@pytest.mark.parametrize("factor", [1.0, 2.0**-130, 2.0**100, 3e-39], ids=["ones", "tiny", "huge", "subnormal"])
def test_codes_are_within_their_bounds_and_nothing_else_is_lost(path, count, factor):
    """Beside float64: 1/16 of a value, 2^-10 of a scale; decoded and lost add up to the value exactly."""
    values = values_of(count, factor)
    codes, scales, lost = coded(values)
    out = decoded(codes, scales).double()
    torch.testing.assert_close(out + lost.double(), values.double(), rtol=0, atol=0)
    of_scale = torch.pow(2.0, scales.double() - 127).repeat_interleave(fp8.BLOCK)[:count]
    assert bool((lost.double().abs() <= torch.maximum(values.double().abs() / 16, of_scale * 2.0**-10)).all())
    most = [block.abs().amax().double() for block in values.split(fp8.BLOCK)] if count else []
    for largest, scale in zip(most, scales.double(), strict=True):
        assert largest <= 448 * 2 ** (scale - 127)
        assert scale == 1 or largest > 224 * 2 ** (scale - 127), "the least power of two"


def test_all_codes_come_back(path):
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].repeat(3)
    scales = torch.full((-(-codes.numel() // fp8.BLOCK),), 127, dtype=torch.uint8)
    values = decoded(codes, scales)
    torch.testing.assert_close(values, codes.view(torch.float8_e4m3fn).float(), rtol=0, atol=0)
    added = torch.ones(codes.numel())
    fp8.decode_fp8(codes, scales, added, add=True)
    torch.testing.assert_close(added, 1 + values, rtol=0, atol=0)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan, LARGEST * (1 + 2.0**-20)])
def test_a_block_that_is_not_finite_is_nan_and_keeps_nothing(path, bad):
    values = values_of(300)
    values[140] = bad
    codes, scales, lost = coded(values)
    out = decoded(codes, scales)
    assert bool(out[128:256].isnan().all())
    assert bool(out[:128].isfinite().all() and out[256:].isfinite().all())
    assert bool(lost.isfinite().all() and (lost[128:256] == 0).all())
    values[140] = LARGEST
    assert decoded(*coded(values)[:2])[140] == LARGEST


def test_both_paths_give_the_same_bits_on_any_number_of_threads(monkeypatch, native_library):
    """Of 2^16 patterns of float32, which hold ties, subnormal codes, and all that is not finite."""
    patterns = (torch.arange(1 << 16) << 16).to(torch.int32)
    ties = torch.cat([patterns, patterns + 0x8000, patterns + 0x7FFF]).view(torch.float32)
    order = torch.randperm(ties.numel(), generator=torch.Generator().manual_seed(0))
    values = torch.cat([ties, ties[order], ties[:77]])
    codes, scales, lost = coded(values)
    expected = (codes, scales, lost, decoded(codes, scales))

    def check():
        for tensor, wanted in zip((*coded(values), decoded(codes, scales)), expected, strict=True):
            torch.testing.assert_close(tensor, wanted, rtol=0, atol=0, equal_nan=True)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    check()
    for name in ("_encoder", "_decoder"):
        monkeypatch.setattr(fp8, name, lambda: None)
    check()


def test_tensors_that_do_not_go_together_are_refused():
    with pytest.raises(ValueError, match=r"take torch.uint8 \[3\] on the CPU, got torch.uint8 \[2\]"):
        fp8.encode_fp8(torch.zeros(300), torch.zeros(300, dtype=torch.uint8), torch.zeros(2, dtype=torch.uint8))
