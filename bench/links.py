"""What do the links carry, alone and while the host is at work? Needs an NVIDIA GPU.

    python -m bench.links --json out.json

1. Page-locked copies of 64 KiB to 1 GiB in both directions, alone and while the other one is busy: as the engine's
   programs issue them (submitted to the transfer engine), and torch's own copies beside them.
2. Copies within host memory by 1, 2, 4, ... threads: bytes read plus bytes written per second.
3. Together: each direction and both, submitted to the transfer engine, while nothing else runs, while all threads copy
   within host memory, and while they run AdamW; the rate of each, and the host memory traffic of all of them. What
   AdamW must move counts as in bench.cpu_adamw.
4. Beside AdamW as the probe measures it: the same 32 MiB again and again, which caches keep, and one piece after
   another of what AdamW works on, of which they keep the more the less that is; and the share of its speed that AdamW
   keeps.
"""

from __future__ import annotations

import argparse
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from bench.cpu_adamw import MODES, native_update, planes_of
from bench.environment import require_gpu, write_json
from flexengine.hardware.measure.host import adamw_rates, adamw_work, copy_curve, engine_threads
from flexengine.hardware.measure.links import (
    Link,
    LinkBuffers,
    LinkRates,
    SweptLink,
    link_buffers,
    link_rates,
    rates_beside,
)
from flexengine.hardware.measure.machine import MOST_HOST_BYTES, PIECE_BYTES
from flexengine.hardware.measure.timing import cpu_timer
from flexengine.native import allocate_host
from flexengine.native.adamw import instruction_sets
from flexengine.native.transfer import open_transfers
from flexengine.native.transfer_operations import Copy, PreparedOperations, Transfers

KIB, MIB, GIB = 2**10, 2**20, 2**30
SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB)
COPY_BYTES = 64 * MIB  # about a millisecond, so that rates over a second are exact to 0.1%
COPIES_IN_FLIGHT = 2  # per direction: one under way, one to follow without a gap
HOST_COPY_BYTES = 512 * MIB
ADAMW_MODE = "split master, bf16 states, bf16 gradient"
ADAMW_PARAMETERS = 2**26
BESIDE_SIZES = (192 * MIB, 512 * MIB, MOST_HOST_BYTES, 2 * GIB)
SECONDS = 1.0

Direction = Literal["h2d", "d2h"]
DIRECTIONS: tuple[Direction, ...] = ("h2d", "d2h")


class EngineLink:
    """A `Link` whose copies are prepared once and submitted to the transfer engine, on whatever stream is current."""

    def __init__(self, buffers: LinkBuffers, transfers: Transfers) -> None:
        self._buffers, self._transfers = buffers, transfers

    @property
    def num_bytes(self) -> int:
        return self._buffers.num_bytes

    def upward(self, num_bytes: int) -> Callable[[], object]:
        return self._copy(self._buffers.up_gpu, self._buffers.up_host, num_bytes)

    def downward(self, num_bytes: int) -> Callable[[], object]:
        return self._copy(self._buffers.down_host, self._buffers.down_gpu, num_bytes)

    def _copy(self, target: Tensor, source: Tensor, num_bytes: int) -> Callable[[], object]:
        prepared: dict[int, PreparedOperations] = {}

        def submit() -> None:
            stream = torch.cuda.current_stream()
            if stream.cuda_stream not in prepared:
                copy = Copy(stream, target, 0, source, 0, num_bytes)
                prepared[stream.cuda_stream] = self._transfers.prepare([copy])
            self._transfers.submit(prepared[stream.cuda_stream])

        return submit


class Together(NamedTuple):
    """Bytes per second of what ran at the same time; 0 for what did not. `host_work` names the host's part."""

    host_work: str
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    host_work_bytes_per_s: float

    @property
    def host_memory_bytes_per_s(self) -> float:
        """All traffic of host memory."""
        return self.h2d_bytes_per_s + self.d2h_bytes_per_s + self.host_work_bytes_per_s


class HostWork(NamedTuple):
    """Work of all threads on host memory, and the bytes that a call reads and writes."""

    name: str
    call: Callable[[], object]
    num_bytes: int


