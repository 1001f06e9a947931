"""LM head with cross-entropy, block by block: against full logits and autograd, and on CUDA against float64."""

import os
from types import SimpleNamespace

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch

from flexengine.ops.cross_entropy import IGNORE_INDEX, LMHeadLoss, block_tokens, row_elements


def operands(h, tokens, vocab_size, width, ignore=0.3, soft_cap=0.0):
    op = LMHeadLoss("lm_head", "h", width, vocab_size, "w", soft_cap)
    labels = torch.randint(vocab_size, (tokens,))
    labels[torch.rand(tokens) < ignore] = IGNORE_INDEX
    chunk = h.chunk((tokens,), vocab_size, labels=labels)
    return op, chunk, {"h": h.randn(tokens, width)}, {"w": h.randn(vocab_size, width, scale=2 * width**-0.5)}


def definition(inputs, params, labels, soft_cap=0.0):
    """Losses and gradients of their sum from full logits."""
    x, w = (t.detach().double().cpu().requires_grad_() for t in (inputs["h"], params["w"]))
    logits = x @ w.t()
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    losses = torch.nn.functional.cross_entropy(logits, labels.cpu(), ignore_index=IGNORE_INDEX, reduction="none")
    grad_x, grad_w = torch.autograd.grad(losses.sum(), (x, w))
    return losses, {"h": grad_x}, {"w": grad_w}


def check(h, checks, op, chunk, inputs, params, tolerance, weight_tolerance):
    losses, grads, param_grads = definition(inputs, params, chunk.labels, op.soft_cap)
    checks.close(h.run(op, chunk, inputs, params).losses, losses, tolerance, "losses of forward")
    chunk.losses.fill_(float("nan"))
    result = h.run(op, chunk, inputs, params, {})
    checks.close(chunk.losses, losses, tolerance, "losses of backward")
    checks.all_close(result.grads, grads, tolerance)
    checks.all_close(result.param_grads, param_grads, weight_tolerance)
    return result


@pytest.mark.parametrize("soft_cap", [0.0, 1.7])
@pytest.mark.parametrize(("tokens", "vocab_size", "width"), [(1, 5, 3), (7, 33, 9), (13, 133, 12)])
def test_matches_autograd(harness, checks, tokens, vocab_size, width, soft_cap):
    check(harness, checks, *operands(harness, tokens, vocab_size, width, soft_cap=soft_cap), 1e-12, 1e-12)


@pytest.mark.parametrize("block", [1, 4, 5, 64])
def test_any_block_gives_the_loss_of_full_logits(harness, checks, block):
    op, chunk, inputs, params = operands(harness, 13, 21, 6)
    op.block = block
    check(harness, checks, op, chunk, inputs, params, 1e-12, 1e-12)


def test_ignored_tokens_give_no_loss_and_no_gradient(harness):
    op, chunk, inputs, params = operands(harness, 9, 21, 6, ignore=2.0)
    result = harness.run(op, chunk, inputs, params, {})
    assert not chunk.losses.any()
    assert not result.grads["h"].any()
    assert not result.param_grads["w"].any()


def test_large_logits_stay_finite(harness):
    op, chunk, inputs, params = operands(harness, 5, 9, 4)
    result = harness.run(op, chunk, {"h": inputs["h"] * 1e4}, params, {})
    assert torch.isfinite(chunk.losses).all()
    assert torch.isfinite(result.grads["h"]).all()


@pytest.mark.parametrize("block", [4, 64])
def test_adds_to_the_accumulator(harness, checks, block):
    op, chunk, inputs, params = operands(harness, 9, 21, 6)
    op.block, before = block, harness.randn(21, 6)
    result = harness.run(op, chunk, inputs, params, {}, previous_params={"w": before})
    checks.close(result.param_grads["w"], definition(inputs, params, chunk.labels)[2]["w"] + before)


def test_nothing_but_zeros_follows_the_last_word():
    """Products of CPUs with AMX read beyond the words of a row of the left operand."""
    op, h, weight = LMHeadLoss("lm_head", "h", 4, 67, "w"), torch.randn(5, 4), torch.randn(67, 4)
    whole_rows = torch.full((8, row_elements(67)), float("nan"))
    logits = op._multiplied(SimpleNamespace(t={"logits": whole_rows, "h": h}, p={"w": weight}), slice(0, 5))
    assert torch.allclose(logits, h @ weight.t())
    assert not whole_rows[:5, 67:].any()


def test_block_depends_on_the_vocabulary_alone():
    assert [block_tokens(v) for v in (8, 32000, 128256, 10**7)] == [4096, 4096, 1024, 64]
    assert [row_elements(v) for v in (8, 32000, 50257, 128257)] == [8, 32000, 50304, 128320]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "vocab_size", "width"), [(1100, 32000, 512), (1027, 4097, 1024)])
@pytest.mark.usefixtures("deterministic")
def test_cuda_matches_definition(make_harness, checks, dtype, tokens, vocab_size, width):
    h = make_harness("cuda", dtype)
    op, chunk, inputs, params = operands(h, tokens, vocab_size, width)
    op.block = 512  # several blocks, the last one short
    tolerance = checks.GPU_TOLERANCE[dtype]
    result = check(h, checks, op, chunk, inputs, params, tolerance, tolerance)
    checks.same_bits(result, h.run(op, chunk, inputs, params, {}))
