"""The head's share of the linear layers' rate: what is timed is the engine's call, on as many words as fit."""

from collections.abc import Callable

import pytest
import torch

from flexengine.hardware.measure import head as measure_head
from flexengine.hardware.measure.head import Head, head_shares
from flexengine.ops.cross_entropy import LogitsBlocks
from flexengine.ops.linear_shape import HeadShape

CPU = torch.device("cpu")
MATMUL = ((64, 1e9), (256, 2e9), (1024, 4e9))


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measure_head, "logits_blocks", lambda width, vocab_size: LogitsBlocks(256, 4096, 2))
    monkeypatch.setattr(measure_head, "FEW_TOKENS", 64)


def test_shares_are_the_heads_rate_without_its_traffic_over_that_of_linear_layers(small_blocks: None):
    """Every call takes 2 s: its traffic takes some of them, and what is left is that of the products."""
    shape, memory_bytes_per_s = HeadShape(32, 1000), 1e7
    shares = head_shares(shape, MATMUL, memory_bytes_per_s, torch.float32, CPU, 2**30, lambda work, s: 2.0, 0.1)
    assert [tokens for tokens, _ in shares] == [64, 256, 512, 1024]
    expected = []
    for tokens in (64, 256, 512):
        moved = 3 * tokens * 1000 * 4 + 2 * 1000 * 32 * 4  # logits in one pass, and the sums of the weight's gradient
        expected.append(6 * tokens * 1000 * 32 / (2.0 - moved / memory_bytes_per_s))
    assert shares[0][1] == pytest.approx(expected[0] / 1e9)
    assert shares[1][1] == pytest.approx(expected[1] / 2e9)
    assert shares[2][1] == pytest.approx(expected[1] / 3e9)  # a longer chunk is multiplied block by block
    assert shares[3][1] == pytest.approx(expected[2] / 4e9)


def test_traffic_never_takes_all_of_the_seconds(small_blocks: None):
    shares = head_shares(HeadShape(32, 1000), MATMUL, 1.0, torch.float32, CPU, 2**30, lambda work, s: 2.0, 0.1)
    assert shares[0][1] == pytest.approx(6 * 64 * 1000 * 32 / 0.2 / 1e9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("soft_cap", [0.0, 30.0])
def test_the_call_computes_losses_and_both_gradients(dtype: torch.dtype, soft_cap: float):
    head, calls = Head(HeadShape(48, 203, soft_cap), 24, dtype, CPU, 2**30), []

    def timer(work: Callable[[], object], least_s: float) -> float:
        calls.append(work())
        return 1.0

    assert head.flops_per_s(timer, 0.1, 1e12) == pytest.approx(6 * 24 * 203 * 48, rel=1e-3)
    assert len(calls) == 1
    h = head.env.t["h"].double().requires_grad_()
    weight = head.env.p["weight"].double().requires_grad_()
    logits = h @ weight.t()
    logits = soft_cap * torch.tanh(logits / soft_cap) if soft_cap else logits
    losses = torch.nn.functional.cross_entropy(logits, head.env.chunk.labels, reduction="none")
    losses.sum().backward()
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    for ours, expected in (
        (head.env.chunk.losses, losses.detach()),
        (head.env.g["h"], h.grad),
        (head.env.gp["weight"], weight.grad),
    ):
        torch.testing.assert_close(ours.double(), expected, **tolerance)


def test_fewer_words_are_measured_where_all_do_not_fit():
    whole = Head(HeadShape(32, 50257), 64, torch.float32, CPU, 2**30)
    assert whole.op.vocab_size == 50257
    part = Head(HeadShape(32, 50257), 64, torch.float32, CPU, 2**23)
    assert part.op.vocab_size < 50257 / 2
    assert part.op.vocab_size % measure_head.ROW_MULTIPLE == 50257 % measure_head.ROW_MULTIPLE
    assert sum(t.nbytes for t in (*part.env.t.values(), *part.env.p.values(), *part.env.gp.values())) <= 2**23
    with pytest.raises(ValueError, match="words of 32 features take more than 1000 bytes"):
        Head(HeadShape(32, 50257), 64, torch.float32, CPU, 1000)
    assert head_shares(HeadShape(32, 50257), MATMUL, 1e9, torch.float32, CPU, 1000, lambda work, s: 1.0, 0.1) == ()
