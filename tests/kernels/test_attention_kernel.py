"""Kernels of attention against the plain path in float64, over NaN-filled buffers."""

from itertools import product
from typing import NamedTuple

import pytest
import torch
from attention_helpers import SMALL_TILE, use_tiles
from thorough import cases

from flexengine.kernels import attention, attention_backward, attention_tilings
from flexengine.kernels.attention import Operands, attention_forward
from flexengine.kernels.attention_backward import Forward, Gradients
from flexengine.kernels.attention_tilings import (
    HOPPER_BYTES,
    Scoring,
    Tiling,
    Widths,
    forward_tiling,
    key_tiling,
    query_tiling,
    short_tiling,
)
from flexengine.ops.attention.kernels import Results, Rows
from flexengine.ops.attention.reference import attention_backward_reference, attention_forward_reference
from flexengine.ops.attention.sinks import add_sinks
from flexengine.ops.attention.style import AttentionStyle

STYLES = {
    "all keys": AttentionStyle(),
    "scaled": AttentionStyle(0.31),
    "window 1": AttentionStyle(window=1),
    "window 5": AttentionStyle(window=5),
    "window 37": AttentionStyle(window=37),
    "soft cap": AttentionStyle(soft_cap=1.5),
    "all of them": AttentionStyle(0.7, 19, 2.0),
}
HEADS = {"GQA": (4, 2), "MHA": (3, 3), "MQA of 6": (6, 1)}
WIDTHS = [(24, 20), (12, 9), (40, 40)]
LENGTHS = [(1,), (53,), (5, 1, 33)]
TILES = [SMALL_TILE, Tiling(32, 16, 4, 1, False), Tiling(16, 32, 4, 1, passes=2)]
PRECISE = 4e-6
ROUNDED = 4e-3
"""In bf16: probabilities and their gradients are rounded before they are multiplied, then results are."""


class Case(NamedTuple):
    """Sizes of a call."""

    heads: tuple[int, int] = (4, 2)
    widths: tuple[int, int] = (16, 16)
    seq_lens: tuple[int, ...] = (70,)
    before: int = 0
    sinks: bool = False


@pytest.fixture(params=TILES, ids=str)
def tiling(request, monkeypatch):
    use_tiles(monkeypatch, request.param)


@pytest.fixture
def small_tiles(monkeypatch):
    use_tiles(monkeypatch)


def strided(x, pad):
    """The same rows with NaN between them, as heads of a fused row have neighbours."""
    whole = torch.full((x.shape[0] + 2, x.shape[1] + pad, x.shape[2]), float("nan"), dtype=x.dtype, device=x.device)
    whole[1:-1, : x.shape[1]] = x
    return whole[1:-1, : x.shape[1]]


def scoring_of(style, head_dim):
    return Scoring(style.scale_of(head_dim), style.soft_cap, style.window)


def make(case, dtype, device):
    (n, g), (h, v), tokens = case.heads, case.widths, sum(case.seq_lens)
    shapes = (tokens, n, h), (case.before + tokens, g, h), (case.before + tokens, g, v), (tokens, n, v)
    q, k, values, grad_out = (strided(torch.randn(*s, device=device).to(dtype), i) for i, s in enumerate(shapes))
    cu = torch.tensor((0, *case.seq_lens), device=device).cumsum(0).int()
    return Operands(q, k, values, cu), grad_out


def wanted_of(case, style, operands, grad_out, sinks):
    q, k, v = (x.double() for x in operands[:3])
    grad_out = grad_out.double()
    out, lse = torch.empty_like(grad_out), torch.empty(q.shape[1], len(q), dtype=torch.float64, device=q.device)
    attention_forward_reference(q, k, v, case.seq_lens, case.before, out, lse, style)
    if sinks is not None:
        add_sinks(out, lse, sinks.double())
    rows, results = Rows(q, k, v), Results(out, lse)
    grads = attention_backward_reference(grad_out, rows, results, case.seq_lens, case.before, style=style)
    return out, lse, grads


