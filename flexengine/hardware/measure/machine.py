"""Measures what no model changes: the link, host memory, updates by the CPU, and a GPU's largest product."""

import logging
import math
import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.hardware.card_watch import CardWatch, mean_mhz
from flexengine.hardware.curve import Points
from flexengine.hardware.machine_rates import MachineRates
from flexengine.hardware.measure.host import (
    adamw_rates,
    adamw_work,
    copy_curve,
    engine_threads,
    host_copy_curve,
    working_bytes,
)
from flexengine.hardware.measure.links import BesideRates, LinkRates, SweptLink, link_buffers, link_rates, rates_beside
from flexengine.hardware.measure.timing import Spent, cuda_timer, timed_calls
from flexengine.hardware.memory_usage import hold_cublas_workspace, release_unused_heap
from flexengine.hardware.parts import HostProfile, LinkProfile
from flexengine.native import allocate_host
from flexengine.optim.adamw import AdamW, adamw_update
from flexengine.optim.rule import Update

MIB = 2**20
SUSTAINED_S = 1.2
"""To heat up, and again to measure. A power-capped H100 multiplied 8192^3 at 721 TFLOP/s for 0.7 s, then at 583 to 709
in swings of 1 s that died away in 6 s, and at 671 from then on; from 1.2 s to 2.4 it did 676
(bench/results/h100_sustained_rate.json)."""
CLOCK_EVERY_S = 0.2
"""Seconds between readings of the clock meanwhile, of which products of milliseconds take no notice."""
CALL_S = 0.06  # shorter runs catch the card between two clocks
UPDATE_SHARE, UPDATE_ROUNDS = 2 / 3, 3
"""Of that time for an update by the CPU, and times that all kinds take turns: where others share the host, some runs of
0.06 s take twice as long as most do, and one run for each kind would tell that of this kind alone."""
COPY_BYTES = 256 * MIB
LINK_BYTES = 128 * MIB  # page-locked, in either direction
PIECE_BYTES = 32 * MIB  # of what AdamW works on, copied beside it
LEAST_HOST_BYTES, MOST_HOST_BYTES = 192 * MIB, 704 * MIB
MEMORY_SHARE = 0.8  # of the free memory, where that is less than a benchmark would like
LEAST_CUBE_BYTES = 1024 * MIB  # free memory for 8192^3 in 16 bits, three times 128 MiB, with room for the rest
NUM_ISSUED, TIMES_ISSUED = 300, 9
"""So many calls, so many times: of one time each, on a host that others share, some probes took up to four times as
long as most did."""

logger = logging.getLogger(__name__)


class HostRates(NamedTuple):
    """Rates of copies in host memory by threads, of AdamW by state dtype, and of the link alone and beside AdamW."""

    copies: Points
    adamw: tuple[tuple[str, float], ...]
    links: LinkRates
    beside: BesideRates


def measure_machine(
    device: torch.device, dtype: torch.dtype, host_free_bytes: int, scale: float = 1.0,
    beside: Callable[[], object] = lambda: None,
) -> MachineRates:  # fmt: skip
    """Measure what no model changes: link, host, and the GPU's largest product; `scale` stretches what is sustained.

    beside: called when the host is measured, for work of other processes beside what the GPU does.
    Takes up to 0.6 GiB of GPU memory, and of page-locked host memory 256 MiB, then up to MOST_HOST_BYTES (less if less
    is free), and gives all of it back to the allocators. Host memory comes first, while the process holds nothing else.
    Order: runs on the current stream of `device` and synchronises. The device should be idle otherwise.
    """
    least_s, spent = CALL_S * scale, Spent()
    with torch.cuda.device(device), torch.no_grad():
        host = _host_rates(device, dtype, host_free_bytes, least_s, spent)
        beside()
        release_unused_heap()
        torch.cuda.empty_cache()  # or cuBLAS would keep a workspace within what the links' benchmark took
        with spent.part("calls"):
            run_engine_kernels(device, dtype)
            calls_s = _host_calls(device)
        with spent.part("large product"):
            memory_rate = _device_copy_rate(device, least_s)
            with CardWatch(device, every_s=CLOCK_EVERY_S) as card:
                peak = cube_rate(device, dtype, SUSTAINED_S * scale)
        with spent.part("calls"):
            launch_s, issue_s = map(min, calls_s, _host_calls(device))
    logger.info("measured the machine in %s", spent.describe())
    link = host.links._asdict()
    curves = (*link.pop("curves"), host_copy_curve(host.copies))
    return MachineRates(
        LinkProfile(**link, **host.beside._asdict()),
        HostProfile(host.copies[-1][1], host.adamw, launch_s, issue_s),
        memory_rate,
        peak,
        mean_mhz(card.take()),
        curves,
    )


