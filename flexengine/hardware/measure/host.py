"""Measures the host: memory copies by threads, and AdamW on parameters and states in host memory."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.hardware.curve import Curve, Points
from flexengine.hardware.measure.timing import cpu_timer
from flexengine.hardware.parts import INTO_SECOND, STOCHASTIC
from flexengine.native.adamw import update_threads
from flexengine.optim import AdamW
from flexengine.optim.into import update_into
from flexengine.optim.rule import Rule, Update
from flexengine.optim.rules import rule_of

FIRST_PARAMETERS = 2**18  # that even the plain torch path updates in a fraction of a second
SLOW_PARAMETERS_PER_S = 50e6  # at a lower rate more parameters would take too long, and show nothing new
PIECE_ALIGNMENT = 64  # parameters (with states in blocks: blocks): whole cache lines in every plane
CPUS = Path("/sys/devices/system/cpu")
UNKNOWN_CACHE_BYTES = 512 * 2**20
"""More than most hosts have: some containers do not show the caches, as those of gVisor."""
CACHE_SHARE = 0.15
"""Of a buffer, what the caches may hold: each sweep evicts most of it before the next. Copies read from them what
AdamW has just touched, and what is in them slows neither: out of 192 MiB 37 GB/s went to an H200 beside AdamW, which
kept 82% of its speed; out of 704 MiB 31 and 68%, out of 2 GiB 28 and 70%."""


def copy_curve(target: Tensor, source: Tensor, least_s: float) -> Points:
    """Measure (threads, bytes read plus written per second) of a copy by 1, 2, 4, ... and all of torch's threads.

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
    """List the powers of two below `most`, and `most`."""
    return [*takewhile(lambda count: count < most, (2**power for power in range(20))), most]


def host_copy_curve(points: Points) -> Curve:
    """Name the points of `copy_curve` for the chart."""
    return Curve("host memory copy", "threads", "bytes/s", points)


def adamw_rates(dtype: torch.dtype, memory: Tensor, least_s: float, rounds: int = 1) -> tuple[tuple[str, float], ...]:
    """Measure (state dtype, parameters/s) of the engine's update for masters as they come with `dtype`.

    All threads but one work, as in the engine, which leaves one to issue commands. bfloat16 compute has split masters
    and bf16 gradients, and is measured with bf16 masters that are rounded stochastically, too; float32 and float64
    have whole ones. memory: uint8, filled with as many parameters as it holds; it should exceed the processor's caches
    (`working_bytes`). Updates with states as floats are measured into second planes, too. Without the native update
    only FIRST_PARAMETERS are timed. rounds: all take turns so many times, for `least_s` each (`steady_seconds`).
    """
    with engine_threads():
        slow = _slow_updates(dtype, memory, least_s / 4)
        fast = [state for state in _updates(dtype) if state not in slow]
        fast += [f"{state}{INTO_SECOND}" for state in fast if _may_be_dropped(dtype, state)]
        times = {state: list[float]() for state in fast}
        for _ in range(rounds):
            for state, found in times.items():
                found.append(_adamw_seconds(memory, dtype, state, memory.numel(), least_s))
    rates = slow | {state: 1 / seconds for state, seconds in steady_seconds(times).items()}
    return tuple((state, rates[state]) for state in dict.fromkeys((*_updates(dtype), *fast)))


def _slow_updates(dtype: torch.dtype, memory: Tensor, least_s: float) -> dict[str, float]:
    """Measure all updates on few parameters; returns the rates of those that are slow."""
    first = {state: 1 / _adamw_seconds(memory, dtype, state, FIRST_PARAMETERS, least_s) for state in _updates(dtype)}
    return {state: rate for state, rate in first.items() if rate <= SLOW_PARAMETERS_PER_S}


