"""Gated units that make low and the gradient of A of the adapter behind them, against float64."""

import pytest
import torch
from engine_helpers import spec_of
from family_configs import CASES

from flexengine.kernels import adapted_glu, lora_grads
from flexengine.ops.adapters.lora import LoraDown
from flexengine.ops.adapters.lora_grads import MOST_RANK
from flexengine.ops.glu import GLU, Activation, ClampedSwiGLU
from flexengine.ops.glu_down import GLUDown
from flexengine.ops.linear import Linear
from flexengine.options.job import Job
from flexengine.request import described
from flexengine.schedule.save_sets import savable_ops
from tests.adapter_ops import adapted, run_ops
from tests.kernels.test_lora_glu_kernel import UNITS

WIDTH = 150
BOTH, NONE = ((0, 0, 0), (WIDTH, 5, WIDTH)), ()


@pytest.mark.parametrize(
    ("tokens", "rank", "halves", "activation", "spans", "dtype"),
    [
        (70, 5, BOTH, "silu", 2, torch.bfloat16),
        (33, 17, BOTH[1:], "gelu_tanh", 3, torch.float32),  # a span without tokens
        (3, 5, NONE, "silu", 1, torch.float32),
    ],
    ids=str,
)
def test_matches_float64(checks, device, tokens, rank, halves, activation, spans, dtype):
    def normal(*shape):
        return checks.normal(*shape, dtype=dtype, device=device)

    gate_up = checks.strided(tokens, 2 * WIDTH, dtype=dtype, device=device)
    gate_up.copy_(normal(tokens, 2 * WIDTH))
    low, up, down = normal(tokens, 2 * rank), normal(2 * WIDTH, 5).mul_(0.4), normal(rank, WIDTH)
    grad_out, grad_low = normal(tokens, WIDTH), normal(tokens, rank)
    out, low_behind = (checks.strided(tokens, n, dtype=dtype, device=device) for n in (WIDTH, rank))
    sizes = ((tokens, 2 * rank), (tokens, 3 * rank), (spans, rank * WIDTH), (rank, WIDTH))
    _, low_parts, parts, grad_down = (checks.empty(*size, dtype=torch.float32, device=device) for size in sizes)
    before = low, up, halves
    forward = adapted_glu.Behind(low_behind, down, low_parts, 0.5)
    adapted_glu.unit_forward(gate_up, before, forward, 64, out, activation)
    expected_out, expected_grad, expected_sum = reference(gate_up, before, grad_out, (grad_low, down), activation)
    checks.assert_close(out, expected_out, checks.TOLERANCE[dtype], "out")
    checks.assert_close(low_behind, 0.5 * out.double() @ down.double().t(), checks.TOLERANCE[dtype], "low")
    grad, behind = checks.empty(tokens, 2 * WIDTH, dtype=dtype, device=device), (grad_low, down, parts)
    adapted_glu.unit_backward(grad_out, gate_up, before, adapted_glu.Behind(*behind), grad, activation)
    lora_grads.add_parts(parts, grad_down, True)
    checks.assert_close(grad, expected_grad, checks.TOLERANCE[dtype], "grad_gate_up")
    checks.assert_close(grad_down, expected_sum, checks.TOLERANCE[dtype], "grad_A")
    first = parts.clone()
    adapted_glu.unit_backward(grad_out, gate_up, before, adapted_glu.Behind(*behind), gate_up, activation)
    assert torch.equal(gate_up, grad)  # in place, and a second run: the same bits
    assert torch.equal(parts, first)


def reference(gate_up, before, grad_out, behind, activation):
    """out, and the gradients of gate_up and of A, in float64."""
    low, up, halves = before
    total = gate_up.double().clone()
    for start, low_start, up_start in halves:
        rows = up[up_start : up_start + WIDTH].double()
        total[:, start : start + WIDTH] += low[:, low_start : low_start + up.shape[1]].double() @ rows.t()
    total.requires_grad_()
    grad_low, down = (tensor.double() for tensor in behind)
    gate, other = total.chunk(2, dim=-1)
    out = UNITS[activation](gate) * other
    (grad,) = torch.autograd.grad(out, total, grad_out.double() + grad_low @ down)
    return out.detach(), grad, grad_low.t() @ out.detach()


