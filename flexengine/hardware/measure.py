"""Short benchmarks of one machine: matrix products, attention, memory, links, overheads.

Random data throughout: zeros draw less power and make a power-capped card look faster than it is in training.
Shapes: T tokens, N query heads, G key/value heads, H head width.
"""

import math
import time
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flexengine.native import allocate_host

MIB = 2**20
CUDA_TOKENS = (256, 512, 1024, 2048, 4096, 8192, 16384)
CPU_TOKENS = (64, 128, 256, 512, 1024, 2048)
SUSTAINED_S = 0.6  # a power-capped H200 needs about 0.1 s to settle at its sustained clock
SHAPE_S = 0.08  # per shape and pass: shorter runs catch the card between two clocks
COPY_BYTES = 128 * MIB


class Rates(NamedTuple):
    """The measured fields of `HardwareProfile`, under the same names and units."""

    matmul_flops_per_s: tuple[tuple[int, float], ...]
    peak_matmul_flops_per_s: float
    attention_forward_flops_per_s: float
    attention_backward_flops_per_s: float
    memory_bytes_per_s: float
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    h2d_duplex_bytes_per_s: float
    d2h_duplex_bytes_per_s: float
    host_bytes_per_s: float
    launch_s: float
    copy_latency_s: float


class LinkRates(NamedTuple):
    """Bytes per second in each direction, alone and with the other busy, and seconds of overhead per copy."""

    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    h2d_duplex_bytes_per_s: float
    d2h_duplex_bytes_per_s: float
    copy_latency_s: float


def measure_cuda(device: torch.device, dtype: torch.dtype, scale: float = 1.0) -> Rates:
    """Rates of a GPU and its link, in about 3 s on a current card; `scale` stretches the sustained measurements.

    Uses up to 1.2 GiB of GPU memory and 256 MiB of page-locked host memory, all given back to the allocators.
    Order: runs on the current stream of `device` and synchronises. The device should be idle otherwise.
    """
    with torch.cuda.device(device), torch.no_grad():
        peak = _cube_rate(device, dtype, SUSTAINED_S * scale)
        curve = _matmul_curve(device, dtype, SHAPE_S * scale)  # at once, while the card is still at its sustained clock
        forward, backward = _attention_rates(device, dtype)
        memory_rate = _device_copy_rate(device)
        links, host_rate = _link_rates(device)
        counter = torch.zeros(1, device=device)
        launch_s = _cuda_seconds(lambda: counter.add_(1), least_s=0.01)
    return Rates(
        matmul_flops_per_s=curve,
        peak_matmul_flops_per_s=peak,
        attention_forward_flops_per_s=forward,
        attention_backward_flops_per_s=backward,
        memory_bytes_per_s=memory_rate,
        host_bytes_per_s=host_rate,
        launch_s=launch_s,
        **links._asdict(),
    )


def measure_cpu(dtype: torch.dtype, scale: float = 1.0) -> Rates:
    """Rates of the CPU backend in about a second: the "GPU" is ordinary memory, so every link is a memory copy."""
    least_s = 0.02 * scale
    with torch.no_grad():
        a, b = (torch.randn(512, 512).to(dtype) for _ in range(2))
        peak = 2 * 512**3 / _cpu_seconds(lambda: torch.mm(a, b), 4 * least_s)
        weight = torch.randn(256, 256).to(dtype)
        curve = tuple((tokens, _cpu_matmul_rate(tokens, weight, least_s)) for tokens in CPU_TOKENS)
        source = torch.randint(256, (64 * MIB,), dtype=torch.uint8)
        target = torch.empty_like(source)
        copy_rate = source.numel() / _cpu_seconds(lambda: target.copy_(source), 2 * least_s)
        small_copy_s = _cpu_seconds(lambda: target[:64].copy_(source[:64]), least_s)
        counter = torch.zeros(1)
        launch_s = _cpu_seconds(lambda: counter.add_(1), least_s)
    forward, backward = _sdpa_rates(
        torch.device("cpu"), dtype, (1, 256, 4, 2, 64), lambda work: _cpu_seconds(work, least_s)
    )
    return Rates(
        matmul_flops_per_s=curve,
        peak_matmul_flops_per_s=peak,
        attention_forward_flops_per_s=forward,
        attention_backward_flops_per_s=backward,
        memory_bytes_per_s=2 * copy_rate,
        h2d_bytes_per_s=copy_rate,
        d2h_bytes_per_s=copy_rate,
        h2d_duplex_bytes_per_s=copy_rate,
        d2h_duplex_bytes_per_s=copy_rate,
        host_bytes_per_s=2 * copy_rate,
        launch_s=launch_s,
        copy_latency_s=small_copy_s,
    )


