"""RoPE kernel against complex multiplication in float64."""

import pytest
import torch

from flexengine.kernels import rope

DTYPES = [torch.float32, torch.bfloat16]


def reference(x, positions, inv_freq, scaling, num_rotated_heads, inverse, interleaved=False):
    """exp(i angle) times the complex number (a, b). The angle is the float32 product, as in Hugging Face."""
    half = inv_freq.numel()
    angle = (positions.float()[:, None] * inv_freq[None, :]).double()
    turn = torch.polar(torch.full_like(angle, scaling), -angle if inverse else angle)[:, None, :]
    out = x.double().clone()
    rotated = out[:, :num_rotated_heads, : 2 * half]
    a, b = (rotated[..., ::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, dim=-1)
    pair = torch.complex(a.clone(), b.clone()) * turn
    a.copy_(pair.real)
    b.copy_(pair.imag)
    return out


def frequencies(rotary, device, theta=500_000.0):
    return 1.0 / theta ** (torch.arange(0, rotary, 2, device=device).float() / rotary)


def check(checks, tokens, heads, rotated, head_dim, rotary, dtype, device, inverse, interleaved=False):
    storage = checks.normal(tokens, heads * head_dim + 5, dtype=dtype, device=device)
    before = storage.clone()
    x = storage[:, : heads * head_dim].unflatten(1, (heads, head_dim))
    positions = torch.randint(0, 1_000_000, (tokens,), dtype=torch.int32, device=device)
    inv_freq = frequencies(rotary, device)
    expected = reference(x, positions, inv_freq, 1.25, rotated, inverse, interleaved)
    rope.rope_(x, positions, inv_freq, 1.25, rotated, inverse, interleaved)
    tolerance = {torch.float32: 3e-7, torch.bfloat16: checks.TOLERANCE[torch.bfloat16]}[dtype]
    checks.assert_close(x[:, :rotated, :rotary], expected[:, :rotated, :rotary], tolerance)
    old = before[:, : heads * head_dim].unflatten(1, (heads, head_dim))
    assert torch.equal(x[:, rotated:], old[:, rotated:])
    assert torch.equal(x[..., rotary:], old[..., rotary:])
    assert torch.equal(storage[:, heads * head_dim :], before[:, heads * head_dim :])
    again = before.clone()
    view = again[:, : heads * head_dim].unflatten(1, (heads, head_dim))
    rope.rope_(view, positions, inv_freq, 1.25, rotated, inverse, interleaved)
    assert torch.equal(again, storage)


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "rotated", "head_dim", "rotary"),
    [(1, 3, 2, 16, 16), (7, 6, 5, 24, 20), (5, 40, 37, 64, 64), (3, 4, 4, 18, 6)],
)
def test_matches_complex_rotation(checks, device, tokens, heads, rotated, head_dim, rotary, dtype, inverse):
    check(checks, tokens, heads, rotated, head_dim, rotary, dtype, device, inverse)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inverse", [False, True])
def test_interleaved_pairs(checks, device, dtype, inverse):
    check(checks, 7, 6, 5, 24, 20, dtype, device, inverse, interleaved=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize(("heads", "rotated", "head_dim", "rotary"), [(48, 40, 128, 128), (20, 18, 256, 64)])
def test_matches_complex_rotation_on_gpu(checks, gpu, heads, rotated, head_dim, rotary, dtype, inverse):
    check(checks, 2049, heads, rotated, head_dim, rotary, dtype, gpu, inverse)
    check(checks, 2049, heads, rotated, head_dim, rotary, dtype, gpu, inverse, interleaved=True)


def test_inverse_is_the_transpose(device):
    """<rotate(x), y> equals <x, inverse(y)>, which makes inverse the backward."""
    x, y = torch.randn(7, 2, 16, device=device), torch.randn(7, 2, 16, device=device)
    positions, inv_freq = torch.arange(7, dtype=torch.int32, device=device), frequencies(12, device)
    turned, returned = x.clone(), y.clone()
    rope.rope_(turned, positions, inv_freq, 0.7, 2, inverse=False)
    rope.rope_(returned, positions, inv_freq, 0.7, 2, inverse=True)
    torch.testing.assert_close((turned * y).sum(), (x * returned).sum(), rtol=1e-5, atol=1e-5)


def test_refuses_impossible_widths(device):
    x, positions = torch.zeros(2, 3, 8, device=device), torch.zeros(2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="exceeds the head width 8"):
        rope.rope_(x, positions, torch.ones(5, device=device), 1.0, 3, inverse=False)
    with pytest.raises(ValueError, match=r"0\.\.3"):
        rope.rope_(x, positions, torch.ones(4, device=device), 1.0, 4, inverse=False)
