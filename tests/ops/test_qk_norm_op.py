"""QKNorm: the plain path against autograd, the CUDA path against the definition in float64."""

import pytest
import torch

from flexengine.ops.qk_norm import QKNorm, Values
from flexengine.ops.rmsnorm import NormStyle
from flexengine.ops.rope import RoPE

EPS = 1e-5
HEADS = [(4, 2, 6), (3, 1, 10), (2, 2, 8)]


def definition(op, qkv, params, grad_y):
    qkv, *weights = (t.detach().double().cpu().requires_grad_() for t in (qkv, *params.values()))
    factors, outputs = [*(weight + op.style.offset for weight in weights), 1.0], []
    for part, factor in zip(op.parts, factors, strict=False):
        rows = part.x.of(qkv)
        rstd = torch.rsqrt(rows.square().mean(-1) + EPS)
        outputs.append((factor * rows * rstd[..., None]).flatten(1))
    if op.values is not None:
        outputs.append(op.values[0].of(qkv).flatten(1))
    y = torch.cat(outputs, dim=1)
    grads = torch.autograd.grad(y, (qkv, *weights), grad_y.double().cpu())
    param_grads = dict(zip(params, grads[1:], strict=True))
    return {"qkv": y}, {"raw": grads[0]}, param_grads


def operands(h, tokens, heads: tuple[int, int, int], span, style, gated=False, values: Values = "plain"):
    op = QKNorm("norm", "raw", "qkv", *heads, span, ("q", "k"), style, gated, values)
    params = {part.weight: 1 - style.offset + h.randn(part.y.width, scale=0.2) for part in op.parts[:2]}
    width = op.width + gated * heads[0] * heads[2] - (values == "keys") * heads[1] * heads[2]
    return op, h.chunk((tokens,)), {"raw": h.randn(tokens, width)}, params, h.randn(tokens, op.width)


