"""The streams of a step as rows of bars: what runs when."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import NamedTuple

from flexengine.metrics import format_seconds
from flexengine.planner.cost.cost_model import StepPart
from flexengine.planner.cost.simulated_step import SimulatedStep
from flexengine.reports.charts.svg import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    Mark,
    Scale,
    legend,
    marks_of,
    part_marks,
    svg,
    time_axis,
)
from flexengine.schedule.commands import STREAM_INDEX, STREAMS, Command, Stream

LANE_HEIGHT = 30
GAP_PIXELS, LEAST_PIXELS = 0.4, 0.5
"""Commands of one kind that are closer than this are drawn as one; none is drawn narrower."""
STREAM_NAMES = {"compute": "compute", "h2d": "to GPU", "d2h": "to host", "cpu": "CPU"}


class Bar(NamedTuple):
    """A command as it is drawn."""

    stream: Stream
    kind: str
    label: str
    begin_s: float
    end_s: float


class Span(NamedTuple):
    """Commands of one kind that follow each other closely, drawn as one bar."""

    kind: str
    begin_s: float
    end_s: float
    busy_s: float
    count: int
    label: str


KINDS = {
    "forward": "#3b82c4",
    "backward": "#5b4fc4",
    "rebuild keys": "#7fd0d3",
    "recompute": "#9b93e8",
    "round gradients": "#f2c230",
    "update": "#7c4ddb",
    "weights": "#2f6fed",
    "gradients": "#e8661b",
    "activations": "#1f9d55",
    "optimizer": "#b79af0",
    "batch": "#a3a08f",
    "other": "#9aa1ad",
}
"""Kinds of bars and their colours."""
COMMAND_KINDS = {
    "fill_window": "rebuild keys",
    "recompute": "recompute",
    "finish_gradient": "round gradients",
    "clip": "update",
    "scale": "update",
}
COPY_KINDS = {
    "weights": "weights",
    "grad": "gradients",
    "save": "activations",
    "input": "activations",
    "tile": "optimizer",
    "batch": "batch",
}
"""Second word of a copy's label -> its kind."""


def kind_of(command: Command) -> str:
    """The kind of bar that a command is drawn as."""
    return bar_kind(command.kind, command.label, bool(command.regions))


def bar_kind(kind: str, label: str, is_copy: bool) -> str:
    """The kind of bar of a command by its own kind, its label, and whether it copies."""
    if is_copy:
        words = label.split()
        return COPY_KINDS.get(words[1] if len(words) > 1 else "", "other")
    kind = COMMAND_KINDS.get(kind, kind)
    return kind if kind in KINDS else "other"


def stream_chart(step: SimulatedStep) -> str:
    """All parts of a step, one row per stream, on the time axis of the memory charts."""
    gap_s = GAP_PIXELS / (RIGHT - LEFT) * step.shown_s
    strips = [(start_s, spans_of(part, gap_s)) for part, start_s in zip(step.parts, step.starts_s, strict=True)]
    return strips_chart(strips, marks_of(step), step.shown_s, "commands by stream")


def strips_chart(
    strips: Iterable[tuple[float, list[list[Span]]]], marks: Iterable[Mark], end_s: float, label: str
) -> str:
    """Programs, each with its start and its bars by stream, on an axis from 0 to `end_s` seconds, with a legend."""
    x = Scale(0, end_s, LEFT, RIGHT)
    parts, used = list(_lanes()), set()
    for start_s, spans in strips:
        parts += _bars(spans, start_s, x)
        used |= {span.kind for lane in spans for span in lane}
    bottom = TOP + LANE_HEIGHT * len(STREAMS)
    parts += [*part_marks(marks, x, TOP, bottom), *time_axis(x, end_s, bottom)]
    return svg(bottom + BOTTOM, parts, label) + _kind_legend(used)


def close_up(part: StepPart, share: float = 0.05) -> str:
    """The turn from forward to backward of a round, close enough to see single commands."""
    return bars_close_up(bars_of(part), share * part.timing.total_s, part.timing.total_s)


