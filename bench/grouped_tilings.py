"""Which tiles of experts' weight gradients are fastest on a card? Needs an NVIDIA GPU with TMA (Hopper or newer).

    python -m bench.grouped_tilings --json out.json

Every candidate is checked against float64 first, over experts without rows, with one and with odd numbers of them, and
NaN before and behind all rows; then timed, where it adds to accumulators and where it writes them first. Beside them:
torch's grouped product of the same operands, which rounds to bf16 and adds to nothing, and a linear layer's product of
the same FLOPs. The floor of a shape is the longer of its FLOPs at that layer's rate and of its bytes at the rate of a
copy: operands read once, accumulators read and written, or only written. Processes beside each other compile first.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from bench.compiling import compile_all
from bench.environment import require_gpu, write_json
from bench.kernels import copy_rate
from flexengine.hardware.measure.timing import cuda_timer
from flexengine.kernels import grouped, grouped_gradient_tma
from flexengine.kernels.grouped_gradient_tma import ADDED, WRITTEN, GradientTiling
from flexengine.kernels.grouped_tiles import Tiling

LEAST_S = 0.05
MOST_ERROR = 1e-5  # of sums in float32, as a share of the largest
SKEW = 0.25  # of the logarithms of experts' popularities
BF16 = torch.bfloat16


class Shape(NamedTuple):
    """A weight of experts: each of `experts` is [columns, inner], and a token has `choices` of them."""

    name: str
    experts: int
    columns: int
    inner: int
    choices: int = 8

    def flops(self, rows: int) -> float:
        return 2.0 * rows * self.columns * self.inner

    def bytes_moved(self, rows: int, accumulate: bool) -> float:
        """Operands in bf16 once, float32 accumulators written, and read where they are added to."""
        sums = 4.0 * self.experts * self.columns * self.inner
        return 2.0 * rows * (self.columns + self.inner) + sums * (2 if accumulate else 1)


SHAPES = (
    Shape("olmoe gate_up", 64, 2048, 2048),
    Shape("olmoe down", 64, 2048, 1024),
    Shape("qwen3-30b-a3b gate_up", 128, 1536, 2048),
    Shape("qwen3-30b-a3b down", 128, 2048, 768),
    Shape("gpt-oss-20b gate_up", 32, 5760, 2880, 4),
    Shape("mixtral-8x7b gate_up", 8, 28672, 4096, 2),
)
TRIED = tuple(shape.name for shape in SHAPES[:4])

WITHOUT = "without TMA"
CANDIDATES: dict[str, GradientTiling | None] = {
    WITHOUT: None,  # what other cards have: two programs of 128 x 128 on a multiprocessor, one for each tile
    "default": WRITTEN,
    "4 stages, 8 parts": ADDED,
    "256 x 128": WRITTEN._replace(tiles=Tiling(256, 128, 64, 8, 8, 3)),
    "128 x 128, two programs": GradientTiling(Tiling(128, 128, 64, 8, 4, 3), 4, 2),
    "a program for each tile": WRITTEN._replace(programs=0),
    "programs load and add": WRITTEN._replace(parts=4, adds=False),
}


class Operands(NamedTuple):
    """Rows of all experts and what their gradients are added to."""

    grad_y: Tensor
    x: Tensor
    bounds: Tensor
    acc: Tensor

    def run(self, candidate: GradientTiling | None, accumulate: bool) -> None:
        if candidate is not None:
            return grouped_gradient_tma.launch(*self, accumulate, candidate)
        with patch.object(grouped, "gradient_takes_descriptors", lambda *_: False):
            return grouped.grouped_weight_gradient(*self, accumulate)


def make_operands(counts: Tensor, columns: int, inner: int, device: torch.device, around: int = 0) -> Operands:
    """Random operands of experts with so many rows; `around` rows of NaN lie before the first and behind the last."""
    bounds = torch.cat((torch.tensor([around]), around + counts.cumsum(0)))
    rows = int(bounds[-1]) + around
    grad_y, x = (torch.randn(rows, width, device=device, dtype=BF16) for width in (columns, inner))
    for matrix in (grad_y, x):
        matrix[:around] = matrix[rows - around :] = float("nan")
    acc = torch.randn(len(counts), columns, inner, device=device)
    return Operands(grad_y, x, bounds.int().to(device), acc)


def small_operands(experts: int, device: torch.device) -> Operands:
    """Odd numbers of rows, and some experts with none or one; the last tiles of both widths are part filled."""
    counts = torch.randint(200, (experts,), generator=torch.Generator().manual_seed(0)) | 1
    counts[::5] = 0
    counts[1::7] = 1
    return make_operands(counts, 336, 592, device, around=70)


def routed(shape: Shape, tokens: int) -> Tensor:
    """Rows of each expert, some of which are chosen more often."""
    generator = torch.Generator().manual_seed(0)
    popularity = (SKEW * torch.randn(shape.experts, generator=generator)).exp()
    chosen = torch.multinomial(popularity, tokens * shape.choices, replacement=True, generator=generator)
    return torch.bincount(chosen, minlength=shape.experts)


def errors(candidate: GradientTiling | None, operands: Operands) -> tuple[float, float]:
    """Largest difference from float64 where sums are added, and where they are written over NaN; shares of the largest
    sum."""
    pieces = [slice(start, end) for start, end in pairwise(operands.bounds.tolist())]
    wanted = torch.stack([operands.grad_y[rows].double().t() @ operands.x[rows].double() for rows in pieces])
    added = operands._replace(acc=operands.acc.clone())
    added.run(candidate, True)
    written = operands._replace(acc=torch.full_like(operands.acc, float("nan")))
    written.run(candidate, False)
    largest = wanted.abs().max()
    totals = (added.acc - (operands.acc + wanted), written.acc - wanted)
    return float(totals[0].abs().max() / largest), float(totals[1].abs().max() / largest)


def compile_trials(trials: Sequence[tuple[str, int, bool]]) -> None:
    """Launch every (candidate, number of experts, accumulate) once, so that Triton's cache has its code."""
    device = torch.device("cuda", torch.cuda.current_device())
    for name, experts, accumulate in trials:
        try:
            make_operands(torch.full((experts,), 3), 256, 256, device).run(CANDIDATES[name], accumulate)
        except Exception as error:  # whatever Triton raises; the measurement tells it
            print(f"{name}: {type(error).__name__}", flush=True)
    torch.cuda.synchronize()