def run_engine_kernels(device: torch.device, dtype: torch.dtype) -> None:
    """Load what every engine loads and no benchmark does: Triton with one kernel, cuBLAS with its workspace.

    The workspace comes first of all, so that it lies in a segment of its own and not in one that could be given back.
    """
    hold_cublas_workspace(device, dtype)
    names = ("weights", "exp_avg", "exp_avg_sq", "grad")
    planes = {name: torch.zeros(1024, device=device, dtype=dtype) for name in names}
    adamw_update(Update(planes, torch.ones(1, device=device), AdamW(), 0.0, 0.0, step=1, seed=0, element_offset=0))
    torch.cuda.synchronize(device)


def cube_rate(device: torch.device, dtype: torch.dtype, sustained_s: float) -> float:
    """Measure FLOP/s of 8192^3 (4096^3 for wider types) on random data for `sustained_s`, after as long to heat up."""
    size = 8192 if dtype.itemsize <= 2 and free_bytes(device) >= LEAST_CUBE_BYTES else 4096
    multiply = square_product(size, device, dtype)
    once_s = cuda_timer(multiply, sustained_s)
    return 2 * size**3 / timed_calls(multiply, math.ceil(sustained_s / once_s))


def square_product(size: int, device: torch.device, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Make a function that issues one product of two square matrices of random data."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(a)
    return lambda: torch.mm(a, b.T, out=product)


def free_bytes(device: torch.device) -> int:
    """Read what torch's allocator may still take: free memory, or what a cap on this process leaves."""
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)
    return min(free_bytes, int(fraction * total_bytes) - torch.cuda.memory_reserved(device))


def _device_copy_rate(device: torch.device, least_s: float) -> float:
    """Measure bytes read plus bytes written per second by copies within the device, larger than its cache."""
    num_bytes = _copy_bytes(free_bytes(device))
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / cuda_timer(lambda: target.copy_(source), least_s)


def _copy_bytes(free_bytes: int) -> int:
    """Choose the size of the largest copies: two buffers of it stay within a share of the free memory."""
    return min(COPY_BYTES, max(MIB, int(MEMORY_SHARE * free_bytes) // 2))


def _host_calls(device: torch.device) -> tuple[float, float]:
    """Measure seconds from one small kernel to the next, and those that the host takes to issue a command.

    Called seconds apart, as neighbours on a host may keep it busy for all of one call: a command then took up to three
    times as long.
    """
    return _launch_seconds(device), _issue_seconds(device)


def _launch_seconds(device: torch.device) -> float:
    """Measure seconds from one small kernel to the next, issued from Python with nothing to hide behind."""
    counter = torch.zeros(1, device=device)
    timed_calls(lambda: counter.add_(1), NUM_ISSUED)  # loads the kernel and warms Python up
    return median(timed_calls(lambda: counter.add_(1), NUM_ISSUED) for _ in range(TIMES_ISSUED))


def _issue_seconds(device: torch.device) -> float:
    """Measure host seconds per command as the executor issues it: choose a stream, wait, bind views, launch, record."""
    stream, waited, done = torch.cuda.current_stream(device), torch.cuda.Event(), torch.cuda.Event()
    arena = torch.zeros(3 * 64 * 64, device=device)
    waited.record(torch.cuda.Stream(device))

    def command() -> None:
        torch.cuda.set_stream(stream)
        stream.wait_event(waited)
        views = {i: arena.as_strided((64, 64), (64, 1), i * 64 * 64) for i in range(3)}
        torch.add(views[0], views[1], out=views[2])
        done.record(stream)

    def seconds(count: int) -> float:
        start_s = time.perf_counter()
        for _ in range(count):
            command()
        issued_s = time.perf_counter() - start_s
        torch.cuda.synchronize(device)
        return issued_s / count

    seconds(NUM_ISSUED // 10)
    return median(seconds(NUM_ISSUED) for _ in range(TIMES_ISSUED))


def _host_rates(
    device: torch.device, dtype: torch.dtype, host_free_bytes: int, least_s: float, spent: Spent
) -> HostRates:
    """Measure host memory and the link to it, each alone and both together."""
    most_bytes = _copy_bytes(min(host_free_bytes // 2, free_bytes(device)))
    with spent.part("link"), link_buffers(min(LINK_BYTES, most_bytes), device) as buffers:
        links = link_rates(buffers, device)
    work_bytes = working_bytes(LEAST_HOST_BYTES, min(MOST_HOST_BYTES, int(MEMORY_SHARE * host_free_bytes) // 2))
    with allocate_host(max(MIB, work_bytes // 2 * 2), page_locked=True) as work:
        with spent.part("host memory"):
            source, target = work.tensor.chunk(2)
            copies = copy_curve(target, source, least_s)
        with spent.part("updates"):
            adamw = adamw_rates(dtype, work.tensor, UPDATE_SHARE * least_s, UPDATE_ROUNDS)
        with spent.part("link beside updates"), engine_threads():
            updates = adamw_work(dtype, work.tensor, adamw).call
            link = SweptLink(work.tensor, min(PIECE_BYTES, most_bytes, work.tensor.numel() // 2), device)
            beside = rates_beside(link, device, updates, least_s)
    return HostRates(copies, adamw, links, beside)
