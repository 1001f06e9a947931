"""What does a vocabulary cost whose size is no multiple of 8? Products of the head, made in two ways, and losses.

    python -m bench.vocabulary --json out.json

Per vocabulary and way: milliseconds of the logits, of the gradients of hidden states and weights, and of the losses
with their gradients, for one block of tokens in bf16, with rows of logits that begin at a multiple of 16 bytes either
way.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from bench.environment import write_json
from flexengine.ops.cross_entropy import block_tokens, cross_entropy_, row_elements, word_ranges
from flexengine.ops.linear import accumulate_weight_grad

SIZES = ((50257, 768), (50264, 768), (128257, 2048), (128256, 2048))
"""Words and width."""
REPEATS = 20


def milliseconds(call: Callable[[], object]) -> float:
    """Of a call on the GPU, on average."""
    for _ in range(3):
        call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(REPEATS):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / REPEATS


def measured(vocab_size: int, width: int, ranges: list[slice]) -> dict[str, float]:
    """Milliseconds of the three products, made for these ranges of words one after the other, and of the losses."""
    tokens = block_tokens(vocab_size)
    logits = torch.randn(tokens, row_elements(vocab_size), device="cuda", dtype=torch.bfloat16)[:, :vocab_size]
    weight = torch.randn(vocab_size, width, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    grad_x, grad_weight = torch.zeros_like(x), torch.zeros(vocab_size, width, device="cuda")

    def forward() -> None:
        for words in ranges:
            torch.mm(x, weight[words].t(), out=logits[:, words])

    def input_grad() -> None:
        for words in ranges:
            torch.addmm(grad_x, logits[:, words], weight[words], out=grad_x)

    def weight_grad() -> None:
        for words in ranges:
            accumulate_weight_grad(grad_weight[words], logits[:, words], x, first=False)

    labels, losses = torch.randint(0, vocab_size, (tokens,), device="cuda"), torch.zeros(tokens, device="cuda")

    def loss() -> None:
        cross_entropy_(logits, labels, losses, write_grad=True)

    calls = {"logits": forward, "hidden_gradient": input_grad, "weight_gradient": weight_grad, "losses": loss}
    return {"tokens": tokens, **{f"{name}_ms": milliseconds(call) for name, call in calls.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default=None, help="write the figures to this file")
    args = parser.parse_args()
    rows = []
    for vocab_size, width in SIZES:
        ways = {"one product": [slice(0, vocab_size)], "by ranges": word_ranges(vocab_size)}
        for way, ranges in ways.items():
            rows.append({"vocab_size": vocab_size, "width": width, "way": way, **measured(vocab_size, width, ranges)})
            print("  ".join(f"{v:.3f}" if isinstance(v, float) else str(v) for v in rows[-1].values()), flush=True)
    write_json(args.json, {"rows": rows})


if __name__ == "__main__":
    main()
