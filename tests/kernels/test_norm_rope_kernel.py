"""Norm and rotation in one kernel, against the plain paths in float64 one after the other."""

from itertools import product

import pytest
import torch
from thorough import cases

from flexengine.kernels import norm_rope as kernel
from flexengine.ops import rmsnorm, rope

EPS = 1e-5
SHAPES = [(3, 6, 6, 3), (3, 10, 10, 2), (1, 18, 6, 3), (1, 24, 8, 2), (9, 64, 64, 32)]
"""(groups, columns of each, width of a head, pairs that rotate)."""


def check(checks, device, dtype, shape, interleaved, wide, tokens=11):
    groups, width, head_dim, half = shape
    x, grad = (checks.strided(tokens, groups * width, dtype=dtype, device=device) for _ in range(2))
    for rows in (x, grad):
        rows.copy_(torch.randn(rows.shape))
    x, grad = (rows.unflatten(1, (groups, width)) for rows in (x, grad))
    weight = checks.normal(width, dtype=dtype, device=device)
    positions = (7 * torch.arange(tokens)).to(device, torch.int32)
    inv_freq = torch.rand(half, device=device)
    norm, rotation = (
        kernel.Norm(weight, EPS, 1.0, wide),
        kernel.Rotation(positions, inv_freq, 1.3, interleaved, head_dim),
    )

    def turned(rows, inverse):
        heads = rows.view(tokens, -1, head_dim)
        turn = (positions.cpu(), inv_freq.cpu().double(), 1.3, groups * width // head_dim, inverse, interleaved)
        rope.rope_(heads, *turn)

    exact, exact_weight = x.double().cpu().contiguous(), weight.double().cpu()
    wanted = torch.empty_like(exact)
    rmsnorm.rmsnorm_forward(exact, exact_weight, EPS, wanted, None, None, 1.0, wide)
    turned(wanted, inverse=False)
    out = checks.strided(tokens, groups * width, dtype=dtype, device=device).unflatten(1, (groups, width))
    kernel.norm_rope_forward(x, out, norm, rotation)
    tolerance = 2 * checks.TOLERANCE[dtype]  # rounded before it is rotated, and after
    checks.assert_close(out, wanted, tolerance, "out")

    wanted_x, before = torch.empty_like(exact), grad.double().cpu().contiguous()
    turned(before, inverse=True)
    sums, rstd = torch.empty(1, width, dtype=torch.float64), torch.empty(tokens, groups, dtype=torch.float64)
    style = rmsnorm.StyleAgain(1.0, EPS, wide)
    rmsnorm.rmsnorm_backward(before, exact, exact_weight, rstd, wanted_x, sums, False, style)
    grad_x = torch.full_like(out, float("nan"))
    for programs in (1, 4, 2 * tokens):
        partials = checks.empty(programs, width, dtype=torch.float32, device=device)
        kernel.norm_rope_backward(grad, x, grad_x, norm, rotation, partials)
        checks.assert_close(grad_x, wanted_x, tolerance, "grad_x")
        checks.assert_close(partials.sum(0), sums[0], 2e-6 if dtype == torch.float32 else 4e-3, "grad_weight")
    own = grad.clone()
    kernel.norm_rope_backward(grad, x, grad_x, norm, rotation, None)  # its sums may be cut among threads otherwise
    checks.assert_close(grad_x, wanted_x, tolerance, "grad_x of a frozen weight")
    kernel.norm_rope_backward(own, x, own, norm, rotation, None)
    assert torch.equal(own, grad_x)


WAYS = list(product((torch.float32, torch.bfloat16), (False, True)))
EVERY_WAY = [(shape, WAYS[i % len(WAYS)]) for i, shape in enumerate(SHAPES)]


@pytest.mark.parametrize(("shape", "way"), cases(product(SHAPES, WAYS), EVERY_WAY), ids=str)
def test_norm_and_rotation(checks, device, shape, way):
    dtype, interleaved = way
    check(checks, device, dtype, shape, interleaved, interleaved)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(32, 128, 128, 64), (16, 256, 256, 32), (1, 2048, 128, 64), (1, 5120, 128, 64)])
def test_large_rows(checks, gpu, shape):
    check(checks, gpu, torch.bfloat16, shape, False, False, tokens=3001)


def test_what_does_not_fit_is_refused(checks, device):
    x = checks.normal(4, 2, 12, dtype=torch.float32, device=device)
    positions = torch.zeros(4, dtype=torch.int32, device=device)
    norm = kernel.Norm(x[0, 0].clone(), EPS, 0.0, False)
    for head_dim, half, message in (
        (5, 2, "no heads of 5"),
        (6, 4, "of which 8 rotate"),
        (6, 3, "2 groups of several"),
    ):
        rotation = kernel.Rotation(positions, torch.ones(half, device=device), 1.0, False, head_dim)
        with pytest.raises(ValueError, match=message):
            kernel.norm_rope_forward(x, x.clone(), norm, rotation)
