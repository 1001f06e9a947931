"""Causal attention: packed ragged sequences and windows of earlier keys, against autograd on explicit masks."""

import os
from dataclasses import replace
from itertools import pairwise

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from attention_helpers import PlainKernels, make, masked, random_rows, use_own_kernels

from flexengine.ops import cards
from flexengine.ops.attention import attention
from flexengine.ops.attention import reference as attention_reference
from flexengine.ops.attention.choice import AttentionChoice
from flexengine.ops.attention.kernels import KERNELS, Lengths, Results, choose_kernels, runs_on
from flexengine.ops.attention.key_value_window import KeyValueWindow, block_tokens_of
from flexengine.ops.attention.style import CAUSAL, AttentionShape, AttentionStyle

HEADS = [(4, 2), (3, 3), (6, 1)]  # grouped, multi-head, multi-query
HEAD_IDS = ["GQA", "MHA", "MQA"]


STYLES = {
    "window 3": AttentionStyle(window=3),
    "window 1": AttentionStyle(window=1),
    "window 64": AttentionStyle(window=64),
    "scaled": AttentionStyle(scale=0.31),
    "soft cap": AttentionStyle(soft_cap=1.5),
    "all of them": AttentionStyle(0.7, 5, 2.0),
}


def definition(qkv, grad_o, seq_lens, n, g, width, style=CAUSAL):
    """Output, log-sum-exp and gradient of a fused row, sequence by sequence with a full mask."""
    qkv = qkv.detach().double().cpu().requires_grad_()
    outs, stats = [], []
    for rows in qkv.split(list(seq_lens)):
        heads = rows[:, : (n + g) * width].unflatten(1, (n + g, width)).transpose(0, 1)
        q, k, v = heads[:n], heads[n:], rows[:, (n + g) * width :].unflatten(1, (g, -1)).transpose(0, 1)
        k, v = (t.repeat_interleave(n // g, dim=0) for t in (k, v))
        scale = width**-0.5 if style.scale is None else style.scale
        scores = masked((q @ k.transpose(1, 2)) * scale, style)
        outs.append((scores.softmax(-1) @ v).transpose(0, 1).reshape(len(rows), -1))
        stats.append(torch.logsumexp(scores, dim=-1))
    o, lse = torch.cat(outs), torch.cat(stats, dim=1)
    (grad_qkv,) = torch.autograd.grad(o, qkv, grad_o.double().cpu())
    return {"o": o, "o_lse": lse}, grad_qkv


def check_uncut(h, checks, op, seq_lens, tolerance, kernels="flash"):
    n, g, width = op.num_heads, op.num_kv_heads, op.head_dim
    qkv, grad_o = random_rows(h, sum(seq_lens), n, g, width, op.value_dim)
    chunk = h.chunk(seq_lens, attention=kernels)
    result = h.run(op, chunk, {"qkv": qkv}, grad_outputs={"o": grad_o})
    outputs, grad_qkv = definition(qkv, grad_o, seq_lens, n, g, width, op.style)
    checks.close(result.outputs["o"], outputs["o"], tolerance, "o")
    checks.close(result.outputs["o_lse"].view(n, -1), outputs["o_lse"], tolerance, "lse")
    grads, wanted = (op.split(t.cpu()) for t in (result.grads["qkv"], grad_qkv))
    least = 1e-2 * float(grad_qkv.norm())  # of sequences of one token the gradients of queries and keys are zero
    for name, actual, expected in zip(("grad_q", "grad_k", "grad_v"), grads, wanted, strict=True):
        checks.close(actual, expected, tolerance, name, least)
    return result, h.run(op, chunk, {"qkv": qkv}, grad_outputs={"o": grad_o})


@pytest.mark.pairs
@pytest.mark.parametrize(("n", "g"), HEADS, ids=HEAD_IDS)
@pytest.mark.parametrize("width", [2, 7, 16])
@pytest.mark.parametrize("seq_lens", [(1,), (9,), (5, 1, 12), (1, 1, 1)], ids=str)
def test_matches_autograd(harness, checks, seq_lens, width, n, g):
    check_uncut(harness, checks, make(n, g, width), seq_lens, 1e-12)


@pytest.mark.pairs
@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES.keys())
@pytest.mark.parametrize("query_block", [512, 4])
@pytest.mark.parametrize("seq_lens", [(9,), (5, 1, 12), (8, 7, 8)], ids=str)
def test_styles_match_autograd(harness, checks, monkeypatch, seq_lens, query_block, style):
    monkeypatch.setattr(attention_reference, "QUERY_BLOCK", query_block)
    check_uncut(harness, checks, make(4, 2, 6, style), seq_lens, 1e-12)


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES.keys())
@pytest.mark.parametrize("cuts", [(4, 4, 3), (1, 9), (5, 1, 1, 4)], ids=str)
def test_a_cut_sequence_in_every_style(harness, checks, cuts, style):
    op, tokens = make(4, 2, 6, style), sum(cuts)
    qkv, grad_o = random_rows(harness, tokens, 4, 2, 6)
    o, grad = run_cut(harness, op, qkv, grad_o, cuts)
    outputs, grad_qkv = definition(qkv, grad_o, (tokens,), 4, 2, 6, style)
    checks.close(o, outputs["o"])
    checks.close(grad, grad_qkv)


