"""bench/attention.py without a GPU: who is compared on what, FLOPs as defined, padded values cut again."""

import pytest
import torch
from attention_helpers import PlainKernels

from bench import attention
from flexengine.ops.attention.kernels import Rows
from flexengine.ops.attention.style import CAUSAL, AttentionStyle

CPU = torch.device("cpu")
SMALL = attention.Case("small", (4, 2), (8, 4), AttentionStyle(window=5))


class WidePlainKernels(PlainKernels):
    """Full masks over float32, whatever comes."""

    def forward(self, q, k, v, lengths, style):
        return super().forward(q.float(), k.float(), v.float(), lengths, style)

    def backward(self, grad_out, rows, results, lengths, rng, style):
        rows, results = Rows(*(x.float() for x in rows)), results._replace(out=results.out.float())
        return super().backward(grad_out.float(), rows, results, lengths, rng, style)


def test_kernels_are_compared_on_what_they_serve():
    found = {case.name: list(attention.contenders(case)) for case in attention.CASES}
    assert found["llama-3.1-8b"] == [("flash", False), ("cudnn", False), ("triton", False)]
    assert found["gemma-2-9b"] == [("triton", False)]
    assert found["gpt-oss-20b, window"] == [("flash", False), ("triton", False)]
    assert found["deepseek-v2-lite"] == [("flash", True), ("triton", False), ("triton", True)]


def test_flops_are_those_of_the_definition():
    """Four products with 8 columns and three with 4 for the pairs of 4 heads."""
    pairs = 4 * 40 * AttentionStyle(window=5).mean_keys(20)
    assert SMALL.flops(40, 20) == (2 * pairs * (8 + 4), 2 * pairs * (3 * 8 + 2 * 4))


@pytest.mark.parametrize("pads", [False, True])
def test_errors_are_of_the_columns_that_there_are(monkeypatch: pytest.MonkeyPatch, pads: bool):
    monkeypatch.setitem(attention.KERNELS, "triton", WidePlainKernels())
    monkeypatch.setattr(attention, "CHECK_LENGTHS", (12, 7))
    found = attention.errors(SMALL, "triton", pads, CPU)
    assert list(found) == ["output", "queries", "keys", "values"]
    assert max(found.values()) < 1e-2


def test_rows_have_rates_of_both_directions(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(attention, "KERNELS", dict.fromkeys(attention.KERNELS, WidePlainKernels()))
    monkeypatch.setattr(attention, "CHECK_LENGTHS", (12, 7))
    monkeypatch.setattr(attention, "cuda_timer", lambda call, _: 1e-3 if call() else 0.0)
    rows = attention.measure(SMALL, 40, 20, CPU)
    assert [(row["kernels"], row["padded"]) for row in rows] == [("flash", True), ("triton", False), ("triton", True)]
    assert rows[0]["forward_flops_per_s"] == SMALL.flops(40, 20)[0] / 1e-3
    assert "triton, padded" in capsys.readouterr().out
    slices = attention.measure(SMALL._replace(style=CAUSAL), 12, 20, CPU, earlier=True)
    assert slices[0]["forward_flops_per_s"] == pytest.approx(2 * 12 * 4 * 20 * (8 + 4) / 1e-3)
    assert "triton, padded, earlier" in capsys.readouterr().out


def test_lengths_that_do_not_fit_are_refused(capsys: pytest.CaptureFixture[str]):
    for arguments, message in ((["--seq-lens", "3000"], "does not divide"), (["--only", "bert"], "names bert")):
        with pytest.raises(SystemExit):
            attention.main(arguments)
        assert message in capsys.readouterr().err
