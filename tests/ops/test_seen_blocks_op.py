"""Attention in which tokens of a block see each other: against a softmax over a full mask, by every backend."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_helpers import PlainKernels, make, random_rows, use_own_kernels
from engine_helpers import peak_bytes

from flexengine.ops.attention import attention
from flexengine.ops.attention.seen_blocks import BlockAttention
from flexengine.ops.attention.style import AttentionStyle
from flexengine.ops.base import OpEnv, Window
from flexengine.ops.placed_rows import SeenBlocks, spans_of

CPU = torch.device("cpu")
GIVEN: Any = SimpleNamespace(share=0.5, block_rows=4, max_tokens=32)
SEQ_LENS, SPANS = (9, 4, 17), ((0, 4), (5, 7), (13, 25), (25, 30))
"""Blocks at both ends of a sequence, side by side, and longer than the window."""
STYLES = {
    "all keys": AttentionStyle(),
    "window 4": AttentionStyle(window=4),
    "soft cap": AttentionStyle(0.4, window=5, soft_cap=2.0),
}
by_style = pytest.mark.parametrize("style", STYLES.values(), ids=STYLES.keys())


def block_op(style, width=6, device=CPU):
    return BlockAttention(make(4, 2, width, style), GIVEN), SeenBlocks(SPANS, device)


def definition(op, qkv, grad_o):
    """(o, lse, grad_qkv)."""
    n, g, width, style, (tokens, _) = op.num_heads, op.num_kv_heads, op.head_dim, op.style, qkv.shape
    qkv = qkv.detach().double().cpu().requires_grad_()
    heads = qkv.view(tokens, n + 2 * g, width).transpose(0, 1)
    q, k, v = heads[:n], heads[n : n + g].repeat_interleave(2, 0), heads[n + g :].repeat_interleave(2, 0)
    scores = q @ k.transpose(1, 2) * style.scale_of(width)
    if style.soft_cap:
        scores = style.soft_cap * torch.tanh(scores / style.soft_cap)
    at, sequence = torch.arange(tokens), torch.arange(len(SEQ_LENS)).repeat_interleave(torch.tensor(SEQ_LENS))
    block = torch.full((tokens,), -1)
    for number, (start, end) in enumerate(SPANS):
        block[start:end] = number
    seen = (at[:, None] >= at) | ((block[:, None] == block) & (block >= 0))
    seen &= (sequence[:, None] == sequence) & (at[:, None] - at < (style.window or tokens))
    scores = scores.masked_fill(~seen, float("-inf"))
    o = (scores.softmax(-1) @ v).transpose(0, 1).reshape(tokens, -1)
    return o, scores.logsumexp(-1), *torch.autograd.grad(o, qkv, grad_o.double().cpu())


def check(h, checks, style, tolerance, width=6):
    op, blocks = block_op(style, width, h.device)
    qkv, grad_o = random_rows(h, sum(SEQ_LENS), 4, 2, width)
    o, lse, grad_qkv = definition(op, qkv, grad_o)
    found = h.run(op, replace(h.chunk(SEQ_LENS), blocks=blocks), {"qkv": qkv}, {}, {"o": grad_o})
    checks.close(found.outputs["o"], o, tolerance, "o")
    checks.close(found.outputs["o_lse"].view(4, -1), lse, tolerance, "lse")
    checks.close(found.grads["qkv"], grad_qkv, tolerance, "grad_qkv")


@by_style
def test_matches_autograd(harness, checks, style):
    check(harness, checks, style, 1e-6 if harness.dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("own", [True, False], ids=["own kernels", "other kernels"])
def test_kernels(make_harness, checks, monkeypatch, own):
    """As on CUDA: both calls are causal ones."""
    if own:
        use_own_kernels(monkeypatch)
    else:
        monkeypatch.setattr(attention, "choose_kernels", lambda *_: PlainKernels())
    check(make_harness("cpu", torch.float32), checks, STYLES["window 4"], 2e-5)


@pytest.mark.gpu
@by_style
@pytest.mark.parametrize("width", [64, 256])
def test_on_the_gpu(make_harness, checks, style, width):
    check(make_harness("cuda", torch.bfloat16), checks, style, 2e-2, width)


def test_without_blocks_it_is_causal_attention(harness, checks):
    op, _ = block_op(STYLES["window 4"])
    qkv, grad_o = random_rows(harness, sum(SEQ_LENS), 4, 2, 6)
    both = [
        harness.run(own, harness.chunk(SEQ_LENS), {"qkv": qkv}, {}, {"o": grad_o})
        for own in (op, make(4, 2, 6, STYLES["window 4"]))
    ]
    checks.same_bits(*both)


def test_a_piece_of_a_chunk_has_its_own_blocks(harness, checks):
    """As prompts are read, one by one: the same rows as together, and what caches hold behind them."""
    h = harness
    op, blocks = block_op(AttentionStyle())
    qkv, _ = random_rows(h, sum(SEQ_LENS), 4, 2, 6)
    whole = h.forward(op, replace(h.chunk(SEQ_LENS), blocks=blocks), {"qkv": qkv}, {})["o"]
    start = 0
    for length in SEQ_LENS:
        rows = slice(start, start + length)
        window = replace(h.window(op, 20, 20), start=0)
        assert isinstance(window, Window)
        chunk = replace(h.chunk((length,), window=window), blocks=blocks.within(rows))
        checks.close(h.forward(op, chunk, {"qkv": qkv[rows]}, {})["o"], whole[rows], 1e-12)
        start += length


def test_spans_are_runs_within_a_sequence():
    assert list(spans_of(torch.tensor([2, 3, 4, 7, 9, 10]), 5)) == [(7, 10), (14, 16)]
    assert list(spans_of(torch.tensor([], dtype=torch.int64), 5)) == []


def test_what_it_takes_is_counted(make_harness):
    """Price and memory beside those of causal attention."""
    h, tokens = make_harness("cpu", torch.float32), 256
    given: Any = SimpleNamespace(share=1.0, block_rows=256, max_tokens=256)
    op = BlockAttention(make(4, 2, 32), given)
    plain = make(4, 2, 32)
    for half in ("forward_work", "backward_input_work"):
        own, causal = (getattr(each, half)(tokens, tokens, 2).flops for each in (op, plain))
        assert own == pytest.approx(2 * causal)
    assert op.model_flops(tokens) == plain.model_flops(tokens)
    qkv, grad_o = random_rows(h, tokens, 4, 2, 32)
    chunk = replace(h.chunk((tokens,)), blocks=SeenBlocks(((0, tokens),), CPU))
    env = h.env(op, chunk, {"qkv": qkv}, {}, {"o": grad_o})
    assert isinstance(env, OpEnv)
    for run in (op.forward, op.backward_input):
        assert 0 < peak_bytes(lambda run=run: run(env)) <= op.plain_workspace_bytes(tokens, 4)
