"""How close is every kernel to the speed of device memory, and where does a block's time go? Needs an NVIDIA GPU.

    python -m bench.kernels --model preset:llama-3.1-8b --tokens 16384 --json out.json

First table: every Triton kernel on normal random data at the model's shapes; median milliseconds of calls that find
nothing in the cache (a buffer of several times its size is read before each), the bytes that the kernel must move (each
input read once, each output written once, by the formula beside it), GB/s, and its share of what a copy of 1 GiB within
device memory reaches (read plus written) in the same run. Rows under 80% are marked. The error is against the plain
path on the CPU, on other and less data. Letters: T tokens, D width, F FFN width, N query and G key/value heads, R
rotated columns, B tokens of a block of logits, V vocabulary, n parameters of a block, P partial sums.

Second table: every op of a block (--block N, where they differ) as training calls it, back to back; TFLOP/s of
products and attention, and microseconds per token of matmuls (with the copies of their residuals), attention (with its
copies) and the rest.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from bench.block_ops import KINDS, OpTime, block_times, microseconds_per_token
from bench.environment import require_gpu, write_json
from bench.kernel_case import Case, Random, Sizes, check_error, has_gated_unit, sizes_of
from bench.kernel_cases import kernel_cases
from flexengine.hardware.measure.timing import Timer, cuda_timer, hold_stream
from flexengine.models.matmul_dtype import with_matmul_dtype
from flexengine.models.registry import open_model
from flexengine.plan import MatmulDtype

MIB = 2**20
COPY_BYTES = 1024 * MIB
FLUSH_BYTES = 256 * MIB  # read before each timed call, and at least CACHES_PER_FLUSH times the card's cache
CACHES_PER_FLUSH = 4
WARM_UP_CALLS, TIMED_CALLS = 3, 25
HOST_S_PER_CALL = 400e-6  # a generous estimate of what Python needs to issue one timed call and what belongs to it
LEAST_S = 0.1  # of every op of the block, back to back
LOW_SHARE = 0.8
MOST_ERROR = 5e-3  # bf16 results that were rounded once or twice differ by less; a wrong kernel is far beyond
TIMED_SEED, CHECK_SEED = 0, 1
CHECK_TOKENS, CHECK_PARAMETERS = 1003, 3_000_017  # no multiples of any tile
BLOCK = "block"
"""What --only calls the second table."""


class Row(NamedTuple):
    """One kernel's figures."""

    name: str
    seconds: float
    num_bytes: int
    formula: str
    share: float
    error: float
    note: str

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.seconds

    @property
    def wrong(self) -> bool:
        """Also when the error is NaN."""
        return not self.error <= MOST_ERROR


ColdTimer = Callable[[Callable[[], object], Callable[[], object]], float]
"""(run, prepare) -> median seconds of `run`, each call after an untimed `prepare` and with a cold cache."""


def cold_timer(device: torch.device) -> ColdTimer:
    """Times by CUDA events on the current stream, behind a gate, so that no gap of the host lies between them."""
    cache_bytes = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
    flush = torch.zeros(int(max(FLUSH_BYTES, CACHES_PER_FLUSH * cache_bytes)) // 4, device=device)

    def timer(run: Callable[[], object], prepare: Callable[[], object]) -> float:
        for _ in range(WARM_UP_CALLS):
            prepare()
            run()
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(TIMED_CALLS)]
        hold_stream(TIMED_CALLS * HOST_S_PER_CALL)
        for start, end in pairs:
            prepare()
            flush.sum()  # a read leaves nothing behind that would have to be written during the timed call
            start.record()
            run()
            end.record()
        torch.cuda.synchronize(device)
        return statistics.median(start.elapsed_time(end) for start, end in pairs) / 1e3

    return timer


