"""Compares ways to multiply experts with their rows on a Hopper card: a program for each tile, programs that walk
through tiles, and rows that programs gather instead of a copy sorted by expert.

    python -m bench.experts_products [--repeats 10]

prints the median of microseconds and TFLOP/s of each, and whether results have the bits of the first.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels import experts, grouped, grouped_tma, grouped_walk
from flexengine.kernels.counts import cdiv, next_power_of_2
from flexengine.kernels.grouped_tiles import (
    LowRank,
    Tiling,
    add_product,
    find_expert,
    grouped_tile,
    load_matrix,
    matrices,
    store_tile,
)

TOKENS, PER_TOKEN, RANKS = 16384, 8, 32
SHAPES = {
    "olmoe gate_up": (64, 2048, 2048, False),
    "olmoe gate_up, gradient": (64, 2048, 2048, True),
    "olmoe down": (64, 1024, 2048, False),
    "olmoe down, gradient": (64, 2048, 1024, True),
    "30b gate_up": (128, 2048, 1536, False),
    "30b gate_up, gradient": (128, 1536, 2048, True),
    "30b down": (128, 768, 2048, False),
    "30b down, gradient": (128, 2048, 768, True),
}
"""Experts, terms and columns of a product, and whether the weight is transposed."""
OLD = Tiling(128, 256, 64, 8, 8, 3)
WALKS = {
    "walk 3 stages 2 parts": grouped_walk.Walk(OLD, 2),
    "walk 3 stages 1 part": grouped_walk.Walk(OLD, 1),
    "walk 4 stages 4 parts": grouped_walk.Walk(OLD._replace(stages=4), 4),
}


@triton.jit
def _gather_kernel(
    x_ptr, token_ptr, weight_tiles, bounds_ptr, out_ptr, inner, columns, experts, row_tiles,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, GROUP: tl.constexpr,
    TRANSPOSED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    tile, column_tile = grouped_tile(tl.program_id(0), row_tiles, tl.cdiv(columns, COLUMNS), GROUP)
    expert, first_row, end = find_expert(bounds_ptr, tile, experts, EXPERTS, ROWS)
    if expert < experts:
        column = column_tile * COLUMNS
        rows = (first_row + tl.arange(0, ROWS)).to(tl.int64)
        outs = column + tl.arange(0, COLUMNS)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        token = tl.load(token_ptr + tl.minimum(rows, end - 1)).to(tl.int64)
        pointers = x_ptr + token[:, None] * inner + tl.arange(0, INNER)[None, :]
        for first in range(0, inner, INNER):
            x = tl.load(pointers + first)
            w = load_matrix(weight_tiles, expert, first, columns, column, inner, TRANSPOSED)
            total = add_product(total, x, w, WIDE)
        store_tile(total, out_ptr, out_ptr, out_ptr, out_ptr, expert, rows, outs, end, columns, False, False, False)


def gathered(x: Tensor, token: Tensor, weight: Tensor, bounds: Tensor, out: Tensor, transposed: bool) -> None:
    """The product of rows x[token]."""
    count, columns, t = len(token), out.shape[1], OLD
    row_tiles = cdiv(count, t.rows) + len(weight)
    _gather_kernel[(row_tiles * cdiv(columns, t.columns),)](
        x, token, matrices(weight, transposed, t.inner, t.columns), bounds, out, x.shape[1], columns, len(weight),
        row_tiles, EXPERTS=next_power_of_2(len(weight)), ROWS=t.rows, COLUMNS=t.columns, INNER=t.inner, GROUP=t.group,
        TRANSPOSED=transposed, WIDE=not x.is_cuda, **t.launch(),
    )  # fmt: skip


def microseconds(repeats: int, call: Callable[..., Any], *args: Any, **options: Any) -> float:
    """The median of so many runs after three to warm up."""
    for _ in range(3):
        call(*args, **options)
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call(*args, **options)
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return statistics.median(times)


def route(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """(place, bounds, token of each row) of tokens that choose among so many experts at random."""
    chosen = torch.rand(TOKENS, count, device="cuda").topk(PER_TOKEN).indices
    expert, order = chosen.flatten().sort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device="cuda")
    bounds = torch.searchsorted(expert, torch.arange(count + 1, device="cuda"))
    return place.view(TOKENS, PER_TOKEN).int(), bounds.int(), (order // PER_TOKEN).int()


def compare(name: str, repeats: int, adapted: bool) -> None:
    """Print a line for each way."""
    count, inner, columns, transposed = SHAPES[name]
    place, bounds, token = route(count)
    x = torch.randn(TOKENS, inner, device="cuda", dtype=torch.bfloat16)
    rows = torch.empty(TOKENS * PER_TOKEN, inner, device="cuda", dtype=torch.bfloat16)
    experts.dispatch(x, place, rows)
    sizes = (count, inner, columns) if transposed else (count, columns, inner)
    weight = torch.randn(sizes, device="cuda", dtype=torch.bfloat16) * inner**-0.5
    out = torch.empty(len(rows), columns, device="cuda", dtype=torch.bfloat16)
    adapter = None
    if adapted:
        low = torch.randn(len(rows), RANKS, device="cuda", dtype=torch.bfloat16)
        small = (count, RANKS, columns) if transposed else (count, columns, RANKS)
        adapter = LowRank(low, torch.randn(small, device="cuda", dtype=torch.bfloat16) * 0.1, transposed)
    operands = (rows, weight, bounds, out, transposed, None, None, adapter, None)
    ways = {"tiles": lambda: grouped_tma.launch(*operands, OLD)}
    walks = {way: walk for way, walk in WALKS.items() if not adapted or walk.parts > 1}  # the others find no room
    ways |= {way: lambda walk=walk: grouped_walk.launch(*operands, walk) for way, walk in walks.items()}
    if not adapted:
        ways["dispatch alone"] = lambda: experts.dispatch(x, place, rows)
        ways["gathered"] = lambda: gathered(x, token, weight, bounds, out, transposed)
    first, base = None, 0.0
    for way, call in ways.items():
        out.fill_(float("nan"))
        took = microseconds(repeats, call)
        first = out.clone() if first is None else first
        base = base or took
        flops = 2.0 * len(rows) * inner * columns
        rate = (
            ""
            if way == "dispatch alone"
            else f"{flops / took / 1e6:6.0f} TFLOP/s, equal bits {torch.equal(out, first)}"
        )
        print(
            f"{name + (', adapters' if adapted else ''):36} {way:22} {took:8.1f} us {base / took:6.3f}x {rate}",
            flush=True,
        )
    assert first is not None
    start, end = bounds[:2].tolist()
    exact = rows[start:end].double() @ (weight[0].double() if transposed else weight[0].double().t())
    if adapter is not None:
        up = adapter.up[0].double()
        exact += adapter.low[start:end].double() @ (up if transposed else up.t())
    error = (first[start:end].double() - exact).abs().max() / exact.abs().max()
    print(f"{name:36} largest error against float64 {error:.1e}", flush=True)


ADAPTERS = {"gate_up": (2048, 1536, 32), "down": (768, 2048, 16)}
"""Inputs, outputs and columns of low of adapters of the 30B's experts."""
NARROW = {
    "as it is": (128, None),
    "narrow tiles": (16, None),
    "narrow, 256 wide": (16, Tiling(256, 256, 64, 8, 8, 3)),
    "narrow, 128 rows": (16, Tiling(128, 128, 128, 8, 8, 3)),
    "narrow, 4 warps": (16, Tiling(128, 128, 64, 8, 4, 4)),
}
"""Fewest outputs or inputs of a gradient's tile, and its tiling."""


