"""Linear with and without bias and residual: the plain path against autograd, cuBLAS against float64."""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats its bits only with a fixed workspace

import pytest
import torch

from flexengine.ops.linear import Linear, accumulate_weight_grad

VARIANTS = [(bias, residual) for bias in (False, True) for residual in (False, True)]
IDS = [f"bias={b}-residual={r}" for b, r in VARIANTS]


def operands(h, tokens, d, f, bias, residual, transposed=False):
    op = Linear("proj", "x", "y", d, f, "w", "b" if bias else None, "r" if residual else None, transposed)
    inputs = {"x": h.randn(tokens, d)} | ({"r": h.randn(tokens, f)} if residual else {})
    params = {"w": h.randn(f, d, scale=d**-0.5)} | ({"b": h.randn(f)} if bias else {})
    return op, h.chunk((tokens,)), inputs, params, h.randn(tokens, f)


@pytest.mark.parametrize(("bias", "residual"), VARIANTS, ids=IDS)
def test_a_transposed_weight(harness, checks, bias, residual):
    """Stored input by output: the same with the weight, and its gradient, turned."""
    op, chunk, inputs, params, grad_y = operands(harness, 7, 12, 9, bias, residual, transposed=True)
    outputs, grads, param_grads = definition(inputs, params, grad_y)
    before = {name: harness.randn(*p.shape) for name, p in params.items()}
    turned = {**params, "w": params["w"].t().contiguous()}
    result = harness.run(op, chunk, inputs, turned, {"y": grad_y}, None, {**before, "w": before["w"].t().contiguous()})
    checks.all_close(result.outputs, outputs)
    checks.all_close(result.grads, grads)
    checks.close(result.param_grads["w"].t(), param_grads["w"] + before["w"])


def definition(inputs, params, grad_y):
    inputs = {k: t.detach().double().cpu().requires_grad_() for k, t in inputs.items()}
    params = {k: t.detach().double().cpu().requires_grad_() for k, t in params.items()}
    y = torch.nn.functional.linear(inputs["x"], params["w"], params.get("b")) + inputs.get("r", 0.0)
    names = [*inputs, *params]
    found = torch.autograd.grad(y, [*inputs.values(), *params.values()], grad_y.double().cpu())
    grads = dict(zip(names, found, strict=True))
    return {"y": y}, {k: grads[k] for k in inputs}, {k: grads[k] for k in params}


@pytest.mark.parametrize(("bias", "residual"), VARIANTS, ids=IDS)
@pytest.mark.parametrize(("tokens", "d", "f"), [(1, 3, 5), (7, 12, 9), (13, 33, 17)])
def test_matches_autograd(harness, checks, tokens, d, f, bias, residual):
    op, chunk, inputs, params, grad_y = operands(harness, tokens, d, f, bias, residual)
    result = harness.run(op, chunk, inputs, params, {"y": grad_y})
    outputs, grads, param_grads = definition(inputs, params, grad_y)
    checks.all_close(result.outputs, outputs)
    checks.all_close(result.grads, grads)
    checks.all_close(result.param_grads, param_grads)


@pytest.mark.parametrize(("bias", "residual"), VARIANTS, ids=IDS)
def test_adds_to_gradients_that_are_there(harness, checks, bias, residual):
    op, chunk, inputs, params, grad_y = operands(harness, 7, 6, 5, bias, residual)
    before = {"x": harness.randn(7, 6)}
    before_params = {name: harness.randn(*p.shape) for name, p in params.items()}
    result = harness.run(op, chunk, inputs, params, {"y": grad_y}, before, before_params)
    _, grads, param_grads = definition(inputs, params, grad_y)
    checks.close(result.grads["x"], grads["x"] + before["x"])
    for name, grad in param_grads.items():
        checks.close(result.param_grads[name], grad + before_params[name], name=name)


def test_gradient_of_the_residual_is_that_of_the_output(harness):
    """It is the same buffer: the input half leaves it alone."""
    op, chunk, inputs, params, grad_y = operands(harness, 4, 6, 5, True, True)
    assert op.grad_alias == (("r", "y"),)
    assert torch.equal(harness.run(op, chunk, inputs, params, {"y": grad_y}).grads["r"], grad_y)


@pytest.mark.parametrize("first", [True, False])
def test_weight_gradient_of_bf16_operands_sums_in_float32(first):
    """A sum of many bf16 products keeps what a bf16 accumulator would lose."""
    grad_y, x = torch.ones(3000, 2, dtype=torch.bfloat16), torch.ones(3000, 3, dtype=torch.bfloat16)
    acc = torch.full((2, 3), float("nan")) if first else torch.ones(2, 3)
    accumulate_weight_grad(acc, grad_y, x, first)
    assert torch.equal(acc, torch.full((2, 3), 3000.0 + (not first)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("bias", "residual"), VARIANTS, ids=IDS)
@pytest.mark.parametrize(("tokens", "d", "f"), [(1024, 1024, 2048), (1027, 520, 1000)])
@pytest.mark.usefixtures("deterministic")
def test_cuda_matches_definition(make_harness, checks, dtype, tokens, d, f, bias, residual):
    h = make_harness("cuda", dtype)
    op, chunk, inputs, params, grad_y = operands(h, tokens, d, f, bias, residual)
    before = {name: h.randn(*p.shape).float() for name, p in params.items()}
    result = h.run(op, chunk, inputs, params, {"y": grad_y}, previous_params=before)
    outputs, grads, param_grads = definition(inputs, params, grad_y)
    tolerance = checks.GPU_TOLERANCE[dtype]
    checks.all_close(result.outputs, outputs, tolerance)
    checks.all_close(result.grads, grads, tolerance)
    # sums over tokens stay in float32 whatever the operands' dtype
    expected = {name: grad + before[name].double().cpu() for name, grad in param_grads.items()}
    checks.all_close(result.param_grads, expected, 1e-5)
    checks.same_bits(result, h.run(op, chunk, inputs, params, {"y": grad_y}, previous_params=before))
