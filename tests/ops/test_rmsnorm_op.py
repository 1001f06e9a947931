"""RMSNorm: the plain path against autograd, the CUDA path against the definition in float64."""

import pytest
import torch

from flexengine.ops.rmsnorm import NormStyle, RMSNorm

EPS = 1e-5
STYLES = {"plain": NormStyle(EPS), "wide": NormStyle(EPS, 0.0, True), "around zero": NormStyle(EPS, 1.0, True)}


def definition(inputs, weight, grad_y, offset=0.0):
    inputs = {name: t.detach().double().cpu().requires_grad_() for name, t in inputs.items()}
    weight = weight.detach().double().cpu().requires_grad_()
    rstd = torch.rsqrt(inputs["x"].square().mean(-1) + EPS)
    y = (weight + offset) * inputs["x"] * rstd[:, None]
    outputs = {"norm_rstd": rstd}
    if "residual" in inputs:
        y, outputs = y + inputs["residual"], {}
    grads = torch.autograd.grad(y, (*inputs.values(), weight), grad_y.double().cpu())
    return {"y": y, **outputs}, {"x": grads[0]}, {"w": grads[-1]}


def operands(h, tokens, width, style=STYLES["plain"], residual=False):
    op = RMSNorm("norm", "x", "y", width, "w", style, "residual" if residual else None)
    inputs = {name: h.randn(tokens, width) for name in op.inputs}
    weight = 1 - style.offset + h.randn(width, scale=0.2)
    return op, h.chunk((tokens,)), inputs, {"w": weight}, h.randn(tokens, width)


def without_residual(grads):
    return {name: grad for name, grad in grads.items() if name != "residual"}


@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES.keys())
@pytest.mark.parametrize(("tokens", "width"), [(1, 8), (7, 33), (13, 48)])
def test_matches_autograd(harness, checks, tokens, width, style, residual):
    op, chunk, inputs, params, grad_y = operands(harness, tokens, width, style, residual)
    result = harness.run(op, chunk, inputs, params, {"y": grad_y})
    outputs, grads, param_grads = definition(inputs, params["w"], grad_y, style.offset)
    checks.all_close(result.outputs, outputs)
    checks.all_close(without_residual(result.grads), grads)
    checks.all_close(result.param_grads, param_grads)


def test_adds_to_gradients_that_are_there(harness, checks):
    op, chunk, inputs, params, grad_y = operands(harness, 7, 12)
    before, before_w = harness.randn(7, 12), harness.randn(12)
    result = harness.run(op, chunk, inputs, params, {"y": grad_y}, {"x": before}, {"w": before_w})
    _, grads, param_grads = definition(inputs, params["w"], grad_y)
    checks.close(result.grads["x"], grads["x"] + before)
    checks.close(result.param_grads["w"], param_grads["w"] + before_w)


@pytest.mark.parametrize("added", [False, True], ids=["first gradient", "added"])
def test_the_first_columns_of_a_wider_row(harness, checks, added):
    """The others take no part: their gradient is zero, or what somebody else left there."""
    op, chunk, inputs, params, grad_y = operands(harness, 7, 12)
    x, before = torch.cat((inputs["x"], harness.randn(7, 5)), dim=1), harness.randn(7, 17)
    result = harness.run(op, chunk, {"x": x}, params, {"y": grad_y}, {"x": before} if added else None)
    outputs, grads, param_grads = definition(inputs, params["w"], grad_y)
    checks.all_close(result.outputs, outputs)
    checks.all_close(result.param_grads, param_grads)
    wanted = torch.nn.functional.pad(grads["x"], (0, 5))
    checks.close(result.grads["x"], wanted + before if added else wanted)


def test_recomputes_the_same_bits(harness, checks):
    op, chunk, inputs, params, _ = operands(harness, 5, 9)
    checks.same_bits(harness.run(op, chunk, inputs, params), harness.run(op, chunk, inputs, params))


@pytest.mark.gpu
@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "width"), [(1024, 2048), (1027, 520)])
@pytest.mark.usefixtures("deterministic")
def test_cuda_matches_definition(make_harness, checks, dtype, tokens, width, style, residual):
    h = make_harness("cuda", dtype)
    op, chunk, inputs, params, grad_y = operands(h, tokens, width, style, residual)
    result = h.run(op, chunk, inputs, params, {"y": grad_y})
    outputs, grads, param_grads = definition(inputs, params["w"], grad_y, style.offset)
    tolerance = checks.GPU_TOLERANCE[dtype]
    checks.all_close(result.outputs, outputs, tolerance)
    checks.all_close(without_residual(result.grads), grads, tolerance)
    checks.all_close(result.param_grads, param_grads, tolerance)
    checks.same_bits(result, h.run(op, chunk, inputs, params, {"y": grad_y}))