@pytest.mark.pairs
@pytest.mark.parametrize("kernels", [False, True], ids=["plain", "kernels"])
@pytest.mark.parametrize(("n", "g"), HEADS, ids=HEAD_IDS)
@pytest.mark.parametrize(("width", "value_dim"), [(6, 4), (7, 1), (2, 2)])
def test_values_narrower_than_keys(make_harness, checks, monkeypatch, width, value_dim, n, g, kernels):
    h, op = make_harness("cpu", torch.float32), make(n, g, width, value_dim=value_dim)
    if kernels:
        monkeypatch.setattr(attention, "choose_kernels", lambda *_: PlainKernels())
    check_uncut(h, checks, op, (5, 1, 12), 1e-5)
    qkv, grad_o = random_rows(h, 11, n, g, width, value_dim)
    o, grad = run_cut(h, op, qkv, grad_o, (4, 4, 3), chunk_tokens=1)
    outputs, grad_qkv = definition(qkv, grad_o, (11,), n, g, width)
    checks.close(o, outputs["o"], 1e-5)
    checks.close(grad, grad_qkv, 1e-5)


def test_narrow_values_are_not_padded():
    """Products with values cost what these are wide, and our own kernels take nothing but statistics."""
    narrow, wide = make(4, 4, 192, value_dim=128), make(4, 4, 192)
    pairs = 4 * 64 * 32
    for work, key_products, value_products in (
        (narrow.forward_work(64, 64, 2), 1, 1),
        (narrow.backward_input_work(64, 64, 2), 3, 2),
    ):
        assert work.flops == work.attention_forward_flops + work.attention_backward_flops
        assert work.flops == 2 * pairs * (192 * key_products + 128 * value_products)
    assert narrow.forward_work(64, 64, 4).attention_forward_flops == narrow.forward_work(64, 64, 2).flops
    assert narrow.workspace_bytes(64, 2) == 2 * 64 * 4 * 4 < wide.workspace_bytes(64, 2)
    assert narrow.window_workspace_bytes(64, 2) == 0
    assert [spec.shape for spec in narrow.carried] == [(4, 192), (4, 128)]


def test_pairs_that_a_window_leaves():
    for window, length in ((5, 3), (5, 5), (5, 40), (1, 7), (0, 9)):
        pairs = sum(min(i + 1, window or length) for i in range(length))
        style = AttentionStyle(window=window)
        assert style.mean_keys(length) * length == pytest.approx(pairs, abs=length / 2)  # a query's own key counts half
        assert make(2, 1, 4, style).forward_work(length, length, 2).attention_forward_flops == (
            4 * 2 * 4 * style.mean_keys(length) * length
        )


