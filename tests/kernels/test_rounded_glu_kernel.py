"""Gated units whose backward reads FP8 codes: kernels against float64, and bit for bit against the plain path."""

import pytest
import torch

from flexengine.kernels import glu, rounded_glu
from flexengine.ops.fp8_scaling import LEAST_ABSMAX
from flexengine.ops.rounded_glu import LARGEST, round_rows
from tests.kernels.test_glu_kernel import reference

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 48), (5, 257), (3, 2500)]


def nearest_e4m3(x):
    """float64 x, within +-448, to the nearest e4m3, ties to even: 3 bits of mantissa, steps of at least 2**-9."""
    step = torch.exp2(x.abs().clamp(min=2.0**-6).log2().floor() - 3)
    return torch.round(x / step) * step


def rounded(gate_up):
    """gate_up in float64, each block of 128 columns of a half rounded on its own.

    It is scaled in float32: bf16 values lie in the middle of two codes so often that this decides on many.
    """
    parts = [part for half in gate_up.float().chunk(2, dim=1) for part in half.split(128, dim=1)]
    largest = [part.abs().amax(1, keepdim=True).clamp(min=LEAST_ABSMAX) for part in parts]
    scaled = [part * (torch.full_like(most, 448.0) / most) for part, most in zip(parts, largest, strict=True)]
    return torch.cat(
        [nearest_e4m3(x.double()) * (most / 448).double() for x, most in zip(scaled, largest, strict=True)], dim=1
    )


