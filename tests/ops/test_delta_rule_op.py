"""Gated delta rule: packed and cut sequences against the recurrence, token by token, under autograd."""

import pytest
import torch
from torch.nn.functional import softplus

from flexengine.ops.columns import Columns, whole
from flexengine.ops.delta import segments as delta_segments
from flexengine.ops.delta.delta_rule import DeltaRule
from flexengine.ops.delta.segments import SEGMENT_TILES, batches, most_tile_heads, runs
from flexengine.ops.delta.tiles import TILE, Sizes, unit_lower_inverse

SIZES = [(2, 4, 5, 3), (3, 3, 4, 6), (1, 3, 2, 7)]  # key heads, value heads, their widths
SIZE_IDS = ["grouped", "equal heads", "one key head"]
LENGTHS = [(1,), (70,), (64, 64), (3, 130, 1, 64, 65), (2, 3, 1, 1, 4, 2, 1, 1, 1, 5)]


def make(sizes, interleaved=False):
    """The gates lie between columns that are nobody's: b and a of all heads, or of each key head."""
    g, n, *_ = sizes
    if interleaved:
        gates = Columns(1, g, 2 * n // g, n // g), Columns(1 + n // g, g, 2 * n // g, n // g)
    else:
        gates = whole(1, n), whole(1 + n, n)
    return DeltaRule("rule", "qkv", "gates", "o", sizes, *gates)


def draw(h, op, tokens):
    """(inputs, params, grad_o)."""
    g, n, k, v = op.sizes
    inputs = {"qkv": h.randn(tokens, 2 * g * k + n * v), "gates": h.randn(tokens, 2 * n + 2)}
    params = {"A_log": h.randn(n), "dt_bias": h.randn(n)}
    return inputs, params, h.randn(tokens, n * v)


def definition(op, inputs, params, grad_o, seq_lens):
    """Output and gradients by name, in float64."""
    g, n, k, v = op.sizes
    leaves = {name: x.detach().double().cpu().requires_grad_() for name, x in {**inputs, **params}.items()}
    q, key, value = leaves["qkv"].split((g * k, g * k, n * v), dim=1)
    q, key = (x.view(-1, g, k).repeat_interleave(n // g, dim=1) for x in (q, key))
    q, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, key))
    b, a = (columns.of(leaves["gates"]).flatten(1) for columns in op.columns)
    decay, b = torch.exp(-leaves["A_log"].exp() * softplus(a + leaves["dt_bias"])), torch.sigmoid(b)
    rows, t = [], 0
    for length in seq_lens:
        state = torch.zeros(n, k, v, dtype=torch.float64)
        for _ in range(length):
            state = decay[t][:, None, None] * state
            found = torch.einsum("nkv,nk->nv", state, key[t])
            state = state + torch.einsum("nk,nv->nkv", key[t], b[t][:, None] * (value.view(-1, n, v)[t] - found))
            rows.append(torch.einsum("nkv,nk->nv", state, q[t]).flatten() / k**0.5)
            t += 1
    o = torch.stack(rows)
    return o, dict(zip(leaves, torch.autograd.grad(o, leaves.values(), grad_o.double().cpu()), strict=True))


def check(h, checks, op, seq_lens, tolerance=1e-11, previous=None):
    inputs, params, grad_o = draw(h, op, sum(seq_lens))
    result = h.run(op, h.chunk(seq_lens), inputs, params, {"o": grad_o}, previous_params=previous)
    o, grads = definition(op, inputs, params, grad_o, seq_lens)
    checks.close(result.outputs["o"], o, tolerance, "o")
    checks.close(result.grads["qkv"], grads["qkv"], tolerance, "qkv", 1e-2)
    checks.close(
        checks.columns(op.columns, result.grads["gates"]),
        checks.columns(op.columns, grads["gates"]),
        tolerance,
        "gates",
        1e-2,
    )
    for name in params:
        before = 0.0 if previous is None else previous[name]
        checks.close(result.param_grads[name], grads[name].to(h.device) + before, tolerance, name, 1e-2)
    assert result.grads["gates"].isnan().sum() == 2 * sum(seq_lens)  # other columns are for other ops
    return result


@pytest.mark.parametrize("sizes", SIZES, ids=SIZE_IDS)
@pytest.mark.parametrize("seq_lens", LENGTHS, ids=str)
def test_packed_sequences_match_the_recurrence(harness, checks, sizes, seq_lens):
    check(harness, checks, make(sizes), seq_lens)


def test_gates_of_each_key_head(harness, checks):
    check(harness, checks, make((2, 6, 3, 4), interleaved=True), (5, 9))


@pytest.mark.parametrize("tiles", [1, 2, 5])
def test_segments_do_not_show(harness, checks, monkeypatch, tiles):
    monkeypatch.setattr(delta_segments, "SEGMENT_TILES", tiles)
    monkeypatch.setattr(delta_segments, "SIDE_BY_SIDE", tiles)
    check(harness, checks, make(SIZES[0]), (300, 20, 290, 64, 129))


def test_parameter_gradients_add_up(harness, checks):
    op = make(SIZES[0])
    check(harness, checks, op, (7, 80), previous={"A_log": harness.randn(4), "dt_bias": harness.randn(4)})


@pytest.mark.parametrize("cuts", [(70, 70, 20), (3, 3, 3, 1), (64, 64), (130, 1)], ids=str)
def test_a_cut_sequence_equals_the_uncut_one(harness, checks, cuts):
    op = make(SIZES[0])
    inputs, params, grad_o = draw(harness, op, sum(cuts))
    o, grads, sums = harness.run_cut(op, inputs, params, grad_o, cuts)
    expected, wanted = definition(op, inputs, params, grad_o, (sum(cuts),))
    checks.close(o, expected, 1e-11)
    checks.close(grads["qkv"], wanted["qkv"], 1e-11)
    checks.close(checks.columns(op.columns, grads["gates"]), checks.columns(op.columns, wanted["gates"]), 1e-11)
    for name in params:
        checks.close(sums[name], wanted[name], 1e-11)


def test_strong_and_weak_decay_in_float32(make_harness, checks):
    """Sums of log decays reach -1e4, and keys are nearly equal: nothing overflows."""
    h, op = make_harness("cpu", torch.float32), make((2, 2, 8, 8))
    inputs, params, grad_o = draw(h, op, 200)
    inputs["qkv"] = 1.0 + 1e-3 * inputs["qkv"]
    inputs["gates"] = 8.0 * inputs["gates"].abs()
    params["A_log"] = torch.tensor([3.0, -9.0])
    o = h.forward(op, h.chunk((200,)), inputs, params)["o"]
    result = h.run(op, h.chunk((200,)), inputs, params, {"o": grad_o})
    expected, wanted = definition(op, inputs, params, grad_o, (200,))
    checks.close(o, expected, 1e-4)
    checks.close(result.grads["qkv"], wanted["qkv"], 1e-3)


def test_the_inverse_of_equal_keys():
    """Powers of this matrix reach 1e18; its inverse has entries of 1."""
    lower = torch.ones(TILE, TILE).tril(-1)
    expected = torch.eye(TILE) - torch.ones(TILE, TILE).tril(-1) * torch.ones(TILE, TILE).triu(-1)
    assert torch.equal(unit_lower_inverse(lower[None])[0], expected)
    drawn = torch.randn(3, 2, TILE, TILE, dtype=torch.float64).tril(-1) / 8
    wanted = torch.linalg.inv(torch.eye(TILE, dtype=torch.float64) + drawn)
    torch.testing.assert_close(unit_lower_inverse(drawn), wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("seq_lens", [(1,) * 50, (5000, 1, 700, 650, 64, 63), (1024,), (1025, 1024)], ids=str)
def test_every_row_is_in_one_segment(seq_lens):
    seen = []
    for segments in batches(seq_lens):
        for segment in segments:
            assert segment.count * segment.tiles <= SEGMENT_TILES
            assert [rows for _, rows in segment.spans] == sorted((rows for _, rows in segment.spans), reverse=True)
            seen += [row for first, rows in segment.spans for row in range(first, first + rows)]
        assert [s.count for s in segments] == sorted((s.count for s in segments), reverse=True)
    assert sorted(seen) == list(range(sum(seq_lens)))


@pytest.mark.parametrize("sizes", [(16, 32, 128, 128), (2, 2, 64, 64), (1, 48, 64, 64)], ids=str)
@pytest.mark.parametrize("seq_lens", [(1,) * 5000, (5000, 1, 700, 650, 64, 63), (400_000, 3), (1025, 1024)], ids=len)
def test_every_tile_is_in_one_slot(seq_lens, sizes):
    sizes, begin, starts = Sizes(*sizes), 0, [0, *torch.tensor(seq_lens).cumsum(0).tolist()]
    for run in runs(seq_lens, sizes):
        assert run.begin == begin < run.end
        slots = []
        for sequence in range(run.begin, run.end):
            first = starts[sequence] // TILE - starts[run.begin] // TILE + sequence - run.begin
            slots += range(first, first + -(-seq_lens[sequence] // TILE))
        assert sorted(set(slots)) == slots
        assert slots[-1] < run.slots
        assert run.heads(sizes) % sizes.ratio == 0
        assert run.slots * run.heads(sizes) <= most_tile_heads(sum(seq_lens), sizes)
        begin = run.end
    assert begin == len(seq_lens)


TOLERANCES = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""On CUDA: the plain path for float64, kernels for the others."""


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("sizes", [(2, 4, 64, 64), (1, 3, 128, 72)], ids=str)
@pytest.mark.parametrize("seq_lens", [(256,), (130, 1, 64, 5)], ids=str)
@pytest.mark.usefixtures("deterministic")
def test_cuda_matches_the_recurrence(make_harness, checks, dtype, sizes, seq_lens):
    torch.manual_seed(0)
    first = check(make_harness("cuda", dtype), checks, make(sizes), seq_lens, TOLERANCES[dtype])
    torch.manual_seed(0)
    checks.same_bits(first, check(make_harness("cuda", dtype), checks, make(sizes), seq_lens, TOLERANCES[dtype]))
    assert first.outputs["o"].is_cuda


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("cuts", [(70, 70, 20), (64, 64), (130, 1)], ids=str)
def test_cut_on_cuda(make_harness, checks, dtype, cuts):
    h, op, tolerance = make_harness("cuda", dtype), make((2, 4, 64, 48)), TOLERANCES[dtype]
    inputs, params, grad_o = draw(h, op, sum(cuts))
    o, grads, sums = h.run_cut(op, inputs, params, grad_o, cuts)
    expected, wanted = definition(op, inputs, params, grad_o, (sum(cuts),))
    checks.close(o, expected, tolerance)
    checks.close(grads["qkv"], wanted["qkv"], tolerance)
    checks.close(checks.columns(op.columns, grads["gates"]), checks.columns(op.columns, wanted["gates"]), tolerance)
    for name in params:
        checks.close(sums[name], wanted[name], tolerance)
