"""Causal convolution: packed and cut sequences against torch's convolution under autograd."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from flexengine.ops import causal_conv
from flexengine.ops.base import OpEnv
from flexengine.ops.causal_conv import CausalConv
from flexengine.ops.columns import Columns, whole

WIDTH = 15
PARTS = {
    "side by side": (whole(0, 4), whole(4, 2), whole(6, 5)),
    "interleaved": (Columns(1, 2, 7, 2), Columns(3, 2, 7, 1), Columns(4, 2, 7, 3)),
}


def make(parts="side by side", taps=4):
    return CausalConv("conv", "x", "y", PARTS[parts], taps, "w")


def draw(h, op, tokens):
    return {"x": h.randn(tokens, WIDTH)}, {"w": h.randn(op.channels, 1, op.taps)}, h.randn(tokens, op.channels)


def own(op, rows):
    """The op's columns, in the order of its channels."""
    return torch.cat([part.of(rows).flatten(1) for part in op.parts], dim=1)


def definition(op, inputs, params, grad_y, seq_lens):
    x, weight = (t.detach().double().cpu().requires_grad_() for t in (inputs["x"], params["w"]))
    found = []
    for rows in own(op, x).split(list(seq_lens)):
        padded = torch.nn.functional.pad(rows.t(), (op.taps - 1, 0))
        found.append(torch.nn.functional.conv1d(padded[None], weight, groups=op.channels)[0].t())
    y = torch.nn.functional.silu(torch.cat(found))
    return y, *torch.autograd.grad(y, (x, weight), grad_y.double().cpu())


def check(h, checks, op, seq_lens, tolerance=1e-12, previous=None):
    inputs, params, grad_y = draw(h, op, sum(seq_lens))
    result = h.run(op, h.chunk(seq_lens), inputs, params, {"y": grad_y}, previous_params=previous)
    y, grad_x, grad_w = definition(op, inputs, params, grad_y, seq_lens)
    checks.close(result.outputs["y"], y, tolerance, "y")
    checks.close(own(op, result.grads["x"]), own(op, grad_x), tolerance, "grad_x")
    checks.close(result.param_grads["w"].cpu(), grad_w + (0.0 if previous is None else previous["w"]), tolerance, "w")
    assert result.grads["x"].isnan().sum() == sum(seq_lens) * (WIDTH - op.channels)  # other columns are for other ops
    return result


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("taps", [2, 4, 7])
@pytest.mark.parametrize("seq_lens", [(1,), (30,), (2, 1, 1, 9, 3)], ids=str)
def test_packed_sequences_match_torch(harness, checks, seq_lens, taps, parts):
    check(harness, checks, make(parts, taps), seq_lens)


def test_weight_gradients_add_up(harness, checks):
    check(harness, checks, make(), (5, 8), previous={"w": harness.randn(11, 1, 4)})


def run_cut(h, op, inputs, params, grad_y, cuts):
    """As the schedule does: forward in order, the window filled anew, backward in reverse."""
    bounds, slices = [0, *torch.tensor(cuts).cumsum(0).tolist()], []
    shared = h.window(op, bounds[-1], max(cuts))
    for i, (a, b) in enumerate(pairwise(bounds)):
        chunk = h.chunk((b - a,), window=replace(shared, start=a, chunk=i))
        slices.append((slice(a, b), chunk, {"x": inputs["x"][a:b]}))
        slices[-1] += (h.forward(op, chunk, slices[-1][2], params)["y"],)
    for rows in shared.carried.values():
        rows.fill_(float("nan"))
    for _, chunk, x, _ in slices:
        op.fill_window(OpEnv(x, params, {}, {}, chunk))
    for grad in shared.grads.values():
        grad.zero_()
    grad_x, sums = h.nan(*inputs["x"].shape), {}
    for rows, chunk, x, _ in reversed(slices):
        result = h.run(op, chunk, x, params, {"y": grad_y[rows]}, previous_params=sums or None)
        grad_x[rows], sums = result.grads["x"], result.param_grads
    return torch.cat([y for *_, y in slices]), grad_x, sums["w"]


def check_cut(h, checks, op, cuts, tolerance=1e-12):
    inputs, params, grad_y = draw(h, op, sum(cuts))
    y, grad_x, grad_w = run_cut(h, op, inputs, params, grad_y, cuts)
    wanted = definition(op, inputs, params, grad_y, (sum(cuts),))
    checks.close(y, wanted[0], tolerance, "y")
    checks.close(own(op, grad_x), own(op, wanted[1]), tolerance, "grad_x")
    checks.close(grad_w, wanted[2], tolerance, "grad_w")


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
    check(h, checks, op, (2, 1, 6), tolerance, {"w": torch.randn(op.channels, 1, taps)})
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
