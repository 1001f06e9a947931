"""How fast and how exact are our own attention kernels beside cuDNN's and flash's? Needs an NVIDIA GPU.

    python -m bench.attention --json out.json

Every call is one that the engine makes: views of a fused row in bf16, packed sequences of equal length, results and
gradients of queries, keys and values. Rates count the products that the definition has, over pairs that are visible:
2 * (H + V) FLOPs per head and pair forward, 2 * (3 * H + 2 * V) backward, however many a kernel makes. Rows of earlier
keys are calls for a slice of a long sequence, whose queries all see so many keys of the slices before. Padded values
are those of latent attention with zeros behind them, as kernels of one width want them. Errors are
||result - exact|| / ||exact|| against the plain path in float64, on two sequences of 512 tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from bench.environment import require_gpu, write_json
from flexengine.hardware.measure.timing import cuda_timer
from flexengine.ops.attention.choice import KERNEL_NAMES, KernelName
from flexengine.ops.attention.kernels import KERNELS, Kernels, Lengths, Results, Rows, can_serve
from flexengine.ops.attention.reference import attention_backward_reference, attention_forward_reference
from flexengine.ops.attention.style import CAUSAL, AttentionStyle

LEAST_S = 0.2  # of calls back to back
CHECK_LENGTHS = (512, 512)
SOFT_CAP = 50.0


class Case(NamedTuple):
    """Heads of a model: queries, keys, width of keys and of values, and what it does with scores."""

    name: str
    heads: tuple[int, int]
    widths: tuple[int, int]
    style: AttentionStyle = CAUSAL

    def flops(self, tokens: int, seq_len: int, earlier: bool = False) -> tuple[float, float]:
        """Forward and backward. earlier: every query sees seq_len keys."""
        pairs = tokens * self.heads[0] * (seq_len if earlier else self.style.mean_keys(seq_len))
        return 2.0 * pairs * sum(self.widths), 2.0 * pairs * (3 * self.widths[0] + 2 * self.widths[1])


CASES = (
    Case("llama-3.1-8b", (32, 8), (128, 128)),
    Case("llama-3.2-1b", (32, 8), (64, 64)),
    Case("gemma-2-9b", (16, 8), (256, 256), AttentionStyle(soft_cap=SOFT_CAP)),
    Case("gemma-2-9b, window", (16, 8), (256, 256), AttentionStyle(window=4096, soft_cap=SOFT_CAP)),
    Case("gpt-oss-20b", (64, 8), (64, 64)),
    Case("gpt-oss-20b, window", (64, 8), (64, 64), AttentionStyle(window=128)),
    Case("deepseek-v2-lite", (16, 16), (192, 128)),
)


class Operands(NamedTuple):
    """What a call reads."""

    rows: Rows
    grad_out: Tensor
    lengths: Lengths | None


def earlier_operands(case: Case, tokens: int, keys: int, device: torch.device) -> Operands:
    """The queries of a slice, and so many keys and values of a window."""
    (n, g), (h, v) = case.heads, case.widths
    shapes = ((tokens, n, h), (keys, g, h), (keys, g, v), (tokens, n, v))
    *rows, grad_out = (torch.randn(*shape, device=device, dtype=torch.bfloat16) for shape in shapes)
    return Operands(Rows(*rows), grad_out, None)


def operands_of(case: Case, seq_lens: tuple[int, ...], device: torch.device) -> Operands:
    """Random rows of a fused [T, (N + G) * H + G * V]."""
    (n, g), (h, v), tokens = case.heads, case.widths, sum(seq_lens)
    fused = torch.randn(tokens, (n + g) * h + g * v, device=device, dtype=torch.bfloat16)
    keys = fused[:, : (n + g) * h].unflatten(1, (n + g, h))
    rows = Rows(keys[:, :n], keys[:, n:], fused[:, (n + g) * h :].unflatten(1, (g, v)))
    offsets = torch.tensor((0, *seq_lens), device=device).cumsum(0).int()
    grad_out = torch.randn(tokens, n, v, device=device, dtype=torch.bfloat16)
    return Operands(rows, grad_out, Lengths(seq_lens, offsets))


def padded(operands: Operands) -> Operands:
    """The same with zeros behind values and what belongs to them, to the width of keys."""
    (q, k, v), grad_out, lengths = operands
    columns = (0, k.shape[2] - v.shape[2])
    return Operands(Rows(q, k, pad(v, columns)), pad(grad_out, columns), lengths)


def contenders(case: Case) -> Iterator[tuple[KernelName, bool]]:
    """Kernels that serve a case, and whether values are padded for them."""
    width, value_width = case.widths
    for name in KERNEL_NAMES:
        if can_serve(name, torch.bfloat16, width, case.style, value_width):
            yield name, False
        if value_width < width and can_serve(name, torch.bfloat16, width, case.style):
            yield name, True


class Calls:
    """Both directions by some kernels over one set of operands."""

    def __init__(self, kernels: Kernels, operands: Operands, style: AttentionStyle) -> None:
        self.kernels, self.operands, self.style = kernels, operands, style
        self.rng = torch.zeros(2, dtype=torch.int64, device=operands.grad_out.device)
        self.out, self.lse = self.forward()

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.kernels.forward(*self.operands.rows, self.operands.lengths, self.style)

    def backward(self) -> tuple[Tensor, Tensor, Tensor]:
        rows, grad_out, lengths = self.operands
        return self.kernels.backward(grad_out, rows, Results(self.out, self.lse), lengths, self.rng, self.style)


def errors(case: Case, name: KernelName, pads: bool, device: torch.device) -> dict[str, float]:
    """Relative errors of the output and of all gradients."""
    operands = operands_of(case, CHECK_LENGTHS, device)
    calls = Calls(KERNELS[name], padded(operands) if pads else operands, case.style)
    rows, grad_out = Rows(*(x.double() for x in operands.rows)), operands.grad_out.double()
    lse = torch.empty(rows.q.shape[1], len(rows.q), dtype=torch.float64, device=device)
    results = Results(torch.empty_like(grad_out), lse)
    attention_forward_reference(*rows, CHECK_LENGTHS, 0, *results, case.style)
    exact = (results.out, *attention_backward_reference(grad_out, rows, results, CHECK_LENGTHS, 0, style=case.style))
    found = (calls.out, *calls.backward())
    names = ("output", "queries", "keys", "values")
    return {name: relative(x, y) for name, x, y in zip(names, found, exact, strict=True)}


def relative(x: Tensor, exact: Tensor) -> float:
    return float((x[..., : exact.shape[-1]].double() - exact).norm() / exact.norm())


def measure(case: Case, tokens: int, seq_len: int, device: torch.device, earlier: bool = False) -> list[dict]:
    """A row for all kernels that serve a case. earlier: seq_len is of earlier keys."""
    if earlier:
        operands = earlier_operands(case, tokens, seq_len, device)
    else:
        operands = operands_of(case, (seq_len,) * (tokens // seq_len), device)
    forward_flops, backward_flops = case.flops(tokens, seq_len, earlier)
    rows = []
    for name, pads in contenders(case):
        calls = Calls(KERNELS[name], padded(operands) if pads else operands, case.style)
        forward_s, backward_s = cuda_timer(calls.forward, LEAST_S), cuda_timer(calls.backward, LEAST_S)
        row = {
            "case": case.name,
            "seq_len": seq_len,
            "kernels": name,
            "padded": pads,
            "earlier": earlier,
            "forward_s": forward_s,
            "backward_s": backward_s,
            "forward_flops_per_s": forward_flops / forward_s,
            "backward_flops_per_s": backward_flops / backward_s,
            "errors": errors(case, name, pads, device),
        }
        rows.append(row)
        print(line(row), flush=True)
    return rows


def line(row: dict) -> str:
    """A row of the table."""
    name = row["kernels"] + (", padded" if row["padded"] else "") + (", earlier" if row["earlier"] else "")
    figures = "".join(
        f"{1e3 * row[f'{half}_s']:9.3f} ms{row[f'{half}_flops_per_s'] / 1e12:6.0f}" for half in ("forward", "backward")
    )
    return f"{row['case']:20}{row['seq_len']:6}  {name:16}{figures}  " + " ".join(
        f"{error:.1e}" for error in row["errors"].values()
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--seq-lens", type=int, nargs="+", default=[2048, 8192], help="tokens of a sequence")
    parser.add_argument("--earlier", type=int, nargs="*", default=[], help="earlier keys, of cases without a window")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="cases by name")
    parser.add_argument("--json", default=None, help="write the figures to this file")
    args = parser.parse_args(arguments)
    if wrong := [length for length in args.seq_lens if args.tokens % length]:
        parser.error(f"--seq-lens has {wrong[0]}, which does not divide --tokens {args.tokens}; give lengths that do")
    if unknown := sorted(set(args.only or ()) - {case.name for case in CASES}):
        parser.error(f"--only names {', '.join(unknown)}; there are: {', '.join(case.name for case in CASES)}")
    require_gpu("bench.attention")
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    print(f"{'case':20}{'tokens':>6}  {'kernels':16}{'forward':>12}{'TF/s':>6}{'backward':>12}{'TF/s':>6}  errors")
    rows = []
    with torch.no_grad():
        for case in (case for case in CASES if case.name in (args.only or [case.name])):
            for seq_len in args.seq_lens:
                rows += measure(case, args.tokens, seq_len, device)
            for keys in () if case.style.window else args.earlier:
                rows += measure(case, args.tokens, keys, device, earlier=True)
    write_json(args.json, {"tokens": args.tokens, "rows": rows})


if __name__ == "__main__":
    main()
