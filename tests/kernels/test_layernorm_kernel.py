"""LayerNorm kernels against torch's layer_norm in float64, with autograd for the gradients."""

import pytest
import torch

from flexengine.kernels import layernorm

EPS = 1e-5
SHAPES = [(1, 48), (37, 257), (19, 1024)]
DTYPES = [torch.float32, torch.bfloat16]


def operands(checks, tokens, width, dtype, device):
    """x, weight, bias and grad_y; rows of x are apart, and their mean is as large as their spread."""
    x = checks.strided(tokens, width, dtype=dtype, device=device)
    x.copy_(1 + checks.normal(tokens, width, dtype=dtype, device=device))
    weight = 1 + 0.1 * checks.normal(width, dtype=dtype, device=device)
    bias, grad_y = (checks.normal(*shape, dtype=dtype, device=device) for shape in ((width,), (tokens, width)))
    return x, weight, bias, grad_y


def reference(x, weight, bias, grad_y):
    """Output and gradients in float64, without any intermediate rounding."""
    leaves = [tensor.double().requires_grad_() for tensor in (x, weight, bias)]
    out = torch.nn.functional.layer_norm(leaves[0], x.shape[-1:], *leaves[1:], EPS)
    found = torch.autograd.grad(out, leaves, grad_y.double())
    return {"out": out.detach(), **dict(zip(("grad_x", "grad_weight", "grad_bias"), found, strict=True))}


def run_all(checks, x, weight, bias, grad_y, groups, previous=None):
    """previous: what gradients are added to."""
    empty = lambda *shape: checks.empty(*shape, dtype=torch.float32, device=x.device)  # noqa: E731
    width, tokens = x.shape[-1], len(x)
    results = {
        name: checks.strided(tokens, width, dtype=x.dtype, device=x.device, pad=pad)
        for name, pad in (("out", 3), ("grad_x", 5))
    }
    results |= {"grad_weight": empty(width), "grad_bias": empty(width)}
    for name, before in (previous or {}).items():
        results[name].copy_(before)
    partials, accumulate = empty(groups, 2, width), previous is not None
    layernorm.layernorm_forward(x, weight, bias, EPS, results["out"])
    layernorm.layernorm_backward(grad_y, x, weight, EPS, results["grad_x"], partials, accumulate)
    layernorm.sum_partials(partials, results["grad_weight"], results["grad_bias"], accumulate)
    return results


def check(checks, given, groups, previous=None):
    results, expected = run_all(checks, *given, groups, previous), reference(*given)
    for name, value in expected.items():
        wide = name in ("grad_weight", "grad_bias")
        tolerance = checks.TOLERANCE[torch.float32 if wide else given[0].dtype]
        checks.assert_close(results[name], value + (previous or {}).get(name, 0.0), tolerance, name)
    return results


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "width"), SHAPES)
def test_matches_float64(checks, device, tokens, width, dtype):
    given = operands(checks, tokens, width, dtype, device)
    results, again = check(checks, given, groups=2), run_all(checks, *given, groups=2)
    assert all(torch.equal(results[name], again[name]) for name in results)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_accumulates_before_the_rounding(checks, device, dtype):
    given = operands(checks, 5, 48, dtype, device)
    previous = {name: torch.randn(48, device=device) for name in ("grad_weight", "grad_bias")}
    check(checks, given, 3, {"grad_x": checks.normal(5, 48, dtype=dtype, device=device), **previous})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "width"), [(16384, 768), (1000, 128), (300, 12345), (100, 57344)])
def test_matches_float64_on_gpu(checks, gpu, tokens, width, dtype):
    given = operands(checks, tokens, width, dtype, gpu)
    results, again = check(checks, given, groups=512), run_all(checks, *given, groups=512)
    assert all(torch.equal(results[name], again[name]) for name in results)


def test_a_large_mean_costs_no_precision(checks, device):
    """The variance is that of x - mean: mean(x^2) - mean^2 would keep nothing of it."""
    x = 4096 + checks.normal(3, 100, dtype=torch.float32, device=device)
    given = (x, *operands(checks, 3, 100, torch.float32, device)[1:])
    out = run_all(checks, *given, groups=1)["out"]
    checks.assert_close(out, reference(*given)["out"], 1e-3, "out")


def test_over_its_operands(checks, device):
    """out may be x, and grad_x may be grad_y, with the sums and without, as where weights are frozen."""
    x, weight, bias, grad_y = operands(checks, 3, 48, torch.float32, device)
    expected, over = run_all(checks, x, weight, bias, grad_y, groups=1), grad_y.clone()
    partials = checks.empty(1, 2, 48, dtype=torch.float32, device=device)
    tolerance = 0.0 if device.type == "cpu" else 1e-6
    layernorm.layernorm_backward(over, x, weight, EPS, over, partials, accumulate=False)
    checks.assert_close(over, expected["grad_x"], tolerance, "grad_x")
    checks.assert_close(partials[0, 0], expected["grad_weight"], tolerance, "grad_weight")
    checks.assert_close(partials[0, 1], expected["grad_bias"], tolerance, "grad_bias")
    layernorm.layernorm_backward_input(grad_y, x, weight, EPS, grad_y, accumulate=False)
    layernorm.layernorm_forward(x, weight, bias, EPS, x)
    checks.assert_close(grad_y, expected["grad_x"], tolerance, "grad_x")
    assert torch.equal(x, expected["out"])


def test_refuses_a_wrong_shape(device):
    x, weight = torch.zeros(4, 8, device=device), torch.ones(8, device=device)
    with pytest.raises(ValueError, match=r"bias must have shape \[8\], got \[7\]"):
        layernorm.layernorm_forward(x, weight, weight[:7], EPS, x.clone())
    with pytest.raises(ValueError, match="grad_y needs a last dimension of stride 1"):
        layernorm.layernorm_backward_input(torch.zeros(8, 4, device=device).t(), x, weight, EPS, x, False)
    with pytest.raises(ValueError, match="at least one row"):
        layernorm.layernorm_backward(x, x, weight, EPS, x.clone(), torch.zeros(0, 2, 8, device=device), True)
