"""Measures a GPU and its host, in an order that keeps the card at its sustained clock.

Random data throughout: zeros draw less power and make a power-capped card look faster than it is in training.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.hardware.card_watch import CardWatch, mean_mhz
from flexengine.hardware.curve import Curve, Points
from flexengine.hardware.measure.attention import (
    AttentionRates,
    errors_of,
    fastest_first,
    fitting_rows,
    kernel_rates,
    mixed_rates,
    plain_rates,
    rates_of,
    serves,
    shape_of,
)
from flexengine.hardware.measure.experts import grouped_shares
from flexengine.hardware.measure.head import head_shares
from flexengine.hardware.measure.host import (
    adamw_rates,
    adamw_work,
    copy_curve,
    engine_threads,
    host_copy_curve,
    working_bytes,
)
from flexengine.hardware.measure.links import BesideRates, LinkRates, SweptLink, link_buffers, link_rates, rates_beside
from flexengine.hardware.measure.matmul import (
    BlockRates,
    Buffers,
    affordable_tokens,
    block_rates,
    scaling_shares,
    usual_layers,
)
from flexengine.hardware.measure.timing import Timer, cuda_timer, timed_calls, timer_among, warmed_timer
from flexengine.hardware.memory_usage import hold_cublas_workspace, release_unused_heap
from flexengine.hardware.parts import AttentionProfile, HostProfile, LinkProfile, MatmulProfile, MemoryProfile
from flexengine.hardware.profile import DeviceType, HardwareProfile, ProbeShape
from flexengine.native import allocate_host
from flexengine.ops.attention.choice import KERNEL_NAMES, AttentionChoice
from flexengine.ops.attention.kernels import runs_on
from flexengine.ops.attention.style import AttentionShape
from flexengine.ops.fp8 import multiplies_fp8
from flexengine.ops.fp8_scaling import FORWARD_DTYPE, MULTIPLE
from flexengine.ops.linear_shape import LinearShape
from flexengine.optim.adamw import AdamW, adamw_update
from flexengine.optim.rule import Update

logger = logging.getLogger(__name__)

MIB = 2**20
CUDA_TOKENS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
FP8_TOKENS = (512, 2048, 8192, 32768)
FP8_SHARE_TOKENS = (2048, 8192)
FP8_PIECE = 16 * MIB  # elements
KERNEL_LENGTHS, PLAIN_LENGTHS = (512, 2048, 8192, 32768), (512, 2048)
ATTENTION_ERROR = 0.02  # relative, of kernels in 16 bits; a few thousandths are usual
SUSTAINED_S = 1.2
"""To heat up, and again to measure. A power-capped H100 multiplied 8192^3 at 721 TFLOP/s for 0.7 s, then at 583 to 709
in swings of 1 s that died away in 6 s, and at 671 from then on; from 1.2 s to 2.4 it did 676
(bench/results/h100_sustained_rate.json)."""
CLOCK_EVERY_S = 0.2
"""Seconds between readings of the clock meanwhile, of which products of milliseconds take no notice."""
PRODUCT_S = 0.04  # per pass and direction, of all layers: six of them, a quarter of a second, make a point of the curve
GROUPED_S = 0.01  # per pass of a shape of experts, and of the head
CALL_S = 0.06  # shorter runs catch the card between two clocks
UPDATE_SHARE, UPDATE_ROUNDS = 2 / 3, 5
"""Of that time for an update by the CPU, and times that all kinds take turns: where others share the host, some runs of
0.06 s take twice as long as most do, and one run for each kind would tell that of this kind alone."""
COPIED_SHARE = 0.15
"""Of the time, copies within the device beside products, as norms and activations take it in training: they draw less
power, so that the card has a higher clock for products than if these were alone."""
PART_S = 0.01  # of attention, and of matrix products before it: about as a block has them in turn
WARMING_SIZE = 4096
LONGEST_BLOCK_S = 0.5  # token counts whose three passes through a block take longer are left out
OPERAND_BYTES, RESULT_BYTES = 832 * MIB, 576 * MIB
COPY_BYTES = 256 * MIB
LINK_BYTES = 128 * MIB  # page-locked, in either direction
PIECE_BYTES = 32 * MIB  # of what AdamW works on, copied beside it
LEAST_HOST_BYTES, MOST_HOST_BYTES = 192 * MIB, 704 * MIB
MEMORY_SHARE = 0.8  # of the free memory, where that is less than a benchmark would like
LEAST_CUBE_BYTES = 1024 * MIB  # free memory for 8192^3 in 16 bits, three times 128 MiB, with room for the rest
NUM_ISSUED, TIMES_ISSUED = 300, 9
"""So many calls, so many times: of one time each, on a host that others share, some probes took up to four times as
long as most did."""


class Rates(NamedTuple):
    """What is measured of a `HardwareProfile`."""

    matmul: MatmulProfile
    attention: AttentionProfile
    link: LinkProfile
    host: HostProfile
    memory_bytes_per_s: float
    curves: tuple[Curve, ...]

    def profile(self, name: str, device_type: DeviceType, *sizes: int) -> HardwareProfile:
        """The profile of a machine with these rates; sizes: those of `MemoryProfile`, in their order."""
        memory = MemoryProfile(self.memory_bytes_per_s, *sizes)
        parts = (self.matmul, self.attention, self.link, self.host, memory)
        return HardwareProfile(name, device_type, "measured", *parts, curves=self.curves)


class HostRates(NamedTuple):
    """Rates of copies in host memory by threads, of AdamW by state dtype, and of the link alone and beside AdamW."""

    copies: Points
    adamw: tuple[tuple[str, float], ...]
    links: LinkRates
    beside: BesideRates


def measure_cuda(
    device: torch.device, dtype: torch.dtype, shape: ProbeShape, host_free_bytes: int, scale: float = 1.0
) -> Rates:
    """Measure a GPU and its link, in about 15 s on a current card; `scale` stretches the sustained measurements.

    Takes up to 1.4 GiB of GPU memory, and of page-locked host memory 256 MiB, then up to MOST_HOST_BYTES (less if less
    is free), and gives all of it back to the allocators. Host memory comes first, while the process holds nothing else.
    Order: runs on the current stream of `device` and synchronises. The device should be idle otherwise.
    """
    least_s = CALL_S * scale
    with torch.cuda.device(device), torch.no_grad():
        host = _host_rates(device, dtype, host_free_bytes, least_s)
        release_unused_heap()
        torch.cuda.empty_cache()  # or cuBLAS would keep a workspace within what the links' benchmark took
        run_engine_kernels(device, dtype)
        calls_s = _host_calls(device)
        memory_rate = _device_copy_rate(device, least_s)
        with CardWatch(device, every_s=CLOCK_EVERY_S) as card:
            peak = cube_rate(device, dtype, SUSTAINED_S * scale)
        layers = shape.linears or usual_layers(shape[:2])
        counts = affordable_tokens(CUDA_TOKENS, layers, peak, LONGEST_BLOCK_S)
        product_s = PRODUCT_S * scale / len(layers)
        # at once, while the card is still at its sustained clock
        block = _linear_rates(layers, counts, dtype, _cuda_buffers(device, dtype), product_s)
        fp8, *fp8_shares = _fp8_rates(layers, counts, device, product_s)
        experts, head = _shares(shape, block.matmul_flops_per_s, memory_rate, dtype, device, GROUPED_S * scale)
        attention, choices = _cuda_attention(shape, device, dtype, least_s)
        launch_s, issue_s = map(min, calls_s, _host_calls(device))
    link = host.links._asdict()
    curves = (*block.curves, *link.pop("curves"), host_copy_curve(host.copies))
    return Rates(
        MatmulProfile(
            block.matmul_flops_per_s, fp8, shape[:2], peak, experts, head, mean_mhz(card.take()), *fp8_shares
        ),
        AttentionProfile(attention.forward, attention.backward, shape.head_dim, attention.kernels, choices),
        LinkProfile(**link, **host.beside._asdict()),
        HostProfile(host.copies[-1][1], host.adamw, launch_s, issue_s),
        memory_rate,
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
    size = 8192 if dtype.itemsize <= 2 and _free_bytes(device) >= LEAST_CUBE_BYTES else 4096
    multiply = _square_product(size, device, dtype)
    once_s = cuda_timer(multiply, sustained_s)
    return 2 * size**3 / timed_calls(multiply, math.ceil(sustained_s / once_s))


def _square_product(size: int, device: torch.device, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Make a function that issues one product of two square matrices of random data."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(a)
    return lambda: torch.mm(a, b.T, out=product)


def _free_bytes(device: torch.device) -> int:
    """Read what torch's allocator may still take: free memory, or what a cap on this process leaves."""
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)
    return min(free_bytes, int(fraction * total_bytes) - torch.cuda.memory_reserved(device))


