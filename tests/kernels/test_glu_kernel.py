"""GLU kernels against float64 autograd."""

from functools import partial

import pytest
import torch

from flexengine.kernels import glu

DTYPES = [torch.float32, torch.bfloat16]


ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
}


CLAMPED = (2.5, 1.702)
"""(limit, alpha): a half of the gates below is clamped, and a third of what they are multiplied by."""
UNITS = [*glu.ACTIVATIONS, CLAMPED]


def reference(gate_up, grad_out, activation="silu"):
    gate_up = gate_up.double().requires_grad_()
    if isinstance(activation, tuple):
        limit, alpha = activation
        gate, up = gate_up[..., ::2].clamp(max=limit), gate_up[..., 1::2].clamp(-limit, limit)
        out = gate * torch.sigmoid(alpha * gate) * (up + 1)
    else:
        gate, up = gate_up.chunk(2, dim=-1)
        out = ACTIVATIONS[activation](gate) * up
    (grad,) = torch.autograd.grad(out, gate_up, grad_out.double())
    return out.detach(), grad


def check(checks, tokens, width, dtype, device, activation="silu"):
    gate_up = checks.strided(tokens, 2 * width, dtype=dtype, device=device)
    gate_up.copy_(3 * checks.normal(tokens, 2 * width, dtype=dtype, device=device))
    grad_out = checks.normal(tokens, width, dtype=dtype, device=device)
    out = checks.strided(tokens, width, dtype=dtype, device=device)
    grad_gate_up = checks.empty(tokens, 2 * width, dtype=dtype, device=device)
    glu.glu_forward(gate_up, out, activation)
    glu.glu_backward(grad_out, gate_up, grad_gate_up, activation)
    expected_out, expected_grad = reference(gate_up, grad_out, activation)
    checks.assert_close(out, expected_out, checks.TOLERANCE[dtype], "out")
    checks.assert_close(grad_gate_up, expected_grad, checks.TOLERANCE[dtype], "grad_gate_up")
    glu.glu_backward(grad_out, gate_up, gate_up, activation)
    assert torch.equal(gate_up, grad_gate_up)  # in place, and a second run: the same bits


@pytest.mark.pairs
@pytest.mark.filterwarnings("ignore:overflow encountered in")  # the interpreter computes with numpy
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", UNITS, ids=str)
@pytest.mark.parametrize(("tokens", "width"), [(1, 48), (7, 257), (3, 2500)])
def test_matches_float64(checks, device, tokens, width, dtype, activation):
    check(checks, tokens, width, dtype, device, activation)


def check_weighted(checks, tokens, width, dtype, device, activation):
    """With a weight for every row, whose gradient is a sum over the row."""
    gate_up = checks.normal(tokens, 2 * width, dtype=dtype, device=device)
    grad_out = checks.normal(tokens, width, dtype=dtype, device=device)
    weight = torch.rand(tokens, device=device)
    out, grad = (checks.empty(tokens, n, dtype=dtype, device=device) for n in (width, 2 * width))
    grad_weight = checks.empty(tokens, dtype=torch.float32, device=device)
    glu.glu_forward(gate_up, out, activation, weight)
    glu.weighted_glu_backward(grad_out, gate_up, grad, activation, glu.WeightedRows(weight, grad_weight))
    expected_out, _ = reference(gate_up, grad_out, activation)
    _, expected_grad = reference(gate_up, grad_out.double() * weight[:, None], activation)
    checks.assert_close(out, expected_out * weight[:, None], checks.TOLERANCE[dtype], "out")
    checks.assert_close(grad, expected_grad, checks.TOLERANCE[dtype], "grad_gate_up")
    wanted = (expected_out * grad_out.double()).sum(1)
    checks.assert_close(grad_weight, wanted, 1e-5, "grad_row_weight")
    before = torch.randn(tokens, device=device)
    once = grad.clone()
    rows = glu.WeightedRows(weight, before.clone(), True, again=grad_out)
    glu.weighted_glu_backward(grad_out, gate_up, gate_up, activation, rows)
    checks.assert_close(rows.grad, wanted + before, 1e-5, "on top of what was there")
    assert torch.equal(gate_up, once)
    assert torch.equal(grad_out, out)  # over its gradient: what forward wrote, bit for bit


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", UNITS, ids=str)
@pytest.mark.parametrize(("tokens", "width"), [(7, 257), (3, 2500)])
@pytest.mark.filterwarnings("ignore:overflow encountered in")
def test_weighted_rows_match_float64(checks, device, tokens, width, dtype, activation):
    check_weighted(checks, tokens, width, dtype, device, activation)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "width"), [(4097, 768), (33, 12345)])