class Pump:
    """Keeps one direction busy from a thread of its own; `moved_bytes` counts what has arrived.

    Every direction has an engine of its own, since only one thread at a time may use an engine. The thread sleeps while
    it waits: a spinning one would take a core from the host's work.
    """

    def __init__(self, transfers: Transfers, copy: Copy) -> None:
        self.moved_bytes = 0
        self._transfers, self._copy = transfers, copy
        self._stop, self._thread = threading.Event(), threading.Thread(target=self._run, name="pump")
        self._error: Exception | None = None

    def __enter__(self) -> Pump:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            for tensor in (self._copy.target, self._copy.source):
                if tensor.is_cuda:
                    torch.cuda.set_device(tensor.device)
            batch = self._transfers.prepare([self._copy])
            resting, flying = [torch.cuda.Event(blocking=True) for _ in range(COPIES_IN_FLIGHT)], []
            while flying or not self._stop.is_set():
                while resting and not self._stop.is_set():
                    self._transfers.submit(batch)
                    flying.append(resting.pop())
                    flying[-1].record(self._copy.stream)
                if flying:
                    flying[0].synchronize()
                    resting.append(flying.pop(0))
                    self.moved_bytes += self._copy.num_bytes
        except Exception as error:  # told to the thread that started this one
            self._error = error


def together(
    engines: dict[Direction, Transfers], copies: dict[Direction, Copy], work: HostWork | None, seconds: float
) -> Together:
    """Rates of the copies and of `work` while all of them run, over at least `seconds`."""
    with ExitStack() as stack:
        pumps = {d: stack.enter_context(Pump(engines[d], copy)) for d, copy in copies.items()}
        time.sleep(seconds / 10)  # all under way
        before, start_s = {d: pump.moved_bytes for d, pump in pumps.items()}, time.perf_counter()
        call_s = cpu_timer(work.call, seconds) if work else time.sleep(seconds)
        moved = {d: pump.moved_bytes - before[d] for d, pump in pumps.items()}
        elapsed_s = time.perf_counter() - start_s
    h2d, d2h = (moved.get(direction, 0) / elapsed_s for direction in DIRECTIONS)
    host = work.num_bytes / call_s if work and call_s else 0.0
    return Together("" if work is None else work.name, h2d, d2h, host)


def pumped_copies(buffers: LinkBuffers) -> dict[Direction, Copy]:
    """One copy per direction for `Pump`, each on a stream of its own."""
    size = min(COPY_BYTES, buffers.num_bytes)
    return {
        "h2d": Copy(torch.cuda.Stream(), buffers.up_gpu, 0, buffers.up_host, 0, size),
        "d2h": Copy(torch.cuda.Stream(), buffers.down_host, 0, buffers.down_gpu, 0, size),
    }


def all_together(
    engines: dict[Direction, Transfers], copies: dict[Direction, Copy], works: Sequence[HostWork], seconds: float
) -> Iterator[Together]:
    """Every set of directions with every work of the host and without, but for nothing at all."""
    sets: list[tuple[Direction, ...]] = [(), ("h2d",), ("d2h",), DIRECTIONS]
    for directions, work in itertools.product(sets, [None, *works]):
        if directions or work:
            yield together(engines, {d: copies[d] for d in directions}, work, seconds)


@contextmanager
def host_works(copy_bytes: int, num_parameters: int) -> Iterator[list[HostWork]]:
    """A copy within host memory of `copy_bytes`, and AdamW where its native library is built."""
    mode = MODES[ADAMW_MODE]
    with allocate_host(2 * copy_bytes, page_locked=False) as buffer, planes_of(mode, num_parameters) as planes:
        source, target = buffer.tensor.chunk(2)
        works = [HostWork("host copy", lambda: target.copy_(source), 2 * copy_bytes)]
        if instruction_sets():
            update = native_update(planes, torch.get_num_threads())
            works.append(HostWork("AdamW", update, num_parameters * mode.bytes_per_parameter))
        yield works


def all_beside(
    device: torch.device, sizes: Sequence[int], piece_bytes: int, seconds: float
) -> dict[str, dict[str, float]]:
    """Rates of pieces beside AdamW by how many bytes it works on, and parameters/s of it alone; of the same piece again
    and again beside the first size, and of one after another of what it works on."""
    dtype, least_s, found = torch.bfloat16, seconds / 10, {}
    with allocate_host(max(sizes), page_locked=True) as memory, link_buffers(piece_bytes, device) as buffers:
        known = adamw_rates(dtype, memory.tensor[: sizes[0]], least_s)
        swept = [(f"of {size / MIB:g} MiB", size) for size in sizes]
        for name, size in [("the same again", sizes[0]), *swept]:
            part = memory.tensor[:size]
            link: Link = SweptLink(part, piece_bytes, device) if found else buffers
            with engine_threads():
                work = adamw_work(dtype, part, known)
                alone = work.parameters / cpu_timer(work.call, least_s)
                rates = rates_beside(link, device, work.call, least_s)
            found[name] = {**rates._asdict(), "adamw_parameters_per_s": alone}
    return found


