"""How fast and how exact are the kernels of the gated delta rule, by what they store between them?

    python -m bench.delta_rule --model preset:qwen3.5-9b --json out.json

Errors are ||result - exact|| / ||exact|| against the plain path in float64, on packed sequences of 1 to 700 tokens in
bf16. Without a GPU TRITON_INTERPRET=1 finds those of Triton's interpreter, for two key heads and without times; it
multiplies in float32 what cards multiply in TF32. Times are of calls back to back, memory is what a call allocates at
its highest beside its results.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from bench.environment import write_json
from flexengine.models.registry import open_model
from flexengine.ops.delta import plain
from flexengine.ops.delta.delta_rule import DeltaRule
from flexengine.ops.delta.tiles import Ends, Operands, Sizes

LEAST_S = 0.3  # of calls back to back
LENGTHS = (700, 1, 64, 65, 173)
STORED = ("float32", "bfloat16")
RESULTS = ("output", "queries and keys", "values", "decay", "strength")
"""The output, and what gradients are of."""


def sizes_of(model: str) -> Sizes:
    """Heads of the model's first delta rule. Raises: SystemExit where it has none."""
    spec = open_model(model, needs_weights=False).spec
    found = [op.sizes for layer in spec.blocks for op in layer.ops if isinstance(op, DeltaRule)]
    if not found:
        raise SystemExit(f"--model names a {spec.family} model without delta rules; try preset:qwen3.5-9b")
    return found[0]


class Case:
    """Operands, drawn, and places for results."""

    def __init__(self, sizes: Sizes, seq_lens: Sequence[int], device: str, dtype: torch.dtype = torch.bfloat16) -> None:
        tokens, (g, n, k, v) = sum(seq_lens), sizes
        draw = lambda *shape: torch.randn(*shape, device=device)  # noqa: E731
        gates = logsigmoid(draw(tokens, n) + 2.0), torch.sigmoid(draw(tokens, n))
        cu = torch.tensor((0, *seq_lens), device=device).cumsum(0).int()
        rows = draw(tokens, 2 * g * k + n * v).to(dtype)
        self.given = Operands(rows, gates, cu, tuple(seq_lens), sizes, Ends())
        self.grad_o = draw(tokens, n * v).to(dtype)

    def forward(self, path: Any, given: Operands | None = None) -> Tensor:
        """The output, by a path."""
        o = torch.empty_like(self.grad_o)
        path.forward(given or self.given, o)
        return o

    def backward(self, path: Any, given: Operands | None = None) -> list[Tensor]:
        """Gradients of queries and keys, of values and of the gates."""
        g, n, k, v = self.given.sizes
        rows, gates = torch.empty_like(self.given.qkv), tuple(torch.empty_like(gate) for gate in self.given.gates)
        path.backward(given or self.given, self.grad_o, Ends(), rows, gates)
        return [*rows.split((2 * g * k, n * v), dim=1), *gates]

    def results(self, path: Any, between: torch.dtype) -> list[Tensor]:
        """RESULTS, by a path."""
        given = self.given._replace(between=between)
        return [self.forward(path, given), *self.backward(path, given)]

    def exact(self) -> list[Tensor]:
        """RESULTS in float64."""
        wide = Case.__new__(Case)
        gates = (self.given.gates[0].double(), self.given.gates[1].double())
        wide.given, wide.grad_o = self.given._replace(qkv=self.given.qkv.double(), gates=gates), self.grad_o.double()
        return wide.results(plain, torch.float32)


def errors(path: Any, sizes: Sizes, device: str) -> dict[str, dict[str, float]]:
    """By what is stored, by RESULTS."""
    case = Case(sizes, LENGTHS, device)
    exact = case.exact()
    found = {}
    for name in STORED:
        results = case.results(path, getattr(torch, name))
        relative = [float((x.double() - y).norm() / y.norm()) for x, y in zip(results, exact, strict=True)]
        found[name] = dict(zip(RESULTS, relative, strict=True))
    return found


def measured(call: Callable[[], Sequence[Tensor]]) -> dict[str, float]:
    """Milliseconds of a call, and MiB that it allocates at its highest beside its results."""
    from flexengine.hardware.measure.timing import cuda_timer  # noqa: PLC0415 (needs a GPU)

    seconds = cuda_timer(call, LEAST_S)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    before += sum(x.nbytes for x in call())
    return {"ms": 1e3 * seconds, "mib": (torch.cuda.max_memory_allocated() - before) / 2**20}


def halves(path: Any, case: Case, between: torch.dtype) -> dict[str, Any]:
    """Time and memory of both halves."""
    given = case.given._replace(between=between)
    return {
        "forward": measured(lambda: [case.forward(path, given)]),
        "backward": measured(lambda: case.backward(path, given)),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="preset:qwen3.5-9b", help="whose heads")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--json", default=None, help="write the figures to this file")
    args = parser.parse_args(arguments)
    sizes, on_gpu = sizes_of(args.model), torch.cuda.is_available()
    if not on_gpu:
        if os.environ.get("TRITON_INTERPRET") != "1":
            raise SystemExit("there is no GPU; TRITON_INTERPRET=1 has Triton's interpreter find the errors alone")
        sizes = sizes._replace(key_heads=2, value_heads=2 * sizes.ratio)
    from flexengine.ops.delta import kernels  # noqa: PLC0415

    torch.manual_seed(0)
    found: dict[str, Any] = {"model": args.model, "tokens": args.tokens, "seq_len": args.seq_len}
    found["errors"] = errors(kernels, sizes, "cuda" if on_gpu else "cpu")
    if on_gpu:
        case = Case(sizes, (args.seq_len,) * (args.tokens // args.seq_len), "cuda")
        found["times"] = {name: halves(kernels, case, getattr(torch, name)) for name in STORED}
    print(json.dumps(found, indent=2))
    write_json(args.json, found)


if __name__ == "__main__":
    main()