def run(case, style, dtype, device, add=False):
    """((name, found, wanted), ...), and what else must not have changed."""
    operands, grad_out = make(case, dtype, device)
    scoring = scoring_of(style, case.widths[0])
    sinks = torch.randn(case.heads[0], device=device).to(dtype) if case.sinks else None
    wanted = wanted_of(case, style, operands, grad_out, sinks)
    out = strided(torch.full_like(grad_out, float("nan")), 1)
    lse = torch.full((case.heads[0], len(operands.q)), float("nan"), device=device)
    attention_forward(operands, scoring, out, lse, sinks)
    grads = [strided(torch.full_like(x, float("nan")), 1) for x in operands[:3]]
    begin = [0.0, 0.0, 0.0]
    if add:
        grads[1:] = [torch.randn(x.shape, device=device) for x in operands[1:3]]
        begin[1:] = [x.double() for x in grads[1:]]
    attention_backward.attention_backward(operands, scoring, Forward(grad_out, out, lse), Gradients(*grads, add))
    results = [("out", out, wanted[0]), ("lse", lse, wanted[1])]
    results += [
        (name, grad, expected + start)
        for name, grad, expected, start in zip(("grad_q", "grad_k", "grad_v"), grads, wanted[2], begin, strict=True)
    ]
    return results


def check(results, tolerance):
    """Rows of sequences of one token have no gradients of queries and keys: errors are held against the output's."""
    for name, found, wanted in results:
        norm = max(float(wanted.norm()), 0.1 * float(wanted.numel()) ** 0.5)
        error = float((found.double() - wanted.to(found.device, torch.float64)).norm()) / norm
        assert error <= tolerance, f"{name}: relative error {error:.2e}"


IN_SHORT = [(lengths, name) for lengths in LENGTHS for name in STYLES if name == "all of them" or len(lengths) > 1]


@pytest.mark.parametrize(("seq_lens", "style"), cases(product(LENGTHS, STYLES), IN_SHORT), ids=str)
@pytest.mark.usefixtures("small_tiles")
def test_styles(device, seq_lens, style):
    check(run(Case(seq_lens=seq_lens), STYLES[style], torch.float32, device), PRECISE)


@pytest.mark.pairs
@pytest.mark.parametrize("style", ["all keys", "all of them"])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.usefixtures("small_tiles")
def test_heads_and_widths(device, widths, heads, style):
    check(run(Case(heads, widths, (3, 19)), STYLES[style], torch.float32, device), PRECISE)


@pytest.mark.parametrize("style", [STYLES["window 5"], STYLES["all of them"]], ids=["window 5", "all of them"])
def test_heads_of_512_columns(device, style):
    check(run(Case((4, 1), (512, 512), (3, 19)), style, torch.float32, device), PRECISE)
    check(run(Case((2, 2), (384, 272), (7,), before=20), style, torch.float32, device, add=True), PRECISE)


@pytest.mark.parametrize("tiling_of", [forward_tiling, query_tiling, key_tiling])
@pytest.mark.parametrize("card_bytes", [99 * 1024, HOPPER_BYTES])
def test_tiles_of_512_columns_fit(monkeypatch, tiling_of, card_bytes):
    monkeypatch.setattr(attention_tilings, "HOPPER_BYTES", card_bytes)
    tiling, widths = tiling_of(Widths.of(512, 512), Scoring(1.0), torch.device("cpu")), 512
    outer, loop = (tiling.keys, tiling.rows) if tiling_of is key_tiling else (tiling.rows, tiling.keys)
    held = widths if tiling_of is forward_tiling else 2 * widths
    assert 2 * (outer * held + tiling.stages * loop * 2 * widths) < card_bytes
    assert min(outer, loop) >= 16
    assert outer * widths <= 8 * 32 * 128  # sums take half of the registers at the most


@pytest.mark.parametrize("style", cases(STYLES, ["all keys", "window 5", "all of them"]))
@pytest.mark.usefixtures("tiling")
def test_tiles(device, style):
    check(run(Case(seq_lens=(35, 20)), STYLES[style], torch.float32, device), PRECISE)


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES.keys())
@pytest.mark.parametrize(("before", "tokens"), [(1, 17), (48, 16), (34, 7)])
@pytest.mark.usefixtures("small_tiles")
def test_earlier_keys(device, before, tokens, style):
    """Gradients of keys are added to float32 sums that earlier calls left."""
    check(run(Case(seq_lens=(tokens,), before=before), style, torch.float32, device, add=True), PRECISE)