def bars_close_up(bars: Sequence[Bar], width_s: float, total_s: float) -> str:
    """`width_s` seconds around the first backward command of a program that takes `total_s`."""
    middle = next((bar.begin_s for bar in bars if bar.kind == "backward"), 0.0)
    begin = max(0.0, middle - width_s / 2)
    end = min(total_s, begin + width_s)
    x = Scale(begin, end, LEFT, RIGHT)
    spans = [[s for s in lane if s.end_s > begin and s.begin_s < end] for lane in merged(bars, 0.0)]
    clipped = [[s._replace(begin_s=max(s.begin_s, begin), end_s=min(s.end_s, end)) for s in lane] for lane in spans]
    bottom = TOP + LANE_HEIGHT * len(STREAMS)
    parts = [*_lanes(), *_bars(clipped, 0.0, x, labels=True), *time_axis(x, end, bottom, begin)]
    return svg(bottom + BOTTOM, parts, "single commands at the turn from forward to backward")


def spans_of(part: StepPart, gap_s: float) -> list[list[Span]]:
    """Per stream the bars of a part: neighbours of one kind that are at most `gap_s` seconds apart are one."""
    return merged(bars_of(part), gap_s)


def bars_of(part: StepPart) -> list[Bar]:
    """Every command of a simulated part."""
    times = zip(part.program.commands, part.timing.start_s, part.timing.end_s, strict=True)
    return [Bar(c.stream, kind_of(c), c.label, begin, end) for c, begin, end in times]


def merged(bars: Iterable[Bar], gap_s: float) -> list[list[Span]]:
    """Bars of a program in the order of its commands, by stream: neighbours of one kind that are at most `gap_s`
    seconds apart are one."""
    lanes: list[list[Span]] = [[] for _ in STREAMS]
    for stream, kind, label, begin, end in bars:
        lane = lanes[STREAM_INDEX[stream]]
        if lane and lane[-1].kind == kind and gap_s and begin - lane[-1].end_s <= gap_s:
            last = lane[-1]
            lane[-1] = last._replace(end_s=end, busy_s=last.busy_s + end - begin, count=last.count + 1)
        else:
            lane.append(Span(kind, begin, end, end - begin, 1, label))
    return lanes


def _lanes() -> Iterator[str]:
    for row, stream in enumerate(STREAMS):
        top = TOP + row * LANE_HEIGHT
        yield f'<rect class="lane" x="{LEFT}" y="{top + 2}" width="{RIGHT - LEFT}" height="{LANE_HEIGHT - 4}"/>'
        name = STREAM_NAMES.get(str(stream), str(stream))
        yield f'<text class="soft" x="{LEFT - 6}" y="{top + LANE_HEIGHT / 2 + 4}" text-anchor="end">{name}</text>'


def _bars(spans: list[list[Span]], start_s: float, x: Scale, labels: bool = False) -> Iterator[str]:
    """Bars of all rows. What would lie wholly under the bar before it, being too narrow to see, is left out."""
    for row, lane in enumerate(spans):
        top, reached = TOP + row * LANE_HEIGHT + 2, -math.inf
        for span in lane:
            left, right = max(x(start_s + span.begin_s), reached), x(start_s + span.end_s)
            if right <= reached:
                continue
            reached = max(right, left + LEAST_PIXELS)
            what = span.label if span.count == 1 else f"{span.count} x {span.kind}"
            yield (
                f'<rect x="{left:.1f}" y="{top}" width="{reached - left:.1f}" height="{LANE_HEIGHT - 4}" '
                f'fill="{KINDS[span.kind]}"><title>{escape(what)}: {format_seconds(span.busy_s)}</title></rect>'
            )
            short = short_label(span.label)
            if labels and reached - left > 6.5 * len(short) + 8:
                yield f'<text class="on-bar" x="{left + 4:.1f}" y="{top + 17}">{escape(short)}</text>'


def short_label(label: str) -> str:
    """A command's label without its verb, which the colour tells: "backward block.3 chunk 0" is "block.3 0"."""
    return " ".join(word for word in label.split()[1:] if word != "chunk")


def _kind_legend(used: Iterable[str]) -> str:
    wanted = set(used)
    return legend((kind, fill) for kind, fill in KINDS.items() if kind in wanted)