def adapters(name: str, repeats: int) -> None:
    """Print microseconds and TB/s of the passes of experts' adapters, and their error against float64."""
    inner, columns, width = ADAPTERS[name]
    _, bounds, token = route(128)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.1

    x, grad_y, low = randn(len(token), inner), randn(len(token), columns), randn(len(token), width)
    down, up = randn(128, width, inner), randn(128, columns, width)
    passes = {
        "low": lambda: grouped.grouped_product(x, down, bounds, torch.empty_like(low), False),
        "grad_low": lambda: grouped.grouped_product(grad_y, up, bounds, torch.empty_like(low), True),
    }
    for way, tiling in {"as it is": None, "4 warps, 128 terms": Tiling(128, 256, 128, 8, 4, 3)}.items():
        with patch.object(grouped, "_tiling", grouped._tiling if tiling is None else lambda _, t=tiling: t):
            for what, call in passes.items():
                took, moved = microseconds(repeats, call), (x if what == "low" else grad_y).nbytes
                print(f"30b {name}, {what:10} {way:20} {took:8.1f} us, {moved / took / 1e6:5.2f} TB/s", flush=True)
    for what, rows, other in (("A", low, x), ("B", grad_y, low)):
        acc = torch.empty(128, rows.shape[1], other.shape[1], device="cuda")
        start, end = bounds[5:7].tolist()
        exact = rows[start:end].double().t() @ other[start:end].double()
        for way, (narrowest, tiling) in NARROW.items():
            tilings = grouped._gradient_tiling if tiling is None else lambda _, t=tiling: t
            with (
                patch.object(grouped, "NARROWEST_GRADIENT", narrowest),
                patch.object(grouped, "_gradient_tiling", tilings),
            ):
                took = microseconds(repeats, grouped.grouped_weight_gradient, rows, other, bounds, acc, False)
            moved = max(rows.nbytes, other.nbytes) + acc.nbytes
            error = (acc[5].double() - exact).abs().max() / exact.abs().max()
            print(
                f"30b {name}, gradient of {what} {way:20} {took:8.1f} us, {moved / took / 1e6:5.2f} TB/s,"
                f" error {error:.1e}",
                flush=True,
            )