def steady_seconds(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Give what each kind of work takes over a long time, from times of it in turn with all others.

    A host that others share stands still now and then, which strikes some times and spares others. So a kind's median
    tells it from the other kinds, and all kinds together how much longer than their medians they took.
    """
    middle = {name: median(found) for name, found in times.items()}
    longer = [seconds / middle[name] for name, found in times.items() for seconds in found]
    return {name: seconds * fmean(longer) for name, seconds in middle.items()}


def _may_be_dropped(dtype: torch.dtype, state: str) -> bool:
    """Whether the engine makes such updates into second planes: not those of states in blocks, nor slow ones."""
    return dtype != torch.float64 and _rule(dtype, state).block == 1


class AdamWork(NamedTuple):
    """A function that updates so many parameters, whose states are of a kind that `adamw_rates` names."""

    state: str
    parameters: int
    call: Callable[[], object]


def adamw_work(dtype: torch.dtype, memory: Tensor, rates: tuple[tuple[str, float], ...]) -> AdamWork:
    """Make a function that updates the parameters that fill `memory`, or few of them if that is slow.

    rates: what `adamw_rates` measured; the update has states in bfloat16 if these are among them.
    """
    known = dict(rates)
    state = "bfloat16" if "bfloat16" in known else next(iter(known))
    most = memory.numel() if known[state] > SLOW_PARAMETERS_PER_S else FIRST_PARAMETERS
    return AdamWork(state, _fitting(memory, dtype, state, most), _update(memory, dtype, state, most))


def _updates(dtype: torch.dtype) -> tuple[str, ...]:
    """Name the updates that are measured, as `Numerics.cpu_update` does."""
    if dtype == torch.float64:
        return ("float64",)
    states = ("float32", "bfloat16", "int8")
    return (*states, *(f"{state}{STOCHASTIC}" for state in states)) if dtype == torch.bfloat16 else states


@contextmanager
def engine_threads() -> Iterator[None]:
    """Give torch as many threads as the engine updates with."""
    most = torch.get_num_threads()
    torch.set_num_threads(update_threads())
    try:
        yield
    finally:
        torch.set_num_threads(most)


def working_bytes(least_bytes: int, most_bytes: int) -> int:
    """Choose the size of a buffer for repeated sweeps, of which the caches hold only a part."""
    return min(max(least_bytes, int(cache_bytes() / CACHE_SHARE)), most_bytes)


def cache_bytes() -> int:
    """Read the size of all last-level caches, UNKNOWN_CACHE_BYTES if Linux does not tell.

    Several cores share a cache, and each of them lists it ("32768K"), so caches are told apart by their cores.
    """
    sizes: dict[str, int] = {}
    try:
        for folder in CPUS.glob("cpu[0-9]*/cache/index3"):
            text = (folder / "size").read_text(encoding="ascii").strip()
            cores = (folder / "shared_cpu_list").read_text(encoding="ascii").strip()
            sizes[cores] = int(text.rstrip("KMG")) * {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:], 1)
    except (OSError, ValueError):
        return UNKNOWN_CACHE_BYTES
    return sum(sizes.values()) or UNKNOWN_CACHE_BYTES


def _adamw_seconds(memory: Tensor, dtype: torch.dtype, state: str, most_parameters: int, least_s: float) -> float:
    """Measure seconds for each parameter."""
    update = _update(memory, dtype, state, most_parameters)
    return cpu_timer(update, least_s) / _fitting(memory, dtype, state, most_parameters)


def _rule(dtype: torch.dtype, state: str) -> Rule:
    state = state.removesuffix(INTO_SECOND).removesuffix(STOCHASTIC)
    return rule_of("adamw", "matrix", state, str(dtype).removeprefix("torch."))


def _layout(dtype: torch.dtype, state: str) -> dict[str, tuple[torch.dtype, int]]:
    """Give the type of every plane and how many elements share an entry; wide types first, which keeps all aligned.

    bfloat16 compute has a remainder of split masters, where they are not rounded stochastically. Names of second planes
    end with INTO_SECOND.
    """
    if state.endswith(INTO_SECOND):
        planes = _layout(dtype, state.removesuffix(INTO_SECOND))
        second = {f"{name}{INTO_SECOND}": plane for name, plane in planes.items() if name != "grad"}
        return dict(sorted({**planes, **second}.items(), key=lambda plane: -plane[1][0].itemsize))
    planes = {plane.kind: (getattr(torch, plane.dtype), plane.block) for plane in _rule(dtype, state).states}
    stored = torch.float32 if dtype == torch.float16 else dtype  # float16 weights lie beside their masters
    planes |= {"weights": (stored, 1), "grad": (stored, 1)}
    if dtype == torch.bfloat16 and not state.endswith(STOCHASTIC):
        planes["remainder"] = (torch.int16, 1)
    return dict(sorted(planes.items(), key=lambda plane: -plane[1][0].itemsize))


def _fitting(memory: Tensor, dtype: torch.dtype, state: str, most: int) -> int:
    """Count the parameters, at most `most`, whose planes fit into `memory`, in whole pieces."""
    piece, planes = PIECE_ALIGNMENT * _rule(dtype, state).block, _layout(dtype, state).values()
    bytes_per_piece = sum(t.itemsize * piece // block for t, block in planes)
    return min(memory.numel() // bytes_per_piece, most // piece) * piece


def _update(memory: Tensor, dtype: torch.dtype, state: str, most: int) -> Callable[[], None]:
    """Make a function that updates at most `most` parameters in `memory`.

    Planes hold zeros, but for a random gradient that repeats every PIECE_ALIGNMENT elements.
    """
    memory.zero_()
    count, planes, offset = _fitting(memory, dtype, state, most), {}, 0
    for name, (plane_dtype, block) in _layout(dtype, state).items():
        num_bytes = count // block * plane_dtype.itemsize
        planes[name] = memory[offset : offset + num_bytes].view(plane_dtype)
        offset += num_bytes
    planes["grad"].view(-1, PIECE_ALIGNMENT).copy_(torch.randn(PIECE_ALIGNMENT, dtype=torch.float64))
    scale = torch.ones(1, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    targets = {name.removesuffix(INTO_SECOND): planes.pop(name) for name in list(planes) if name.endswith(INTO_SECOND)}
    update = Update(planes, scale, AdamW(lr=1e-4), lr=1e-4, weight_decay=0.0, step=1, seed=0, element_offset=0)
    rule = _rule(dtype, state)
    return (lambda: update_into(rule, update, targets)) if targets else (lambda: rule.update(update))
