"""Formulas with kernels as functions of autograd: against their definitions, in what they keep, and on a GPU."""

from functools import partial

import pytest
import torch

from flexengine.ops.fused_calls import fused_rmsnorm
from flexengine.ops.opaque_cost import traced_call
from flexengine.ops.rmsnorm import NormStyle

STYLES = [NormStyle(1e-5), NormStyle(1e-5, 1.0, True)]


def defined_norm(x, weight, style):
    return (weight + style.offset) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + style.eps)


def compare(checks, call, definition, operands, tolerance=1e-12):
    """Value and gradients, the latter against the definition in float64."""
    exact = [t.detach().double().cpu().requires_grad_() for t in operands]
    given = [t.detach().requires_grad_() for t in operands]
    wanted, found = definition(*exact), call(*given)
    weights = torch.randn(wanted.shape, dtype=torch.float64)
    checks.close(found, wanted, tolerance)
    pairs = zip(
        torch.autograd.grad(found, given, weights.to(found)), torch.autograd.grad(wanted, exact, weights), strict=True
    )
    for index, (one, other) in enumerate(pairs):
        assert one.dtype == given[index].dtype
        checks.close(one, other, tolerance, f"gradient {index}")


@pytest.mark.parametrize("style", STYLES, ids=["plain", "around zero"])
@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 5, 33), (3, 1, 5000)])
def test_norms(checks, shape, style):
    x, weight = (torch.randn(size, dtype=torch.float64) for size in (shape, shape[-1]))
    compare(checks, partial(fused_rmsnorm, style=style), partial(defined_norm, style=style), (x, weight))


def test_norms_of_heads_that_lie_apart_and_of_none(checks):
    heads, style = torch.randn(2, 7, 3, 6, dtype=torch.float64).transpose(1, 2), STYLES[0]
    weight = torch.randn(6, dtype=torch.float64)
    compare(checks, partial(fused_rmsnorm, style=style), partial(defined_norm, style=style), (heads, weight))
    x = torch.zeros(1, 0, 6, dtype=torch.float64, requires_grad=True)
    assert fused_rmsnorm(x, weight, style).shape == x.shape


def test_a_norm_whose_weight_is_frozen(checks):
    x, weight = torch.randn(5, 9, dtype=torch.float64), torch.randn(9, dtype=torch.float64)
    style = STYLES[1]
    compare(checks, lambda x: fused_rmsnorm(x, weight, style), lambda x: defined_norm(x, weight, style), (x,))


def test_a_norm_keeps_its_input_alone():
    """Backward takes two gradients of a row at the most, beside the rows and the sums of the weight's."""
    cost = traced_call(lambda w, x: fused_rmsnorm(x, w["weight"], STYLES[0]), {"weight": (256,)}, 256, 2048, ["weight"])
    row_bytes, sums = 2048 * 256 * 2, 1024 * 256 * 4
    assert cost.peak_bytes <= 3 * row_bytes + sums + 2**14
    assert cost.forward.memory_bytes <= 2 * row_bytes + 2**14


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_cuda(checks, dtype, tolerance):
    given = tuple(torch.randn(size, device="cuda", dtype=dtype) for size in ((3, 257, 520), (520,)))
    for style in STYLES:
        compare(checks, partial(fused_rmsnorm, style=style), partial(defined_norm, style=style), given, tolerance)
