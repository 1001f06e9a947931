"""Gated units that add what adapters change before and behind them, against float64 autograd of the written sums."""

import pytest
import torch

from flexengine.kernels import lora_glu, lora_sum
from flexengine.ops.glu import GLU
from flexengine.ops.linear import Linear
from tests.adapter_ops import adapted, run_ops

UNITS = {"silu": torch.nn.functional.silu, "gelu_tanh": lambda z: torch.nn.functional.gelu(z, approximate="tanh")}
WIDTH = 70
HALVES = {
    "gate and up": ((0, 0, 0), (WIDTH, 5, WIDTH)),
    "one module for both": ((0, 0, 0), (WIDTH, 0, WIDTH)),
    "gate": ((0, 0, 0),),
    "up": ((WIDTH, 0, 0),),
}


def reference(gate_up, low, up, halves, grad_out, activation):
    total = gate_up.double().clone()
    for start, low_start, up_start in halves:
        rows = up[up_start : up_start + WIDTH].double()
        total[:, start : start + WIDTH] += low[:, low_start : low_start + up.shape[1]].double() @ rows.t()
    total.requires_grad_()
    gate, other = total.chunk(2, dim=-1)
    out = UNITS[activation](gate) * other
    (grad,) = torch.autograd.grad(out, total, grad_out.double())
    return out.detach(), grad


@pytest.mark.parametrize(
    ("tokens", "rank", "halves", "activation", "dtype"),
    [
        *((19, 5, halves, "silu", torch.float32) for halves in HALVES),
        (67, 5, "gate and up", "silu", torch.bfloat16),
        (3, 70, "gate and up", "gelu_tanh", torch.float32),
    ],
    ids=str,
)
def test_matches_float64(checks, device, tokens, rank, halves, activation, dtype):
    spans = tuple((start, min(low, 1) * rank, row) for start, low, row in HALVES[halves])
    gate_up = checks.strided(tokens, 2 * WIDTH, dtype=dtype, device=device)
    gate_up.copy_(checks.normal(tokens, 2 * WIDTH, dtype=dtype, device=device))
    low = checks.normal(tokens, 2 * rank, dtype=dtype, device=device)
    up = checks.normal(2 * WIDTH, rank, dtype=dtype, device=device)
    up.mul_(rank**-0.5)
    grad_out = checks.normal(tokens, WIDTH, dtype=dtype, device=device)
    out = checks.strided(tokens, WIDTH, dtype=dtype, device=device)
    grad = checks.empty(tokens, 2 * WIDTH, dtype=dtype, device=device)
    lora_glu.glu_forward(gate_up, low, up, spans, out, activation)
    lora_glu.glu_backward(grad_out, gate_up, low, up, spans, grad, activation)
    expected_out, expected_grad = reference(gate_up, low, up, spans, grad_out, activation)
    checks.assert_close(out, expected_out, checks.TOLERANCE[dtype], "out")
    checks.assert_close(grad, expected_grad, checks.TOLERANCE[dtype], "grad_gate_up")
    behind = checks.normal(tokens, 7, dtype=dtype, device=device), checks.normal(7, WIDTH, dtype=dtype, device=device)
    total = grad_out.double() + behind[0].double() @ behind[1].double()
    grads = [checks.empty(tokens, 2 * WIDTH, dtype=dtype, device=device) for _ in range(2)]
    lora_glu.glu_backward(grad_out, gate_up, low, up, spans, grads[0], activation, behind)
    expected_grad = reference(gate_up, low, up, spans, total, activation)[1]
    checks.assert_close(grads[0], expected_grad, checks.TOLERANCE[dtype], "grad_gate_up of a sum")
    lora_glu.glu_backward(grad_out, gate_up, low, up, spans, gate_up, activation)
    assert torch.equal(gate_up, grad)  # in place, and a second run: the same bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("per_row", [True, False], ids=["residual", "bias"])