@pytest.mark.parametrize("style", [STYLES["all keys"], STYLES["window 5"]], ids=["all keys", "window 5"])
@pytest.mark.usefixtures("small_tiles")
def test_sinks(device, style):
    check(run(Case(seq_lens=(5, 33), sinks=True), style, torch.float32, device), PRECISE)
    check(run(Case(seq_lens=(20,), before=30, sinks=True), style, torch.float32, device, add=True), PRECISE)


@pytest.mark.usefixtures("small_tiles")
def test_scores_beyond_the_range_of_exponentials(device):
    for style in (AttentionStyle(200.0), AttentionStyle(200.0, soft_cap=50.0), AttentionStyle(200.0, window=3)):
        results = run(Case(seq_lens=(40,)), style, torch.float32, device)
        check(results, 1e-3)  # gradients are differences of scores of 1000 and more


SHORT_CASES = {
    "packed": (Case((8, 2), (16, 16), (37, 1, 20)), AttentionStyle(window=19)),
    "narrow values": (Case((8, 1), (24, 20), (5, 33)), AttentionStyle(0.7, 7, 2.0)),
    "window 1": (Case((4, 1), (16, 16), (18,)), AttentionStyle(window=1)),
    "earlier keys": (Case((8, 2), (16, 16), (21,), 40), AttentionStyle(window=33)),
    "fewer earlier keys": (Case((4, 1), (16, 16), (70,), 3), AttentionStyle(window=20)),
    "sinks": (Case((8, 1), (16, 16), (5, 70), sinks=True), AttentionStyle(window=33)),
}


@pytest.mark.parametrize(("case", "style"), SHORT_CASES.values(), ids=SHORT_CASES.keys())
@pytest.mark.usefixtures("small_tiles")
def test_short_windows(device, monkeypatch, case, style):
    """Four query heads of a key head go through the kernels that take all keys of a tile at once, two tiles each."""
    check_short_windows(device, monkeypatch, case, style, own=16)


@pytest.mark.parametrize("name", ["packed", "earlier keys"])
@pytest.mark.usefixtures("small_tiles")
def test_short_windows_in_tiles_of_more_queries(device, monkeypatch, name):
    check_short_windows(device, monkeypatch, *SHORT_CASES[name], own=32)


def check_short_windows(device, monkeypatch, case, style, own):
    launched = []
    two_tiles = lambda *args: short_tiling(*args)._replace(tiles=2, own=own)  # noqa: E731
    for module, name in ((attention, "_short_forward"), (attention_backward, "_short_query_gradients")):
        launch = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, launch=launch: (launched.append(1), launch(*args)))
        monkeypatch.setattr(module, "short_tiling", two_tiles)
    check(run(case, style, torch.float32, device, case.before > 0), PRECISE)
    assert len(launched) == 2


def test_which_calls_take_all_keys_at_once(monkeypatch):
    """Wide heads, long windows, few query heads and cards with little shared memory go block by block."""
    narrow, window, cpu = Widths.of(64, 64), Scoring(1.0, window=128), torch.device("cpu")
    assert short_tiling(narrow, window, 8, True, cpu).far == 128
    assert short_tiling(narrow, Scoring(1.0, window=2), 4, False, cpu).far == 16
    for widths, scoring, members in (
        (Widths.of(128, 128), window, 8),
        (Widths.of(80, 64), window, 8),
        (narrow, Scoring(1.0), 8),
        (narrow, Scoring(1.0, window=130), 8),
        (narrow, window, 6),
    ):
        assert short_tiling(widths, scoring, members, False, cpu) is None
    monkeypatch.setattr(attention_tilings, "_shared_memory_bytes", lambda _: 99 * 1024)  # a consumer card
    assert short_tiling(narrow, window, 8, False, cpu) is not None
    assert short_tiling(narrow, window, 8, True, cpu) is None


@pytest.mark.parametrize("seq_lens", [(40,), (5, 33)], ids=str)
@pytest.mark.usefixtures("small_tiles")
def test_both_ways(device, seq_lens):
    """Without a causal mask every query sees all keys of its sequence."""
    operands, grad_out = make(Case(seq_lens=seq_lens), torch.float32, device)
    q, k, v = (x.double().cpu().requires_grad_() for x in operands[:3])
    keys, values = (x.repeat_interleave(2, dim=1) for x in (k, v))
    parts = []
    for rows in torch.arange(len(q)).split(list(seq_lens)):
        scores = torch.einsum("tnh,knh->ntk", q[rows], keys[rows]) / 4.0
        parts.append(torch.einsum("ntk,knh->tnh", scores.softmax(-1), values[rows]))
    wanted = torch.cat(parts)
    expected = torch.autograd.grad(wanted, (q, k, v), grad_out.double().cpu())
    out, lse = torch.full_like(grad_out, float("nan")), torch.empty(4, len(q), device=device)
    scoring = Scoring(0.25, causal=False)
    attention_forward(operands, scoring, out, lse)
    grads = [torch.full_like(x, float("nan")) for x in operands[:3]]
    attention_backward.attention_backward(operands, scoring, Forward(grad_out, out, lse), Gradients(*grads))
    check([("out", out, wanted.detach()), *zip("qkv", grads, expected, strict=True)], PRECISE)