def _cuda_seconds(work: Callable[[], object], least_s: float) -> float:
    """Device seconds per call of `work`, issued back to back for at least `least_s`, after one call to warm up."""
    work()
    once_s = _timed_calls(work, 1)
    return _timed_calls(work, math.ceil(least_s / once_s))


def _timed_calls(work: Callable[[], object], calls: int) -> float:
    """Mean seconds per call between two events on the current stream."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        work()
    end.record()
    end.synchronize()
    return max(start.elapsed_time(end) / 1e3 / calls, 1e-7)  # events count in ms, to about 0.5 us


def _cpu_seconds(work: Callable[[], object], least_s: float) -> float:
    """Wall seconds per call of `work`, repeated for at least `least_s`, after one call to warm up."""
    work()
    calls = 0
    start_s = time.perf_counter()
    while True:
        work()
        calls += 1
        elapsed_s = time.perf_counter() - start_s
        if elapsed_s >= least_s:
            return elapsed_s / calls


def _cube_rate(device: torch.device, dtype: torch.dtype, sustained_s: float) -> float:
    """FLOP/s of 8192^3 on normal random data, after a quarter of `sustained_s` to heat up."""
    size = 8192
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(a)

    def multiply() -> Tensor:
        return torch.mm(a, b.T, out=product)

    once_s = _cuda_seconds(multiply, sustained_s / 4)
    return 2 * size**3 / _timed_calls(multiply, math.ceil(sustained_s / once_s))


def _matmul_curve(device: torch.device, dtype: torch.dtype, shape_s: float) -> tuple[tuple[int, float], ...]:
    """(tokens, FLOP/s) of an up and a down projection, 4096 -> 14336 -> 4096 as in an 8B model.

    Together the weights are larger than any GPU's cache, so each product reads its weight from memory as in training.
    Long shapes come first and no gap lies between them: a card that cools for a moment bursts above its sustained rate.
    """
    hidden_size, intermediate_size, most_tokens = 4096, 14336, CUDA_TOKENS[-1]
    x = torch.randn(most_tokens, hidden_size, device=device, dtype=dtype)
    up = torch.randn(intermediate_size, hidden_size, device=device, dtype=dtype) / hidden_size**0.5
    down = torch.randn(hidden_size, intermediate_size, device=device, dtype=dtype) / intermediate_size**0.5
    h = torch.empty(most_tokens, intermediate_size, device=device, dtype=dtype)
    y = torch.empty_like(x)

    def project(tokens: int) -> None:
        torch.mm(x[:tokens], up.T, out=h[:tokens])
        torch.mm(h[:tokens], down.T, out=y[:tokens])

    flops_per_token = 4 * hidden_size * intermediate_size
    seconds = dict.fromkeys(CUDA_TOKENS, 0.0)
    for order in (reversed(CUDA_TOKENS), CUDA_TOKENS):  # there and back, so that a drifting clock weighs on all alike
        for tokens in order:
            seconds[tokens] += _cuda_seconds(lambda tokens=tokens: project(tokens), shape_s) / 2
    rates = [tokens * flops_per_token / seconds[tokens] for tokens in CUDA_TOKENS]
    # a longer product is never slower per token than a shorter one: it could be run in parts
    return tuple(zip(CUDA_TOKENS, accumulate(rates, max), strict=True))


def _attention_rates(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Forward and backward FLOP/s of causal attention, 8 sequences of 2048, 32/8 heads of width 128."""
    shape = (8, 2048, 32, 8, 128)
    try:
        return _flash_rates(device, dtype, shape)
    except (RuntimeError, TypeError, NotImplementedError):  # no such kernel for this dtype, card or torch
        return _sdpa_rates(device, dtype, shape, lambda work: _cuda_seconds(work, SHAPE_S))


def _flash_rates(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int, int, int]
) -> tuple[float, float]:
    """Rates of the variable-length flash kernels; shape (sequences, tokens each, N, G, H). Raises: RuntimeError."""
    sequences, length, N, G, H = shape
    T = sequences * length
    q = torch.randn(T, N, H, device=device, dtype=dtype)
    k, v = (torch.randn(T, G, H, device=device, dtype=dtype) for _ in range(2))
    grad_out = torch.randn_like(q)
    offsets = torch.arange(0, T + 1, length, device=device, dtype=torch.int32)
    ragged = (offsets, offsets, length, length, 0.0, True)  # offsets of q and k, longest q and k, dropout, causal

    def forward() -> tuple[Tensor, ...]:
        return torch.ops.aten._flash_attention_forward(q, k, v, *ragged, False)

    out, lse, rng_state, unused, _ = forward()

    def backward() -> tuple[Tensor, ...]:
        return torch.ops.aten._flash_attention_backward(grad_out, q, k, v, out, lse, *ragged, rng_state, unused)

    forward_s, backward_s = _cuda_seconds(forward, SHAPE_S), _cuda_seconds(backward, SHAPE_S)
    return _attention_flops(shape, 2) / forward_s, _attention_flops(shape, 5) / backward_s


