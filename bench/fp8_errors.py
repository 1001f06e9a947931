"""How far are products in bf16 and in FP8, by scheme of scales, from the same products of the same operands in float64?

    python -m bench.fp8_errors --json out.json

One linear layer, forward and both gradients: relative errors ||found - exact|| / ||exact|| of the plain path on the
CPU. Operands are normal; with `outliers` one feature of x in 256 is 100 times as large, as in transformers, and tokens'
gradients differ by powers of two.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from bench.environment import write_json
from flexengine.ops.base import ChunkContext, DropoutDraws, OpEnv
from flexengine.ops.fp8 import SCALINGS, Fp8Linear
from flexengine.ops.linear import Linear

TOKENS, INS, OUTS, EVERY, FACTOR = 1000, 1024, 768, 256, 100.0
BUFFERS = {"uint8": torch.uint8, "float32": torch.float32}
RESULTS = ("y", "gradient of x", "gradient of the weight")


def operands(outliers: bool) -> dict[str, Tensor]:
    """Draw x, weight and the gradient of y, in bf16."""
    generator = torch.Generator().manual_seed(0)
    x, weight, grad_y = (
        torch.randn(*shape, generator=generator) for shape in ((TOKENS, INS), (OUTS, INS), (TOKENS, OUTS))
    )
    if outliers:
        x[:, ::EVERY] *= FACTOR
        grad_y *= torch.exp2(torch.randn(TOKENS, 1, generator=generator) * 2)
    named = {"x": x, "weight": weight * INS**-0.5, "grad_y": grad_y * 1e-3}
    return {name: each.bfloat16() for name, each in named.items()}


def run(op: Linear, given: dict[str, Tensor], chunk: ChunkContext) -> list[Tensor]:
    """What an op gives, in the order of RESULTS."""
    x, weight, grad_y = given.values()
    specs = {spec.name: spec for half in ("forward", "input", "weight") for spec in op.scratch(half)}
    buffers = {
        name: torch.zeros(spec.height(TOKENS), *spec.shape, dtype=BUFFERS[spec.dtype]) for name, spec in specs.items()
    }
    y, grad_x, grad = torch.empty_like(grad_y), torch.empty_like(x), torch.empty(OUTS, INS)
    env = OpEnv({"x": x, "y": y, **buffers}, {"w": weight}, {"x": grad_x, "y": grad_y}, {"w": grad}, chunk)
    for half in (op.forward, op.backward_input, op.backward_weight):
        half(env)
    return [y, grad_x, grad]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    linear, no = Linear("proj", "x", "y", INS, OUTS, "w"), torch.empty(0)
    chunk = ChunkContext(TOKENS, no, no, no, no, (TOKENS,), no, {}, dropout=DropoutDraws(0, 0, 0))
    ops = {"bfloat16": linear, **{name: Fp8Linear(linear, scaling=scaling) for name, scaling in SCALINGS.items()}}
    rows = []
    for outliers in (False, True):
        given = operands(outliers)
        x, weight, grad_y = (each.double() for each in given.values())
        exact = (x @ weight.t(), grad_y @ weight, grad_y.t() @ x)
        for name, op in ops.items():
            found = zip(RESULTS, run(op, given, chunk), exact, strict=True)
            errors = {result: round(float((own.double() - one).norm() / one.norm()), 6) for result, own, one in found}
            rows.append({"outliers": outliers, "matmul": name, **errors})
            print(f"outliers {outliers!s:5} {name:20}", *(f"{result} {error:.2%}" for result, error in errors.items()))
    if args.json:
        write_json(args.json, {"sizes": {"tokens": TOKENS, "in": INS, "out": OUTS}, "rows": rows})


if __name__ == "__main__":
    main()