def buffers(tokens, width, device):
    codes = torch.full((tokens, 2 * width), 0x7F, dtype=torch.uint8, device=device)
    return codes, torch.full((tokens, 2 * -(-width // 128)), float("nan"), device=device)


def check(checks, tokens, width, dtype, device, activation):
    gate_up = 3 * checks.normal(tokens, 2 * width, dtype=dtype, device=device)
    gate_up[0, : width // 2] *= 1e-4  # beside large ones: subnormals
    grad_out = checks.normal(tokens, width, dtype=dtype, device=device)
    codes, scales = buffers(tokens, width, device)
    both = buffers(tokens, width, device)
    out, plain_out, again = (checks.empty(tokens, width, dtype=dtype, device=device) for _ in range(3))
    grad = checks.empty(tokens, 2 * width, dtype=dtype, device=device)
    rounded_glu.round_gate_up(gate_up, codes, scales, LARGEST, LEAST_ABSMAX)
    rounded_glu.round_gate_up(gate_up, *both, LARGEST, LEAST_ABSMAX, out, activation)
    rounded_glu.glu_from_codes(codes, scales, again, activation)
    rounded_glu.glu_backward_from_codes(grad_out, codes, scales, grad, activation)
    glu.glu_forward(gate_up, plain_out, activation)
    assert torch.equal(out, plain_out)
    assert torch.equal(both[0], codes)
    assert torch.equal(both[1], scales)
    plain = buffers(tokens, width, "cpu")
    round_rows(gate_up.cpu(), *plain)
    assert torch.equal(codes.cpu(), plain[0])
    assert torch.equal(scales.cpu(), plain[1])
    near = rounded(gate_up)
    expected_out, expected_grad = reference(near, grad_out, activation)
    checks.assert_close(again, expected_out, checks.TOLERANCE[dtype], "a again")
    checks.assert_close(grad, expected_grad, checks.TOLERANCE[dtype], "grad_gate_up")


@pytest.mark.pairs
@pytest.mark.filterwarnings("ignore:overflow encountered in")  # the interpreter computes with numpy
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", glu.ACTIVATIONS)
@pytest.mark.parametrize(("tokens", "width"), SHAPES)
def test_matches_float64(checks, device, tokens, width, dtype, activation):
    check(checks, tokens, width, dtype, device, activation)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", glu.ACTIVATIONS)
@pytest.mark.parametrize(("tokens", "width"), [(4097, 14336), (33, 12345)])
def test_matches_float64_on_gpu(checks, gpu, tokens, width, dtype, activation):
    check(checks, tokens, width, dtype, gpu, activation)


@pytest.mark.gpu
def test_cards_without_the_instruction_get_the_same_codes_on_gpu(checks, gpu, monkeypatch):
    tokens, width = 257, 1000
    gate_up = checks.normal(tokens, 2 * width, dtype=torch.bfloat16, device=gpu)
    gate_up[3, 5], gate_up[4, :200] = float("nan"), 1e-6
    found = []
    for since in ((8, 9), (99, 0)):
        monkeypatch.setattr(rounded_glu, "NATIVE_SINCE", since)
        codes, scales = buffers(tokens, width, gpu)
        rounded_glu.round_gate_up(gate_up, codes, scales, LARGEST, LEAST_ABSMAX)
        out = checks.empty(tokens, width, dtype=torch.bfloat16, device=gpu)
        rounded_glu.glu_from_codes(codes, scales, out, "silu")
        found.append((codes & 0x7F, scales, out.nan_to_num(7.0)))  # a NaN may have either sign
    for native, by_hand in zip(*found, strict=True):
        assert torch.equal(native, by_hand)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements_on_gpu(checks, gpu):
    tokens, width = 32768, 33024
    gate_up = torch.zeros(tokens, 2 * width, dtype=torch.bfloat16, device=gpu)
    gate_up[-1] = torch.randn(2 * width, device=gpu)
    codes, scales = buffers(tokens, width, gpu)
    rounded_glu.round_gate_up(gate_up, codes, scales, LARGEST, LEAST_ABSMAX)
    out = torch.empty(tokens, width, dtype=torch.bfloat16, device=gpu)
    rounded_glu.glu_from_codes(codes, scales, out, "silu")
    expected, _ = reference(rounded(gate_up[-1:]), torch.ones(1, width, device=gpu))
    checks.assert_close(out[-1:], expected, 4e-3)
    assert int(torch.count_nonzero(out[:-1])) == 0


@pytest.mark.filterwarnings("ignore:invalid value encountered in", "ignore:overflow encountered in")
@pytest.mark.parametrize("value", [0.0, 3e37, 1e-38, float("nan"), float("inf"), -float("inf")], ids=str)
def test_extreme_values_stay_within_their_block(checks, device, value):
    """A block of zeros gives zeros, huge values stay finite, and what is not finite spoils its own block at most."""
    tokens, width = 2, 300
    gate_up = checks.normal(tokens, 2 * width, dtype=torch.float32, device=device)
    before = gate_up.clone()
    gate_up[1, 128:256] = 0.0 if value == 0.0 else gate_up[1, 128:256]
    gate_up[1, 130] = value
    codes, scales = buffers(tokens, width, device)
    plain = buffers(tokens, width, "cpu")
    rounded_glu.round_gate_up(gate_up, codes, scales, LARGEST, LEAST_ABSMAX)
    round_rows(gate_up.cpu(), *plain)
    out = checks.empty(tokens, width, dtype=torch.float32, device=device)
    rounded_glu.glu_from_codes(codes, scales, out, "silu")
    values = codes.cpu().view(torch.float8_e4m3fn).float()
    assert torch.equal(values.nan_to_num(7.0), plain[0].view(torch.float8_e4m3fn).float().nan_to_num(7.0))
    assert torch.equal(scales.cpu(), plain[1])
    spoilt = out.isnan().cpu()
    if value != value:  # noqa: PLR0124 - a NaN
        assert spoilt.nonzero().tolist() == [[1, 130]]
    elif abs(value) == float("inf"):
        assert spoilt[1, 128:256].all()
        assert spoilt.sum() == 128
    else:
        assert out.isfinite().all()
    untouched = checks.empty(tokens, width, dtype=torch.float32, device=device)
    rounded_glu.round_gate_up(before, codes, scales, LARGEST, LEAST_ABSMAX)
    rounded_glu.glu_from_codes(codes, scales, untouched, "silu")
    assert torch.equal(out[0], untouched[0])
    assert torch.equal(out[1, :128], untouched[1, :128])


def test_refuses_scales_of_other_blocks(device):
    codes = torch.zeros(2, 600, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match=r"scales must have shape \[2, 6\], got \[2, 5\]"):
        rounded_glu.glu_from_codes(codes, torch.zeros(2, 5, device=device), torch.zeros(2, 300, device=device), "silu")
