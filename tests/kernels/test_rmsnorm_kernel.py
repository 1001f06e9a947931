"""RMSNorm kernels against float64 formulas written from the definition, with autograd for the gradients."""

import pytest
import torch

from flexengine.kernels import rmsnorm

EPS = 1e-5
SHAPES = [(1, 48), (7, 257), (33, 48), (33, 1024)]
DTYPES = [torch.float32, torch.bfloat16]


def reference(x, weight, grad_y):
    """(y, grad_x, grad_weight) in float64, without any intermediate rounding."""
    x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
    y = weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    grad_x, grad_weight = torch.autograd.grad(y, (x, weight), grad_y.double())
    return y.detach(), grad_x, grad_weight


def run_all(checks, x, weight, grad_y, groups=128):
    (tokens, width), device = x.shape, x.device
    out = checks.strided(tokens, width, dtype=x.dtype, device=device)
    rstd = checks.empty(tokens, dtype=torch.float32, device=device)
    grad_x = checks.strided(tokens, width, dtype=x.dtype, device=device)
    grad_weight = checks.empty(width, dtype=torch.float32, device=device)
    partials = checks.empty(groups, width, dtype=torch.float32, device=device)
    rmsnorm.rmsnorm_forward(x, weight, EPS, out, rstd)
    rmsnorm.rmsnorm_backward(grad_y, x, weight, rstd, grad_x, partials, accumulate=False)
    rmsnorm.sum_partials(partials, grad_weight, accumulate=False)
    return {"out": out, "rstd": rstd, "grad_x": grad_x, "grad_weight": grad_weight}


def check(checks, tokens, width, dtype, device, groups):
    x = checks.strided(tokens, width, dtype=dtype, device=device)
    x.copy_(checks.normal(tokens, width, dtype=dtype, device=device))
    weight = 1 + 0.1 * checks.normal(width, dtype=dtype, device=device)
    grad_y = checks.normal(tokens, width, dtype=dtype, device=device)
    results = run_all(checks, x, weight, grad_y, groups)
    out, grad_x, grad_weight = reference(x, weight, grad_y)
    # The forward rounds twice in bf16 (as Hugging Face); the weight gradient reads the rounded normalised value.
    factor = 1.0 if dtype == torch.float32 else 1.5
    checks.assert_close(results["out"], out, factor * checks.TOLERANCE[dtype], "out")
    checks.assert_close(results["rstd"], torch.rsqrt(x.double().square().mean(-1) + EPS), 1e-6, "rstd")
    checks.assert_close(results["grad_x"], grad_x, checks.TOLERANCE[dtype], "grad_x")
    checks.assert_close(results["grad_weight"], grad_weight, factor * checks.TOLERANCE[dtype], "grad_weight")
    again = run_all(checks, x, weight, grad_y, groups)
    assert all(torch.equal(results[name], again[name]) for name in results)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "width"), SHAPES)
def test_matches_float64(checks, device, tokens, width, dtype):
    check(checks, tokens, width, dtype, device, groups=8)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "width"), [(4097, 4096), (1000, 128), (300, 12345), (100, 57344)])
def test_matches_float64_on_gpu(checks, gpu, tokens, width, dtype):
    check(checks, tokens, width, dtype, gpu, groups=128)


def test_rounds_like_hugging_face(checks, device):
    """bf16: the normalised value is rounded before the weight multiplies it; almost every bit agrees."""
    x = checks.normal(16, 512, dtype=torch.bfloat16, device=device)
    weight = (1 + 0.3 * torch.randn(512, device=device)).bfloat16()
    out, rstd = torch.empty_like(x), torch.empty(16, device=device)
    rmsnorm.rmsnorm_forward(x, weight, EPS, out, rstd)
    wide = x.float()
    expected = weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).bfloat16()
    assert (out != expected).float().mean() < 1e-3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_accumulate_adds_before_the_rounding(checks, device, dtype):
    tokens, width = 7, 48
    x, grad_y, previous = (checks.normal(tokens, width, dtype=dtype, device=device) for _ in range(3))
    weight = checks.normal(width, dtype=dtype, device=device)
    previous_weight = torch.randn(width, device=device)
    rstd, partials = torch.rsqrt(x.float().square().mean(-1) + EPS), torch.empty(4, width, device=device)
    grad_x, grad_weight = previous.clone(), previous_weight.clone()
    rmsnorm.rmsnorm_backward(grad_y, x, weight, rstd, grad_x, partials, accumulate=True)
    rmsnorm.sum_partials(partials, grad_weight, accumulate=True)
    _, expected_x, expected_weight = reference(x, weight, grad_y)
    checks.assert_close(grad_x, expected_x + previous.double(), checks.TOLERANCE[dtype], "grad_x")
    tolerance = 1.5 * checks.TOLERANCE[dtype]
    checks.assert_close(grad_weight, expected_weight + previous_weight.double(), tolerance, "grad_weight")


