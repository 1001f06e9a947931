"""Causal convolution: packed and cut sequences against torch's convolution under autograd."""

import pytest
import torch

from flexengine.ops import causal_conv
from flexengine.ops.causal_conv import CausalConv
from flexengine.ops.columns import Columns, whole

WIDTH = 15
PARTS = {
    "side by side": (whole(0, 4), whole(4, 2), whole(6, 5)),
    "interleaved": (Columns(1, 2, 7, 2), Columns(3, 2, 7, 1), Columns(4, 2, 7, 3)),
}


def make(parts="side by side", taps=4):
    """Channels side by side have biases."""
    return CausalConv("conv", "x", "y", PARTS[parts], taps, "w", "b" if parts == "side by side" else None)


def draw(h, op, tokens):
    params = {"w": h.randn(op.channels, 1, op.taps), "b": h.randn(op.channels)}
    inputs = {"x": h.randn(tokens, WIDTH)}
    return inputs, {name: params[name] for name in op.params}, h.randn(tokens, op.channels)


def own(op, rows):
    """The op's columns, in the order of its channels."""
    return torch.cat([part.of(rows).flatten(1) for part in op.parts], dim=1)


def definition(op, inputs, params, grad_y, seq_lens):
    leaves = {name: t.detach().double().cpu().requires_grad_() for name, t in (inputs | params).items()}
    found = []
    for rows in own(op, leaves["x"]).split(list(seq_lens)):
        padded = torch.nn.functional.pad(rows.t(), (op.taps - 1, 0))[None]
        found.append(torch.nn.functional.conv1d(padded, leaves["w"], leaves.get("b"), groups=op.channels)[0].t())
    y = torch.nn.functional.silu(torch.cat(found))
    return y, dict(zip(leaves, torch.autograd.grad(y, leaves.values(), grad_y.double().cpu()), strict=True))


def check(h, checks, op, seq_lens, tolerance=1e-12, previous=None):
    inputs, params, grad_y = draw(h, op, sum(seq_lens))
    result = h.run(op, h.chunk(seq_lens), inputs, params, {"y": grad_y}, previous_params=previous)
    y, grads = definition(op, inputs, params, grad_y, seq_lens)
    checks.close(result.outputs["y"], y, tolerance, "y")
    checks.close(own(op, result.grads["x"]), own(op, grads["x"]), tolerance, "grad_x")
    for name, grad in result.param_grads.items():
        checks.close(grad.cpu(), grads[name] + (0.0 if previous is None else previous[name].cpu()), tolerance, name)
    assert result.grads["x"].isnan().sum() == sum(seq_lens) * (WIDTH - op.channels)  # other columns are for other ops
    return result


@pytest.mark.pairs
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("taps", [2, 4, 7])
@pytest.mark.parametrize("seq_lens", [(1,), (30,), (2, 1, 1, 9, 3)], ids=str)
def test_packed_sequences_match_torch(harness, checks, seq_lens, taps, parts):
    check(harness, checks, make(parts, taps), seq_lens)


def test_weight_gradients_add_up(harness, checks):
    check(harness, checks, make(), (5, 8), previous={"w": harness.randn(11, 1, 4), "b": harness.randn(11)})


def check_cut(h, checks, op, cuts, tolerance=1e-12):
    inputs, params, grad_y = draw(h, op, sum(cuts))
    y, grads, sums = h.run_cut(op, inputs, params, grad_y, cuts)
    expected, wanted = definition(op, inputs, params, grad_y, (sum(cuts),))
    checks.close(y, expected, tolerance, "y")
    checks.close(own(op, grads["x"]), own(op, wanted["x"]), tolerance, "grad_x")
    for name, grad in sums.items():
        checks.close(grad, wanted[name], tolerance, name)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("cuts", [(5, 5, 3), (1, 1, 1, 1), (2, 2, 1), (9, 1)], ids=str)
def test_a_cut_sequence_equals_the_uncut_one(harness, checks, cuts, parts):
    """Also where a chunk is shorter than what the convolution reaches back."""
    check_cut(harness, checks, make(parts), cuts)


@pytest.mark.parametrize(
    ("parts", "taps", "dtype", "tolerance"),
    [("side by side", 4, torch.bfloat16, 1e-2), ("interleaved", 3, torch.float32, 1e-5)],
    ids=str,
)
@pytest.mark.usefixtures("interpreted")
def test_kernels_match_torch(monkeypatch, make_harness, checks, parts, taps, dtype, tolerance):
    """What runs on CUDA."""
    h, op = make_harness("cpu", dtype), make(parts, taps)
    check(h, checks, op, (2, 1, 6), tolerance, {name: torch.randn(p.shape) for name, p in draw(h, op, 1)[1].items()})
    monkeypatch.setattr(causal_conv, "WEIGHT_GRAD_PARTIALS", 1)
    check_cut(h, checks, make(parts, taps), (4, 1), tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.usefixtures("deterministic")
def test_cuda_matches_torch(make_harness, checks, dtype, parts):
    h, tolerance = make_harness("cuda", dtype), checks.GPU_TOLERANCE[dtype]
    check(h, checks, make(parts), (300, 1, 2, 77), tolerance)
    check_cut(h, checks, make(parts), (64, 64, 3), tolerance)
