"""LM head with cross-entropy, block by block: against full logits and autograd, and on CUDA against float64."""

import os
from types import SimpleNamespace

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch

from flexengine.ops.cross_entropy import IGNORE_INDEX, LMHeadLoss, LogitsBlocks, logits_blocks, row_elements


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
    op.blocks = LogitsBlocks(block, block)
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
    op.blocks, before = LogitsBlocks(block, block), harness.randn(21, 6)
    result = harness.run(op, chunk, inputs, params, {}, previous_params={"w": before})
    checks.close(result.param_grads["w"], definition(inputs, params, chunk.labels)[2]["w"] + before)


def test_nothing_but_zeros_follows_the_last_word():
    """Products of CPUs with AMX read beyond the words of a row of the left operand."""
    op, h, weight = LMHeadLoss("lm_head", "h", 4, 67, "w"), torch.randn(5, 4), torch.randn(67, 4)
    whole_rows = torch.full((8, row_elements(67)), float("nan"))
    logits = op._multiplied(SimpleNamespace(t={"logits": whole_rows, "h": h}, p={"w": weight}), slice(0, 5))
    assert torch.allclose(logits, h @ weight.t())
    assert not whole_rows[:5, 67:].any()


def test_blocks_are_equal_parts_of_a_chunk():
    """They follow from the head's shape and the chunk's tokens, and a chunk of more tokens has no smaller ones."""
    few = [logits_blocks(64, v).rows(4096) for v in (8, 32000, 128256, 10**7)]
    assert few == [4096, 4096, 1024, 64]
    qwen, llama = logits_blocks(896, 151936), logits_blocks(4096, 128256)
    assert [qwen.rows(n) for n in (1, 500, 4096, 8192, 9000, 16384, 65536)] == [1, 500, 512, 1024, 1152, 2048, 4096]
    assert [llama.rows(n) for n in (512, 2048, 4096, 8192, 16384)] == [512, 1024, 2048, 4096, 4096]
    rows = [qwen.rows(n) for n in range(1, 40000, 17)]
    assert rows == sorted(rows)
    assert all(row % 64 == 0 for row in rows if row > 512)


def test_the_buffer_holds_the_largest_block():
    op = LMHeadLoss("lm_head", "h", 896, 151936, "w")
    (logits,) = op.scratch("forward")
    assert logits.num_bytes(16384, 2) == 2048 * 151936 * 2
    work = op.backward_input_work(16384, 1024, 2)
    assert work.memory_bytes == 3 * 16384 * 151936 * 2 + 8 * 2 * 151936 * 896 * 4  # 8 blocks add to the sums
    assert work.kernels == 8 * 4
    frozen = op.untrained()  # which has no such sums
    heights = [spec.height(16384) for one in (frozen, frozen.forward_only()) for spec in one.scratch("forward")]
    assert heights == [512, 512]


def test_evaluation_has_the_blocks_of_training():
    op = LMHeadLoss("head", "h", 896, 151936, "head.weight")
    for tokens in (100, 4096, 16384, 32768):
        assert op.forward_only().blocks.rows(tokens) == op.blocks.rows(tokens)
    assert op.blocks.rows(16384) > op.untrained().blocks.rows(16384)


def test_rows_of_logits_begin_where_products_are_fast():
    assert [row_elements(v) for v in (8, 32000, 50257, 128257)] == [8, 32000, 50304, 128320]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "vocab_size", "width"), [(1100, 32000, 512), (1027, 4097, 1024)])
@pytest.mark.usefixtures("deterministic")
def test_cuda_matches_definition(make_harness, checks, dtype, tokens, vocab_size, width):
    h = make_harness("cuda", dtype)
    op, chunk, inputs, params = operands(h, tokens, vocab_size, width)
    op.blocks = LogitsBlocks(512, 512)  # several blocks, the last one short
    tolerance = checks.GPU_TOLERANCE[dtype]
    result = check(h, checks, op, chunk, inputs, params, tolerance, tolerance)
    checks.same_bits(result, h.run(op, chunk, inputs, params, {}))
