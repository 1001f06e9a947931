"""Times calls of a function, on the device's clock or on the host's."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import Any

import torch

Timer = Callable[[Callable[[], object], float], float]
"""Called as (work, least_s); gives seconds per call of `work`, repeated for `least_s` seconds after a first call."""
TimerOfAll = Callable[[Iterable[Callable[[], object]], float], list[float]]
"""Called as (works, least_s); gives seconds per call of each work, repeated for `least_s` seconds."""

SHORT_CALL_S, SHORT_ISSUES = 30e-6, 2
"""A call that is shorter, or takes less than so many times what issuing it does, may end before Python has issued the
next one. Alone on an idle stream a call takes what issuing it does, and then its own time."""
MOST_SHORT_CALLS = 500  # below the depth of CUDA's launch queue, so that issuing never has to wait
TURN_S = 1e-3
"""How long a work runs before the next one's turn; two events take next to nothing of that."""
HEAT_S = 0.05
"""How long a card works at full power before anything is timed: one that is power-capped and has rested takes some
hundredths of a second to lower its clock."""
ISSUE_S, MOST_ISSUE_S = 12e-6, 100e-6
"""What Python needs per launch, and at most per call: a host that others share may stop while one is issued."""
LEAST_SHARE = 0.1  # of the seconds of a call, which remains when its traffic is taken off
MOST_CYCLES_PER_S = 3e9  # no GPU's clock is faster, so a sleep of this many cycles lasts at least a second


class Spent:
    """Wall seconds of the parts of a measurement, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Have what runs inside count as the part of this name."""
        began_s = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began_s

    def describe(self) -> str:
        """All seconds and those of the parts, in words."""
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        return f"{sum(self.seconds.values()):.1f} s ({parts})"


def cuda_timer(work: Callable[[], object], least_s: float) -> float:
    """Measure device seconds per call of `work`, issued back to back on the current stream without gaps of the host."""
    work()
    issued_s: list[float] = []

    def noted() -> None:
        start_s = time.perf_counter()
        work()
        issued_s.append(time.perf_counter() - start_s)

    once_s = timed_calls(noted, 1)
    if once_s >= least_s:
        return once_s
    issue_s, calls = min(issued_s[0], MOST_ISSUE_S), math.ceil(least_s / once_s)
    if once_s >= max(SHORT_CALL_S, SHORT_ISSUES * issue_s):
        return timed_calls(work, calls)
    # Short calls: hold the stream until all are issued, or the host's gaps between them would be timed.
    calls = min(calls, MOST_SHORT_CALLS)
    hold_stream(calls * max(ISSUE_S, issue_s))
    return timed_calls(work, calls)


def warmed_timer(warm: Callable[[], object], part_s: float, most_parts: int) -> Timer:
    """Make a timer that runs work in parts of `part_s` seconds, each right behind a call of `warm`, and takes their
    median; in one long part where more than `most_parts` are asked for.

    Alone, work that draws less power than matrix products would run at a higher clock than between them.
    """

    def timer(work: Callable[[], object], least_s: float) -> float:
        once_s = cuda_timer(work, 0.0)
        parts = max(1, round(least_s / part_s))
        parts = 1 if parts > most_parts else parts
        calls = max(1, min(math.ceil(least_s / parts / once_s), MOST_SHORT_CALLS))
        seconds: list[float] = []
        for _ in range(parts):
            warm()
            seconds.append(timed_calls(work, calls))
        return median(seconds)

    return timer


def each_alone(timer: Timer) -> TimerOfAll:
    """Make a timer of all works that times one after the other; each is made when its time has come."""
    return lambda works, least_s: [timer(work, least_s) for work in works]


def timed_in_turn(works: Iterable[Callable[[], object]], least_s: float) -> list[float]:
    """Measure device seconds per call of each work, while all take turns on the current stream, as in a step.

    A power-capped card then has the clock that it has in training, which works by themselves differ from.
    """
    works = list(works)
    once_s = [cuda_timer(work, 0.0) for work in works]
    calls = [max(1, min(math.ceil(TURN_S / s), MOST_SHORT_CALLS // len(works))) for s in once_s]
    round_s = sum(count * s for count, s in zip(calls, once_s, strict=True))

    def turns(hold_s: float) -> list[torch.cuda.Event]:
        """Issue every work's turn, with events around it."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(works) + 1)]
        if hold_s:
            hold_stream(hold_s)
        events[0].record()
        for work, count, event in zip(works, calls, events[1:], strict=True):
            for _ in range(count):
                work()
            event.record()
        return events

    start_s = time.perf_counter()
    turns(0.0)
    issue_s = sum(calls) * min(max((time.perf_counter() - start_s) / sum(calls), ISSUE_S), MOST_ISSUE_S)
    # a short round waits until all of it is issued, or the host's gaps would be timed; beside long works it gets ahead
    hold_s = issue_s if round_s < SHORT_ISSUES * issue_s else 0.0
    for _ in range(math.ceil(HEAT_S / round_s)):
        turns(0.0)
    rounds = [turns(hold_s) for _ in range(math.ceil(len(works) * least_s / round_s))]
    rounds[-1][-1].synchronize()
    found = zip(*([start.elapsed_time(end) for start, end in pairwise(events)] for events in rounds), strict=True)
    return [max(median(times_ms) / 1e3 / count, 1e-7) for times_ms, count in zip(found, calls, strict=True)]


def timed_calls(work: Callable[[], object], calls: int, meanwhile: Callable[[], object] | None = None) -> float:
    """Measure mean seconds per call between two events on the current stream; blocks until the last call has ended.

    Calls `meanwhile` again and again until then.
    """
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        work()
    end.record()
    while meanwhile is not None and not end.query():
        meanwhile()
    end.synchronize()
    return max(start.elapsed_time(end) / 1e3 / calls, 1e-7)  # events count in ms, to about 0.5 us


def hold_stream(seconds: float) -> None:
    """Keep the current stream busy for at least `seconds`, so that what is issued meanwhile then runs without gaps.

    Does nothing on a torch without the sleep kernel: short calls are then timed with the host's gaps between them.
    """
    sleep: Any = getattr(torch.cuda, "_sleep", None)
    if sleep is not None:
        sleep(int(seconds * MOST_CYCLES_PER_S))


def without_traffic(seconds: float, num_bytes: float, bytes_per_s: float) -> float:
    """Take off what so many bytes take by themselves; a part of the seconds remains, as they move beside the work."""
    return max(seconds - num_bytes / bytes_per_s, LEAST_SHARE * seconds)


def cpu_timer(work: Callable[[], object], least_s: float) -> float:
    """Measure wall seconds per call of `work` on the host."""
    work()
    calls = 0
    start_s = time.perf_counter()
    while True:
        work()
        calls += 1
        elapsed_s = time.perf_counter() - start_s
        if elapsed_s >= least_s:
            return max(elapsed_s / calls, 1e-9)
