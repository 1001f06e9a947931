"""SwiGLU: the plain path against autograd, the CUDA path against the definition in float64."""

import pytest
import torch

from flexengine.ops.swiglu import SwiGLU


def operands(h, tokens, width):
    op = SwiGLU("swiglu", "gate_up", "a", width)
    return op, h.chunk((tokens,)), {"gate_up": h.randn(tokens, 2 * width, scale=2.0)}, h.randn(tokens, width)


def definition(gate_up, grad_a):
    gate_up = gate_up.detach().double().cpu().requires_grad_()
    gate, up = gate_up.chunk(2, dim=-1)
    a = torch.nn.functional.silu(gate) * up
    (grad,) = torch.autograd.grad(a, gate_up, grad_a.double().cpu())
    return {"a": a}, {"gate_up": grad}


@pytest.mark.parametrize("write_over", [False, True], ids=["own buffer", "over gate_up"])
@pytest.mark.parametrize(("tokens", "width"), [(1, 3), (7, 33), (13, 48)])
def test_matches_autograd(harness, checks, tokens, width, write_over):
    op, chunk, inputs, grad_a = operands(harness, tokens, width)
    result = harness.run(op, chunk, inputs, grad_outputs={"a": grad_a}, write_over=write_over)
    outputs, grads = definition(inputs["gate_up"], grad_a)
    checks.all_close(result.outputs, outputs)
    checks.all_close(result.grads, grads)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("write_over", [False, True], ids=["own buffer", "over gate_up"])
@pytest.mark.parametrize(("tokens", "width"), [(1024, 2048), (1027, 1000)])
@pytest.mark.usefixtures("deterministic")
def test_cuda_matches_definition(make_harness, checks, dtype, tokens, width, write_over):
    h = make_harness("cuda", dtype)
    op, chunk, inputs, grad_a = operands(h, tokens, width)
    result = h.run(op, chunk, inputs, grad_outputs={"a": grad_a}, write_over=write_over)
    outputs, grads = definition(inputs["gate_up"], grad_a)
    checks.all_close(result.outputs, outputs, checks.GPU_TOLERANCE[dtype])
    checks.all_close(result.grads, grads, checks.GPU_TOLERANCE[dtype])
    checks.same_bits(result, h.run(op, chunk, inputs, grad_outputs={"a": grad_a}, write_over=write_over))
