"""Collectives of the ranks of a node, as split plans make them: are they right, how fast, alone and beside products?"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.cuda import nccl

from bench.rank_processes import save
from flexengine.hardware.measure.timing import ISSUE_S, MOST_SHORT_CALLS, hold_stream
from flexengine.hardware.memory_usage import gpu_used_bytes, resident_bytes
from flexengine.hardware.nodes import PEER_MEMORY_BYTES
from flexengine.parallel.collectives import Collectives
from flexengine.parallel.team import Team

MIB = 2**20
SIZES = (MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 512 * MIB)
SMALL_SIZES = (2**16, MIB)
TABLE_BYTES = (8, MIB)
"""Of sums: one number, and partial sums of squares of 128 runs."""
BESIDE_BYTES = (64 * MIB, 256 * MIB)
PRODUCT_SIZE, PRODUCTS = 8192, 12
LEAST_S = 0.03
ODD_PIECE = 4099
"""Elements of pieces that differ from rank to rank, and whose addresses no kernel likes."""


class Call(NamedTuple):
    """A call that all ranks make, and the bytes that this rank receives from the others."""

    name: str
    num_bytes: int
    received_bytes: int
    call: Callable[[], object]


class Streams(NamedTuple):
    """Streams of a GPU: of products, of collectives as the executor has it, and one of the usual priority."""

    compute: torch.cuda.Stream
    comm: torch.cuda.Stream
    equal: torch.cuda.Stream


class Bench:
    """The calls of one rank, its buffers, and what it has found."""

    def __init__(self, team: Team, device: torch.device, small: bool, out: Path) -> None:
        self.team, self.device, self._out = team, device, out
        self.on_cuda = device.type == "cuda"
        self.rank, self.size = team.ranks.rank, team.ranks.size
        self.sizes = SMALL_SIZES if small else SIZES
        self.found: dict[str, Any] = {"environment": _environment()}
        if self.on_cuda:
            self.streams = Streams(*(torch.cuda.Stream(device, priority=p) for p in (0, -1, 0)))
            self.found["version"] = ".".join(map(str, nccl.version()))

    def run(self) -> dict[str, Any]:
        """All measurements, written to the file after each."""
        if self.on_cuda:
            self._load_kernels()
        before = self._memory()
        start = time.perf_counter()
        self.collectives = Collectives(self.team.control, self.device, self.team.watch)
        self._note("connect_s", time.perf_counter() - start)
        way = self.collectives.way
        self._note("way", way)
        assumed = 0 if way == "host" else PEER_MEMORY_BYTES[way]
        self._note("memory", {"before": before, "connected": self._memory(), "assumed": assumed})
        most = self.sizes[-1]
        memory = torch.empty(2 * most, dtype=torch.uint8, device=self.device)
        self.collectives.share(memory)
        self.shares, self.received = memory[:most], memory[most:].view(torch.float32)
        self._note("right", self.check())
        self.shares.random_()
        self.received.normal_()
        self.sent = torch.empty_like(self.received).normal_()
        self._note("alone", [self.alone(call) for call in self.calls()])
        if self.on_cuda:
            self._note("beside", self.beside())
            self.found["memory"]["used"] = self._memory()
        start = time.perf_counter()
        self.collectives.close()
        self._note("close_s", time.perf_counter() - start)
        return self.found

    def _note(self, name: str, value: Any) -> None:
        self.found[name] = value
        save(self._out, self.found)

    # ---- what is called -----------------------------------------------------------------------------------------

    def calls(self) -> Iterator[Call]:
        """Every kind of call by size; pieces of exchanges differ from rank to rank, as those of split plans may."""
        for num_bytes in self.sizes:
            yield self.gather(num_bytes)
            yield self.exchange(num_bytes)
        yield from (self.add(num_bytes) for num_bytes in TABLE_BYTES)

    def gather(self, num_bytes: int) -> Call:
        share = num_bytes // self.size // 512 * 512
        shares = self.shares[: share * self.size]
        own = shares[self.rank * share :][:share]
        call = self.collectives.gather
        return Call("gather", share * self.size, share * (self.size - 1), lambda: call(shares, own))

    def exchange(self, num_bytes: int) -> Call:
        piece = num_bytes // 4 // self.size
        counts = [piece] * self.size
        counts[0], counts[-1] = piece - piece // 64, min(piece + piece // 64, self.received.numel() // self.size)
        own, call = counts[self.rank], self.collectives.exchange
        received, sent = self.received[: self.size * own], self.sent[: sum(counts)]
        return Call("exchange", 4 * sum(counts), 4 * own * (self.size - 1), lambda: call(received, sent, counts, own))

    def add(self, num_bytes: int) -> Call:
        table = torch.zeros(num_bytes // 8, dtype=torch.float64, device=self.device)
        moved = 2 * (self.size - 1) * num_bytes // self.size
        return Call("add", num_bytes, moved, lambda: self.collectives.add(table))

    def check(self) -> dict[str, bool]:
        """Whether calls of odd sizes bring the right bytes, also from pieces of which one rank's is empty."""
        generator = torch.Generator().manual_seed(self.team.control.broadcast(int.from_bytes(os.urandom(4), "little")))
        whole = torch.randint(256, (self.size, ODD_PIECE), dtype=torch.uint8, generator=generator)
        shares = self.shares[: whole.numel()].view_as(whole).zero_()
        shares[self.rank] = whole[self.rank].to(self.device)
        self.collectives.gather(shares.view(-1), shares[self.rank])
        found = {"gather": torch.equal(shares.cpu(), whole)}
        for name, last in (("exchange", ODD_PIECE), ("exchange, an empty piece", 0)):
            counts = [ODD_PIECE + 7 * rank for rank in range(self.size - 1)] + [last]
            sent = torch.randn(self.size, sum(counts), generator=generator)
            received = self.received[: self.size * counts[self.rank]].fill_(math.nan)
            self.collectives.exchange(received, sent[self.rank].to(self.device), counts, counts[self.rank])
            expected = torch.cat([row.split(counts)[self.rank] for row in sent])
            found[name] = torch.equal(received.cpu(), expected)
        parts = torch.zeros(self.size, ODD_PIECE, dtype=torch.float64)
        for rank in range(self.size):  # each element is one rank's, as in a table of squares
            parts[rank, rank :: self.size] = torch.randn(len(parts[rank, rank :: self.size]), generator=generator)
        table = parts[self.rank].clone().to(self.device)
        self.collectives.add(table)
        found["add"] = torch.equal(table.cpu(), parts.sum(0))
        return found

    # ---- time ---------------------------------------------------------------------------------------------------

    def alone(self, call: Call) -> dict[str, Any]:
        """Seconds of a call while nothing else runs."""
        if not self.on_cuda:
            return _row(call, self._on_host(call))
        with torch.cuda.stream(self.streams.comm):
            call.call()
            self._meet()
            once_s = self._slowest(_seconds(call.call, 3))
            calls = min(MOST_SHORT_CALLS // 2, max(4, math.ceil(LEAST_S / once_s)))
            self._meet()
            hold_stream(calls * 3 * ISSUE_S)
            return _row(call, _seconds(call.call, calls))

    def _on_host(self, call: Call) -> float:
        call.call()
        self.team.control.barrier()
        start, calls = time.perf_counter(), 5
        for _ in range(calls):
            call.call()
        return (time.perf_counter() - start) / calls

    def beside(self) -> list[dict[str, Any]]:
        """Seconds of calls beside products, and of products beside calls; the calls' stream first, or none first."""
        a, b = (torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        product = torch.empty_like(a)

        def multiply() -> None:
            torch.mm(a, b.T, out=product)

        with torch.cuda.stream(self.streams.compute):
            for _ in range(2):  # the second time at the clock that lasts
                alone_s = self._slowest(_seconds(multiply, 200))
        rows = []
        for num_bytes in (size for size in BESIDE_BYTES if size <= self.sizes[-1]):
            for make in (self.gather, self.exchange):
                call = make(num_bytes)
                call_s = self._slowest(self.alone(call)["seconds"])
                for first, stream in (("collectives", self.streams.comm), ("nothing", self.streams.equal)):
                    calls = min(PRODUCTS, math.ceil(PRODUCTS * alone_s / call_s / 3))
                    slowed = self._beside(stream, call.call, calls, self.streams.compute, multiply, 3 * PRODUCTS)
                    many = max(4, math.ceil(3 * PRODUCTS * alone_s / call_s))
                    product_s = self._beside(self.streams.compute, multiply, PRODUCTS, stream, call.call, many)
                    flops = 2 * PRODUCT_SIZE**3
                    rows.append(
                        {
                            **_row(call, slowed),
                            "first": first,
                            "alone_s": call_s,
                            "product_flops_per_s": flops / product_s,
                            "product_alone_flops_per_s": flops / alone_s,
                        }
                    )
        return rows

    def _beside(
        self, stream: torch.cuda.Stream, timed: Callable[[], object], calls: int,
        other: torch.cuda.Stream, opposite: Callable[[], object], opposites: int,
    ) -> float:  # fmt: skip
        """Seconds of `timed` on one stream while `opposite` runs on another one, from before until after."""
        self._meet()
        with torch.cuda.stream(other):
            for _ in range(opposites):
                opposite()
        with torch.cuda.stream(stream):
            seconds = _seconds(timed, calls)
        torch.cuda.synchronize(self.device)
        return seconds

    def _meet(self) -> None:
        torch.cuda.synchronize(self.device)
        self.team.control.barrier()

    def _slowest(self, seconds: float) -> float:
        """The most of all ranks, so that all make as many calls."""
        return max(self.team.control.gather(seconds))

    # ---- memory -------------------------------------------------------------------------------------------------

    def _load_kernels(self) -> None:
        """Have everything in GPU memory that the calls do not bring."""
        x = torch.ones(64, 64, device=self.device, dtype=torch.bfloat16)
        torch.mm(x, x)
        torch.ones(3, dtype=torch.float64, device=self.device).add_(1).sum().item()
        torch.full((2, 8), 1, dtype=torch.uint8, device=self.device).random_()
        self._meet()

    def _memory(self) -> dict[str, Any]:
        """Bytes in use, without what torch's allocator has: of this process, and of every GPU as this process sees."""
        if not self.on_cuda:
            return {}
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        self.team.control.barrier()
        free, total = torch.cuda.mem_get_info(self.device)
        held = torch.cuda.memory_reserved(self.device)
        found: dict[str, Any] = {"of_process": gpu_used_bytes(self.device) - held, "of_gpu": total - free - held}
        found["resident_on_host"] = resident_bytes()
        self.team.control.barrier()
        return found


def _seconds(work: Callable[[], object], calls: int) -> float:
    """Seconds of a call on the current stream, which are issued without a wait between them."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / calls


def _row(call: Call, seconds: float) -> dict[str, Any]:
    rate = call.received_bytes / max(seconds, 1e-9)
    return {"call": call.name, "bytes": call.num_bytes, "seconds": seconds, "received_bytes_per_s": rate}


def _environment() -> dict[str, str]:
    """What is set that NCCL, or torch about it, reads."""
    return {name: value for name, value in sorted(os.environ.items()) if "NCCL" in name}


def slowest_rows(ranks: Sequence[dict[str, Any]], part: str) -> list[dict[str, Any]]:
    """Of every measurement that of the slowest rank."""
    return [max(rows, key=lambda row: row["seconds"]) for rows in zip(*(r[part] for r in ranks), strict=True)]