def layers(activation: Activation = "silu"):
    """The frozen layers around a unit."""
    up, down = Linear("l", "x", "gate_up", 24, 2 * WIDTH, "w"), Linear("d", "a", "y", WIDTH, 20, "v", residual="r")
    return up, GLU("glu", "gate_up", "a", WIDTH, activation), down


@pytest.mark.parametrize("rows", [{"l": ((0, WIDTH), (WIDTH, 2 * WIDTH))}, {}], ids=["both layers", "one layer"])
def test_a_layer_has_the_gradients_of_the_plain_path(rows, device, checks, monkeypatch):
    ops = adapted(layers(), rows | {"d": ((0, 20),)})
    assert not any("a" in (*op.needs_input, *op.needs_weight) for op in ops)  # nothing keeps or recomputes it
    shapes = {"w": (2 * WIDTH, 24), "v": (20, WIDTH), "d.lora_A": (3, WIDTH), "d.lora_B": (20, 3)}
    shapes |= {"l.lora_A": (6, 24), "l.lora_B": (2 * WIDTH, 3)}
    with device:
        params = {name: torch.randn(*shape).mul_(shape[1] ** -0.5).bfloat16() for name, shape in shapes.items()}
        inputs = {"x": torch.randn(70, 24).bfloat16(), "r": torch.randn(70, 20).bfloat16()}
        grads, found = {"y": torch.randn(70, 20).bfloat16()}, []
        for kernel in (False, True):
            for choice in ("adapters.lora_grads.use_product_kernel", "glu.use_kernel"):
                monkeypatch.setattr(f"flexengine.ops.{choice}", lambda tensor, kernel=kernel: kernel)
            outputs, into, sums = run_ops(ops, params, dict(inputs), dict(grads), chunks=2)
            found.append({name: outputs[name] for name in ("a", "d.low", "y")} | into | sums)
    assert {"x", "d.lora_A", "d.lora_B"} | ({"l.lora_B"} if rows else set()) <= found[0].keys() == found[1].keys()
    for name, expected in found[0].items():
        checks.assert_close(found[1][name], expected, 2 * checks.TOLERANCE[torch.bfloat16], name)


@pytest.mark.parametrize(
    ("activation", "options", "expected"),
    [
        ("silu", {}, True),
        ("silu", {"rank": MOST_RANK + 1}, False),
        ("silu", {"dropout": 0.1}, False),
        ("silu", {"has_magnitude": True}, False),
        (ClampedSwiGLU(7.0, 1.7), {}, False),
    ],
    ids=str,
)
def test_which_units_do_the_work_of_adapters(activation, options, expected):
    ops = adapted(layers(activation), {"d": ((0, 20),)}, **options)
    assert any(isinstance(op, GLUDown) for op in ops) == expected
    assert any(isinstance(op, LoraDown) for op in ops) != expected


def test_wrong_operands_are_refused(checks, device):
    gate_up, out, low, down = (checks.normal(*size, dtype=torch.float32, device=device) for size in
                               ((4, 2 * WIDTH), (4, WIDTH), (4, 65), (65, WIDTH)))  # fmt: skip
    before, behind = (gate_up, gate_up[:0, :1], ()), adapted_glu.Behind(low, down, low)
    with pytest.raises(ValueError, match="rank 65, of which a program holds 64"):
        adapted_glu.unit_backward(out, gate_up, before, behind, gate_up, "silu")
    behind = adapted_glu.Behind(low[:, :3], down[:3], checks.empty(4, 6, dtype=torch.float32, device=device))
    with pytest.raises(ValueError, match="expected a multiple of 64"):
        adapted_glu.unit_forward(gate_up, before, behind, 100, out, "silu")


def test_what_no_backward_reads_is_not_kept():
    """Experts of Gemma 4 let the dense unit beside them be kept. With adapters low alone is read, kept elsewhere."""
    job = Job(max_seq_len=64, max_global_batch_tokens=64, mode="lora")
    ops = described(spec_of(CASES["gemma4_text, experts"]), job).blocks[0].ops
    units = {op.name for op in ops if isinstance(op, GLUDown)}
    assert units
    assert not units & {*savable_ops(ops)}
