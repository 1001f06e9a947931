"""How fast are gradients of experts' weights, by tiles and by who adds them up? TFLOP/s, as JSON.

    python -m bench.grouped_tilings --json out.json

Sums are added to accumulators in float32 as in training. Rows are random shares of all experts'. Each way is checked
against float64 on a few experts first, and timed beside products of a linear layer of as many FLOPs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from bench.environment import write_json
from flexengine.kernels import grouped
from flexengine.kernels.grouped_tiles import Tiling
from flexengine.kernels.grouped_tma import launch_gradient
from flexengine.ops.linear import accumulate_weight_grad

ROWS = 16384 * 8
CHECKED = 3
"""Experts whose sums are compared."""
LEAST_S = 0.15


class Shape(NamedTuple):
    """Experts, outputs and inputs of their matrices."""

    name: str
    experts: int
    columns: int
    inner: int


SHAPES = (
    Shape("olmoe-1b-7b gate_up", 64, 2048, 2048),
    Shape("olmoe-1b-7b down", 64, 2048, 1024),
    Shape("qwen3-30b-a3b gate_up", 128, 1536, 2048),
    Shape("qwen3-30b-a3b down", 128, 2048, 768),
)
CANDIDATES = (
    Tiling(128, 128, 64, 8, 4, 3),
    Tiling(128, 128, 64, 8, 8, 3),
    Tiling(128, 256, 64, 8, 8, 3),
    Tiling(256, 128, 64, 8, 8, 3),
)


def bounds_of(experts: int) -> Tensor:
    """Uneven shares of all rows: between half and one and a half of the mean."""
    shares = 0.5 + torch.rand(experts, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ends = (shares.cumsum(0) / shares.sum() * ROWS).round().to(torch.int32)
    return torch.cat([torch.zeros(1, dtype=torch.int32), ends]).cuda()


def tflops(call: Callable[[], object], flops: float) -> float:
    """TFLOP/s of a call that is made again and again."""
    for _ in range(3):
        call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    seconds, count = 0.0, 4
    while seconds < LEAST_S:
        begin.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        seconds = begin.elapsed_time(end) / 1e3
        once_s, count = seconds / count, 2 * count
    return flops / once_s / 1e12


def error(call: Callable[[], object], operands: tuple[Tensor, ...]) -> float:
    """||found - exact|| / ||exact|| of some experts' sums, added twice."""
    grad_y, x, bounds, acc = operands
    acc.zero_()
    call()
    call()
    worst = 0.0
    for expert in range(0, len(acc), len(acc) // CHECKED):
        rows = slice(*bounds[expert : expert + 2].tolist())
        exact = 2 * grad_y[rows].double().T @ x[rows].double()
        worst = max(worst, ((acc[expert] - exact).norm() / exact.norm()).item())
    return worst


def rows_of(shape: Shape) -> list[dict]:
    """What was measured for one shape."""
    grad_y = torch.randn(ROWS, shape.columns, device="cuda").bfloat16()
    x = torch.randn(ROWS, shape.inner, device="cuda").bfloat16()
    bounds, flops = bounds_of(shape.experts), 2.0 * ROWS * shape.columns * shape.inner
    acc = torch.zeros(shape.experts, shape.columns, shape.inner, device="cuda")
    operands = grad_y, x, bounds, acc
    whole = torch.zeros(shape.columns, shape.inner, device="cuda")
    linear = tflops(lambda: accumulate_weight_grad(whole, grad_y, x, first=False), flops)
    ways: dict[str, Callable[[], object]] = {"loaded by pointers": partial(by_pointers, *operands)}
    for tiles in CANDIDATES:
        ways[f"{'x'.join(map(str, tiles))}, added by the card"] = partial(launch_gradient, *operands, tiles)
    found = []
    for way, call in ways.items():
        row = {**shape._asdict(), "way": way, "linear_tflops": linear}
        try:
            row |= {"error": error(call, operands), "tflops": tflops(call, flops)}
        except Exception as failure:
            row |= {"failed": f"{type(failure).__name__}: {failure}"[:500]}
        found.append(row)
        print(row, flush=True)
    return found


def by_pointers(grad_y: Tensor, x: Tensor, bounds: Tensor, acc: Tensor) -> None:
    """The kernel of cards without an engine for tiles."""
    with patch.object(grouped, "takes_added_tiles", lambda *_: False):
        grouped.grouped_weight_gradient(grad_y, x, bounds, acc, accumulate=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default=None, help="write the figures to this file")
    args = parser.parse_args()
    rows: list[dict] = []
    for shape in SHAPES:
        rows += rows_of(shape)
        torch.cuda.empty_cache()
        write_json(args.json, {"rows": rows})


if __name__ == "__main__":
    main()
