"""Gated RMSNorm and gated attention output against autograd, the gate in columns at any place of another tensor."""

import pytest
import torch

from flexengine.ops.attention.head_gate import HeadGate
from flexengine.ops.columns import Columns, whole
from flexengine.ops.gated_rmsnorm import GatedRMSNorm

EPS, HEADS, HEAD_DIM, WIDTH = 1e-3, 4, 5, 43
GATES = {"side by side": whole(3, HEADS * HEAD_DIM), "in two groups": Columns(2, 2, 21, 2 * HEAD_DIM)}


KINDS = {"norm": (True, False), "norm of gated rows": (False, True), "norm of each head": (False, False), "gate": None}
"""Norms: whether heads share the weight, and whether the gate comes first."""


def norm_definition(op, o, gate, weight):
    factor = torch.nn.functional.silu(gate)
    rows = (o * factor if op.gate_first else o).view(len(o), HEADS, HEAD_DIM)
    normed = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + EPS) * weight.view(-1, HEAD_DIM)
    return normed.flatten(1) * (1.0 if op.gate_first else factor)


def make(kind, gate):
    if KINDS[kind]:
        return GatedRMSNorm("norm", "o", "z", "y", GATES[gate], HEAD_DIM, "w", EPS, *KINDS[kind])
    return HeadGate("gate", "o", "z", "y", GATES[gate])


def check(h, checks, kind, gate, tokens, tolerance=1e-12, previous=None):
    op = make(kind, gate)
    inputs = {"o": h.randn(tokens, HEADS * HEAD_DIM), "z": h.randn(tokens, WIDTH)}
    params = {"w": h.randn(op.weights * HEAD_DIM)} if op.params else {}
    grad_y = h.randn(tokens, HEADS * HEAD_DIM)
    result = h.run(op, h.chunk((tokens,)), inputs, params, {"y": grad_y}, previous_params=previous)
    leaves = [t.detach().double().cpu().requires_grad_() for t in (*inputs.values(), *params.values())]
    z = op.gate.of(leaves[1]).flatten(1)
    y = norm_definition(op, leaves[0], z, leaves[2]) if params else leaves[0] * torch.sigmoid(z)
    grads = torch.autograd.grad(y, leaves, grad_y.double().cpu())
    checks.close(result.outputs["y"], y, tolerance, "y")
    checks.close(result.grads["o"], grads[0], tolerance, "grad_o")
    found, wanted = (op.gate.of(grad).flatten(1) for grad in (result.grads["z"], grads[1]))
    checks.close(found, wanted, tolerance, "grad_z")
    assert result.grads["z"].isnan().sum() == tokens * (WIDTH - HEADS * HEAD_DIM)  # other columns are for other ops
    if params:
        before = 0.0 if previous is None else previous["w"].cpu()
        checks.close(result.param_grads["w"].cpu(), grads[2] + before, tolerance, "grad_w")


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("kind", KINDS)
def test_matches_autograd(harness, checks, kind, gate):
    check(harness, checks, kind, gate, 7)


def test_weight_gradients_add_up(harness, checks):
    check(harness, checks, "norm", "side by side", 3, previous={"w": harness.randn(HEAD_DIM)})


@pytest.mark.parametrize(
    ("gate", "dtype", "tolerance"),
    [("side by side", torch.bfloat16, 1e-2), ("in two groups", torch.float32, 1e-5)],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("interpreted")
def test_kernels_match_autograd(make_harness, checks, kind, gate, dtype, tolerance):
    """What runs on CUDA."""
    check(make_harness("cpu", dtype), checks, kind, gate, 7, tolerance)
    previous = {"w": torch.randn(make(kind, gate).weights * HEAD_DIM)} if KINDS[kind] else None
    check(make_harness("cpu", dtype), checks, kind, gate, 131, tolerance, previous)


@pytest.mark.usefixtures("interpreted")
def test_a_frozen_weight_changes_no_other_gradient(make_harness, checks):
    h, op = make_harness("cpu", torch.float32), make("norm", "in two groups")
    inputs = {"o": h.randn(9, HEADS * HEAD_DIM), "z": h.randn(9, WIDTH)}
    given = (h.chunk((9,)), inputs, {"w": h.randn(HEAD_DIM)}, {"y": h.randn(9, HEADS * HEAD_DIM)})
    trained, frozen = h.run(op, *given), h.run(op.untrained(), *given)
    for name, grad in trained.grads.items():
        assert torch.equal(frozen.grads[name].nan_to_num(), grad.nan_to_num())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("deterministic")
def test_cuda_matches_autograd(make_harness, checks, kind, gate, dtype):
    check(make_harness("cuda", dtype), checks, kind, gate, 1000, checks.GPU_TOLERANCE[dtype])