def test_query_blocks_do_not_show(harness, checks, monkeypatch):
    monkeypatch.setattr(attention_reference, "QUERY_BLOCK", 4)
    check_uncut(harness, checks, make(4, 2, 6), (13, 3, 4), 1e-12)


def run_cut(h, op, qkv, grad_o, cuts, kernels="flash", chunk_tokens=300):
    """Forward over slices in order, backward in reverse, with one window, as the schedule does."""
    bounds = [0, *torch.tensor(cuts).cumsum(0).tolist()]
    shared = h.window(op, bounds[-1] + 3, chunk_tokens)
    slices = []
    for a, b in pairwise(bounds):
        chunk = h.chunk((b - a,), window=replace(shared, start=a), attention=kernels)
        slices.append((slice(a, b), chunk, h.forward(op, chunk, {"qkv": qkv[a:b]}, {})))
    # the window is rebuilt for backward from the kept rows; what is in it now must not matter
    for rows in shared.carried.values():
        rows.fill_(float("nan"))
    for rows, chunk, _ in slices:
        op.fill_window(attention.OpEnv({"qkv": qkv[rows]}, {}, {}, {}, chunk))
    for grad in shared.grads.values():
        grad.zero_()
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


@pytest.mark.pairs
@pytest.mark.parametrize("style", [CAUSAL, AttentionStyle(0.4), AttentionStyle(window=4)], ids=str)
@pytest.mark.parametrize("chunk_tokens", [1, 2, 25])
@pytest.mark.parametrize("cuts", [(4, 4, 3), (1, 9), (5, 1, 1, 4)], ids=str)
def test_blocks_of_a_window_add_up(make_harness, checks, monkeypatch, cuts, chunk_tokens, style):
    h, op, tokens = make_harness("cpu", torch.float32), make(4, 2, 6, style), sum(cuts)
    monkeypatch.setattr(attention, "choose_kernels", lambda *_: PlainKernels())
    qkv, grad_o = random_rows(h, tokens, 4, 2, 6)
    o, grad = run_cut(h, op, qkv, grad_o, cuts, chunk_tokens=chunk_tokens)
    outputs, grad_qkv = definition(qkv, grad_o, (tokens,), 4, 2, 6, style)
    checks.close(o, outputs["o"], 1e-5)
    checks.close(grad, grad_qkv, 1e-5)


def test_slices_pay_for_sums_over_blocks_of_earlier_keys():
    """The kernels take four chunks of keys at a time, and no more than 16384 where chunks hold fewer."""
    assert [block_tokens_of(tokens) for tokens in (1, 4096, 5000, 16384, 20000)] == [4, 16384, 15000, 16384, 20000]
    op = make(32, 8, 128)
    for work, columns in ((op.forward_work, 0), (op.backward_input_work, 2 * 8 * 128)):
        whole, slices = work(4096, 4096, 2), work(4096, 4096 + 2 * 16384, 2)  # 16384 earlier keys
        sums = 10 * 4096 * 32 * 128 + 12 * 4096 * 32 * 128 + 10 * 16384 * columns
        assert slices.memory_bytes == whole.memory_bytes + sums
        assert slices.kernels > whole.kernels
    for earlier, keys in ((4096, 4096), (8192, 8192), (16384, 16384), (10**6, 16384)):
        more = (keys - 4096) * 2 * (32 + 8) * 128 * 2
        assert attention.block_workspace_bytes(op, 4096, earlier, 2) == more


@pytest.fixture
def own_kernels(monkeypatch):
    use_own_kernels(monkeypatch)


