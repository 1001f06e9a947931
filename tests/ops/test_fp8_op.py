"""Linear layers with FP8 operands: against products of the rounded operands, and near those of the operands."""

import pytest
import torch

from flexengine.ops.fp8 import Fp8Linear, multiplies_fp8, quantize, scale_buffer, scale_of
from flexengine.ops.linear import Linear

VARIANTS = [(bias, residual) for bias in (False, True) for residual in (False, True)]
IDS = [f"bias={b}-residual={r}" for b, r in VARIANTS]
ROUNDING = 2.2e-3  # of a result in bf16; with a residual two of them
NEARNESS = 0.1  # an operand of 3 bits of mantissa is 2.6% off on average, one of 2 bits 5.2%


def operands(h, tokens, d, f, bias, residual):
    op = Fp8Linear(Linear("proj", "x", "y", d, f, "w", "b" if bias else None, "r" if residual else None))
    inputs = {"x": h.randn(tokens, d)} | ({"r": h.randn(tokens, f)} if residual else {})
    params = {"w": h.randn(f, d, scale=d**-0.5)} | ({"b": h.randn(f)} if bias else {})
    return op, h.chunk((tokens,)), inputs, params, h.randn(tokens, f, scale=1e-3)


def rounded(x, dtype):
    """What FP8 keeps of x, in float64."""
    x, largest = x.float().cpu(), torch.finfo(dtype).max
    scale = x.abs().max() / largest
    return (x / scale).clamp(-largest, largest).to(dtype).double() * scale.double()


def definition(inputs, params, grad_y, forward=lambda x: x.double().cpu(), gradient=lambda x: x.double().cpu()):
    """(y, grad_x, grad_w, grad_b) of operands rounded by `forward` and `gradient`, in float64."""
    x, w, g = forward(inputs["x"]), forward(params["w"]), gradient(grad_y)
    y = x @ w.t()
    if "b" in params:
        y = y + params["b"].double().cpu()
    if "r" in inputs:
        y = y + inputs["r"].double().cpu()
    return y, g @ w, g.t() @ x, grad_y.double().cpu().sum(0)


def check(h, checks, tokens, d, f, bias, residual):
    op, chunk, inputs, params, grad_y = operands(h, tokens, d, f, bias, residual)
    before = {name: h.randn(*p.shape, scale=1e-2).float() for name, p in params.items()}
    first = h.run(op, chunk, inputs, params, {"y": grad_y})
    added = h.run(op, chunk, inputs, params, {"y": grad_y}, previous_params=before)
    exact = definition(
        inputs, params, grad_y, lambda x: rounded(x, torch.float8_e4m3fn), lambda x: rounded(x, torch.float8_e5m2)
    )
    y, grad_x, grad_w, grad_b = exact
    checks.close(first.outputs["y"], y, 2 * ROUNDING, name="y")
    checks.close(first.grads["x"], grad_x, 2 * ROUNDING, name="grad_x")
    checks.close(first.param_grads["w"], grad_w, 1e-3, name="grad_w")  # cards sum in a little less than float32
    checks.close(added.param_grads["w"], grad_w + before["w"].double().cpu(), 1e-3, name="grad_w, added")
    if bias:
        checks.close(first.param_grads["b"], grad_b, 1e-5, name="grad_b")
        checks.close(added.param_grads["b"], grad_b + before["b"].double().cpu(), 1e-5, name="grad_b, added")
    if residual:
        assert torch.equal(first.grads["r"], grad_y)
    wanted = definition(inputs, params, grad_y)
    found = (first.outputs["y"], first.grads["x"], first.param_grads["w"])
    for name, actual, expected in zip(("y", "grad_x", "grad_w"), found, wanted, strict=False):
        checks.close(actual, expected, NEARNESS, name=name)
    checks.same_bits(first, h.run(op, chunk, inputs, params, {"y": grad_y}))


@pytest.mark.parametrize(("bias", "residual"), VARIANTS, ids=IDS)
@pytest.mark.parametrize(("tokens", "d", "f"), [(1, 16, 32), (37, 48, 80), (64, 80, 16)])
def test_matches_the_product_of_rounded_operands(make_harness, checks, tokens, d, f, bias, residual):
    check(make_harness("cpu", torch.bfloat16), checks, tokens, d, f, bias, residual)


@pytest.mark.gpu
@pytest.mark.parametrize(("bias", "residual"), VARIANTS, ids=IDS)
@pytest.mark.parametrize(("tokens", "d", "f"), [(1, 16, 32), (1027, 512, 1008), (4096, 4096, 6144)])
def test_matches_the_product_of_rounded_operands_on_cuda(make_harness, checks, tokens, d, f, bias, residual):
    if not multiplies_fp8(torch.device("cuda")):
        pytest.skip("this card multiplies no FP8 operands")
    check(make_harness("cuda", torch.bfloat16), checks, tokens, d, f, bias, residual)


@pytest.mark.gpu
def test_stays_within_its_workspace_on_cuda(make_harness):
    h = make_harness("cuda", torch.bfloat16)
    op, chunk, inputs, params, grad_y = operands(h, 4096, 4096, 6144, True, True)
    env = h.env(op, chunk, inputs, params, {"y": grad_y})
    calls = (op.forward, op.backward_input, op.backward_weight)
    for call in calls:
        call(env)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for call in calls:
        call(env)
    assert torch.cuda.max_memory_allocated() - held <= op.workspace_bytes(4096, 2)


def test_weight_gradients_are_made_in_parts_that_fit_their_buffer(make_harness, checks, monkeypatch):
    monkeypatch.setattr("flexengine.ops.fp8.PRODUCT_ELEMENTS", 48 * 20)  # 16 of 80 rows at a time
    check(make_harness("cpu", torch.bfloat16), checks, 37, 48, 80, True, False)


def test_nan_and_infinity_reach_the_results(make_harness):
    h = make_harness("cpu", torch.bfloat16)
    op, chunk, inputs, params, grad_y = operands(h, 8, 16, 32, False, False)
    params["w"][3, 5] = float("nan")
    assert h.run(op, chunk, inputs, params, {"y": grad_y}).outputs["y"].isnan().any()
    params["w"][3, 5], grad_y[2, 2] = 1.0, float("inf")
    assert h.run(op, chunk, inputs, params, {"y": grad_y}).param_grads["w"].isnan().any()


def test_quantising_transposed_fills_up_with_zeros():
    x = torch.randn(5, 3)
    rows = torch.empty(5, 3, dtype=torch.float8_e4m3fn)
    columns = torch.full((3, 16), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.full((scale_buffer("proj").height(5),), float("nan"))
    scale = quantize(x, scales, 1, rows, columns)
    assert scale.data_ptr() == scale_of(scales, 1).data_ptr()
    assert (scale.data_ptr() - scales.data_ptr()) % 16 == 0  # or cuBLAS refuses it
    assert torch.equal(columns.float()[:, :5], rows.float().t())
    assert not columns.float()[:, 5:].any()
    torch.testing.assert_close(rows.float() * scale, x, rtol=0.0625, atol=float(scale) * 2**-10)


def test_features_that_fp8_cannot_take_are_refused():
    with pytest.raises(ValueError, match=r"proj has 24 input and 32 output features.*multiples of 16"):
        Fp8Linear(Linear("proj", "x", "y", 24, 32, "w"))