def beside_table(rates: dict[str, dict[str, float]]) -> str:
    """GB/s of copies beside AdamW, its share, and its G parameters/s alone."""
    lines = [f"{'pieces':16}{'H2D':>7}{'D2H':>7}{'H2D only':>10}{'D2H only':>10}{'AdamW':>7}{'alone':>7}   GB/s, G/s"]
    for name, found in rates.items():
        *links, share, alone = found.values()
        figures = "".join(f"{rate / 1e9:>{width}.1f}" for rate, width in zip(links, (7, 7, 10, 10), strict=True))
        lines.append(f"{name:16}{figures}{100 * share:>6.0f}%{alone / 1e9:>7.2f}")
    return "\n".join(lines)


def size_table(rates: dict[str, LinkRates]) -> str:
    """GB/s by size, one column per way of copying and curve."""
    columns = [(way, curve) for way, rate in rates.items() for curve in rate.curves]
    heads = [f"{way}: {curve.name}" for way, curve in columns]
    lines = [f"  ({letter}) {head}" for letter, head in zip("abcdefghijkl", heads, strict=False)]
    lines.append(
        f"{'GB/s of copies of':>18}" + "".join(f"{f'({letter})':>8}" for letter in "abcdefghijkl"[: len(heads)])
    )
    for index, (size, _) in enumerate(columns[0][1].points):
        row = "".join(f"{curve.points[index][1] / 1e9:8.2f}" for _, curve in columns)
        lines.append(f"{size // KIB:>14} KiB{row}")
    return "\n".join(lines)


def together_table(rows: Sequence[Together]) -> str:
    """GB/s of everything that ran at once."""
    lines = [f"{'host work':12}{'H2D':>9}{'D2H':>9}{'host work':>11}{'host memory':>13}   GB/s, all at the same time"]
    for row in rows:
        rates = (row.h2d_bytes_per_s, row.d2h_bytes_per_s, row.host_work_bytes_per_s, row.host_memory_bytes_per_s)
        figures = "".join(f"{rate / 1e9:>{width}.1f}" for rate, width in zip(rates, (9, 9, 11, 13), strict=True))
        lines.append(f"{row.host_work or '-':12}{figures}")
    return "\n".join(lines)


def measure(device: torch.device, most_bytes: int, seconds: float) -> dict:
    """All four parts, printed as they come and returned ready for JSON."""
    sizes = [size for size in SIZES if size <= most_bytes]
    engines: dict[Direction, Transfers] = {direction: open_transfers(device) for direction in DIRECTIONS}
    try:
        with link_buffers(sizes[-1], device) as buffers, host_works(HOST_COPY_BYTES, ADAMW_PARAMETERS) as works:
            links: dict[str, Link] = {"engine": EngineLink(buffers, engines["h2d"]), "torch": buffers}
            rates = {way: link_rates(link, device, sizes) for way, link in links.items()}
            print(size_table(rates), flush=True)
            half = buffers.down_host[: sizes[-1] // 2]
            points = copy_curve(half, buffers.up_host[: half.numel()], seconds / 4)
            print("\n" + "\n".join(f"host copy, {n} threads: {rate / 1e9:.1f} GB/s" for n, rate in points), flush=True)
            rows = list(all_together(engines, pumped_copies(buffers), works, seconds))
            print("\n" + together_table(rows), flush=True)
        beside = all_beside(device, BESIDE_SIZES, PIECE_BYTES, seconds)
        print("\n" + beside_table(beside))
    finally:
        for transfers in engines.values():
            transfers.close()
    return {
        "transfers": type(engines["h2d"]).__name__,
        "threads": torch.get_num_threads(),
        "by_size": {way: [asdict(curve) for curve in rate.curves] for way, rate in rates.items()},
        "copy_latency_s": {way: rate.copy_latency_s for way, rate in rates.items()},
        "host_copy": points,
        "beside_adamw": beside,
        "together": [
            {**row._asdict(), "host_memory_bytes_per_s": row.host_memory_bytes_per_s} for row in rows
        ],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most-mib", type=int, default=1024, help="largest copy; twice as much is page-locked")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="least time of everything that runs together")
    parser.add_argument("--json", default=None, help="write the figures to this file")
    args = parser.parse_args()
    if args.most_mib < 1 or args.seconds <= 0:
        parser.error(f"--most-mib is {args.most_mib} and --seconds {args.seconds:g}; expected at least 1, and above 0")
    require_gpu("bench.links")
    device = torch.device("cuda", torch.cuda.current_device())
    write_json(args.json, measure(device, args.most_mib * MIB, args.seconds))


if __name__ == "__main__":
    main()