def copy_rate(device: torch.device) -> float:
    """Bytes read plus bytes written per second by a large copy within device memory."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / cuda_timer(lambda: target.copy_(source), LEAST_S)


def measure_case(case: Case, device: torch.device, timer: ColdTimer) -> float:
    """Seconds of a case; what it changes in place is restored before each call."""
    tensors = case.make(Random(device, TIMED_SEED))
    originals: dict[str, Tensor] = {name: tensors[name].clone() for name in case.in_place}

    def restore() -> None:
        for name, original in originals.items():
            tensors[name].copy_(original)

    return timer(lambda: case.run(tensors), restore)


def kernel_rows(
    sizes: Sizes, names: Sequence[str], device: torch.device, timer: ColdTimer, memory_bytes_per_s: float
) -> list[Row]:
    """The named kernels, timed at `sizes` and checked on less."""
    checked = {case.name: case for case in kernel_cases(sizes.cut(CHECK_TOKENS, CHECK_PARAMETERS))}
    rows = []
    for case in kernel_cases(sizes):
        if case.name not in names:
            continue
        error = check_error(checked[case.name], device, CHECK_SEED)
        seconds = measure_case(case, device, timer)
        share = case.num_bytes / seconds / memory_bytes_per_s
        rows.append(Row(case.name, seconds, case.num_bytes, case.formula, share, error, case.note))
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def kernel_table(rows: Sequence[Row]) -> str:
    """One line per kernel; the slow and the wrong are marked."""
    lines = [f"{'kernel':34}{'ms':>9}{'MB':>9}{'GB/s':>8}{'share':>7}{'error':>10}  bytes"]
    for row in rows:
        figures = f"{1e3 * row.seconds:9.3f}{row.num_bytes / 1e6:9.1f}{row.bytes_per_s / 1e9:8.0f}{row.share:7.0%}"
        marks = [f"  <- under {LOW_SHARE:.0%}"] * (row.share < LOW_SHARE) + ["  <- WRONG"] * row.wrong
        note = f" ({row.note})" if row.note else ""
        lines.append(f"{row.name:34}{figures}{row.error:10.1e}  {row.formula}{''.join(marks)}{note}")
    return "\n".join(lines)


def block_table(times: Sequence[OpTime], tokens: int) -> str:
    """One line per op and half, then microseconds per token by pass and kind."""
    lines = [f"{'op':16}{'half':17}{'ms':>9}{'TFLOP/s':>9}{'GB/s':>8}"]
    for time in times:
        rate = f"{time.flops_per_s / 1e12:9.1f}" if time.flops else " " * 9
        memory = f"{time.memory_bytes / time.seconds / 1e9:8.0f}" if time.memory_bytes and not time.flops else ""
        lines.append(f"{time.op:16}{time.half:17}{1e3 * time.seconds:9.3f}{rate}{memory}")
    lines.append("")
    lines.append(f"{'us per token':16}" + "".join(f"{kind:>12}" for kind in (*KINDS, "all")))
    for name, totals in microseconds_per_token(list(times), tokens).items():
        lines.append(f"{name:16}" + "".join(f"{total:12.4f}" for total in totals.values()))
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; an unknown kernel or a number of tokens that is no multiple of a sequence ends it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="preset:llama-3.1-8b", help="whose shapes")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens of a sequence, for attention")
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"kernels by name, and {BLOCK} for the second table")
    parser.add_argument("--block", type=int, default=0, metavar="N", help="which one the second table is of, from 0")
    parser.add_argument(
        "--matmul-dtype", choices=get_args(MatmulDtype), default="compute", help="of the block's linear layers"
    )
    parser.add_argument("--json", default=None, help="write the figures to this file")
    args = parser.parse_args(arguments)
    if args.tokens < 1 or args.seq_len < 1 or args.tokens % args.seq_len:
        parser.error(f"--tokens is {args.tokens}; expected a multiple of --seq-len, {args.seq_len}")
    return args


def chosen(names: Sequence[str] | None, known: Sequence[str]) -> Sequence[str]:
    """What --only names, all by default. Raises: SystemExit naming what there is."""
    unknown = sorted(set(names or ()) - set(known))
    if unknown:
        raise SystemExit(f"--only names {', '.join(unknown)}; there are: {', '.join(known)}")
    return names or known


class Clock(NamedTuple):
    """What the two tables are timed with, and the rate that kernels are held against."""

    cold: ColdTimer
    back_to_back: Timer
    memory_bytes_per_s: float


def measure(args: argparse.Namespace, device: torch.device, clock: Clock) -> tuple[dict, list[Row]]:
    """Both tables as far as --only wants them, printed; returned ready for JSON, and the rows of the first.

    Raises: SystemExit for a name or a block that there is not.
    """
    spec = with_matmul_dtype(open_model(args.model, needs_weights=False).spec, args.matmul_dtype)
    if not 0 <= args.block < len(spec.blocks):
        raise SystemExit(f"--block is {args.block}; {args.model} has {len(spec.blocks)} blocks, counted from 0")
    sizes = sizes_of(spec, args.tokens) if has_gated_unit(spec) else None
    cases = [] if sizes is None else kernel_cases(sizes)
    names = chosen(args.only, [*(case.name for case in cases), BLOCK])
    results: dict = {"model": args.model, "tokens": args.tokens, "seq_len": args.seq_len, "of_block": args.block}
    rate = clock.memory_bytes_per_s
    print(f"copy within device memory: {rate / 1e9:.0f} GB/s, read plus written\n", flush=True)
    rows = [] if sizes is None else kernel_rows(sizes, names, device, clock.cold, rate)
    print(kernel_table(rows), flush=True)
    results |= {"copy_bytes_per_s": rate, "kernels": [row_json(row) for row in rows]}
    if sizes is not None:
        results["sizes"] = sizes._asdict()
    if BLOCK in names:
        sizes_of_chunk, dtype = (args.tokens, args.seq_len), torch.bfloat16
        times = block_times(spec, *sizes_of_chunk, device, dtype, clock.back_to_back, LEAST_S, args.block)
        print("\n" + block_table(times, args.tokens))
        results["block"] = [time._asdict() for time in times]
        results["block_us_per_token"] = microseconds_per_token(times, args.tokens)
    return results, rows


def main() -> None:
    """Measure, print, write; ends with 1 if a kernel's results are wrong."""
    args = parse()
    require_gpu("bench.kernels")
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.no_grad():
        results, rows = measure(args, device, Clock(cold_timer(device), cuda_timer, copy_rate(device)))
    write_json(args.json, results)
    if any(row.wrong for row in rows):
        sys.exit("a kernel's results differ from the plain path's; see the marked rows")


def row_json(row: Row) -> dict:
    """A row with its rate."""
    return {**row._asdict(), "bytes_per_s": row.bytes_per_s}


if __name__ == "__main__":
    main()
