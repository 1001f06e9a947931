"""Mamba-2's scan: packed and cut sequences against the recurrence, token by token, under autograd."""

import pytest
import torch
from torch.nn.functional import softplus

from flexengine.ops.columns import whole
from flexengine.ops.delta import segments as delta_segments
from flexengine.ops.delta.segments import in_parts
from flexengine.ops.delta.state_space import UNLIMITED, Limits, StateSpaceScan
from flexengine.ops.delta.tiles import Sizes

SIZES = {"grouped": (2, 4, 5, 3), "one group": (1, 6, 3, 8)}  # groups, heads, size of the state, width of a head


def make(sizes=SIZES["grouped"], limits=UNLIMITED):
    """dt lies between columns that are nobody's."""
    return StateSpaceScan("scan", "xbc", "gates", "y", sizes, whole(1, sizes[1]), limits)


def draw(h, op, tokens):
    g, n, k, v = op.sizes
    inputs = {"xbc": h.randn(tokens, n * v + 2 * g * k), "gates": h.randn(tokens, n + 3)}
    return inputs, {name: h.randn(n) for name in op.params}, h.randn(tokens, n * v)


def definition(op, inputs, params, grad_y, seq_lens):
    """Output and gradients by name, in float64."""
    g, n, k, v = op.sizes
    leaves = {name: x.detach().double().cpu().requires_grad_() for name, x in {**inputs, **params}.items()}
    x, b, c = leaves["xbc"].split((n * v, g * k, g * k), dim=1)
    x, (b, c) = x.unflatten(1, (n, v)), (part.view(-1, g, k).repeat_interleave(n // g, dim=1) for part in (b, c))
    dt = softplus(op.columns[0].of(leaves["gates"]).flatten(1) + leaves["dt_bias"]).clamp(*op.limits)
    decay, rows, t = torch.exp(-leaves["A_log"].exp() * dt), [], 0
    for length in seq_lens:
        state = torch.zeros(n, k, v, dtype=torch.float64)
        for _ in range(length):
            state = decay[t, :, None, None] * state + torch.einsum("nk,nv->nkv", b[t], dt[t][:, None] * x[t])
            rows.append((torch.einsum("nkv,nk->nv", state, c[t]) + leaves["D"][:, None] * x[t]).flatten())
            t += 1
    y = torch.stack(rows)
    return y, dict(zip(leaves, torch.autograd.grad(y, leaves.values(), grad_y.double().cpu()), strict=True))


def compare(checks, op, found, wanted, tolerance):
    """found, wanted: output, gradients of inputs and of parameters."""
    (y, grads, sums), (expected, others) = found, wanted
    checks.close(y, expected, tolerance, "y")
    checks.close(grads["xbc"], others["xbc"], tolerance, "xbc", 1e-2)
    checks.close(
        checks.columns(op.columns, grads["gates"]),
        checks.columns(op.columns, others["gates"]),
        tolerance,
        "gates",
        1e-2,
    )
    for name in op.params:
        checks.close(sums[name], others[name], tolerance, name, 1e-2)


def check(h, checks, op, seq_lens, tolerance=1e-11, previous=None):
    inputs, params, grad_y = draw(h, op, sum(seq_lens))
    result = h.run(op, h.chunk(seq_lens), inputs, params, {"y": grad_y}, previous_params=previous)
    sums = {name: grad if previous is None else grad - previous[name] for name, grad in result.param_grads.items()}
    wanted = definition(op, inputs, params, grad_y, seq_lens)
    compare(checks, op, (result.outputs["y"], result.grads, sums), wanted, tolerance)
    assert result.grads["gates"].isnan().sum() == 3 * sum(seq_lens)  # other columns are for other ops
    return result


def check_cut(h, checks, op, cuts, tolerance=1e-11):
    inputs, params, grad_y = draw(h, op, sum(cuts))
    found = h.run_cut(op, inputs, params, grad_y, cuts)
    compare(checks, op, found, definition(op, inputs, params, grad_y, (sum(cuts),)), tolerance)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("seq_lens", [(1,), (70,), (3, 130, 1, 64)], ids=str)
def test_packed_sequences_match_the_recurrence(harness, checks, monkeypatch, sizes, seq_lens):
    for name in ("SEGMENT_TILES", "SIDE_BY_SIDE"):
        monkeypatch.setattr(delta_segments, name, 2)
    check(harness, checks, make(SIZES[sizes]), seq_lens)


def test_limits_of_dt_and_gradients_that_add_up(harness, checks):
    op = make(limits=Limits(0.5, 1.0))
    check(harness, checks, op, (7, 80), previous={name: harness.randn(4) for name in op.params})


@pytest.mark.parametrize("cuts", [(70, 70, 20), (3, 3, 1), (130, 1)], ids=str)
def test_a_cut_sequence_equals_the_uncut_one(harness, checks, cuts):
    check_cut(harness, checks, make(), cuts)


@pytest.mark.parametrize(("sizes", "parts"), [((1, 128, 128, 64), 8), ((8, 128, 128, 64), 8), ((1, 24, 256, 128), 2)])
def test_parts_of_heads(sizes, parts):
    assert in_parts(Sizes(*sizes)) == (parts, *sizes[1:])


KERNELS = {torch.float32: 5e-5, torch.bfloat16: 1e-2}
"""Tolerances of kernels, which multiply in float32 in the interpreter; gradients of decays are differences."""


@pytest.mark.parametrize(("sizes", "dtype"), [((2, 4, 5, 3), torch.float32), ((1, 4, 70, 20), torch.bfloat16)], ids=str)
@pytest.mark.usefixtures("interpreted")
def test_kernels_match_the_recurrence(monkeypatch, make_harness, checks, sizes, dtype):
    """What runs on CUDA, with parts of two heads, of which those of one tile are taken at a time."""
    monkeypatch.setattr(delta_segments, "PART_HEADS", 2)
    monkeypatch.setattr(delta_segments, "STATE_BYTES", 4 * 2 * sizes[2] * sizes[3])
    h, op = make_harness("cpu", dtype), make(sizes)
    check(h, checks, op, (66, 3, 1), KERNELS[dtype])
    check_cut(h, checks, op, (70, 2), KERNELS[dtype])


ON_CUDA = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""The plain path for float64, kernels for the others."""


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ON_CUDA, ids=str)
@pytest.mark.parametrize("sizes", [(1, 32, 128, 64), (2, 4, 256, 128), (8, 16, 16, 72)], ids=str)
@pytest.mark.usefixtures("deterministic")
def test_cuda_matches_the_recurrence(make_harness, checks, dtype, sizes):
    h, op, seq_lens = make_harness("cuda", dtype), make(sizes), (130, 1, 64, 205)
    torch.manual_seed(0)
    found = check(h, checks, op, seq_lens, ON_CUDA[dtype])  # the definition, on the CPU, takes seconds
    for _ in range(4):
        torch.manual_seed(0)
        inputs, params, grad_y = draw(h, op, sum(seq_lens))
        checks.same_bits(found, h.run(op, h.chunk(seq_lens), inputs, params, {"y": grad_y}, previous_params=None))
    check_cut(h, checks, op, (128, 128, 20), ON_CUDA[dtype])
