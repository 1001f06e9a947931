"""Embedding: the plain path against autograd with repeated tokens, the CUDA path against the definition in float64."""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch

from flexengine.ops.embedding import Embedding


def operands(h, tokens, vocab_size, width, scale=1.0):
    op = Embedding("embed", "y", vocab_size, width, "w", scale)
    return op, h.chunk((tokens,), vocab_size), {"w": h.randn(vocab_size, width)}, h.randn(tokens, width)


def definition(weight, ids, grad_y, scale=1.0):
    weight = weight.detach().double().cpu().requires_grad_()
    y = scale * torch.nn.functional.embedding(ids.cpu(), weight)
    (grad,) = torch.autograd.grad(y, weight, grad_y.double().cpu())
    return {"y": y}, {"w": grad}


@pytest.mark.parametrize(("tokens", "vocab_size", "width"), [(1, 5, 3), (17, 5, 9), (13, 40, 12)])
@pytest.mark.parametrize("scale", [1.0, 4.5])
def test_matches_autograd(harness, checks, tokens, vocab_size, width, scale):
    op, chunk, params, grad_y = operands(harness, tokens, vocab_size, width, scale)
    result = harness.run(op, chunk, {}, params, {"y": grad_y})
    outputs, param_grads = definition(params["w"], chunk.input_ids, grad_y, scale)
    checks.all_close(result.outputs, outputs)
    checks.all_close(result.param_grads, param_grads)


def test_adds_to_gradients_that_are_there(harness, checks):
    op, chunk, params, grad_y = operands(harness, 9, 4, 6)
    before = harness.randn(4, 6)
    result = harness.run(op, chunk, {}, params, {"y": grad_y}, previous_params={"w": before})
    checks.close(result.param_grads["w"], definition(params["w"], chunk.input_ids, grad_y)[1]["w"] + before)


def test_bf16_gradients_are_summed_in_float32(make_harness):
    h = make_harness("cpu", torch.bfloat16)
    op, chunk, params, _ = operands(h, 3000, 1, 2)
    result = h.run(op, chunk, {}, params, {"y": torch.ones(3000, 2, dtype=torch.bfloat16)})
    assert torch.equal(result.param_grads["w"], torch.full((1, 2), 3000.0))


def test_the_scale_is_rounded_as_the_model_is(make_harness):
    """As in transformers: sqrt(1536) = 39.19 is 39.25 in bf16."""
    h = make_harness("cpu", torch.bfloat16)
    op, chunk, _, _ = operands(h, 4, 5, 3, 1536**0.5)
    result = h.run(op, chunk, {}, {"w": torch.ones(5, 3, dtype=torch.bfloat16)})
    assert torch.equal(result.outputs["y"], torch.full((4, 3), 39.25, dtype=torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "vocab_size", "width"), [(2000, 300, 1024), (1027, 32000, 520)])
@pytest.mark.usefixtures("deterministic")
def test_cuda_matches_definition(make_harness, checks, dtype, tokens, vocab_size, width):
    h = make_harness("cuda", dtype)
    op, chunk, params, grad_y = operands(h, tokens, vocab_size, width)
    result = h.run(op, chunk, {}, params, {"y": grad_y})
    outputs, param_grads = definition(params["w"], chunk.input_ids, grad_y)
    checks.all_close(result.outputs, outputs, 0.0)
    checks.all_close(result.param_grads, param_grads, 1e-5)
    checks.same_bits(result, h.run(op, chunk, {}, params, {"y": grad_y}))
