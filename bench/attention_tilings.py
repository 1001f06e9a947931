"""Which tiles of our attention kernels are fastest on a card? Needs an NVIDIA GPU.

    python -m bench.attention_tilings --json out.json

Every pass of the kernels is timed alone with every candidate: forward, gradients of queries, gradients of keys and
values. A candidate's results are held against those of the tiles that `kernels/attention_tilings.py` has. Processes
beside each other compile the candidates before one of them is timed. Prices are seconds at the rate that the same heads
have without a window, for the FLOPs that a window leaves.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from bench.attention import CASES, Case, operands_of, relative
from bench.compiling import compile_all
from bench.environment import require_gpu, write_json
from flexengine.hardware.measure.timing import cuda_timer
from flexengine.kernels import attention, attention_backward
from flexengine.kernels.attention_tilings import ShortTiling, Tiling
from flexengine.ops.attention.kernels import _operands

LEAST_S = 0.03
TRIED = ("gpt-oss-20b", "gpt-oss-20b, window", "llama-3.1-8b", "gemma-2-9b", "deepseek-v2-lite")
MOST_DIFFERENCE = 1e-2  # of bf16 results in another order of sums, with room
PASSES = ("forward", "queries", "keys")
Candidate = Tiling | ShortTiling | None  # None: as `attention_tilings` has it


class Trial(NamedTuple):
    """A pass of a case with a candidate's tiles."""

    case: str
    name: str
    candidate: Candidate


def short_tilings() -> list[Candidate]:
    """For a window of 128."""
    sizes = product((4, 8), ((1, 1), (4, 1), (2, 2), (4, 2), (8, 2)), (0, 128, 168))
    longer = product((2, 4), ((1, 1), (2, 2), (4, 2)), (0, 168))
    found: list[Candidate] = [ShortTiling(pack, 128, *tiles, registers) for pack, tiles, registers in sizes]
    return [*found, *(ShortTiling(pack, 128, *tiles, registers, own=32) for pack, tiles, registers in longer)]