def check_in_one_pass(checks, shape, dtype, device, groups, accumulate, found, wide):
    """The input half is that without the sums, and all of it may be written over the gradient of y."""
    tolerance = 0.0 if device.type == "cpu" else checks.TOLERANCE[dtype]  # a GPU sums rows with more threads
    *rows, width = shape
    x, grad_y, previous = (checks.strided(rows[0], shape.numel() // rows[0], dtype=dtype, device=device) for _ in "123")
    x, grad_y, previous = (tensor.unflatten(1, shape[1:]) for tensor in (x, grad_y, previous))
    for tensor in (x, grad_y, previous):
        tensor.copy_(checks.normal(*shape, dtype=dtype, device=device))
    offset = 1.0 if wide else 0.0
    weight = 1 - offset + 0.1 * checks.normal(width, dtype=dtype, device=device)
    exact = torch.rsqrt(x.double().square().mean(-1) + EPS)
    given, grad_x, alone = exact.float(), previous.clone(), previous.clone()
    rstd = checks.empty(*rows, dtype=torch.float32, device=device) if found else given
    partials = checks.empty(groups, width, dtype=torch.float32, device=device)
    eps = EPS if found else None
    rmsnorm.rmsnorm_backward(grad_y, x, weight, rstd, grad_x, partials, accumulate, offset, eps, wide)
    rmsnorm.rmsnorm_backward_input(grad_y, x, weight, given.clone(), alone, accumulate, offset, eps)
    checks.assert_close(grad_x, alone.double(), tolerance, "grad_x")
    checks.assert_close(rstd, exact, 1e-6, "rstd")
    before = torch.randn(width, device=device)
    for added in (False, True):
        total = before.clone()
        rmsnorm.sum_partials(partials, total, added)
        terms = grad_y.double() * x.double() * exact[..., None]
        expected = terms.flatten(0, -2).sum(0) + added * before.double()
        checks.assert_close(total, expected, 1.5 * checks.TOLERANCE[dtype], "grad_weight")
    over, again = grad_y.clone(), torch.empty_like(partials)
    rmsnorm.rmsnorm_backward(over, x, weight, given.clone(), over, again, False, offset, eps, wide)
    rmsnorm.rmsnorm_backward_input(grad_y, x, weight, given.clone(), alone, False, offset, eps)
    checks.assert_close(over, alone.double(), tolerance, "grad_x over grad_y")
    assert torch.equal(again, partials)


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("found", [False, True])
@pytest.mark.parametrize(
    ("shape", "groups"), [((1, 48), 1), ((7, 257), 3), ((33, 1024), 8), ((5, 48), 8), ((9, 3, 40), 4)], ids=str
)
def test_in_one_pass(checks, device, shape, groups, dtype, accumulate, found):
    check_in_one_pass(checks, torch.Size(shape), dtype, device, groups, accumulate, found, found)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("found", "wide"), [(False, False), (True, True)])
@pytest.mark.parametrize("shape", [(4097, 4096), (1000, 2048), (300, 12345), (100, 57344), (513, 16, 128)], ids=str)
def test_in_one_pass_on_gpu(checks, gpu, shape, dtype, found, wide):
    check_in_one_pass(checks, torch.Size(shape), dtype, gpu, 512, True, found, wide)


def test_more_groups_than_rows_leave_no_garbage(checks, device):
    x, grad_y = (checks.normal(3, 48, dtype=torch.float32, device=device) for _ in range(2))
    weight = torch.ones(48, device=device)
    results = run_all(checks, x, weight, grad_y, groups=5)
    checks.assert_close(results["grad_weight"], reference(x, weight, grad_y)[2], 1e-6, "grad_weight")


def test_refuses_a_wrong_shape(checks, device):
    x = torch.zeros(4, 8, device=device)
    with pytest.raises(ValueError, match=r"weight must have shape \[8\], got \[7\]"):
        rmsnorm.rmsnorm_forward(x, torch.ones(7, device=device), EPS, x.clone(), torch.empty(4, device=device))
    with pytest.raises(ValueError, match="stride 1"):
        rmsnorm.rmsnorm_forward(x.t(), torch.ones(4, device=device), EPS, x.t().clone(), torch.empty(8, device=device))