@pytest.mark.usefixtures("own_kernels")
@pytest.mark.parametrize(
    ("n", "g", "width", "value_dim", "style"),
    [
        pytest.param(4, 2, 6, 6, CAUSAL, marks=pytest.mark.thorough),
        (3, 3, 7, 4, STYLES["window 3"]),
        (4, 2, 6, 6, STYLES["all of them"]),
    ],
    ids=["all keys", "window 3, values narrower than keys", "all of them"],
)
def test_our_own_kernels(make_harness, checks, n, g, width, value_dim, style):
    h, op = make_harness("cpu", torch.float32), make(n, g, width, style, value_dim)
    checks.same_bits(*check_uncut(h, checks, op, (5, 1, 12), 1e-5))
    qkv, grad_o = random_rows(h, 20, n, g, width, value_dim)
    o, grad = run_cut(h, op, qkv, grad_o, (3, 15, 2))
    outputs, grad_qkv = definition(qkv, grad_o, (20,), n, g, width, style)
    checks.close(o, outputs["o"], 1e-5)
    checks.close(grad, grad_qkv, 1e-5)


def test_kernels_are_for_16_bits_on_cuda():
    assert choose_kernels("cudnn", torch.zeros(4, 2, 64, dtype=torch.bfloat16), (4,)) is None


@pytest.mark.parametrize(
    ("style", "name"),
    [(AttentionStyle(0.1), "cudnn"), (AttentionStyle(window=9), "triton"), (AttentionStyle(soft_cap=50.0), "triton")],
    ids=str,
)
def test_kernels_serve_what_they_can(style, name):
    assert choose_kernels("cudnn", Queries(), (2048,), (), style) is KERNELS[name]


def test_soft_caps_take_the_plain_path_in_float32():
    queries = Queries()
    queries.dtype = torch.float32
    assert choose_kernels("flash", queries, (2048,), (), AttentionStyle(soft_cap=50.0)) is None


@pytest.mark.parametrize(("style", "name"), [(CAUSAL, "efficient"), (AttentionStyle(window=300), None)], ids=str)
def test_float16_on_a_card_before_2020_takes_the_memory_efficient_kernels(style, name, monkeypatch):
    monkeypatch.setattr(cards, "_capability", lambda _: (7, 5))
    queries = Queries()
    queries.dtype, queries.device = torch.float16, torch.device("cuda", 0)
    assert choose_kernels("flash", queries, (2048,), (), style) is (KERNELS[name] if name else None)
    monkeypatch.setattr(cards, "_capability", lambda _: (8, 0))
    assert choose_kernels("flash", queries, (2048,)) is KERNELS["flash"]


def test_values_narrower_than_keys_are_for_our_own_kernels():
    assert choose_kernels("cudnn", Queries(), (2048,), (), CAUSAL, 64) is KERNELS["triton"]
    assert choose_kernels("cudnn", Queries(), (2048,), (), CAUSAL, 128) is KERNELS["cudnn"]


def test_kernels_that_are_preferred_serve_where_they_can():
    for style, name in ((CAUSAL, "triton"), (AttentionStyle(window=9), "flash")):
        assert choose_kernels(name, Queries(), (2048, 100), (), style) is KERNELS[name]


def test_the_fastest_kernels_of_a_measured_shape_serve(harness, monkeypatch):
    op, asked = make(8, 2, 64, AttentionStyle(window=9)), []
    monkeypatch.setattr(attention, "choose_kernels", lambda preferred, *_: asked.append(preferred))
    choices = (AttentionChoice(AttentionShape(4, 64, 64, 9), ((16, ("flash",)), (64, ("triton", "flash")))),)
    for length in (8, 100):
        chunk = replace(harness.chunk((length,), attention="cudnn"), attention_choices=choices)
        op._kernels(attention.OpEnv({}, {}, {}, {}, chunk), Queries(64))
    assert asked == [("flash", "cudnn"), ("triton", "flash", "cudnn")]


class Queries:
    """Shape and dtype of queries on a GPU."""

    is_cuda, dtype, device = True, torch.bfloat16, torch.device("cpu")

    def __init__(self, width=128):
        self.shape = (4, 2, width)


