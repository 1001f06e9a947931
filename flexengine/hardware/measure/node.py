"""Measures what one of several ranks of a node reaches while all others do the same on their GPUs.

Ranks that wait for each other are at work together, so what counts is what all of them reach at once: links share host
memory, and sometimes a switch, and cards may be slower where all of them multiply.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple, Protocol, TypeVar

import torch

from flexengine.hardware.measure.host import AdamWork, adamw_work, engine_threads, working_bytes
from flexengine.hardware.measure.links import Link, SweptLink
from flexengine.hardware.measure.machine import LEAST_HOST_BYTES, LINK_BYTES, MOST_HOST_BYTES, SUSTAINED_S, cube_rate
from flexengine.hardware.measure.timing import cpu_timer, timed_calls
from flexengine.native import allocate_host

MIB = 2**20
SHARE_OF_FREE = 0.3
"""Of the host memory that is free for a rank: what it works on there."""
LINK_S, HOST_S = 0.3, 0.4

T = TypeVar("T")


class AtOnce(Protocol):
    """Has all ranks do something at the same time, and gives what this one's call gives. Raises what one raises."""

    def __call__(self, call: Callable[[], T]) -> T: ...


class MeasuredRank(NamedTuple):
    """Rates of a rank under the names of `RankRates`, and the kind of states that were updated."""

    rates: dict[str, float]
    adamw_state: str


class _Work(NamedTuple):
    """What a rank copies and updates. link: copies of what it updates, which no cache holds."""

    link: Link
    copy: Callable[[], object]
    copied_bytes: int
    adamw: AdamWork


def measure_at_work(
    device: torch.device,
    dtype: torch.dtype,
    adamw_rates: tuple[tuple[str, float], ...],
    free_bytes: int,
    at_once: AtOnce,
) -> MeasuredRank:
    """Measure a rank's host memory, link and products with all others, in about five seconds.

    adamw_rates: as one rank alone measured them. free_bytes: of host memory, for this rank. Takes twice LINK_BYTES of
    the GPU's memory, then what a large product takes, and at most MOST_HOST_BYTES of host memory, page-locked; gives
    all of it back. Copies go through all of that, as steps go through more than the host's caches hold.
    Order: all ranks make this call together; synchronises.
    """
    with ExitStack() as held, torch.cuda.device(device), torch.no_grad():
        work = at_once(lambda: _made(held, device, dtype, adamw_rates, free_bytes))
        with engine_threads():
            copy_s = at_once(lambda: cpu_timer(work.copy, HOST_S))
            update_s = at_once(lambda: cpu_timer(work.adamw.call, HOST_S))
            h2d = _copied(work.link, at_once, up=True)
            d2h = _copied(work.link, at_once, down=True)
            duplex = _copied(work.link, at_once, up=True, down=True)
            beside = _copied(work.link, at_once, up=True, down=True, meanwhile=work.adamw.call)
        matmul = at_once(lambda: cube_rate(device, dtype, SUSTAINED_S))
        rates = {
            "h2d_bytes_per_s": h2d[0],
            "d2h_bytes_per_s": d2h[0],
            "h2d_duplex_bytes_per_s": duplex[0],
            "d2h_duplex_bytes_per_s": duplex[1],
            "h2d_beside_cpu_bytes_per_s": beside[0],
            "d2h_beside_cpu_bytes_per_s": beside[1],
            "host_copy_bytes_per_s": work.copied_bytes / copy_s,
            "adamw_parameters_per_s": work.adamw.parameters / update_s,
            "matmul_flops_per_s": matmul,
        }
        return MeasuredRank(rates, work.adamw.state)


def _made(
    held: ExitStack,
    device: torch.device,
    dtype: torch.dtype,
    adamw_rates: tuple[tuple[str, float], ...],
    free_bytes: int,
) -> _Work:
    """Allocate what is copied and updated, until `held` ends."""
    share = int(SHARE_OF_FREE * free_bytes)
    num_bytes = max(MIB, working_bytes(LEAST_HOST_BYTES, min(MOST_HOST_BYTES, share)))
    memory = held.enter_context(allocate_host(num_bytes // 2 * 2, page_locked=True)).tensor
    held.callback(torch.cuda.synchronize, device)  # whatever failed: nothing may be on its way when host memory goes
    source, target = memory.chunk(2)
    link = SweptLink(memory, min(LINK_BYTES, memory.numel() // 2), device)
    adamw = adamw_work(dtype, memory, adamw_rates)
    return _Work(link, lambda: target.copy_(source), 2 * source.numel(), adamw)


def _copied(
    link: Link,
    at_once: AtOnce,
    up: bool = False,
    down: bool = False,
    meanwhile: Callable[[], object] | None = None,
) -> list[float]:
    """Bytes per second to the device, or to the host, or both at the same time, while all ranks copy."""
    ways = [link.upward(link.num_bytes)] * up + [link.downward(link.num_bytes)] * down

    def alone_s() -> list[float]:
        for way in ways:
            way()
        return [timed_calls(way, 2) for way in ways]

    calls = [max(2, math.ceil(LINK_S / seconds)) for seconds in at_once(alone_s)]
    seconds = at_once(lambda: _busy_seconds(ways, calls, meanwhile))
    return [link.num_bytes / s for s in seconds]


def _busy_seconds(
    ways: Sequence[Callable[[], object]], calls: Sequence[int], meanwhile: Callable[[], object] | None
) -> list[float]:
    """Seconds per call of each, on streams of their own at the same time; this thread calls `meanwhile` until then.

    As many calls again follow, because other ranks may still be timing theirs.
    """
    timed = []
    for way, count in zip(ways, calls, strict=True):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(torch.cuda.Stream()):
            start.record()
            for _ in range(count):
                way()
            end.record()
            for _ in range(count):
                way()
        timed.append((start, end, count))
    while meanwhile is not None and not all(end.query() for _, end, _ in timed):
        meanwhile()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 / count for start, end, count in timed]