@pytest.mark.usefixtures("small_tiles")
def test_bf16(device):
    for style in (STYLES["all keys"], STYLES["all of them"]):
        check(run(Case(seq_lens=(5, 40)), style, torch.bfloat16, device), ROUNDED)


def test_no_tokens_is_fine(device):
    operands, grad_out = make(Case(seq_lens=(0,)), torch.float32, device)
    out, lse = torch.empty_like(grad_out), torch.empty(4, 0, device=device)
    attention_forward(operands, Scoring(1.0), out, lse)
    grads = Gradients(*(torch.empty_like(x) for x in operands[:3]))
    attention_backward.attention_backward(operands, Scoring(1.0), Forward(grad_out, out, lse), grads)


def test_refuses_what_it_cannot_do(device):
    operands, grad_out = make(Case(), torch.float32, device)
    out, lse = torch.empty_like(grad_out), torch.empty(4, 70, device=device)
    both_ways = Scoring(1.0, window=3, causal=False)
    for scoring, message in ((Scoring(0.0), "scale is 0"), (both_ways, "window is for causal")):
        with pytest.raises(ValueError, match=message):
            attention_forward(operands, scoring, out, lse)
    wide = torch.zeros(70, 4, 513, device=device)
    with pytest.raises(ValueError, match="widths up to 512"):
        attention_forward(Operands(wide, wide, wide, operands.cu_seqlens), Scoring(1.0), wide, lse)
    packed = operands._replace(q=operands.q[:40], cu_seqlens=torch.tensor((0, 20, 40), dtype=torch.int32))
    with pytest.raises(ValueError, match="earlier keys go with one sequence"):
        attention_forward(packed, Scoring(1.0), out, lse)


@pytest.mark.parametrize(
    ("widths", "parts"),
    [
        ((128, 128), (128, 0, 128)),
        ((192, 128), (128, 64, 128)),
        ((80, 80), (64, 16, 128)),
        ((112, 112), (128, 0, 128)),
        ((7, 3), (16, 0, 16)),
        ((256, 256), (256, 0, 256)),
        ((512, 300), (512, 0, 512)),
    ],
)
def test_heads_lie_in_powers_of_two(widths, parts):
    assert Widths.of(*widths)[2:] == parts


GPU_CASES = [
    Case((32, 8), (128, 128), (700, 1, 129, 1213)),
    Case((8, 4), (256, 256), (700, 1, 129, 213)),
    Case((16, 1), (512, 512), (700, 1, 129, 213)),
    Case((8, 4), (512, 512), (513,), before=700),
    Case((16, 16), (192, 128), (700, 1, 129, 213)),
    Case((64, 8), (64, 64), (700, 1, 129, 213), sinks=True),
    Case((4, 2), (80, 80), (700, 1, 129, 213)),
    Case((6, 2), (100, 100), (513,), before=700),
    Case((16, 2), (64, 64), (513,), before=70, sinks=True),
]
GPU_STYLES = [AttentionStyle(), AttentionStyle(window=128), AttentionStyle(0.1, 300, 50.0)]


@pytest.mark.gpu
@pytest.mark.parametrize("style", GPU_STYLES, ids=str)
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_on_gpu(gpu, case, style):
    check(run(case, style, torch.bfloat16, gpu, case.before > 0), ROUNDED)


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_the_same_bits_every_time(gpu, case):
    results = []
    for _ in range(5):
        torch.manual_seed(0)
        results.append(run(case, GPU_STYLES[0], torch.bfloat16, gpu, case.before > 0))
    for again in results[1:]:
        assert all(torch.equal(a[1], b[1]) for a, b in zip(results[0], again, strict=True))
