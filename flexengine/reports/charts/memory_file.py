"""Memory over a planned step as one SVG file, for a README or a chat: it needs no page around it."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from flexengine.metrics import format_bytes, format_seconds, format_tokens_per_s
from flexengine.reports.charts.memory import memory_drawing, without_small
from flexengine.reports.charts.style import colour
from flexengine.reports.charts.svg import LEFT, RIGHT, WIDTH
from flexengine.reports.memory_over_time import MemorySeries
from flexengine.reports.picture import Picture

STYLE = """
svg { --ink: #1a1d23; --soft: #5b6472; --line: #d9dde4; --page: #ffffff; --bad: #c81e1e; }
@media (prefers-color-scheme: dark) { svg { --ink: #e7e9ee; --soft: #a3abb9; --line: #363c47; --page: #14171c;
  --bad: #ff7b72; } }
text { fill: var(--ink); font: 14px system-ui, sans-serif; } .title { font-size: 19px; font-weight: 600; }
.soft { fill: var(--soft); } .bad { fill: var(--bad); } .grid { stroke: var(--line); } .page { fill: var(--page); }
.edge { stroke: var(--soft); stroke-dasharray: 2 3; }
.budget { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 7 4; }
"""
TITLE, CAPTION, ROW, CHARACTER = 66, 24, 22, 7.6
"""Pixels of the title, of a caption above a chart, of a row of a legend, and the width of a character in one."""


def memory_svg(picture: Picture) -> str:
    """Draw GPU and host memory over the simulated step, with the answer as title, as the text of an SVG file."""
    plan = picture.plan
    request, step_s = plan.request, plan.predicted.step_s
    parts, y = [], float(TITLE)
    for place, whole, budget in (
        ("GPU memory", picture.gpu, request.max_gpu_bytes),
        ("host memory", picture.host, request.max_host_bytes),
    ):
        series = without_small(whole)
        elements, height, _ = memory_drawing(series, picture.step, budget)
        legend = list(_legend(series, height + CAPTION + 14))
        rows = [f'<text x="{LEFT}" y="16">{place} over one step</text>', *legend]
        parts.append(f'<g transform="translate(0 {y:g})">{"".join(rows)}')
        parts.append(f'<g transform="translate(0 {CAPTION})">{"".join(elements)}</g></g>')
        y += height + CAPTION + ROW * _rows(series) + 26
    title = f"{plan.model}: {format_tokens_per_s(request.max_global_batch_tokens / step_s)} predicted"
    soft = (
        f"on {picture.profile.name} with {format_bytes(request.max_gpu_bytes)} of its memory and"
        f" {format_bytes(request.max_host_bytes)} of the host's; a step of {request.max_global_batch_tokens:,} tokens"
        f" takes {format_seconds(step_s)}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:g}" role="img"'
        f' aria-label="{escape(f"{title} {soft}")}"><style>{STYLE}</style>'
        f'<rect class="page" width="{WIDTH}" height="{y:g}"/>'
        f'<text class="title" x="{LEFT}" y="28">{escape(title)}</text>'
        f'<text class="soft" x="{LEFT}" y="50">{escape(soft)}</text>{"".join(parts)}</svg>\n'
    )


def _places(series: MemorySeries) -> Iterator[tuple[str, str, float, int]]:
    """Lay the legend out: name, its text, pixels from the left, row."""
    x, row = float(LEFT), 0
    for name in reversed(series.categories):
        text = f"{name} {format_bytes(series.peaks[name])}"
        width = 16 + CHARACTER * len(text) + 14
        if x + width > RIGHT:
            x, row = float(LEFT), row + 1
        yield name, text, x, row
        x += width


def _rows(series: MemorySeries) -> int:
    return 1 + max((row for _, _, _, row in _places(series)), default=0)


def _legend(series: MemorySeries, y: float) -> Iterator[str]:
    for name, text, x, row in _places(series):
        top = y + ROW * row
        yield f'<rect x="{x:.0f}" y="{top - 10:.0f}" width="11" height="11" rx="2" fill="{colour(name)}"/>'
        yield f'<text class="soft" x="{x + 16:.0f}" y="{top:.0f}">{escape(text)}</text>'
