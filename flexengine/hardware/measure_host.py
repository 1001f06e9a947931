"""The host's own rates: memory copies by threads, and AdamW on parameters and states in host memory."""

from collections.abc import Callable
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.hardware.curve import Curve, Points
from flexengine.hardware.timing import cpu_timer
from flexengine.native import allocate_host
from flexengine.optim.adamw import adamw_update

FIRST_PARAMETERS = 2**18  # a piece that even the plain torch path updates in a fraction of a second
SLOW_PARAMETERS_PER_S = 50e6  # below this a larger piece would take too long, and shows nothing new


class Planes(NamedTuple):
    """What AdamW reads and writes of n parameters; `remainder` as in a split master, or None."""

    weight: Tensor
    remainder: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor
    grad: Tensor


def copy_curve(target: Tensor, source: Tensor, least_s: float) -> Points:
    """(threads, bytes read plus bytes written per second) of a copy by 1, 2, 4, ... and all of torch's threads.

    target and source: uint8 of one length, larger than the processor's caches. Restores the number of threads.
    """
    most = torch.get_num_threads()
    points = []
    try:
        for threads in thread_counts(most):
            torch.set_num_threads(threads)
            seconds = cpu_timer(lambda: target.copy_(source), least_s)
            points.append((threads, 2 * source.numel() / seconds))
    finally:
        torch.set_num_threads(most)
    return tuple(points)


def thread_counts(most: int) -> list[int]:
    """Powers of two below `most`, and `most`."""
    return [*takewhile(lambda count: count < most, (2**power for power in range(20))), most]


def host_copy_curve(points: Points) -> Curve:
    """The curve of `copy_curve` for people."""
    return Curve("host memory copy", "threads", "bytes/s", points)


def adamw_rates(dtype: torch.dtype, num_parameters: int, least_s: float) -> tuple[tuple[str, float], ...]:
    """(state dtype, parameters/s) of the engine's update for masters as they come with `dtype`, by all threads but one,
    which the engine leaves to the host.

    bfloat16 compute has split masters and bf16 gradients, float32 and float64 have whole ones. `num_parameters` should
    exceed the processor's caches; where the native update is missing, a smaller piece is timed instead.
    """
    states, most = ("float64",) if dtype == torch.float64 else ("float32", "bfloat16"), torch.get_num_threads()
    rates = []
    torch.set_num_threads(max(1, most - 1))
    try:
        for state in states:
            rate = _adamw_rate(dtype, getattr(torch, state), FIRST_PARAMETERS, least_s / 4)
            if rate > SLOW_PARAMETERS_PER_S:
                rate = _adamw_rate(dtype, getattr(torch, state), num_parameters, least_s)
            rates.append((state, rate))
    finally:
        torch.set_num_threads(most)
    return tuple(rates)


def _adamw_rate(dtype: torch.dtype, state_dtype: torch.dtype, num_parameters: int, least_s: float) -> float:
    layout = _plane_dtypes(dtype, state_dtype)
    with allocate_host(num_parameters * sum(t.itemsize for t in layout), page_locked=False) as buffer:
        planes = _planes(buffer.tensor, layout, num_parameters)
        return num_parameters / cpu_timer(_update(planes), least_s)


def _plane_dtypes(dtype: torch.dtype, state_dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Types of states, weight, gradient and (for bf16 compute) remainder: wide ones first, which keeps all aligned."""
    planes = (state_dtype, state_dtype, dtype, dtype)
    return (*planes, torch.int16) if dtype == torch.bfloat16 else planes


def _planes(memory: Tensor, layout: tuple[torch.dtype, ...], num_parameters: int) -> Planes:
    views, offset = [], 0
    for dtype in layout:
        num_bytes = num_parameters * dtype.itemsize
        views.append(memory[offset : offset + num_bytes].view(dtype))
        offset += num_bytes
    exp_avg, exp_avg_sq, weight, grad, *rest = views
    grad.normal_()
    return Planes(weight, rest[0] if rest else None, exp_avg, exp_avg_sq, grad)


def _update(planes: Planes) -> Callable[[], None]:
    grad_scale = torch.ones(1, dtype=torch.float64 if planes.weight.dtype == torch.float64 else torch.float32)

    def update() -> None:
        adamw_update(
            **planes._asdict(), grad_scale=grad_scale, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, step=1,
            seed=0, element_offset=0,
        )  # fmt: skip

    return update
