"""Causal attention: packed ragged sequences and windows of earlier keys, against autograd on explicit masks."""

import os
from itertools import pairwise

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch

from flexengine.ops import attention
from flexengine.ops.attention import CausalAttention
from flexengine.ops.base import KeyValueWindow

HEADS = [(4, 2), (3, 3), (6, 1)]  # grouped, multi-head, multi-query
HEAD_IDS = ["GQA", "MHA", "MQA"]


def make(n, g, width):
    return CausalAttention("attention", "qkv", "o", n, g, width)


def definition(qkv, grad_o, seq_lens, n, g, width):
    """Output, log-sum-exp and gradient of a fused row, sequence by sequence with a full mask."""
    qkv = qkv.detach().double().cpu().requires_grad_()
    outs, stats = [], []
    for rows in qkv.split(list(seq_lens)):
        heads = rows.view(len(rows), n + 2 * g, width).transpose(0, 1)
        q, k, v = heads[:n], heads[n : n + g], heads[n + g :]
        k, v = (t.repeat_interleave(n // g, dim=0) for t in (k, v))
        scores = (q @ k.transpose(1, 2)) * width**-0.5
        scores = scores.masked_fill(torch.ones(len(rows), len(rows)).triu(1).bool(), float("-inf"))
        outs.append((scores.softmax(-1) @ v).transpose(0, 1).reshape(len(rows), -1))
        stats.append(torch.logsumexp(scores, dim=-1))
    o, lse = torch.cat(outs), torch.cat(stats, dim=1)
    (grad_qkv,) = torch.autograd.grad(o, qkv, grad_o.double().cpu())
    return {"o": o, "o_lse": lse}, grad_qkv


def random_rows(h, tokens, n, g, width):
    return h.randn(tokens, (n + 2 * g) * width), h.randn(tokens, n * width)


def check_uncut(h, checks, op, seq_lens, tolerance):
    n, g, width = op.num_heads, op.num_kv_heads, op.head_dim
    qkv, grad_o = random_rows(h, sum(seq_lens), n, g, width)
    chunk = h.chunk(seq_lens)
    result = h.run(op, chunk, {"qkv": qkv}, grad_outputs={"o": grad_o})
    outputs, grad_qkv = definition(qkv, grad_o, seq_lens, n, g, width)
    checks.close(result.outputs["o"], outputs["o"], tolerance, "o")
    checks.close(result.outputs["o_lse"].view(n, -1), outputs["o_lse"], tolerance, "lse")
    grads, wanted = (op.split(t.cpu()) for t in (result.grads["qkv"], grad_qkv))
    least = 1e-2 * float(grad_qkv.norm())  # of sequences of one token the gradients of queries and keys are zero
    for name, actual, expected in zip(("grad_q", "grad_k", "grad_v"), grads, wanted, strict=True):
        checks.close(actual, expected, tolerance, name, least)
    return result, h.run(op, chunk, {"qkv": qkv}, grad_outputs={"o": grad_o})


@pytest.mark.parametrize(("n", "g"), HEADS, ids=HEAD_IDS)
@pytest.mark.parametrize("width", [2, 7, 16])
@pytest.mark.parametrize("seq_lens", [(1,), (9,), (5, 1, 12), (1, 1, 1)], ids=str)
def test_matches_autograd(harness, checks, seq_lens, width, n, g):
    check_uncut(harness, checks, make(n, g, width), seq_lens, 1e-12)


def test_query_blocks_do_not_show(harness, checks, monkeypatch):
    monkeypatch.setattr(attention, "QUERY_BLOCK", 4)
    check_uncut(harness, checks, make(4, 2, 6), (13, 3, 4), 1e-12)


def run_cut(h, op, qkv, grad_o, cuts):
    """Forward over slices in order, backward in reverse, with one window, as the schedule does."""
    g, width = op.num_kv_heads, op.head_dim
    bounds = [0, *torch.tensor(cuts).cumsum(0).tolist()]
    shared = h.window(bounds[-1] + 3, g, width, 0)
    slices = []
    for a, b in pairwise(bounds):
        window = KeyValueWindow(shared.keys, shared.values, a, shared.grad_keys, shared.grad_values)
        chunk = h.chunk((b - a,), window=window)
        slices.append((slice(a, b), chunk, h.forward(op, chunk, {"qkv": qkv[a:b]}, {})))
    # the window is rebuilt for backward from the kept rows; what is in it now must not matter
    shared.keys.fill_(float("nan"))
    shared.values.fill_(float("nan"))
    for rows, chunk, _ in slices:
        op.fill_window(attention.OpEnv({"qkv": qkv[rows]}, {}, {}, {}, chunk))
    shared.grad_keys.zero_()
    shared.grad_values.zero_()
    grads = {}
    for rows, chunk, outputs in reversed(slices):
        given = {"o": grad_o[rows].clone(), "qkv": h.nan(*qkv[rows].shape)}
        op.backward_input(attention.OpEnv({"qkv": qkv[rows], **outputs}, {}, given, {}, chunk))
        grads[rows.start] = given["qkv"]
    o = torch.cat([outputs["o"] for _, _, outputs in slices])
    return o, torch.cat([grads[a] for a in bounds[:-1]])


@pytest.mark.parametrize(("n", "g"), HEADS, ids=HEAD_IDS)
@pytest.mark.parametrize("cuts", [(4, 4, 3), (1, 9), (5, 1, 1, 4)], ids=str)
def test_a_window_equals_the_uncut_sequence(harness, checks, cuts, n, g):
    op, tokens = make(n, g, 6), sum(cuts)
    qkv, grad_o = random_rows(harness, tokens, n, g, 6)
    o, grad = run_cut(harness, op, qkv, grad_o, cuts)
    outputs, grad_qkv = definition(qkv, grad_o, (tokens,), n, g, 6)
    checks.close(o, outputs["o"])
    checks.close(grad, grad_qkv)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("n", "g", "width"), [(16, 4, 64), (8, 8, 128), (8, 1, 128), (4, 2, 80)])
@pytest.mark.parametrize("seq_lens", [(1024,), (700, 1, 129, 213)], ids=str)
@pytest.mark.usefixtures("deterministic")
def test_cuda_matches_definition(make_harness, checks, dtype, n, g, width, seq_lens):
    h = make_harness("cuda", dtype)
    first, second = check_uncut(h, checks, make(n, g, width), seq_lens, checks.GPU_TOLERANCE[dtype])
    checks.same_bits(first, second)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cuts", [(512, 512, 100), (256, 1, 767)], ids=str)
@pytest.mark.usefixtures("deterministic")
def test_cuda_window_equals_the_uncut_sequence(make_harness, checks, dtype, cuts):
    h, op, tokens = make_harness("cuda", dtype), make(8, 2, 64), sum(cuts)
    qkv, grad_o = random_rows(h, tokens, 8, 2, 64)
    o, grad = run_cut(h, op, qkv, grad_o, cuts)
    outputs, grad_qkv = definition(qkv, grad_o, (tokens,), 8, 2, 64)
    checks.close(o, outputs["o"], checks.GPU_TOLERANCE[dtype], "o")
    for actual, expected in zip(op.split(grad.cpu()), op.split(grad_qkv), strict=True):
        checks.close(actual, expected, checks.GPU_TOLERANCE[dtype], "gradient")
    again = run_cut(h, op, qkv, grad_o, cuts)
    assert torch.equal(o, again[0])
    assert torch.equal(grad, again[1])