def test_a_sum_with_adapters_matches_float64(checks, device, per_row, dtype):
    low, up = (checks.normal(n, 5, dtype=dtype, device=device) for n in (67, 150))
    start = checks.normal(67, 150, dtype=dtype, device=device) if per_row else torch.ones(150, dtype=dtype).to(device)
    out = checks.strided(67, 150, dtype=dtype, device=device)
    lora_sum.add_product(start, low, up, out)
    checks.assert_close(out, start.double() + low.double() @ up.double().t(), checks.TOLERANCE[dtype], "out")
    if per_row:
        also = checks.strided(67, 150, dtype=dtype, device=device)
        also.copy_(low.float() @ up.float().t())
        expected = start.double() + also.double() + low.double() @ up.double().t()
        lora_sum.add_product(start.clone(), low, up, summed := torch.full_like(start, float("nan")), also)
        checks.assert_close(summed, expected, checks.TOLERANCE[dtype], "out with another tensor")
        lora_sum.add_product(start, low, up, start)
        assert torch.equal(start, out)  # in place: the same bits


def test_halves_outside_are_refused(checks, device):
    gate_up, low, up = (checks.normal(4, n, dtype=torch.float32, device=device) for n in (16, 6, 3))
    with pytest.raises(ValueError, match="lie outside"):
        lora_glu.glu_forward(gate_up, low, up, ((0, 0, 0),), gate_up[:, :8].contiguous(), "silu")


GATE_AND_UP = ((0, 70), (70, 140))


@pytest.mark.parametrize(
    ("spans", "behind"),
    [(GATE_AND_UP, True), (((0, 140),), True), (((70, 140),), True), (GATE_AND_UP, False), ((), True)],
    ids=str,
)
def test_a_layer_and_its_unit_are_those_of_the_written_sum(spans, behind, checks, monkeypatch):
    torch.manual_seed(1)
    first, last = Linear("l", "x", "gate_up", 24, 2 * WIDTH, "w"), Linear("d", "a", "y", WIDTH, 20, "v", residual="r")
    rows = ({"l": spans} if spans else {}) | ({"d": ((0, 20),)} if behind else {})
    ops = adapted((first.untrained(), GLU("glu", "gate_up", "a", WIDTH), last.untrained()), rows)
    unit = next(op for op in ops if isinstance(op, GLU))
    assert (unit.before is not None, unit.behind is not None) == (bool(spans), behind)
    height, width = sum(end - start for start, end in spans), len(spans) * 3
    params = {"w": torch.randn(2 * WIDTH, 24), "l.lora_A": torch.randn(width, 24), "l.lora_B": torch.randn(height, 3)}
    params |= {"v": torch.randn(20, WIDTH), "d.lora_A": torch.randn(3, WIDTH), "d.lora_B": torch.randn(20, 3)}
    inputs, grad, found = {"x": torch.randn(19, 24), "r": torch.randn(19, 20)}, torch.randn(19, 20), []
    for kernel in (False, True):
        for choice in ("products.use_product_kernel", "glu.use_kernel"):
            monkeypatch.setattr(f"flexengine.ops.{choice}", lambda tensor, kernel=kernel: kernel)
        outputs, grads, sums = run_ops(ops, params, inputs, {"y": grad})
        found.append({name: outputs[name] for name in ("a", "y")} | {"grad_x": grads["x"]} | sums)
    expected = by_autograd(params, inputs, spans, behind, grad)
    for each in found:
        assert each.keys() == expected.keys()
        for name, tensor in expected.items():
            checks.assert_close(each[name], tensor, 1e-5, name)


def by_autograd(params, inputs, spans, behind, grad):
    """Outputs and gradients in float64, of sums that are written."""
    leaves = {name: tensor.double().requires_grad_() for name, tensor in (params | inputs).items()}
    low = 2.0 * leaves["x"] @ leaves["l.lora_A"].t()
    gate_up, row = leaves["x"] @ leaves["w"].t(), 0
    for number, (start, end) in enumerate(spans):
        up = leaves["l.lora_B"][row : row + end - start]
        added = low[:, 3 * number : 3 * number + 3] @ up.t()
        gate_up, row = gate_up + torch.nn.functional.pad(added, (start, 2 * WIDTH - end)), row + end - start
    gate, other = gate_up.chunk(2, dim=-1)
    a = UNITS["silu"](gate) * other
    y = a @ leaves["v"].t() + leaves["r"]
    if behind:
        y = y + 2.0 * (a @ leaves["d.lora_A"].t()) @ leaves["d.lora_B"].t()
    names = {"grad_x": "x"} | {
        n: n for n in leaves if n[2:] in ("lora_A", "lora_B") and (spans if n[0] == "l" else behind)
    }
    found = torch.autograd.grad(y, [leaves[name] for name in names.values()], grad.double())
    return {"a": a.detach(), "y": y.detach()} | dict(zip(names, found, strict=True))