def others(operands: Operands) -> dict[str, Callable[[], object]]:
    """What torch has for the same FLOPs: a linear layer of all rows, and its product of groups into bf16."""
    weight = torch.randn(operands.x.shape[1], operands.grad_y.shape[1], device=operands.x.device, dtype=BF16)
    out = torch.empty_like(operands.grad_y)
    ends, transposed = operands.bounds[1:].contiguous(), operands.grad_y.t()
    product = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    found: dict[str, Callable[[], object]] = {"linear layer": lambda: torch.mm(operands.x, weight, out=out)}
    if product is not None:
        found["torch's grouped product"] = lambda: product(transposed, operands.x, offs=ends)
    return found


def seconds_of(work: Callable[[], object]) -> dict[str, Any]:
    """Seconds of a call, or what it raises."""
    try:
        return {"seconds": cuda_timer(work, LEAST_S)}
    except Exception as error:  # whatever Triton or torch raises: too much shared memory, mostly
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}


def measure_shape(
    shape: Shape, tokens: int, memory_bytes_per_s: float, checked: dict[str, str | None], ends: Callable[[], bool]
) -> list[dict[str, Any]]:
    """A row per candidate that is right and per way to write, as far as there is time, behind those of torch."""
    torch.manual_seed(0)
    rows = tokens * shape.choices
    device = torch.device("cuda", torch.cuda.current_device())
    operands = make_operands(routed(shape, tokens), shape.columns, shape.inner, device)
    found: list[dict[str, Any]] = []
    for name, work in others(operands).items():
        found.append({"shape": shape.name, "candidate": name, "accumulate": None, **seconds_of(work)})
    linear_s = found[0].get("seconds", float("nan"))
    for name, candidate in CANDIDATES.items():
        for accumulate in (True, False):
            if ends():
                continue
            row: dict[str, Any] = {"shape": shape.name, "candidate": name, "accumulate": accumulate}
            row["floor_s"] = max(linear_s, shape.bytes_moved(rows, accumulate) / memory_bytes_per_s)
            if checked[name] is not None:
                found.append({**row, "error": checked[name]})
                continue
            found.append({**row, **seconds_of(lambda c=candidate, a=accumulate: operands.run(c, a))})
    for row in found:
        if "seconds" in row:
            row["flops_per_s"] = shape.flops(rows) / row["seconds"]
    return found


