"""Attention with sinks: against a softmax over one more column, cut or whole, by every backend's interface."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from attention_helpers import PlainKernels, make, masked, random_rows, use_own_kernels
from thorough import cases

from flexengine.kernels import attention_sinks as kernel
from flexengine.ops.attention import attention
from flexengine.ops.attention.style import AttentionStyle
from flexengine.ops.base import OpEnv

STYLES = {
    "all keys": AttentionStyle(sinks=True),
    "window 4": AttentionStyle(window=4, sinks=True),
    "scaled": AttentionStyle(0.4, sinks=True),
}
SOFT_CAP = {"soft cap, window": AttentionStyle(window=5, soft_cap=2.0, sinks=True)}
by_style = pytest.mark.parametrize("style", STYLES.values(), ids=STYLES.keys())
by_cuts = pytest.mark.parametrize("cuts", [(4, 4, 3), (1, 9), (5, 1, 1, 4)], ids=str)


def definition(op, qkv, grad_o, sinks, seq_lens):
    """(o, lse, grad_qkv, grad_sinks): the sink is a column of scores whose value is zero."""
    n, g, width, style = op.num_heads, op.num_kv_heads, op.head_dim, op.style
    qkv, sinks = (x.detach().double().cpu().requires_grad_() for x in (qkv, sinks))
    outs, stats = [], []
    for rows in qkv.split(list(seq_lens)):
        heads = rows.view(len(rows), n + 2 * g, width).transpose(0, 1)
        q, k, v = heads[:n], heads[n : n + g], heads[n + g :]
        k, v = (t.repeat_interleave(n // g, dim=0) for t in (k, v))
        scores = masked((q @ k.transpose(1, 2)) * style.scale_of(width), style)
        every = torch.cat((scores, sinks[:, None, None].expand(n, len(rows), 1)), dim=-1)
        outs.append((every.softmax(-1)[..., :-1] @ v).transpose(0, 1).reshape(len(rows), -1))
        stats.append(torch.logsumexp(every, dim=-1))
    o = torch.cat(outs)
    return o, torch.cat(stats, dim=1), *torch.autograd.grad(o, (qkv, sinks), grad_o.double().cpu())


def check_uncut(h, checks, op, seq_lens, tolerance):
    qkv, grad_o = random_rows(h, sum(seq_lens), op.num_heads, op.num_kv_heads, op.head_dim)
    sinks, before = h.randn(op.num_heads, scale=2.0), torch.randn(op.num_heads).to(h.device)
    o, lse, grad_qkv, grad_sinks = definition(op, qkv, grad_o, sinks, seq_lens)
    accumulators = before.double() if h.dtype == torch.float64 else before
    for previous in (None, {"sinks": accumulators}):
        operands = (h.chunk(seq_lens), {"qkv": qkv}, {"sinks": sinks}, {"o": grad_o})
        result = h.run(op, *operands, previous_params=previous)
        checks.close(result.outputs["o"], o, tolerance, "o")
        checks.close(result.outputs["o_lse"].view(op.num_heads, -1), lse, tolerance, "lse")
        checks.close(result.grads["qkv"], grad_qkv, tolerance, "grad_qkv")
        wanted = grad_sinks if previous is None else grad_sinks + accumulators.cpu()
        checks.close(result.param_grads["sinks"], wanted, tolerance, "grad_sinks")


def run_cut(h, op, qkv, grad_o, sinks, cuts, chunk_tokens=300):
    """(o, grad_qkv, grad_sinks) of a sequence in slices, whose sinks add up in reverse."""
    bounds = [0, *torch.tensor(cuts).cumsum(0).tolist()]
    shared, params, slices = h.window(op, bounds[-1] + 3, chunk_tokens), {"sinks": sinks}, []
    for a, b in pairwise(bounds):
        chunk = h.chunk((b - a,), window=replace(shared, start=a))
        slices.append((slice(a, b), chunk, h.forward(op, chunk, {"qkv": qkv[a:b]}, params)))
    for grad in shared.grads.values():
        grad.zero_()
    grads, total = (
        {},
        {"sinks": h.nan(op.num_heads, dtype=torch.float64 if h.dtype == torch.float64 else torch.float32)},
    )
    for rows, chunk, outputs in reversed(slices):
        given = {"o": grad_o[rows].clone(), "qkv": h.nan(*qkv[rows].shape)}
        tensors = {"qkv": qkv[rows], **outputs, **h._buffers(op.scratch("weight"), chunk.tokens)}
        env = OpEnv(tensors, params, given, total, chunk, first=not grads)
        op.backward_input(env)
        op.backward_weight(env)
        grads[rows.start] = given["qkv"]
    return torch.cat([out["o"] for _, _, out in slices]), torch.cat([grads[a] for a in bounds[:-1]]), total["sinks"]


def check_cut(h, checks, op, cuts, tolerance, chunk_tokens=300):
    qkv, grad_o = random_rows(h, sum(cuts), op.num_heads, op.num_kv_heads, op.head_dim)
    sinks = h.randn(op.num_heads, scale=2.0)
    o, _, grad_qkv, grad_sinks = definition(op, qkv, grad_o, sinks, (sum(cuts),))
    found = run_cut(h, op, qkv, grad_o, sinks, cuts, chunk_tokens)
    for name, actual, expected in zip(("o", "grad_qkv", "grad_sinks"), found, (o, grad_qkv, grad_sinks), strict=True):
        checks.close(actual, expected, tolerance, name)


@pytest.mark.pairs
@pytest.mark.parametrize("style", [*STYLES.values(), *SOFT_CAP.values()], ids=[*STYLES, *SOFT_CAP])
@pytest.mark.parametrize(("n", "g"), [(4, 2), (3, 3), (6, 1)], ids=["GQA", "MHA", "MQA"])
@pytest.mark.parametrize("seq_lens", [(1,), (9,), (5, 1, 12)], ids=str)
def test_matches_autograd(harness, checks, seq_lens, n, g, style):
    check_uncut(harness, checks, make(n, g, 7, style), seq_lens, 1e-12)


@by_style
@by_cuts
def test_a_cut_sequence_has_every_sink_once(harness, checks, cuts, style):
    check_cut(harness, checks, make(4, 2, 6, style), cuts, 1e-12)


@by_style
@pytest.mark.parametrize("chunk_tokens", [1, 25])
@by_cuts
def test_parts_of_the_keys_are_joined_before(make_harness, checks, monkeypatch, cuts, chunk_tokens, style):
    """As on CUDA: what the kernels give for parts of the keys is merged, then the sink comes to it."""
    monkeypatch.setattr(attention, "choose_kernels", lambda *_: PlainKernels())
    h = make_harness("cpu", torch.float32)
    check_cut(h, checks, make(4, 2, 6, style), cuts, 2e-5, chunk_tokens)
    check_uncut(h, checks, make(4, 2, 6, style), (5, 1, 12), 2e-5)


@pytest.mark.parametrize("sink", [-1e4, -80.0, 80.0, 1e4])
def test_extreme_sinks(harness, checks, sink):
    """None of the attention, or all of it."""
    op, (qkv, grad_o) = make(4, 2, 6, STYLES["all keys"]), random_rows(harness, 9, 4, 2, 6)
    sinks = torch.full((4,), sink, dtype=torch.float64)
    result = harness.run(op, harness.chunk((9,)), {"qkv": qkv}, {"sinks": sinks}, {"o": grad_o})
    o, _, grad_qkv, grad_sinks = definition(op, qkv, grad_o, sinks, (9,))
    found = (result.outputs["o"], result.grads["qkv"], result.param_grads["sinks"])
    for actual, expected in zip(found, (o, grad_qkv, grad_sinks), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-14)


def check_kernel(checks, device, dtype, tokens, heads, width, parts):
    grad, out = (torch.randn(tokens, heads, width).to(device, dtype) for _ in range(2))
    lse, sinks = torch.randn(heads, tokens).to(device), torch.randn(heads).to(device, dtype)
    partials = torch.full((parts, heads), float("nan"), device=device)
    kernel.sink_gradients(grad, out, lse, sinks, partials)
    delta = (grad.double() * out.double()).sum(-1).t()
    wanted = -(torch.exp(sinks.double()[:, None] - lse.double()) * delta).sum(1)
    checks.close(partials.sum(0), wanted, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "heads", "width", "parts"), [(1, 1, 8, 4), (37, 3, 20, 2), (130, 2, 64, 8)])
def test_the_kernel_matches_float64(checks, dtype, tokens, heads, width, parts):
    check_kernel(checks, "cpu", dtype, tokens, heads, width, parts)


@pytest.mark.parametrize("name", cases(STYLES, ["window 4"]))
def test_our_own_kernels(make_harness, checks, monkeypatch, name):
    """They have the sinks in the call, however a sequence is cut."""
    style = STYLES[name]
    use_own_kernels(monkeypatch)
    h, op = make_harness("cpu", torch.float32), make(4, 2, 6, style)
    check_uncut(h, checks, op, (5, 1, 12), 1e-5)
    check_cut(h, checks, op, (4, 17, 3), 1e-5)


@pytest.mark.gpu
@by_style
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("deterministic")
def test_cuda_matches_definition(make_harness, checks, dtype, style):
    h = make_harness("cuda", dtype)
    check_kernel(checks, "cuda", dtype, 5000, 8, 64, 64)
    for seq_lens in ((1024,), (700, 1, 129, 213)):
        check_uncut(h, checks, make(8, 2, 64, style), seq_lens, checks.GPU_TOLERANCE[dtype])
    check_cut(h, checks, make(8, 2, 64, style), (512, 512, 100), checks.GPU_TOLERANCE[dtype])