def shares(repeats: int) -> None:
    """Print the share of a linear layer's rate that products of experts have: forward and both gradients, as the probe
    has them, by either kernel."""
    from flexengine.hardware.measure.experts import Buffers  # noqa: PLC0415
    from flexengine.ops.experts.shape import ExpertShape  # noqa: PLC0415

    for name, shapes in {
        "olmoe": [(64, 2048, 2048), (64, 1024, 2048)],
        "30b": [(128, 2048, 1536), (128, 768, 2048)],
    }.items():
        for walks in (False, True):
            flops = took = linear = 0.0
            for experts_, inner, columns in shapes:
                with patch.object(grouped, "WALKS", walks):
                    shape = ExpertShape(experts_, PER_TOKEN, inner, columns)
                    b = Buffers(shape, TOKENS, torch.bfloat16, torch.device("cuda"), 32 << 30)
                    took += b.seconds(lambda call, _: 1e-6 * microseconds(repeats, call), 0.0, 4e12)
                    flops += b.flops()
                x, w = b.x, b.weight[0]
                out = torch.empty(len(x), columns, device="cuda", dtype=torch.bfloat16)
                linear += 3e-6 * microseconds(repeats, torch.mm, x, w.t(), out=out)
                del b
            print(f"{name}, walks {walks}: {flops / took / 1e12:.0f} TFLOP/s, {linear / took:.3f} of a linear layer")


def main() -> None:
    """Compare all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--only", default="", metavar="TEXT", help="of a shape's name")
    args = parser.parse_args()
    torch.manual_seed(0)
    for name in SHAPES:
        for adapted in (False, True):
            if args.only in name and not (adapted and name.startswith("olmoe")):
                compare(name, args.repeats, adapted)
    for name in ADAPTERS:
        adapters(name, args.repeats)
    shares(args.repeats)


if __name__ == "__main__":
    main()