def candidates(case: Case, name: str) -> list[Candidate]:
    """What a pass of a case is tried with, the present tiles first."""
    width = case.widths[0]
    found: list[Candidate] = [None]
    if case.style.window == 128 and name != "keys":
        blocks = [Tiling(*sizes) for sizes in ((64, 32, 4, 3), (128, 32, 8, 3), (64, 32, 4, 3, False))]
        return [*found, *blocks, *short_tilings()]
    if case.style.window == 128:
        many = product((32, 64), (64,), (4,), (2, 3, 4), (True, False), (1,), (0, 128, 168))
        wide = product((32, 64), (128,), (8,), (2, 3), (True, False))
        narrow = [Tiling(rows, 32, warps, 3, apart) for rows, warps, apart in product((32, 64), (2, 4), (True, False))]
        return [*found, *(Tiling(*each) for each in (*many, *wide)), *narrow]
    if case.name == "gpt-oss-20b":  # what its windows are priced at
        return found
    if name == "keys":
        passes = (1, 2) if width > 128 else (1,)
        sizes = [(rows, keys, keys // 16, stages) for rows, keys, stages in product((32, 64), (64, 128), (2, 3))]
        return [*found, *(Tiling(*each, True, several) for each in sizes for several in passes)]
    sizes = [(64, 64, 4), (128, 64, 8), (128, 128, 8), (128, 32, 8), (64, 128, 4), (128, 64, 4)]
    return [*found, *(Tiling(*each, stages) for each in sizes for stages in (2, 3))]


class Passes:
    """The passes of a case over one set of operands; results lie in `outputs` by pass."""

    def __init__(self, case: Case, tokens: int, seq_len: int, device: torch.device) -> None:
        given = operands_of(case, (seq_len,) * (tokens // seq_len), device)
        self.operands, self.scoring = _operands(given.rows, given.lengths, case.style)
        q, k, v, _ = self.operands
        self.grad_out, out = given.grad_out, torch.empty_like(given.grad_out)
        lse = torch.empty(q.shape[1], tokens, device=device)
        self.sinks = torch.randn(q.shape[1], device=device, dtype=q.dtype) if case.style.window == 128 else None
        self.left = attention_backward.Forward(given.grad_out, out, lse)
        self.grads = attention_backward.Gradients(torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
        self.stats = torch.empty(2, tokens, q.shape[1], device=device)
        self.outputs: dict[str, tuple[Tensor, ...]] = {
            "forward": (out, lse), "queries": (self.grads.q, self.stats), "keys": (self.grads.k, self.grads.v)
        }  # fmt: skip
        self.run("forward")
        self.run("queries")

    def run(self, name: str) -> None:
        both = (self.operands, self.scoring)
        if name == "forward":
            attention.attention_forward(*both, self.left.out, self.left.lse, self.sinks)
        elif name == "queries":
            attention_backward._query_gradients(*both, self.left, self.grads.q, self.stats)
        else:
            attention_backward._key_gradients(*both, self.left, self.grads, self.stats)


@contextmanager
def tiled(name: str, candidate: Candidate) -> Iterator[None]:
    """The kernels of a pass work in such tiles."""
    module = attention if name == "forward" else attention_backward
    general = {"forward": "forward_tiling", "queries": "query_tiling", "keys": "key_tiling"}[name]
    with ExitStack() as stack:
        if isinstance(candidate, Tiling):
            stack.enter_context(patch.object(module, general, lambda *_: candidate))
        if candidate is not None and name != "keys":
            short = candidate if isinstance(candidate, ShortTiling) else None
            stack.enter_context(patch.object(module, "short_tiling", lambda *_: short))
        yield


def case_of(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def compile_trials(trials: Sequence[Trial]) -> None:
    """Launch every trial once, on few tokens, so that Triton's cache has its code."""
    torch.manual_seed(0)
    passes: dict[str, Passes] = {}
    for trial in trials:
        if trial.case not in passes:
            passes[trial.case] = Passes(case_of(trial.case), 512, 256, torch.device("cuda"))
        try:
            with tiled(trial.name, trial.candidate):
                passes[trial.case].run(trial.name)
        except Exception as error:  # whatever Triton raises; the measurement tells it
            print(f"{trial}: {type(error).__name__}", flush=True)


def timed(passes: Passes, trial: Trial, wanted: Sequence[Tensor]) -> dict[str, Any]:
    """Seconds of a trial, and how far its results are from those of the present tiles."""
    row: dict[str, Any] = {"case": trial.case, "pass": trial.name, "kind": type(trial.candidate).__name__}
    row["tiling"] = None if trial.candidate is None else trial.candidate._asdict()
    for output in passes.outputs[trial.name]:
        output.fill_(float("nan"))
    try:
        with tiled(trial.name, trial.candidate):
            row["seconds"] = cuda_timer(lambda: passes.run(trial.name), LEAST_S)
    except Exception as error:  # whatever Triton raises: too much shared memory, mostly
        return {**row, "error": f"{type(error).__name__}: {str(error)[:200]}"}
    results = passes.outputs[trial.name]
    row["difference"] = max(relative(x, y.double()) for x, y in zip(results, wanted, strict=True))
    return row


def measure(trials: Sequence[Trial], sizes: tuple[int, int], ends: Callable[[], bool]) -> list[dict[str, Any]]:
    """A row per trial, as far as there is time."""
    rows: list[dict[str, Any]] = []
    device = torch.device("cuda", torch.cuda.current_device())
    for name in dict.fromkeys(trial.case for trial in trials):
        torch.manual_seed(0)
        passes = Passes(case_of(name), *sizes, device)
        passes.run("keys")
        wanted = {key: tuple(x.clone() for x in outputs) for key, outputs in passes.outputs.items()}
        for trial in trials:
            if trial.case != name or ends():
                continue
            rows.append(timed(passes, trial, wanted[trial.name]))
            for output, value in zip(passes.outputs[trial.name], wanted[trial.name], strict=True):
                output.copy_(value)  # later passes read what earlier ones leave
    return rows


def summary(rows: Sequence[dict[str, Any]], sizes: tuple[int, int]) -> list[str]:
    """The fastest tiles of every pass, and what a window costs over its price."""
    lines, best = [], {}
    for case, name in dict.fromkeys((row["case"], row["pass"]) for row in rows):
        right = [
            row for row in rows if (row["case"], row["pass"]) == (case, name) and row.get("difference", 1.0) < 1e-2
        ]
        right.sort(key=lambda row: row["seconds"])
        best[case, name] = [row["seconds"] for row in right[:1]]
        for row in (*right[:4], *(row for row in right[4:] if row["tiling"] is None)):
            lines.append(f"{case:20}{name:9}{1e3 * row['seconds']:8.4f} ms  {row['difference']:.1e}  {row['tiling']}")
    for case in {case for case, _ in best}:
        if not case.endswith(", window") or (plain := case.removesuffix(", window")) not in {c for c, _ in best}:
            continue
        share = case_of(case).flops(*sizes)[0] / case_of(plain).flops(*sizes)[0]
        for names in (("forward",), ("queries", "keys")):
            taken, whole = (sum(sum(best.get((each, name), [])) for name in names) for each in (case, plain))
            if whole:
                lines.append(f"{case}: {' and '.join(names)} take {taken / whole / share:.2f} of their price")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="cases by name", default=TRIED)
    parser.add_argument("--most-s", type=float, default=120.0, help="no further candidate is timed after so long")
    parser.add_argument("--json", default=None, help="write the figures to this file")
    args = parser.parse_args(arguments)
    begin = time.monotonic()
    chosen = [case for name in args.only for case in CASES if case.name == name]
    if wrong := sorted(set(args.only) - {case.name for case in chosen}):
        parser.error(f"--only names {', '.join(wrong)}; there are: {', '.join(case.name for case in CASES)}")
    require_gpu("bench.attention_tilings")
    trials = [Trial(case.name, name, each) for case in chosen for name in PASSES for each in candidates(case, name)]
    compile_all(compile_trials, trials)
    compile_s, sizes = time.monotonic() - begin, (args.tokens, args.seq_len)
    print(f"compiled {len(trials)} candidates in {compile_s:.0f} s", flush=True)
    with torch.no_grad():
        rows = measure(trials, sizes, lambda: time.monotonic() - begin > args.most_s)
    lines = summary(rows, sizes)
    print("\n".join(lines))
    results = {"tokens": args.tokens, "seq_len": args.seq_len, "compile_s": compile_s, "summary": lines, "rows": rows}
    write_json(args.json, results)


if __name__ == "__main__":
    main()