def _cuda_buffers(device: torch.device, dtype: torch.dtype) -> Buffers:
    """Allocate operands and results for products, within a share of the free memory."""
    share = min(1.0, MEMORY_SHARE * _free_bytes(device) / (OPERAND_BYTES + RESULT_BYTES))
    operands = torch.randn(int(share * OPERAND_BYTES) // dtype.itemsize, device=device, dtype=dtype)
    return Buffers(operands, torch.empty(int(share * RESULT_BYTES), device=device, dtype=torch.uint8))


def _linear_rates(
    layers: Sequence[LinearShape], counts: Sequence[int], dtype: torch.dtype, buffers: Buffers, least_s: float
) -> BlockRates:
    """Measure linear layers among copies, as the kernels between them are in training."""
    half = buffers.operands.numel() // 2
    first, second = buffers.operands[:half], buffers.operands[half : 2 * half]
    timer = timer_among(lambda: first.copy_(second), COPIED_SHARE)
    return block_rates(layers, counts, dtype, buffers, timer, least_s)


def _fp8_rates(
    layers: Sequence[LinearShape], counts: list[int], device: torch.device, least_s: float
) -> tuple[Points, Points, Points]:
    """Measure linear layers with FP8 operands, at sizes that FP8 can have, and shares of that rate with scales of rows
    and of blocks; none on a card without FP8."""
    if not multiplies_fp8(device):
        return (), (), ()
    counts = [tokens for tokens in FP8_TOKENS if tokens <= max(counts)] or list(FP8_TOKENS[:1])
    buffers = _in_fp8(_cuda_buffers(device, torch.bfloat16))
    whole = [
        layer._replace(in_features=_whole(layer.in_features), out_features=_whole(layer.out_features))
        for layer in layers
    ]
    rates = _linear_rates(whole, counts, FORWARD_DTYPE, buffers, least_s).matmul_flops_per_s
    few = [tokens for tokens in counts if tokens in FP8_SHARE_TOKENS] or counts[:1]
    by_rows = _fp8_shares(whole, few, "fp8-rowwise-gw-hp", buffers, least_s)
    return rates, by_rows, _fp8_shares(whole, few, "fp8-blockwise", buffers, least_s)


def _fp8_shares(
    layers: Sequence[LinearShape], counts: list[int], matmul: str, buffers: Buffers, least_s: float
) -> Points:
    """Measure shares of the FP8 rate with other scales, between products; none, and why, where the card takes none."""
    try:
        return scaling_shares(layers, counts, matmul, buffers, cuda_timer, least_s)
    except RuntimeError as error:
        logger.warning("%s is not measured: this card's libraries refuse it: %s", matmul, error)
        return ()


def _whole(features: int) -> int:
    """Round features down to a multiple that FP8 operands may have."""
    return max(MULTIPLE, features // MULTIPLE * MULTIPLE)


def _shares(
    shape: ProbeShape, matmul: Points, memory_rate: float, dtype: torch.dtype, device: torch.device, least_s: float
) -> tuple[Points, Points]:
    """Measure products of experts and of the head between others, as a step has them, within a share of the free
    memory."""
    timer = warmed_timer(_products(device, dtype, PART_S), PART_S)
    most_bytes = min(OPERAND_BYTES + RESULT_BYTES, int(MEMORY_SHARE * _free_bytes(device)))
    limits = (matmul, memory_rate, dtype, device, most_bytes, timer, least_s)
    experts = grouped_shares(shape.experts, *limits) if shape.experts else ()
    return experts, head_shares(shape.head, *limits) if shape.head else ()


def _in_fp8(buffers: Buffers) -> Buffers:
    """Round operands to FP8 in place, piece by piece from the front.

    FP8 takes fewer bytes, so a piece overwrites only operands that were read before, and no second buffer is needed.
    """
    target, start = buffers.operands.view(torch.uint8), 0
    for piece in buffers.operands.split(FP8_PIECE):
        target[start : start + len(piece)] = piece.to(FORWARD_DTYPE).view(torch.uint8)
        start += len(piece)
    return Buffers(target[:start].view(FORWARD_DTYPE), buffers.results)


def _cuda_attention(
    shape: ProbeShape, device: torch.device, dtype: torch.dtype, least_s: float
) -> tuple[AttentionRates, tuple[AttentionChoice, ...]]:
    """Measure attention of all shapes of a model: their rates together, and the fastest kernels for each.

    Calls run between matrix products, so that a power-capped card has the clock that it has in training.
    """
    timer = warmed_timer(_products(device, dtype, PART_S), PART_S)
    shapes = shape.attention or ((shape_of(shape.head_dim), 1),)
    parts, choices = [], []
    for each, heads in shapes:
        found = _attention_rates(each, device, dtype, timer, least_s)
        if found:
            choice = fastest_first(each, found)
            parts.append((each, heads, rates_of(choice, found)))
            choices.append(choice)
    if parts:
        return mixed_rates(parts), tuple(choices)
    return plain_rates(PLAIN_LENGTHS, 16, shape.head_dim, device, dtype, timer, least_s), ()


def _attention_rates(
    shape: AttentionShape, device: torch.device, dtype: torch.dtype, timer: Timer, least_s: float
) -> list[AttentionRates]:
    """Measure all kernels that give the right answer for a shape; none where heads, dtype or card have no kernels."""
    found: list[AttentionRates] = []
    rows = fitting_rows(shape.head_dim, int(MEMORY_SHARE * _free_bytes(device)))
    for kernels in KERNEL_NAMES if device.type == "cuda" else ():
        if not runs_on(kernels, device) or not serves(kernels, dtype, shape, KERNEL_LENGTHS[0]):
            continue
        try:
            if all(error(kernels, shape, device, dtype) <= ATTENTION_ERROR for error in errors_of(kernels)):
                found.append(kernel_rates(kernels, KERNEL_LENGTHS, shape, device, dtype, timer, least_s, rows))
        except (RuntimeError, NotImplementedError):  # an older card
            pass
        torch.cuda.empty_cache()
    return found


def _products(device: torch.device, dtype: torch.dtype, seconds: float) -> Callable[[], None]:
    """Make a function that issues matrix products of random data for about so many seconds."""
    multiply = _square_product(WARMING_SIZE, device, dtype)
    calls = math.ceil(seconds / cuda_timer(multiply, seconds))

    def products() -> None:
        for _ in range(calls):
            multiply()

    return products


def _device_copy_rate(device: torch.device, least_s: float) -> float:
    """Measure bytes read plus bytes written per second by copies within the device, larger than its cache."""
    num_bytes = _copy_bytes(_free_bytes(device))
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


def _host_rates(device: torch.device, dtype: torch.dtype, host_free_bytes: int, least_s: float) -> HostRates:
    """Measure host memory and the link to it, each alone and both together."""
    most_bytes = _copy_bytes(min(host_free_bytes // 2, _free_bytes(device)))
    with link_buffers(min(LINK_BYTES, most_bytes), device) as buffers:
        links = link_rates(buffers, device)
    work_bytes = working_bytes(LEAST_HOST_BYTES, min(MOST_HOST_BYTES, int(MEMORY_SHARE * host_free_bytes) // 2))
    with allocate_host(max(MIB, work_bytes // 2 * 2), page_locked=True) as work:
        source, target = work.tensor.chunk(2)
        copies = copy_curve(target, source, least_s)
        adamw = adamw_rates(dtype, work.tensor, UPDATE_SHARE * least_s, UPDATE_ROUNDS)
        updates = adamw_work(dtype, work.tensor, adamw).call
        link = SweptLink(work.tensor, min(PIECE_BYTES, most_bytes, work.tensor.numel() // 2), device)
        with engine_threads():
            beside = rates_beside(link, device, updates, least_s)
    return HostRates(copies, adamw, links, beside)