@pytest.mark.parametrize("style", [NormStyle(EPS), NormStyle(EPS, 1.0, True)], ids=["plain", "around zero"])
@pytest.mark.parametrize("span", ["head", "row"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("values", ["plain", "normed", "keys"])
def test_matches_autograd(harness, checks, values, heads, span, style):
    op, chunk, inputs, params, grad_y = operands(harness, 7, heads, span, style, values=values)
    result = harness.run(op, chunk, inputs, params, {"qkv": grad_y})
    outputs, grads, param_grads = definition(op, inputs["raw"], params, grad_y)
    checks.all_close(result.outputs, outputs)
    checks.all_close(result.grads, grads)
    checks.all_close(result.param_grads, param_grads)


def check_rotation(h, checks, heads: tuple[int, int, int], span, values: Values, tolerance):
    """Norm and rotation as one op, beside the one and then the other."""
    op, _, inputs, params, grad_y = operands(h, 7, heads, span, NormStyle(EPS, 1.0, True), values=values)
    chunk = h.chunk((7,), inv_freq=torch.rand(heads[2] // 2))
    rope = RoPE("rope", "qkv", "rotated", *heads, 1.25)
    assert op.with_next(rope) is None
    both = op.with_next(rope.changed(after_norm=True))
    assert both is not None
    assert both.has_input_half
    normed = h.run(op, chunk, inputs, params).outputs["qkv"]
    rotated = h.run(rope, chunk, {"qkv": normed.clone()}, grad_outputs={"rotated": grad_y.clone()})
    wanted = h.run(op, chunk, inputs, params, {"qkv": rotated.grads["qkv"]})
    found = h.run(both, chunk, inputs, params, {"rotated": grad_y.clone()})
    checks.close(found.outputs["rotated"], rotated.outputs["rotated"], tolerance)
    checks.close(found.grads["raw"], wanted.grads["raw"], tolerance)
    for name, grad in found.param_grads.items():
        checks.close(grad, wanted.param_grads[name], tolerance)


@pytest.mark.parametrize("values", ["plain", "normed", "keys"])
@pytest.mark.parametrize("span", ["head", "row"])
def test_norm_and_rotation_as_one(harness, checks, span, values):
    check_rotation(harness, checks, (4, 2, 6), span, values, 1e-12)


@pytest.mark.parametrize("values", ["plain", "keys"])
@pytest.mark.parametrize("span", ["head", "row"])
@pytest.mark.usefixtures("interpreted")
def test_norm_and_rotation_as_one_kernel(make_harness, checks, span, values):
    check_rotation(make_harness("cpu", torch.float32), checks, (4, 2, 6), span, values, 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("span", ["head", "row"])
def test_norm_and_rotation_as_one_kernel_on_cuda(make_harness, checks, span):
    check_rotation(make_harness("cuda", torch.bfloat16), checks, (16, 4, 128), span, "plain", 2e-2)


def test_adds_to_accumulators_that_are_there(harness, checks):
    op, chunk, inputs, params, grad_y = operands(harness, 5, HEADS[0], "head", NormStyle(EPS))
    before = {name: harness.randn(*p.shape) for name, p in params.items()}
    result = harness.run(op, chunk, inputs, params, {"qkv": grad_y}, previous_params=before)
    _, _, param_grads = definition(op, inputs["raw"], params, grad_y)
    checks.all_close(result.param_grads, {name: grad + before[name] for name, grad in param_grads.items()})


def check_gated(h, checks, heads, tolerance):
    """The gates' columns get no gradient here."""
    op, chunk, inputs, params, grad_y = operands(h, 5, heads, "head", NormStyle(EPS, 1.0, True), gated=True)
    result = h.run(op, chunk, inputs, params, {"qkv": grad_y})
    outputs, grads, param_grads = definition(op, inputs["raw"], params, grad_y)
    n, _, width = heads
    is_gate = torch.arange(inputs["raw"].shape[1]) // width % 2 == 1
    is_gate[2 * n * width :] = False
    checks.all_close(result.outputs, outputs, tolerance)
    checks.close(result.grads["raw"][:, ~is_gate], grads["raw"][:, ~is_gate], tolerance)
    assert result.grads["raw"][:, is_gate].isnan().all()
    checks.all_close(result.param_grads, param_grads, tolerance)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_queries_with_gates_between_them(harness, checks, heads):
    check_gated(harness, checks, heads, 1e-12)


@pytest.mark.usefixtures("interpreted")
def test_kernels_on_queries_with_gates(make_harness, checks):
    check_gated(make_harness("cpu", torch.float32), checks, HEADS[1], 1e-5)


@pytest.mark.usefixtures("interpreted")
def test_kernels_on_views_of_a_row(make_harness, checks):
    """What runs on CUDA: heads are strided views, and so are their statistics."""
    h = make_harness("cpu", torch.float32)
    for span, values in (("head", "plain"), ("row", "plain"), ("head", "normed"), ("head", "keys")):
        style = NormStyle(EPS, 1.0, True)
        op, chunk, inputs, params, grad_y = operands(h, 3, HEADS[0], span, style, values=values)
        result = h.run(op, chunk, inputs, params, {"qkv": grad_y})
        outputs, grads, param_grads = definition(op, inputs["raw"], params, grad_y)
        checks.all_close(result.outputs, outputs, 1e-5)
        checks.all_close(result.grads, grads, 1e-5)
        checks.all_close(result.param_grads, param_grads, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("span", ["head", "row"])
@pytest.mark.parametrize("heads", [(32, 8, 128), (5, 1, 72)], ids=str)
@pytest.mark.usefixtures("deterministic")
def test_cuda_matches_definition(make_harness, checks, dtype, heads, span):
    h = make_harness("cuda", dtype)
    op, chunk, inputs, params, grad_y = operands(h, 515, heads, span, NormStyle(EPS))
    result = h.run(op, chunk, inputs, params, {"qkv": grad_y})
    outputs, grads, param_grads = definition(op, inputs["raw"], params, grad_y)
    tolerance = checks.GPU_TOLERANCE[dtype]
    checks.all_close(result.outputs, outputs, tolerance)
    checks.all_close(result.grads, grads, tolerance)
    checks.all_close(result.param_grads, param_grads, tolerance)
    checks.same_bits(result, h.run(op, chunk, inputs, params, {"qkv": grad_y}))