@pytest.mark.parametrize(
    ("width", "seq_lens", "other", "name"),
    [
        (128, (2048, 2048), (), "cudnn"),
        (128, (2048, 1024), (), "flash"),
        (128, (2040, 2040), (), "flash"),
        (128, (2048,), (0, 2048), "cudnn"),
        (128, (2048,), (4096, 1000), "flash"),
        (256, (2048,), (), "flash"),
        (100, (2048,), (), "triton"),
        (300, (2048,), (), "triton"),
        (600, (2048,), (), None),
    ],
)
def test_cudnn_serves_equal_lengths_that_come_again(width, seq_lens, other, name):
    assert choose_kernels("cudnn", Queries(width), seq_lens, other) is (None if name is None else KERNELS[name])


@pytest.mark.usefixtures("deterministic")
def test_deterministic_runs_use_flash():
    assert choose_kernels("cudnn", Queries(), (2048,)) is KERNELS["flash"]
    assert not runs_on("cudnn", Queries.device)  # nor does the probe measure it, which would price what does not run


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "g", "width"), [(16, 4, 64), (8, 8, 128), (8, 1, 128), (4, 2, 80)])
@pytest.mark.parametrize("seq_lens", [(1024,), (512, 512, 512), (256,), (700, 1, 129, 213)], ids=str)
def test_cudnn_matches_definition(make_harness, checks, n, g, width, seq_lens):
    h = make_harness("cuda", torch.bfloat16)
    check_uncut(h, checks, make(n, g, width), seq_lens, checks.GPU_TOLERANCE[torch.bfloat16], "cudnn")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("width", "value_dim"), [(192, 128), (96, 64), (20, 12)])
def test_narrow_values_on_cuda(make_harness, checks, width, value_dim, dtype):
    h, op = make_harness("cuda", dtype), make(8, 8, width, value_dim=value_dim)
    check_uncut(h, checks, op, (700, 1, 129, 213), checks.GPU_TOLERANCE[dtype])
    qkv, grad_o = random_rows(h, 1024, 8, 8, width, value_dim)
    o, grad = run_cut(h, op, qkv, grad_o, (512, 512), chunk_tokens=64)
    outputs, grad_qkv = definition(qkv, grad_o, (1024,), 8, 8, width)
    checks.close(o, outputs["o"], checks.GPU_TOLERANCE[dtype], "o")
    checks.close(grad, grad_qkv, checks.GPU_TOLERANCE[dtype], "gradient")


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["flash", "cudnn"])
@pytest.mark.parametrize("cuts", [(512, 512, 512), (256, 256, 100), (256, 1, 767)], ids=str)
def test_windows_by_both_kernels(make_harness, checks, cuts, kernels):
    h, op, tokens = make_harness("cuda", torch.bfloat16), make(8, 2, 64), sum(cuts)
    qkv, grad_o = random_rows(h, tokens, 8, 2, 64)
    o, grad = run_cut(h, op, qkv, grad_o, cuts, kernels, chunk_tokens=64)
    outputs, grad_qkv = definition(qkv, grad_o, (tokens,), 8, 2, 64)
    checks.close(o, outputs["o"], checks.GPU_TOLERANCE[torch.bfloat16], "o")
    for actual, expected in zip(op.split(grad.cpu()), op.split(grad_qkv), strict=True):
        checks.close(actual, expected, checks.GPU_TOLERANCE[torch.bfloat16], "gradient")


