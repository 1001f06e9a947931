"""Builds what all charts share: the frame, axes, legends, and marks for the parts of a step."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from html import escape
from typing import NamedTuple

from flexengine.reports.simulated_step import SimulatedStep

WIDTH, LEFT, RIGHT = 1216, 66, 1206
"""Pixels of a chart, and where its plot begins and ends."""
TOP, BOTTOM = 22, 20
"""Pixels above and below the plot."""
LEAST_BETWEEN_MARKS = 3.0
"""Pixels: parts of a step that begin closer to each other are marked by one line."""


class Scale(NamedTuple):
    """A linear map from [low, high] to pixels [start, end]."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / max(self.high - self.low, 1e-30) * (self.end - self.start)


def svg(height: float, elements: Iterable[str], label: str) -> str:
    """Frame SVG elements; screen readers read `label`."""
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(label)}">{"".join(elements)}</svg>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Lay out (text, colour) pairs in a row."""
    items = "".join(f'<span><i style="background:{fill}"></i>{escape(text)}</span>' for text, fill in entries)
    return f'<div class="legend">{items}</div>'


class Mark(NamedTuple):
    """A part of a step to mark on the time axis."""

    name: str
    start_s: float
    seconds: float


def marks_of(step: SimulatedStep) -> list[Mark]:
    """Give the marks of a simulated step, whose parts are drawn once each."""
    return [
        Mark(p.name if p.repeats == 1 else f"{p.name}, one of {p.repeats}", start_s, p.timing.total_s)
        for p, start_s in zip(step.parts, step.starts_s, strict=True)
    ]


def part_marks(marks: Iterable[Mark], x: Scale, top: float, bottom: float) -> Iterator[str]:
    """Draw a line where a part of the step begins, and its name where there is room."""
    reached = -math.inf
    for name, start_s, seconds in marks:
        left, right = x(start_s), x(start_s + seconds)
        if start_s > 0 and left - reached >= LEAST_BETWEEN_MARKS:
            yield f'<line class="edge" x1="{left:.1f}" x2="{left:.1f}" y1="{top - 14}" y2="{bottom}"/>'
            reached = left
        if right - left > 6.5 * len(name) + 10:  # a character of 12 pixels is about 6.5 wide
            yield f'<text class="soft" x="{left + 5:.1f}" y="{top - 8}">{escape(name)}</text>'


def time_axis(x: Scale, end_s: float, y: float, begin_s: float = 0.0) -> Iterator[str]:
    """Draw ticks from `begin_s`, which is called 0, to `end_s`; in ms for less than half a second."""
    unit, word = (1.0, "s") if end_s - begin_s >= 0.5 else (1e-3, "ms")
    for value in ticks((end_s - begin_s) / unit, 8):
        place = x(begin_s + value * unit)
        yield f'<line class="grid" x1="{place:.1f}" x2="{place:.1f}" y1="{y}" y2="{y + 4}"/>'
        if place < RIGHT - 24:  # the unit stands at the end of the axis
            yield f'<text class="soft" x="{place:.1f}" y="{y + 16}" text-anchor="middle">{value:g}</text>'
    yield f'<text class="soft" x="{RIGHT}" y="{y + 16}" text-anchor="end">{word}</text>'


def ticks(top: float, about: int) -> list[float]:
    """Choose round values from 0 to `top`, about as many as asked."""
    # Steps of 1, 2 or 5 times a power of ten are what people read at a glance.
    raw = top / about
    size = 10 ** math.floor(math.log10(max(raw, 1e-12)))
    step = next(size * m for m in (1, 2, 5, 10) if size * m >= raw)
    return [float(f"{i * step:.6g}") for i in range(int(top / step) + 1)]


def embedded(data: object) -> str:
    """Write JSON that may stand inside a script element."""
    # "</script>" inside a string would end the element.
    return json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