def test_weighted_rows_match_float64_on_gpu(checks, gpu, tokens, width, dtype):
    check_weighted(checks, tokens, width, dtype, gpu, "silu")


def test_refuses_weights_of_other_rows(device):
    with pytest.raises(ValueError, match=r"row_weight must have shape \[4\], got \[2\]"):
        glu.glu_forward(
            torch.zeros(4, 8, device=device), torch.zeros(4, 4, device=device), "silu", torch.ones(2, device=device)
        )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", UNITS, ids=str)
@pytest.mark.parametrize(("tokens", "width"), [(4097, 14336), (33, 12345)])
def test_matches_float64_on_gpu(checks, gpu, tokens, width, dtype, activation):
    check(checks, tokens, width, dtype, gpu, activation)


@pytest.mark.gpu
@pytest.mark.alone
def test_more_than_two_to_the_31_elements_on_gpu(checks, gpu):
    """32768 tokens x 2 * 33000 columns: the last row lies beyond a 32-bit offset."""
    tokens, width = 32768, 33000
    gate_up = torch.zeros(tokens, 2 * width, dtype=torch.bfloat16, device=gpu)
    gate_up[-1] = torch.randn(2 * width, device=gpu)
    out = torch.empty(tokens, width, dtype=torch.bfloat16, device=gpu)
    glu.glu_forward(gate_up, out, "silu")
    expected, _ = reference(gate_up[-1:], torch.ones(1, width, device=gpu))
    checks.assert_close(out[-1:], expected, checks.TOLERANCE[torch.bfloat16])
    assert int(torch.count_nonzero(out[:-1])) == 0


@pytest.mark.filterwarnings("ignore:overflow encountered in")  # the interpreter computes with numpy
@pytest.mark.parametrize("gate", [-200.0, -88.5, 0.0, 88.5, 200.0])
@pytest.mark.parametrize("activation", UNITS, ids=str)
def test_extreme_gates_stay_finite(device, gate, activation):
    gate_up = torch.tensor([[gate, 2.0]], device=device)
    out, grad = torch.empty(1, 1, device=device), torch.empty(1, 2, device=device)
    glu.glu_forward(gate_up, out, activation)
    glu.glu_backward(torch.ones(1, 1, device=device), gate_up, grad, activation)
    expected_out, expected_grad = reference(gate_up, torch.ones(1, 1, device=device), activation)
    torch.testing.assert_close(out, expected_out.float(), rtol=3e-5, atol=1e-30)
    torch.testing.assert_close(grad, expected_grad.float(), rtol=3e-5, atol=1e-30)


@pytest.mark.parametrize("place", [(0, 2.5), (0, 2.6), (1, -2.5), (1, 2.6), (0, float("nan"))], ids=str)
def test_the_edge_of_a_clamped_unit(device, place):
    """At the limit itself there is a gradient, as torch.clamp has it; a NaN stays one."""
    gate_up = torch.tensor([[1.0, 1.0]], device=device)
    gate_up[0, place[0]] = place[1]
    out, grad = torch.empty(1, 1, device=device), torch.empty(1, 2, device=device)
    glu.glu_forward(gate_up, out, CLAMPED)
    glu.glu_backward(torch.ones(1, 1, device=device), gate_up, grad, CLAMPED)
    expected_out, expected_grad = reference(gate_up, torch.ones(1, 1, device=device), CLAMPED)
    torch.testing.assert_close(out, expected_out.float(), equal_nan=True)
    if place[1] == place[1]:
        torch.testing.assert_close(grad, expected_grad.float())
    assert out.isnan().any() == (place[1] != place[1])


def test_refuses_halves_of_unequal_width(device):
    with pytest.raises(ValueError, match=r"gate_up must have shape \[2, 8\], got \[2, 7\]"):
        glu.glu_forward(torch.zeros(2, 7, device=device), torch.zeros(2, 4, device=device), "silu")


def test_refuses_an_unknown_activation(device):
    with pytest.raises(ValueError, match="'relu', expected one of"):
        glu.glu_forward(torch.zeros(2, 8, device=device), torch.zeros(2, 4, device=device), "relu")
