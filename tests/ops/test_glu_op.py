"""GLU: the plain path against autograd, the CUDA path against the definition in float64."""

from functools import partial

import pytest
import torch

from flexengine.ops.glu import GLU, ClampedSwiGLU

ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
}


CLAMPED = ClampedSwiGLU(limit=1.5, alpha=1.702)
UNITS = [*ACTIVATIONS, CLAMPED]


def operands(h, tokens, width, activation):
    op = GLU("glu", "gate_up", "a", width, activation)
    return op, h.chunk((tokens,)), {"gate_up": h.randn(tokens, 2 * width, scale=2.0)}, h.randn(tokens, width)


def definition(gate_up, grad_a, activation):
    gate_up = gate_up.detach().double().cpu().requires_grad_()
    if isinstance(activation, ClampedSwiGLU):
        gate, up = gate_up[:, ::2].clamp(max=1.5), gate_up[:, 1::2].clamp(-1.5, 1.5)
        a = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    else:
        gate, up = gate_up.chunk(2, dim=-1)
        a = ACTIVATIONS[activation](gate) * up
    (grad,) = torch.autograd.grad(a, gate_up, grad_a.double().cpu())
    return {"a": a}, {"gate_up": grad}


@pytest.mark.pairs
@pytest.mark.parametrize("activation", UNITS, ids=str)
@pytest.mark.parametrize("write_over", [False, True], ids=["own buffer", "over gate_up"])
@pytest.mark.parametrize(("tokens", "width"), [(1, 3), (7, 33), (13, 48)])
def test_matches_autograd(harness, checks, tokens, width, write_over, activation):
    op, chunk, inputs, grad_a = operands(harness, tokens, width, activation)
    result = harness.run(op, chunk, inputs, grad_outputs={"a": grad_a}, write_over=write_over)
    outputs, grads = definition(inputs["gate_up"], grad_a, activation)
    checks.all_close(result.outputs, outputs)
    checks.all_close(result.grads, grads)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", UNITS, ids=str)
@pytest.mark.parametrize("write_over", [False, True], ids=["own buffer", "over gate_up"])
@pytest.mark.parametrize(("tokens", "width"), [(1024, 2048), (1027, 1000)])
@pytest.mark.usefixtures("deterministic")
def test_cuda_matches_definition(make_harness, checks, dtype, tokens, width, write_over, activation):
    h = make_harness("cuda", dtype)
    op, chunk, inputs, grad_a = operands(h, tokens, width, activation)
    result = h.run(op, chunk, inputs, grad_outputs={"a": grad_a}, write_over=write_over)
    outputs, grads = definition(inputs["gate_up"], grad_a, activation)
    checks.all_close(result.outputs, outputs, checks.GPU_TOLERANCE[dtype])
    checks.all_close(result.grads, grads, checks.GPU_TOLERANCE[dtype])
    checks.same_bits(result, h.run(op, chunk, inputs, grad_outputs={"a": grad_a}, write_over=write_over))
