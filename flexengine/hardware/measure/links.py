"""Measures the link to page-locked host memory: each direction alone, both at once, and beside work of the CPU."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from statistics import fmean, median
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flexengine.hardware.curve import Curve
from flexengine.hardware.measure.timing import ISSUE_S, cpu_timer, hold_stream, timed_calls
from flexengine.native import allocate_host

MIB = 2**20
SIZES = (2**16, 2**18, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 128 * MIB)
LATENCY_SIZE = MIB  # the fixed part of a copy is read from copies of this size
LEAST_COPIES, MOST_COPIES = 4, 64
BESIDE_COPIES, BESIDE_ROUNDS = 96, 3  # long enough for several calls of what the CPU does


class LinkRates(NamedTuple):
    """Bytes per second of the largest copies, fixed seconds per copy, and rates by size."""

    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    h2d_duplex_bytes_per_s: float
    d2h_duplex_bytes_per_s: float
    copy_latency_s: float
    curves: tuple[Curve, ...]


class Link(Protocol):
    """Copies of up to `num_bytes` bytes between page-locked host memory and the device, on the current stream."""

    @property
    def num_bytes(self) -> int: ...

    def upward(self, num_bytes: int) -> Callable[[], object]:
        """Make a function that copies the first `num_bytes` to the device."""
        ...

    def downward(self, num_bytes: int) -> Callable[[], object]:
        """Make a function that copies the first `num_bytes` to the host."""
        ...


class LinkBuffers(NamedTuple):
    """uint8 tensors of one length: page-locked host memory to read and to write, and their device counterparts.

    A `Link` of torch's own copies.
    """

    up_host: Tensor
    up_gpu: Tensor
    down_gpu: Tensor
    down_host: Tensor

    @property
    def num_bytes(self) -> int:
        """Length of each tensor."""
        return self.up_host.numel()

    def upward(self, num_bytes: int) -> Callable[[], object]:
        """Make a function that copies the first `num_bytes` to the device."""
        target, source = self.up_gpu[:num_bytes], self.up_host[:num_bytes]
        return lambda: target.copy_(source, non_blocking=True)

    def downward(self, num_bytes: int) -> Callable[[], object]:
        """Make a function that copies the first `num_bytes` to the host."""
        target, source = self.down_host[:num_bytes], self.down_gpu[:num_bytes]
        return lambda: target.copy_(source, non_blocking=True)


class SweptLink:
    """A `Link` that goes through page-locked host memory piece by piece, so that no cache holds what it copies.

    host: uint8, of two pieces or more; what it holds becomes zeros. num_bytes: of a piece.
    """

    def __init__(self, host: Tensor, num_bytes: int, device: torch.device) -> None:
        self._pieces = [piece for piece in host.split(num_bytes) if len(piece) == num_bytes]
        self._on_gpu = torch.zeros(2, num_bytes, dtype=torch.uint8, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of a piece."""
        return self._on_gpu.shape[1]

    def upward(self, num_bytes: int) -> Callable[[], object]:
        """Make a function that copies the first `num_bytes` of the next piece to the device."""
        target, pieces = self._on_gpu[0, :num_bytes], cycle(self._pieces)
        return lambda: target.copy_(next(pieces)[:num_bytes], non_blocking=True)

    def downward(self, num_bytes: int) -> Callable[[], object]:
        """Make a function that copies `num_bytes` zeros to the next piece, half-way through the memory at first."""
        half = len(self._pieces) // 2
        source, pieces = self._on_gpu[1, :num_bytes], cycle(self._pieces[half:] + self._pieces[:half])
        return lambda: next(pieces)[:num_bytes].copy_(source, non_blocking=True)


@contextmanager
def link_buffers(num_bytes: int, device: torch.device) -> Iterator[LinkBuffers]:
    """Allocate page-locked and device memory of this size, with random contents."""
    with allocate_host(num_bytes, page_locked=True) as up, allocate_host(num_bytes, page_locked=True) as down:
        up_gpu = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        down_gpu = torch.empty_like(up_gpu).random_()
        up.tensor.copy_(down_gpu)
        try:
            yield LinkBuffers(up.tensor, up_gpu, down_gpu, down.tensor)
        finally:
            torch.cuda.synchronize(device)  # whatever failed: nothing may be on its way when host memory goes


