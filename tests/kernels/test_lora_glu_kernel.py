"""Gated units that add what adapters change before and behind them, against float64 autograd of the written sums."""

import pytest
import torch

from flexengine.kernels import lora_glu, lora_sum
from flexengine.ops.adapters.lora import AdaptedRows, LoRALinear
from flexengine.ops.adapters.lora_glu import LoRAGLU
from flexengine.ops.base import ChunkContext, OpEnv
from flexengine.ops.glu import GLU
from flexengine.ops.linear import Linear

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
        lora_sum.add_product(start, low, up, start)
        assert torch.equal(start, out)  # in place: the same bits


def test_halves_outside_are_refused(checks, device):
    gate_up, low, up = (checks.normal(4, n, dtype=torch.float32, device=device) for n in (16, 6, 3))
    with pytest.raises(ValueError, match="lie outside"):
        lora_glu.glu_forward(gate_up, low, up, ((0, 0, 0),), gate_up[:, :8].contiguous(), "silu")


@pytest.mark.parametrize("adapted", [((0, 70), (70, 140)), ((0, 140),), ((70, 140),)], ids=str)
def test_a_layer_and_its_unit_are_those_of_the_written_sum(adapted, checks, monkeypatch):
    torch.manual_seed(1)
    spans = tuple(AdaptedRows(*rows) for rows in adapted)
    linear = LoRALinear(Linear("l", "x", "gate_up", 24, 2 * WIDTH, "w"), 3, 2.0, spans)
    unit = GLU("glu", "gate_up", "a", WIDTH)
    last = LoRALinear(Linear("d", "a", "y", WIDTH, 20, "w2", residual="r"), 4, 0.5, (AdaptedRows(0, 20),))
    leaving, taking = linear.leaving_sum(), last.taking_low()
    rows, width = sum(end - start for start, end in adapted), len(adapted) * 3
    params = {"w": torch.randn(2 * WIDTH, 24), linear.down: torch.randn(width, 24), linear.up: torch.randn(rows, 3)}
    params |= {"w2": torch.randn(20, WIDTH), last.down: torch.randn(4, WIDTH), last.up: torch.randn(20, 4)}
    x, residual, grad, found = torch.randn(19, 24), torch.randn(19, 20), torch.randn(19, 20), []
    for ops, kernel in (
        ((linear, unit, last), False),
        ((leaving, LoRAGLU(unit, leaving, taking), taking), False),
        ((leaving, LoRAGLU(unit, leaving, taking), taking), True),
        ((leaving, LoRAGLU(unit, leaving), last), True),
        ((linear, LoRAGLU(unit, None, taking), taking), False),
        ((linear, LoRAGLU(unit, None, taking), taking), True),
    ):
        for module in ("lora", "lora_glu"):
            monkeypatch.setattr(f"flexengine.ops.{module}.use_kernel", lambda tensor, kernel=kernel: kernel)
        found.append(run_ops(ops, params, {"x": x, "r": residual}, grad))
    assert {linear.down, linear.up, last.down, last.up} < set(found[0])
    for others in found[1:]:
        assert set(others) == set(found[0])
        for name, expected in found[0].items():
            checks.assert_close(others[name], expected, 1e-5, name)


def run_ops(ops, params, inputs, grad):
    """The outputs of unit and last layer, the gradient of x and those of all A and B."""
    specs = [spec for op in ops for half in ("forward", "input", "weight") for spec in op.scratch(half)]
    specs += [spec for op in ops for spec in op.outputs]
    x, outputs = inputs["x"], {spec.name for op in ops for spec in op.outputs}
    tensors = {s.name: torch.full((len(x), *s.shape), float("nan")) for s in specs} | inputs
    sums = {name: torch.full(p.shape, float("nan")) for name, p in params.items()}
    grads = {name: torch.full_like(tensors[name], float("nan")) for name in outputs} | {"x": torch.empty_like(x)}
    grads |= {"y": grad, "gate_up": tensors["gate_up"]}  # written over gate_up
    empty = torch.empty(0)
    chunk = ChunkContext(len(x), empty, empty, empty, empty, (len(x),), empty, {})
    env = OpEnv(tensors, params, grads, sums, chunk)
    for op in ops:
        op.forward(env)
    for op in reversed(ops):
        op.backward_input(env)
        if op.params:
            op.backward_weight(env)
    trained = {name: sums[name] for op in ops for name in op.params}
    return {"a": tensors["a"], "y": tensors["y"], "grad_x": env.g["x"], **trained}
