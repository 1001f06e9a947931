"""RMSNorm: the plain path against autograd, the CUDA path against the definition in float64."""

import pytest
import torch

from flexengine.ops.rmsnorm import RMSNorm

EPS = 1e-5


def definition(x, weight, grad_y):
    x, weight = (t.detach().double().cpu().requires_grad_() for t in (x, weight))
    rstd = torch.rsqrt(x.square().mean(-1) + EPS)
    y = weight * x * rstd[:, None]
    grad_x, grad_weight = torch.autograd.grad(y, (x, weight), grad_y.double().cpu())
    return {"y": y, "y_rstd": rstd}, {"x": grad_x}, {"w": grad_weight}


def operands(h, tokens, width):
    op = RMSNorm("norm", "x", "y", width, "w", EPS)
    return (
        op,
        h.chunk((tokens,)),
        {"x": h.randn(tokens, width)},
        {"w": 1 + h.randn(width, scale=0.2)},
        h.randn(tokens, width),
    )


@pytest.mark.parametrize(("tokens", "width"), [(1, 8), (7, 33), (13, 48)])
def test_matches_autograd(harness, checks, tokens, width):
    op, chunk, inputs, params, grad_y = operands(harness, tokens, width)
    result = harness.run(op, chunk, inputs, params, {"y": grad_y})
    outputs, grads, param_grads = definition(inputs["x"], params["w"], grad_y)
    checks.all_close(result.outputs, outputs)
    checks.all_close(result.grads, grads)
    checks.all_close(result.param_grads, param_grads)


def test_adds_to_gradients_that_are_there(harness, checks):
    op, chunk, inputs, params, grad_y = operands(harness, 7, 12)
    before, before_w = harness.randn(7, 12), harness.randn(12)
    result = harness.run(op, chunk, inputs, params, {"y": grad_y}, {"x": before}, {"w": before_w})
    _, grads, param_grads = definition(inputs["x"], params["w"], grad_y)
    checks.close(result.grads["x"], grads["x"] + before)
    checks.close(result.param_grads["w"], param_grads["w"] + before_w)


def test_recomputes_the_same_bits(harness, checks):
    op, chunk, inputs, params, _ = operands(harness, 5, 9)
    checks.same_bits(harness.run(op, chunk, inputs, params), harness.run(op, chunk, inputs, params))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "width"), [(1024, 2048), (1027, 520)])
@pytest.mark.usefixtures("deterministic")
def test_cuda_matches_definition(make_harness, checks, dtype, tokens, width):
    h = make_harness("cuda", dtype)
    op, chunk, inputs, params, grad_y = operands(h, tokens, width)
    result = h.run(op, chunk, inputs, params, {"y": grad_y})
    outputs, grads, param_grads = definition(inputs["x"], params["w"], grad_y)
    tolerance = checks.GPU_TOLERANCE[dtype]
    checks.all_close(result.outputs, outputs, tolerance)
    checks.all_close(result.grads, grads, tolerance)
    checks.all_close(result.param_grads, param_grads, tolerance)
    checks.same_bits(result, h.run(op, chunk, inputs, params, {"y": grad_y}))
