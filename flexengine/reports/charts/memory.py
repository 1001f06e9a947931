"""Draws the bytes in use over a step, stacked by category, against the budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from flexengine.metrics import GIB, MIB, format_bytes
from flexengine.reports.charts.style import colour
from flexengine.reports.charts.svg import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Scale,
    embedded,
    legend,
    marks_of,
    part_marks,
    svg,
    ticks,
    time_axis,
)
from flexengine.reports.memory_over_time import MemorySeries
from flexengine.reports.simulated_step import SimulatedStep

HEIGHT = 250
SMALL_SHARE = 0.004
"""Categories that never reach this share of the peak are drawn as one: they would be thinner than a pixel."""
BUDGET_IN_SIGHT = 2.5
"""A budget above this multiple of the peak is written above the chart: drawn, it would flatten all else."""


class Drawing(NamedTuple):
    """The elements of a chart, its height in pixels, and what it shows in words."""

    elements: list[str]
    height: float
    label: str


def memory_drawing(series: MemorySeries, step: SimulatedStep, budget_bytes: int) -> Drawing:
    """Draw one memory as stacked areas against its budget."""
    peak = int(series.totals.max())
    shows_budget = budget_bytes <= BUDGET_IN_SIGHT * peak
    top_bytes = 1.04 * max(peak, budget_bytes if shows_budget else 0)
    height = TOP + HEIGHT + BOTTOM
    y = Scale(0, top_bytes, TOP + HEIGHT, TOP)
    x = Scale(0, series.end_s, LEFT, RIGHT)
    elements = [*_gib_grid(y, top_bytes), *_areas(series, x, y), *part_marks(marks_of(step), x, TOP, TOP + HEIGHT)]
    budget = f"budget {format_bytes(budget_bytes)}"
    if shows_budget:
        line = y(budget_bytes)
        elements.append(f'<line class="budget" x1="{LEFT}" x2="{RIGHT}" y1="{line:.1f}" y2="{line:.1f}"/>')
        elements.append(f'<text class="bad" x="{RIGHT}" y="{line - 4:.1f}" text-anchor="end">{budget}</text>')
    else:
        elements.append(
            f'<text class="bad" x="{RIGHT}" y="{TOP - 8}" text-anchor="end">{budget}, above this chart</text>'
        )
    elements += time_axis(x, series.end_s, TOP + HEIGHT)
    return Drawing(elements, height, f"bytes in use, peak {format_bytes(peak)}, {budget}")


def memory_chart(identity: str, series: MemorySeries, step: SimulatedStep, budget_bytes: int) -> str:
    """Draw one memory with a legend and the data that the tooltip reads."""
    series = without_small(series)
    elements, height, label = memory_drawing(series, step, budget_bytes)
    elements.append(f'<line class="cursor" x1="0" x2="0" y1="{TOP}" y2="{TOP + HEIGHT}"/>')
    data = {
        "width": WIDTH,
        "left": LEFT,
        "right": RIGHT,
        "end": series.end_s,
        "names": series.categories,
        # Rounded to what a tooltip shows: the data are most of the page.
        "times": [float(f"{t:.6g}") for t in series.times_s],
        "mib": np.rint(series.num_bytes / MIB).astype(int).tolist(),
    }
    return "".join(
        (
            svg(height, elements, label),
            '<div class="tip"></div>',
            legend((f"{name} {format_bytes(num)}", colour(name)) for name, num in series.peaks.items()),
            f'<script type="application/json" id="{identity}">{embedded(data)}</script>',
        )
    )


def without_small(series: MemorySeries) -> MemorySeries:
    """Merge the small categories into one, "other", at the bottom."""
    limit = SMALL_SHARE * series.totals.max()
    # One small category alone is clearer by its own name.
    small = [i for i, name in enumerate(series.categories) if series.peaks[name] < limit]
    if len(small) < 2:
        return series
    large = [i for i in range(len(series.categories)) if i not in small]
    other = series.num_bytes[:, small].sum(axis=1, keepdims=True)
    names = ("other", *(series.categories[i] for i in large))
    return series._replace(categories=names, num_bytes=np.hstack([other, series.num_bytes[:, large]]))


def _areas(series: MemorySeries, x: Scale, y: Scale) -> Iterator[str]:
    # Bytes hold until the next moment, so areas have steps, not slopes.
    edges = [x(t) for t in (*series.times_s, series.end_s)]
    above = series.num_bytes.cumsum(axis=1)
    below = above - series.num_bytes
    for i, name in enumerate(series.categories):
        upper = _stairs(edges, [y(v) for v in above[:, i].tolist()])
        lower = _stairs(edges, [y(v) for v in below[:, i].tolist()])
        path = "M" + "L".join(f"{a:.1f},{b:.1f}" for a, b in (*upper, *reversed(lower)))
        title = f"{name}: at most {format_bytes(series.peaks[name])}"
        yield f'<path d="{path}Z" fill="{colour(name)}"><title>{escape(title)}</title></path>'


def _stairs(edges: Sequence[float], heights: Sequence[float]) -> list[tuple[float, float]]:
    """Give the corners of a step line, two per flat stretch."""
    corners: list[tuple[float, float]] = []
    for i, height in enumerate(heights):
        if corners and abs(corners[-1][1] - height) < 0.05:
            corners[-1] = (edges[i + 1], corners[-1][1])
        else:
            corners += [(edges[i], height), (edges[i + 1], height)]
    return corners


def _gib_grid(y: Scale, top_bytes: float) -> Iterator[str]:
    # Tests and tiny models use less than a GiB.
    unit, word = (GIB, "GiB") if top_bytes >= 0.5 * GIB else (MIB, "MiB")
    for value in ticks(top_bytes / unit, 5):
        line = y(value * unit)
        yield f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{line:.1f}" y2="{line:.1f}"/>'
        yield f'<text class="soft" x="{LEFT - 6}" y="{line + 4:.1f}" text-anchor="end">{value:g}</text>'
    yield f'<text class="soft" x="{LEFT - 6}" y="{TOP - 8}" text-anchor="end">{word}</text>'
