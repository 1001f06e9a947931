"""Draws a figure of every step, such as the loss, as a line over the steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from flexengine.reports.charts.svg import BOTTOM, LEFT, RIGHT, TOP, Scale, svg, ticks

HEIGHT = 150
Point = tuple[int, float | None]
"""(step, value); None where the value was no finite number."""


class Reference(NamedTuple):
    """A dashed line to compare a curve with, and its name."""

    value: float
    text: str


def curve_chart(points: Sequence[Point], label: str, fill: str, reference: Reference | None = None) -> str:
    """Draw values over steps; a step without a finite value leaves a gap. Screen readers read `label`."""
    known = [value for _, value in points if value is not None]
    shown = known if reference is None else [*known, reference.value]
    low, high = _range(shown)
    y = Scale(low, high, TOP + HEIGHT, TOP)
    first, last = points[0][0], max(points[-1][0], points[0][0] + 1)
    x = Scale(first, last, LEFT, RIGHT)
    elements = [*_value_axis(y), *_step_axis(x)]
    # A diverged step breaks the line: joining its neighbours would hide it.
    for is_known, group in groupby(points, key=lambda point: point[1] is not None):
        if is_known:
            elements.append(_line([(x(step), y(value)) for step, value in group if value is not None], fill))
    if reference is not None:
        line = y(reference.value)
        elements.append(f'<line class="edge" x1="{LEFT}" x2="{RIGHT}" y1="{line:.1f}" y2="{line:.1f}"/>')
        elements.append(f'<text class="soft" x="{RIGHT}" y="{line - 4:.1f}" text-anchor="end">{reference.text}</text>')
    return svg(TOP + HEIGHT + BOTTOM, elements, label)


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Choose the range of the value axis: it begins at 0 where that leaves the curve half of the height."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    # Losses that fall from 8 to 7 would be a flat line on an axis from 0.
    if 0 <= low <= high / 2 or high - low < 1e-6 * max(abs(low), abs(high)):
        low, high = min(low, 0.0), max(high, 0.0)
    room = 0.06 * (high - low) if high - low > 1e-9 else 1.0
    return (low if low == 0 else low - room), high + room


def _line(points: list[tuple[float, float]], fill: str) -> str:
    if len(points) == 1:  # a path of one point draws nothing
        return f'<circle cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="2.5" fill="{fill}"/>'
    path = "L".join(f"{a:.1f},{b:.1f}" for a, b in _thinned(points))
    return f'<path d="M{path}" fill="none" stroke="{fill}" stroke-width="1.5"/>'


def _thinned(points: list[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Keep at most four points per pixel: the first, the last, the highest and the lowest."""
    for _, group in groupby(points, key=lambda point: int(point[0])):
        inside = list(group)
        if len(inside) <= 4:
            yield from inside
        else:
            yield inside[0]
            yield min(inside, key=lambda point: point[1])
            yield max(inside, key=lambda point: point[1])
            yield inside[-1]


def _value_axis(y: Scale) -> Iterator[str]:
    size = ticks(y.high - y.low, 4)[1]
    for i in range(math.ceil(y.low / size), math.floor(y.high / size) + 1):
        line = y(i * size)
        yield f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{line:.1f}" y2="{line:.1f}"/>'
        yield f'<text class="soft" x="{LEFT - 6}" y="{line + 4:.1f}" text-anchor="end">{i * size:.6g}</text>'


def _step_axis(x: Scale) -> Iterator[str]:
    bottom = TOP + HEIGHT
    size = max(1, math.ceil(ticks(x.high - x.low, 8)[1]))
    for step in range(math.ceil(x.low / size) * size, int(x.high) + 1, size):
        place = x(step)
        if place < RIGHT - 24:
            yield f'<text class="soft" x="{place:.1f}" y="{bottom + 16}" text-anchor="middle">{step}</text>'
    yield f'<text class="soft" x="{RIGHT}" y="{bottom + 16}" text-anchor="end">step</text>'
