"""Counts the bytes in use at every moment of a simulated step, by category, in either memory.

Stored planes and the batch are there all the time. Any other slot is in use from the start of the command that writes
it to the end of the last one that reads what was written. Slots that share bytes are never in use together, since
commands wait for each other's addresses; so the sum is never above what the plan takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from flexengine.planner.cost.memory import gpu_categories, host_categories
from flexengine.reports.simulated_step import SimulatedStep
from flexengine.schedule.layer_program import align
from flexengine.schedule.layout import Layout
from flexengine.schedule.region import RUN
from flexengine.schedule.slots import Memory
from flexengine.schedule.step_parts import StepPart

LASTING = {
    "gpu": (
        *("batch", "scalars", "resident weights", "resident gradients"),
        *("resident optimizer states", "dealt optimizer states", "shards"),
    ),
    "host": ("batch", "weights", "gradients", "optimizer states", "second planes"),
}
"""Categories of slots that hold something from step to step, or that the host fills."""
MAX_POINTS = 300
"""Moments that a chart of a thousand pixels shows; a large step has tens of thousands."""


class MemorySeries(NamedTuple):
    """Bytes in use over time, by category.

    Row i of `num_bytes` [times, categories] holds from times_s[i] to times_s[i + 1], the last one to end_s.
    """

    categories: tuple[str, ...]
    times_s: tuple[float, ...]
    num_bytes: np.ndarray
    end_s: float

    @property
    def totals(self) -> np.ndarray:
        """Bytes of all categories together, by time."""
        return self.num_bytes.sum(axis=1)

    @property
    def peaks(self) -> dict[str, int]:
        """The most bytes that each category has at any moment."""
        return {name: int(self.num_bytes[:, i].max()) for i, name in enumerate(self.categories)}


def step_memory(step: SimulatedStep, memory: Memory, max_points: int = MAX_POINTS) -> MemorySeries:
    """Give the bytes in use over all parts of a step, each shown once, at about `max_points` moments or fewer."""
    # What is never freed is counted once, over all parts; slots come and go within a part.
    lasting = _outside_the_arena(step, memory) | _lasting_bytes(step.layout, memory)
    series = [part_memory(part, step.layout, memory, lasting) for part in step.parts]
    names = tuple(dict.fromkeys(name for s in series for name in s.categories))
    times, rows = [], []
    for one, part, start_s in zip(series, step.parts, step.starts_s, strict=True):
        # Points are shared out by seconds, so that a short update does not take them from a long round.
        share = part.timing.total_s / max(step.shown_s, 1e-30)
        thin = thinned(one, max(8, round(max_points * share)))
        times += [start_s + t for t in thin.times_s]
        column = {name: i for i, name in enumerate(thin.categories)}
        rows += [[row[column[name]] if name in column else 0 for name in names] for row in thin.num_bytes]
    return MemorySeries(names, tuple(times), np.array(rows, dtype=np.int64), step.shown_s)


def part_memory(part: StepPart, layout: Layout, memory: Memory, lasting: Mapping[str, int]) -> MemorySeries:
    """Give the bytes in use over one program, at every moment at which they change."""
    slots, intervals = layout.slots, slot_intervals(part, layout, memory)
    names = (*lasting, *dict.fromkeys(slots[i].category for i in intervals))
    names = tuple(dict.fromkeys(names))
    column = {name: i for i, name in enumerate(names)}
    moments = sorted({0.0, *(t for times in intervals.values() for interval in times for t in interval)})
    row = {t: i for i, t in enumerate(moments)}
    # Bytes that a slot gains or loses at a moment; the running sum is what is in use. A step has tens of thousands of
    # commands, and asking every slot at every moment would take their product.
    changes = np.zeros((len(moments), len(names)), dtype=np.int64)
    for index, times in intervals.items():
        for begin, end in times:
            changes[row[begin], column[slots[index].category]] += align(slots[index].num_bytes)
            changes[row[end], column[slots[index].category]] -= align(slots[index].num_bytes)
    for name, num_bytes in lasting.items():
        changes[0, column[name]] += num_bytes
    return MemorySeries(names, tuple(moments), changes.cumsum(axis=0), part.timing.total_s)


def slot_intervals(part: StepPart, layout: Layout, memory: Memory) -> dict[int, list[tuple[float, float]]]:
    """Give for every slot that is not in use all the time the disjoint intervals of seconds in which it is."""
    passing = [
        i
        for i, s in enumerate(layout.slots)
        if s.memory == memory and s.category not in (*LASTING[memory], RUN) and s.num_bytes
    ]
    found: dict[int, list[tuple[float, float]]] = {i: [] for i in passing}
    for command in part.program.commands:
        begin, end = part.timing.start_s[command.index], part.timing.end_s[command.index]
        reads = {access.slot for access in command.reads}
        for slot in reads & found.keys():
            # A slot that is read before it is written holds what the program before this one left in it.
            since = found[slot].pop()[0] if found[slot] else 0.0
            found[slot].append((since, max(end, since)))
        for slot in {access.slot for access in command.writes} & found.keys():
            if slot not in reads:  # a command that reads and writes a slot continues its interval
                found[slot].append((begin, end))
    return {slot: merge_intervals(intervals) for slot, intervals in found.items() if intervals}


def merge_intervals(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Sort intervals by time, and join those that touch or overlap."""
    result: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((begin, end))
    return result


def thinned(series: MemorySeries, max_points: int) -> MemorySeries:
    """Keep at most `max_points` moments: of as many equal stretches of time, the moment with the most bytes of each."""
    if len(series.times_s) <= max_points:
        return series
    edges = np.linspace(0.0, series.end_s, max_points + 1)
    first = np.searchsorted(series.times_s, edges[:-1], side="right") - 1  # what holds when a stretch begins
    last = np.maximum(np.searchsorted(series.times_s, edges[1:], side="left"), first + 1)
    totals = series.totals
    keep = [a + int(totals[a:b].argmax()) for a, b in zip(first.tolist(), last.tolist(), strict=True)]
    return series._replace(times_s=tuple(edges[:-1].tolist()), num_bytes=series.num_bytes[keep])


def _lasting_bytes(layout: Layout, memory: Memory) -> dict[str, int]:
    totals: dict[str, int] = {}
    for slot in layout.slots:
        if slot.memory == memory and slot.category in LASTING[memory]:
            totals[slot.category] = totals.get(slot.category, 0) + align(slot.num_bytes)
    return {name: num_bytes for name, num_bytes in totals.items() if num_bytes}


def _outside_the_arena(step: SimulatedStep, memory: Memory) -> dict[str, int]:
    """Give what the process takes beside the arena, by category."""
    everything = {"gpu": gpu_categories, "host": host_categories}[memory](step.layout, step.profile)
    arena = step.layout.categories(memory)
    return {name: n for name, n in everything.items() if name not in arena and n}
