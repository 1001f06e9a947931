"""LayerNorm, FFNs without a gate, learned positions, scaled sums and queries against autograd, on CPU and CUDA."""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch

from flexengine.ops.gelu import Gelu
from flexengine.ops.layernorm import LayerNorm
from flexengine.ops.positions import LearnedPositions
from flexengine.ops.query_scale import QueryScale
from flexengine.ops.scaled_sum import ScaledSum
from flexengine.ops.squared_relu import SquaredReLU

EPS, LENGTHS = 1e-5, (5, 1, 9)


def layernorm(h, tokens):
    op = LayerNorm("norm", "x", "y", 12, "w", "b", EPS)
    params = {"w": 1 + h.randn(12, scale=0.2), "b": h.randn(12)}
    return op, {"x": h.randn(tokens, 12)}, params, h.randn(tokens, 12)


def gelu(h, tokens):
    return Gelu("gelu", "x", "y", 7), {"x": h.randn(tokens, 7, scale=2.0)}, {}, h.randn(tokens, 7)


def positions(h, tokens):
    op = LearnedPositions("positions", "x", "y", 11, 6, "w")
    return op, {"x": h.randn(tokens, 6)}, {"w": h.randn(11, 6)}, h.randn(tokens, 6)


def centred(h, tokens):
    """Nemotron's norm, without a bias: the stored weight is less 1."""
    op = LayerNorm("norm", "x", "y", 12, "w", None, EPS, offset=1.0)
    return op, {"x": h.randn(tokens, 12)}, {"w": h.randn(12, scale=0.2)}, h.randn(tokens, 12)


def bare(h, tokens):
    return LayerNorm("norm", "x", "y", 12, None, None, EPS), {"x": h.randn(tokens, 12)}, {}, h.randn(tokens, 12)


def squared_relu(h, tokens):
    return SquaredReLU("relu2", "x", "y", 7), {"x": h.randn(tokens, 7)}, {}, h.randn(tokens, 7)


def scaled(h, tokens):
    return ScaledSum("sum", "x", "y", 7, 0.3), {"x": h.randn(tokens, 7)}, {}, h.randn(tokens, 7)


def query_scale(h, tokens):
    return QueryScale("scale", "x", "y", 4, 9, 0.7, 3), {"x": h.randn(tokens, 9)}, {}, h.randn(tokens, 9)


MAKERS = [layernorm, gelu, positions, centred, bare, squared_relu, scaled, query_scale]


def definition(op, chunk, inputs, params, grad_y):
    """Output and gradients in float64, by torch's own functions."""
    x, *own = (t.detach().double().cpu().requires_grad_() for t in (*inputs.values(), *params.values()))
    if isinstance(op, LayerNorm):
        weight, bias = (*own, None, None)[:2]
        y = torch.nn.functional.layer_norm(x, (op.width,), None if weight is None else weight + op.offset, bias, EPS)
    elif isinstance(op, Gelu):
        y = torch.nn.functional.gelu(x, approximate="tanh")
    elif isinstance(op, SquaredReLU):
        y = torch.relu(x).square()
    elif isinstance(op, ScaledSum):
        y = op.factor * x
    elif isinstance(op, QueryScale):
        factor = 1 + op.beta * torch.log1p((chunk.positions.cpu() // op.original).double())[:, None]
        y = torch.cat((x[:, : op.query_width] * factor, x[:, op.query_width :]), dim=1)
    else:
        y = x + own[0][chunk.positions.cpu().long()]
    grad_x, *grads = torch.autograd.grad(y, (x, *own), grad_y.double().cpu())
    return y.detach(), grad_x, dict(zip(params, grads, strict=True))


def check(h, checks, make, tolerance):
    op, inputs, params, grad_y = make(h, sum(LENGTHS))
    chunk = h.chunk(LENGTHS)
    result = h.run(op, chunk, inputs, params, {"y": grad_y})
    y, grad_x, grads = definition(op, chunk, inputs, params, grad_y)
    checks.close(result.outputs["y"], y, tolerance)
    checks.close(result.grads["x"], grad_x, tolerance)
    checks.all_close(result.param_grads, grads, tolerance)
    checks.same_bits(result, h.run(op, chunk, inputs, params, {"y": grad_y}))


@pytest.mark.parametrize("make", MAKERS)
def test_matches_autograd(harness, checks, make):
    check(harness, checks, make, 1e-12)


@pytest.mark.parametrize("make", [layernorm, positions])
def test_adds_to_gradients_that_are_there(harness, checks, make):
    op, inputs, params, grad_y = make(harness, 6)
    chunk, before = harness.chunk((6,)), {name: harness.randn(*p.shape) for name, p in params.items()}
    previous = {"x": harness.randn(6, 12)} if make is layernorm else None
    result = harness.run(op, chunk, inputs, params, {"y": grad_y}, previous, before)
    _, grad_x, grads = definition(op, chunk, inputs, params, grad_y)
    checks.all_close(result.param_grads, {name: grad + before[name] for name, grad in grads.items()})
    if previous:
        checks.close(result.grads["x"], grad_x + previous["x"])


@pytest.mark.parametrize("make", [layernorm, centred, bare])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("interpreted")
def test_kernels_of_layernorm_match_definition(make_harness, checks, make, dtype):
    """The weight half finds the statistics that the input half left."""
    check(make_harness("cpu", dtype), checks, make, checks.GPU_TOLERANCE[dtype])


def test_a_scaled_sum_adds_to_its_residual(harness, checks):
    op, x, residual, grad_y = ScaledSum("s", "x", "y", 7, 0.3, "r"), *(harness.randn(6, 7) for _ in range(3))
    result = harness.run(op, harness.chunk((6,)), {"x": x, "r": residual}, {}, {"y": grad_y})
    checks.close(result.outputs["y"], residual + 0.3 * x)
    checks.close(result.grads["x"], 0.3 * grad_y)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.usefixtures("deterministic")
def test_cuda_matches_definition(make_harness, checks, dtype, make):
    check(make_harness("cuda", dtype), checks, make, checks.GPU_TOLERANCE[dtype])