def link_rates(link: Link, device: torch.device, sizes: Sequence[int] | None = None) -> LinkRates:
    """Measure copies of every size that the link takes, on two streams beside the current one.

    sizes: default SIZES; LATENCY_SIZE must be among them. Order: synchronises the device before and after.
    """
    streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
    sizes = [size for size in sizes or SIZES if size <= link.num_bytes]
    seconds: dict[str, list[float]] = {name: [] for name in CURVE_NAMES}
    for size in sizes:
        up, down = link.upward(size), link.downward(size)
        for name, pair in zip(CURVE_NAMES, ((up,), (down,), (up, down), (down, up)), strict=True):
            seconds[name].append(_copy_seconds(streams, size, *pair))
    return _link_rates(sizes, seconds)


class BesideRates(NamedTuple):
    """Bytes per second of copies beside work of the CPU, the other direction busy or (`only`) idle, and the share of
    its speed that the work keeps while both directions are busy."""

    h2d_beside_cpu_bytes_per_s: float
    d2h_beside_cpu_bytes_per_s: float
    h2d_only_beside_cpu_bytes_per_s: float
    d2h_only_beside_cpu_bytes_per_s: float
    cpu_share_beside_link: float


def rates_beside(link: Link, device: torch.device, work: Callable[[], object], least_s: float) -> BesideRates:
    """Measure copies while this thread calls `work` again and again, and what that loses.

    No cache should hold what is copied (`SweptLink`): 32 MiB that are copied again and again move a third faster than
    what a step copies. least_s: of the work alone. All takes turns BESIDE_ROUNDS times, of which the medians count.
    Order: synchronises the device before and after, also where something fails.
    """
    streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
    up, down = link.upward(link.num_bytes), link.downward(link.num_bytes)
    rates: dict[tuple, list[float]] = {pair: [] for pair in ((up, down), (down, up), (up,), (down,))}
    shares = list[float]()
    try:
        for _ in range(BESIDE_ROUNDS):
            alone_s, calls_s = cpu_timer(work, least_s), list[float]()
            for pair, found in rates.items():
                meanwhile = partial(_timed, work, calls_s if len(pair) == 2 else [])
                found.append(link.num_bytes / _copy_seconds(streams, link.num_bytes, *pair, meanwhile=meanwhile))
            shares.append(min(1.0, alone_s / fmean(calls_s or [alone_s])))  # none where copies end at once
    finally:
        torch.cuda.synchronize(device)  # nothing may be on its way when host memory goes
    return BesideRates(*map(median, rates.values()), cpu_share_beside_link=median(shares))


def _timed(work: Callable[[], object], seconds: list[float]) -> None:
    """Call `work`, and note what it takes."""
    start_s = time.perf_counter()
    work()
    seconds.append(time.perf_counter() - start_s)


CURVE_NAMES = ("host to device", "device to host", "host to device, both busy", "device to host, both busy")


def _link_rates(sizes: Sequence[int], seconds: dict[str, list[float]]) -> LinkRates:
    """Compute rates from the seconds of one copy by curve and size."""
    curves = tuple(
        Curve(name, "bytes", "bytes/s", tuple((size, size / s) for size, s in zip(sizes, seconds[name], strict=True)))
        for name in CURVE_NAMES
    )
    largest = [curve.points[-1][1] for curve in curves]
    overheads = [
        seconds[name][sizes.index(LATENCY_SIZE)] - LATENCY_SIZE / rate
        for name, rate in zip(CURVE_NAMES[:2], largest[:2], strict=True)
    ]
    return LinkRates(*largest, copy_latency_s=max(sum(overheads) / 2, 1e-7), curves=curves)


def _copy_seconds(
    streams: tuple[torch.cuda.Stream, torch.cuda.Stream],
    size: int,
    copy: Callable[[], object],
    opposite: Callable[[], object] | None = None,
    meanwhile: Callable[[], object] | None = None,
) -> float:
    """Measure seconds per `copy` on the first stream.

    `opposite` runs on the second stream from before until after the copies, and this thread calls `meanwhile`. All
    copies are issued while the streams are held, so that short ones follow each other as fast as the link takes them.
    """
    copies = min(max(LEAST_COPIES, 64 * MIB // size), MOST_COPIES) if meanwhile is None else BESIDE_COPIES
    opposites = 0 if opposite is None else 3 * copies + 1  # outlasts the copies unless it is three times as fast
    copy()
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        hold_stream((copies + opposites) * ISSUE_S)
        gate = torch.cuda.Event()
        gate.record()
    if opposite is not None:
        with torch.cuda.stream(streams[1]):
            streams[1].wait_event(gate)
            for _ in range(opposites):
                opposite()
    with torch.cuda.stream(streams[0]):
        seconds = timed_calls(copy, copies, meanwhile)
    torch.cuda.synchronize()
    return seconds