def _sdpa_rates(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int, int],
    seconds: Callable[[Callable[[], object]], float],
) -> tuple[float, float]:
    """Rates of torch's own choice of kernel; shape (sequences, tokens each, N, G, H), `seconds` times one call."""
    sequences, length, N, G, H = shape
    q = torch.randn(sequences, N, length, H, device=device, dtype=dtype)
    k, v = (
        torch.randn(sequences, G, length, H, device=device, dtype=dtype).repeat_interleave(N // G, dim=1)
        for _ in range(2)
    )
    grad_out = torch.randn_like(q)

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    with torch.enable_grad():
        inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
        out = forward()
    backward_s = seconds(lambda: torch.autograd.grad(out, inputs, grad_out, retain_graph=True))
    return _attention_flops(shape, 2) / seconds(forward), _attention_flops(shape, 5) / backward_s


def _attention_flops(shape: tuple[int, int, int, int, int], products: int) -> int:
    """FLOPs of causal attention: `products` multiply-adds of width H per head and visible (query, key) pair."""
    sequences, length, N, _, H = shape
    return products * 2 * H * N * sequences * length * (length + 1) // 2


def _device_copy_rate(device: torch.device) -> float:
    """Bytes read plus bytes written per second by copies within the device, larger than its cache."""
    source = torch.empty(256 * MIB, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / _cuda_seconds(lambda: target.copy_(source), SHAPE_S)


def _link_rates(device: torch.device) -> tuple[LinkRates, float]:
    """The link between GPU and host, and bytes read plus written per second by a copy within host memory."""
    streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
    with allocate_host(COPY_BYTES, page_locked=True) as up, allocate_host(COPY_BYTES, page_locked=True) as down:
        up_gpu = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
        down_gpu = torch.empty_like(up_gpu).random_()
        up.tensor.copy_(down_gpu)
        torch.cuda.synchronize(device)

        def h2d() -> None:
            up_gpu.copy_(up.tensor, non_blocking=True)

        def d2h() -> None:
            down.tensor.copy_(down_gpu, non_blocking=True)

        def h2d_small(source: Tensor = up.tensor[:MIB], target: Tensor = up_gpu[:MIB]) -> None:
            target.copy_(source, non_blocking=True)

        h2d_s, d2h_s = _copy_seconds(streams, h2d), _copy_seconds(streams, d2h)
        links = LinkRates(
            h2d_bytes_per_s=COPY_BYTES / h2d_s,
            d2h_bytes_per_s=COPY_BYTES / d2h_s,
            h2d_duplex_bytes_per_s=COPY_BYTES / _copy_seconds(streams, h2d, d2h),
            d2h_duplex_bytes_per_s=COPY_BYTES / _copy_seconds(streams, d2h, h2d),
            copy_latency_s=max(_copy_seconds(streams, h2d_small, copies=64) - h2d_s * MIB / COPY_BYTES, 1e-7),
        )
        host_s = _cpu_seconds(lambda: down.tensor.copy_(up.tensor), SHAPE_S)
        return links, 2 * COPY_BYTES / host_s


def _copy_seconds(
    streams: tuple[torch.cuda.Stream, torch.cuda.Stream],
    copy: Callable[[], None],
    opposite: Callable[[], None] | None = None,
    copies: int = 4,
) -> float:
    """Seconds per `copy` on the first stream, with `opposite` running on the second from before until after."""
    copy()
    torch.cuda.synchronize()
    if opposite is not None:
        with torch.cuda.stream(streams[1]):
            for _ in range(3 * copies + 1):  # outlasts the measured copies unless they are three times slower
                opposite()
    with torch.cuda.stream(streams[0]):
        seconds = _timed_calls(copy, copies)
    torch.cuda.synchronize()
    return seconds


def _cpu_matmul_rate(tokens: int, weight: Tensor, least_s: float) -> float:
    """FLOP/s of x @ weight.T, x [tokens, D], weight [F, D]."""
    x = torch.randn(tokens, weight.shape[1]).to(weight.dtype)
    return 2 * tokens * weight.numel() / _cpu_seconds(lambda: torch.mm(x, weight.T), least_s)