@pytest.mark.gpu
@pytest.mark.parametrize("style", [CAUSAL, AttentionStyle(0.2, 300)], ids=str)
def test_cards_before_8_0_match_definition(make_harness, checks, style, monkeypatch):
    """By memory-efficient attention, where there is no window; any card has it."""
    monkeypatch.setattr(cards, "_capability", lambda _: (7, 5))
    h, op, tolerance = make_harness("cuda", torch.float16), make(8, 2, 64, style), checks.GPU_TOLERANCE[torch.bfloat16]
    check_uncut(h, checks, op, (700, 1, 129, 213), tolerance)
    qkv, grad_o = random_rows(h, 1100, 8, 2, 64)
    o, grad = run_cut(h, op, qkv, grad_o, (512, 512, 76), chunk_tokens=64)
    outputs, grad_qkv = definition(qkv, grad_o, (1100,), 8, 2, 64, style)
    checks.close(o, outputs["o"], tolerance, "o")
    for actual, expected in zip(op.split(grad.cpu()), op.split(grad_qkv), strict=True):
        checks.close(actual, expected, tolerance, "gradient")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "style"), [("flash", CAUSAL), ("cudnn", CAUSAL), ("flash", AttentionStyle(window=5000))], ids=str
)
@pytest.mark.parametrize("before", [0, 3 * 2048])
def test_kernels_stay_within_their_workspace(name, style, before):
    tokens, n, g, width = 2048, 32, 8, 128
    make_rows = lambda rows, heads: torch.randn(rows, heads, width, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    q, grad_out, out = (make_rows(tokens, n) for _ in range(3))
    keys, values = (make_rows(before + tokens, g) for _ in range(2))
    grads = [torch.zeros(before + tokens, g, width, device="cuda") for _ in range(2)]
    window = KeyValueWindow(keys, values, before, *grads, tokens)
    lse, rng = torch.empty(n, tokens, device="cuda"), torch.zeros(2, dtype=torch.int64, device="cuda")
    lengths = Lengths((tokens,), torch.tensor([0, tokens], dtype=torch.int32, device="cuda"))
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    attention.window_forward(KERNELS[name], q, window, lengths, style, out, lse)
    attention.window_backward(KERNELS[name], grad_out, q, window, Results(out, lse), lengths, rng, style)
    op = make(n, g, width, style)
    allowed = op.workspace_bytes(tokens, 2) + (before > 0) * op.window_workspace_bytes(tokens, 2)
    assert torch.cuda.max_memory_allocated() - held <= allowed


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


GPU_STYLES = {
    "window 100": AttentionStyle(window=100),
    "window 300, scaled": AttentionStyle(0.2, 300),
    "soft cap, window": AttentionStyle(window=70, soft_cap=5.0),
}


@pytest.mark.gpu
@pytest.mark.parametrize("style", GPU_STYLES.values(), ids=GPU_STYLES.keys())
@pytest.mark.parametrize("seq_lens", [(1024,), (700, 1, 129, 213)], ids=str)
@pytest.mark.usefixtures("deterministic")
def test_cuda_styles_match_definition(make_harness, checks, seq_lens, style):
    h = make_harness("cuda", torch.bfloat16)
    op = make(8, 2, 64, style)
    checks.same_bits(*check_uncut(h, checks, op, seq_lens, checks.GPU_TOLERANCE[torch.bfloat16]))


@pytest.mark.gpu
@pytest.mark.parametrize("style", GPU_STYLES.values(), ids=GPU_STYLES.keys())
@pytest.mark.parametrize("cuts", [(512, 512, 100), (256, 1, 767)], ids=str)
def test_cuda_styles_of_a_cut_sequence(make_harness, checks, cuts, style):
    h, op, tokens = make_harness("cuda", torch.bfloat16), make(8, 2, 64, style), sum(cuts)
    qkv, grad_o = random_rows(h, tokens, 8, 2, 64)
    o, grad = run_cut(h, op, qkv, grad_o, cuts)
    outputs, grad_qkv = definition(qkv, grad_o, (tokens,), 8, 2, 64, style)
    checks.close(o, outputs["o"], checks.GPU_TOLERANCE[torch.bfloat16], "o")
    for actual, expected in zip(op.split(grad.cpu()), op.split(grad_qkv), strict=True):
        checks.close(actual, expected, checks.GPU_TOLERANCE[torch.bfloat16], "gradient")
