"""Kernels of latent attention's rows against the plain path in float64."""

import pytest
import torch

from flexengine.kernels import latent_heads
from flexengine.ops.attention import latent_heads as plain
from flexengine.ops.attention.latent_heads import HeadSizes, Rotation

DTYPES = [torch.float32, torch.bfloat16]
LAYOUTS = [HeadSizes(1, 1, 2, 1), HeadSizes(3, 20, 12, 17), HeadSizes(5, 16, 8, 24)]


def rotation_of(tokens, heads, interleaved, device):
    positions = torch.randint(0, 100_000, (tokens,), dtype=torch.int32, device=device)
    inv_freq = 1.0 / 10_000.0 ** (torch.arange(0, heads.rope_dim, 2, device=device).float() / heads.rope_dim)
    return Rotation(positions, inv_freq, 1.25, interleaved)


def exact(rotation):
    """The same angles in float64: they are float32 products, as in Hugging Face."""
    angle = (rotation.positions.float()[:, None] * rotation.inv_freq[None]).double()

    class Exact(Rotation):
        def rotate(self, x, inverse):
            cos, sin = (f(angle.cpu())[:, None] * self.scaling for f in (torch.cos, torch.sin))
            a, b = (x[..., ::2], x[..., 1::2]) if self.interleaved else x.chunk(2, dim=-1)
            sin = -sin if inverse else sin
            new_a, new_b = a * cos - b * sin, b * cos + a * sin
            a.copy_(new_a)
            b.copy_(new_b)

    return Exact(*rotation)


def widths(heads, latent):
    return heads.query_width, heads.latent_width, latent + heads.rope_dim


def check_forward(checks, tokens, heads, latent, interleaved, dtype, device):
    parts = [checks.normal(tokens, width, dtype=dtype, device=device) for width in widths(heads, latent)]
    rotation = rotation_of(tokens, heads, interleaved, device)
    row = checks.empty(tokens, heads.width, dtype=dtype, device=device)
    latent_heads.latent_heads_forward(*parts, *rotation, heads, row)
    wanted = torch.full((tokens, heads.width), float("nan"), dtype=torch.float64)
    plain.latent_heads_forward(*(x.double().cpu() for x in parts), exact(rotation), heads, wanted)
    checks.assert_close(row, wanted, checks.TOLERANCE[dtype])


def check_backward(checks, tokens, heads, latent, interleaved, accumulate, dtype, device):
    grad_row = checks.normal(tokens, heads.width, dtype=dtype, device=device)
    rotation = rotation_of(tokens, heads, interleaved, device)
    grads = [checks.empty(tokens, width, dtype=dtype, device=device) for width in widths(heads, latent)]
    if accumulate:
        grads[2].normal_()
    wanted = [x.double().cpu() for x in grads]
    plain.latent_heads_backward(grad_row.double().cpu(), exact(rotation), heads, tuple(wanted), accumulate)
    again = [x.clone() for x in grads]
    latent_heads.latent_heads_backward(grad_row, *rotation, heads, *grads, accumulate)
    for name, found, expected in zip(("q", "kv", "shared"), grads, wanted, strict=True):
        checks.assert_close(found, expected, checks.TOLERANCE[dtype], name)
    latent_heads.latent_heads_backward(grad_row, *rotation, heads, *again, accumulate)
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("heads", LAYOUTS, ids=str)
@pytest.mark.parametrize("tokens", [1, 7])
def test_forward(checks, device, tokens, heads, interleaved, dtype):
    check_forward(checks, tokens, heads, 9, interleaved, dtype, device)


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("heads", LAYOUTS, ids=str)
def test_backward(checks, device, heads, interleaved, accumulate, dtype):
    check_backward(checks, 5, heads, 9, interleaved, accumulate, dtype, device)


def test_many_heads_and_a_wide_latent_take_several_tiles(checks, device, monkeypatch):
    monkeypatch.setattr(latent_heads, "_TILE_ELEMENTS", 64)
    monkeypatch.setattr(latent_heads, "_LATENT_TILE", 16)
    check_forward(checks, 3, LAYOUTS[2], 37, True, torch.float32, device)
    check_backward(checks, 3, LAYOUTS[2], 37, True, False, torch.float32, device)


def test_no_tokens_is_fine(device):
    heads = LAYOUTS[0]
    parts = [torch.empty(0, width, device=device) for width in widths(heads, 3)]
    latent_heads.latent_heads_forward(*parts, *rotation_of(0, heads, True, device), heads, torch.empty(0, heads.width))


def test_refuses_rows_of_another_width(device):
    heads, rotation = LAYOUTS[1], rotation_of(2, LAYOUTS[1], True, device)
    parts = [torch.zeros(2, width, device=device) for width in widths(heads, 3)]
    with pytest.raises(ValueError, match="row must have shape"):
        latent_heads.latent_heads_forward(*parts, *rotation, heads, torch.zeros(2, heads.width + 1, device=device))
    parts[2] = torch.zeros(2, heads.rope_dim - 1, device=device)
    with pytest.raises(ValueError, match="rotated key"):
        latent_heads.latent_heads_forward(*parts, *rotation, heads, torch.zeros(2, heads.width, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [HeadSizes(16, 128, 64, 128), HeadSizes(128, 128, 64, 128)], ids=str)
def test_on_gpu(checks, gpu, heads, dtype):
    check_forward(checks, 1025, heads, 512, True, dtype, gpu)
    for accumulate in (False, True):
        check_backward(checks, 1025, heads, 512, True, accumulate, dtype, gpu)