def check_all(experts: int) -> dict[str, str | None]:
    """What is wrong with each candidate, None with those that are right."""
    torch.manual_seed(0)
    operands = small_operands(experts, torch.device("cuda", torch.cuda.current_device()))
    found: dict[str, str | None] = {}
    for name, candidate in CANDIDATES.items():
        try:
            both = errors(candidate, operands)
        except Exception as error:  # whatever Triton raises
            found[name] = f"{type(error).__name__}: {str(error)[:200]}"
            continue
        right = all(each < MOST_ERROR for each in both)  # NaN is not
        found[name] = None if right else f"WRONG: differs by {both[0]:.1e} where it adds, by {both[1]:.1e} else"
    return found


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    way = {None: "", True: "adds", False: "writes"}[row["accumulate"]]
    start = f"{row['shape']:23}{row['candidate']:26}{way:8}"
    if "error" in row:
        return f"{start}{row['error']}"
    floor = f"{row['floor_s'] / row['seconds']:8.0%} of the floor's speed" if "floor_s" in row else ""
    return f"{start}{1e3 * row['seconds']:9.3f} ms{row['flops_per_s'] / 1e12:8.0f} TFLOP/s{floor}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile, check, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--only", nargs="+", metavar="SHAPE", help="shapes by name, or all", default=TRIED)
    parser.add_argument("--most-s", type=float, default=55.0, help="no further candidate is timed after so long")
    parser.add_argument("--json", default=None, help="write the figures to this file")
    args = parser.parse_args(arguments)
    begin = time.monotonic()
    names = [shape.name for shape in SHAPES]
    wanted = names if list(args.only) == ["all"] else args.only
    if wrong := sorted(set(wanted) - set(names)):
        parser.error(f"--only names {', '.join(wrong)}; there are: all, {', '.join(names)}")
    require_gpu("bench.grouped_tilings")
    shapes = [shape for shape in SHAPES if shape.name in wanted]
    experts = sorted({shape.experts for shape in shapes})
    trials = [(name, count, accumulate) for name in CANDIDATES for count in experts for accumulate in (True, False)]
    compile_all(compile_trials, trials)
    compile_s = time.monotonic() - begin
    print(f"compiled {len(trials)} kernels in {compile_s:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        memory_bytes_per_s = copy_rate(torch.device("cuda", torch.cuda.current_device()))
        print(f"copy within device memory: {memory_bytes_per_s / 1e9:.0f} GB/s, read plus written", flush=True)
        checked = {count: check_all(count) for count in experts}
        for shape in shapes:
            found = measure_shape(
                shape,
                args.tokens,
                memory_bytes_per_s,
                checked[shape.experts],
                lambda: time.monotonic() - begin > args.most_s,
            )
            print("\n".join(line(row) for row in found), flush=True)
            rows += found
            torch.cuda.empty_cache()
    tilings = {name: None if each is None else each._asdict() for name, each in CANDIDATES.items()}
    results = {"tokens": args.tokens, "compile_s": compile_s, "copy_bytes_per_s": memory_bytes_per_s}
    write_json(args.json, {**results, "candidates": tilings, "rows": rows})


if __name__ == "__main__":
    main()
