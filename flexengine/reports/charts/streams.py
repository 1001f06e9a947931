"""Draws the streams of a step as rows of bars: which command runs when."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import NamedTuple

from flexengine.metrics import format_seconds
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
from flexengine.reports.simulated_step import SimulatedStep
from flexengine.schedule.commands import BASE_STREAMS, STREAM_INDEX, STREAMS, Command, CommandName, Stream, Subject
from flexengine.schedule.step_parts import StepPart

ROW_HEIGHT = 30
GAP_PIXELS, LEAST_PIXELS = 0.4, 0.5
"""Commands of one kind that are closer than this are drawn as one; none is drawn narrower."""
STREAM_NAMES = {
    Stream.COMPUTE: "compute",
    Stream.H2D: "to GPU",
    Stream.D2H: "to host",
    Stream.CPU: "CPU",
    Stream.RELAY_IN: "taken over",
    Stream.RELAY_OUT: "passed on",
    Stream.COMM: "between GPUs",
    Stream.DRIVE_IN: "from drive",
    Stream.DRIVE_OUT: "to drive",
    Stream.DRIVE_FETCH: "drive to GPU",
    Stream.DRIVE_STORE: "GPU to drive",
}


class Bar(NamedTuple):
    """A command to draw, with its times in seconds since its program began."""

    stream: Stream
    kind: str
    name: CommandName
    begin_s: float
    end_s: float


class MergedBar(NamedTuple):
    """Commands of one kind that follow each other closely, drawn as one bar."""

    kind: str
    begin_s: float
    end_s: float
    busy_s: float
    count: int
    name: CommandName


KINDS = {
    "forward": "#3b82c4",
    "backward": "#5b4fc4",
    "rebuild keys": "#7fd0d3",
    "recompute": "#9b93e8",
    "round gradients": "#f2c230",
    "decode weights": "#58a6a6",
    "update": "#7c4ddb",
    "weights": "#2f6fed",
    "gradients": "#e8661b",
    "activations": "#1f9d55",
    "optimizer": "#b79af0",
    "batch": "#a3a08f",
    "other": "#9aa1ad",
}
"""Colours of the kinds of bars, in the order of the legend."""
COMMAND_KINDS = {
    "fill_window": "rebuild keys",
    "recompute": "recompute",
    "forward_again": "recompute",
    "finish_gradient": "round gradients",
    "decode": "decode weights",
    "fold": "round gradients",
    "gather": "weights",
    "gather_owned": "weights",
    "exchange": "gradients",
    "add_squares": "update",
    "sum_squares": "update",
    "clip": "update",
    "scale": "update",
}
COPY_KINDS: dict[Subject, str] = {
    "weights": "weights",
    "grad": "gradients",
    "save": "activations",
    "input": "activations",
    "tile": "optimizer",
    "batch": "batch",
}
"""What a copy moves -> the kind of its bar."""


def kind_of(command: Command) -> str:
    """Give the kind of bar that a command is drawn as."""
    return bar_kind(command.kind, command.name, is_copy=bool(command.regions))


def bar_kind(kind: str, name: CommandName, is_copy: bool) -> str:
    """Give the kind of bar for a command's own kind; for a copy, that of what it moves."""
    if is_copy:
        return COPY_KINDS.get(name.subject, "other")
    kind = COMMAND_KINDS.get(kind, kind)
    return kind if kind in KINDS else "other"


def stream_chart(step: SimulatedStep) -> str:
    """Draw all parts of a simulated step, one row per stream, on the time axis of the memory charts."""
    gap_s = GAP_PIXELS / (RIGHT - LEFT) * step.shown_s
    programs = [(start_s, merged_bars(part, gap_s)) for part, start_s in zip(step.parts, step.starts_s, strict=True)]
    return programs_chart(programs, marks_of(step), step.shown_s, "commands by stream")


def programs_chart(
    programs: Iterable[tuple[float, list[list[MergedBar]]]], marks: Iterable[Mark], end_s: float, label: str
) -> str:
    """Draw (start in seconds, bars by stream) of programs on an axis from 0 to `end_s` seconds, with a legend."""
    x = Scale(0, end_s, LEFT, RIGHT)
    programs, used = list(programs), set()
    shown = _shown(rows for _, rows in programs)
    elements = list(_stream_rows(shown))
    for start_s, rows in programs:
        elements += _bars([rows[STREAM_INDEX[stream]] for stream in shown], start_s, x)
        used |= {bar.kind for row in rows for bar in row}
    bottom = TOP + ROW_HEIGHT * len(shown)
    elements += [*part_marks(marks, x, TOP, bottom), *time_axis(x, end_s, bottom)]
    return svg(bottom + BOTTOM, elements, label) + _kind_legend(used)


def close_up(part: StepPart, share: float = 0.05) -> str:
    """Draw where forward ends and backward begins in a round, close enough to see single commands."""
    return bars_close_up(bars_of(part), share * part.timing.total_s, part.timing.total_s)


def bars_close_up(bars: Sequence[Bar], width_s: float, total_s: float) -> str:
    """Draw `width_s` seconds around the first backward command of a program that takes `total_s`."""
    middle = next((bar.begin_s for bar in bars if bar.kind == "backward"), 0.0)
    begin = max(0.0, middle - width_s / 2)
    end = min(total_s, begin + width_s)
    x = Scale(begin, end, LEFT, RIGHT)
    rows = [[bar for bar in row if bar.end_s > begin and bar.begin_s < end] for row in merge_bars(bars, 0.0)]
    clipped = [[b._replace(begin_s=max(b.begin_s, begin), end_s=min(b.end_s, end)) for b in row] for row in rows]
    shown = _shown([clipped])
    bottom, clipped = TOP + ROW_HEIGHT * len(shown), [clipped[STREAM_INDEX[stream]] for stream in shown]
    elements = [*_stream_rows(shown), *_bars(clipped, 0.0, x, labels=True), *time_axis(x, end, bottom, begin)]
    return svg(bottom + BOTTOM, elements, "single commands where forward ends and backward begins")


def merged_bars(part: StepPart, gap_s: float) -> list[list[MergedBar]]:
    """Give the bars of a simulated part by stream, as `merge_bars` does."""
    return merge_bars(bars_of(part), gap_s)


def bars_of(part: StepPart) -> list[Bar]:
    """Give every command of a simulated part as a bar."""
    times = zip(part.program.commands, part.timing.start_s, part.timing.end_s, strict=True)
    return [Bar(c.stream, kind_of(c), c.name, begin, end) for c, begin, end in times]


def merge_bars(bars: Iterable[Bar], gap_s: float) -> list[list[MergedBar]]:
    """Sort the bars of a program by stream, and merge neighbours of one kind at most `gap_s` seconds apart.

    bars: in the order of the program's commands. A gap of 0 merges nothing.
    """
    # A step has tens of thousands of commands; a chart has a thousand pixels, and a page should stay below a megabyte.
    rows: list[list[MergedBar]] = [[] for _ in STREAMS]
    for stream, kind, name, begin, end in bars:
        row = rows[STREAM_INDEX[stream]]
        if row and row[-1].kind == kind and gap_s and begin - row[-1].end_s <= gap_s:
            last = row[-1]
            row[-1] = last._replace(end_s=end, busy_s=last.busy_s + end - begin, count=last.count + 1)
        else:
            row.append(MergedBar(kind, begin, end, end - begin, 1, name))
    return rows


def _shown(programs: Iterable[list[list[MergedBar]]]) -> list[Stream]:
    """The streams that have a row: those that every program has, and others with bars."""
    used = {stream for rows in programs for stream, row in zip(STREAMS, rows, strict=True) if row}
    return [stream for stream in STREAMS if stream in BASE_STREAMS or stream in used]


def _stream_rows(shown: list[Stream]) -> Iterator[str]:
    for row, stream in enumerate(shown):
        top = TOP + row * ROW_HEIGHT
        yield f'<rect class="lane" x="{LEFT}" y="{top + 2}" width="{RIGHT - LEFT}" height="{ROW_HEIGHT - 4}"/>'
        name = STREAM_NAMES[stream]
        yield f'<text class="soft" x="{LEFT - 6}" y="{top + ROW_HEIGHT / 2 + 4}" text-anchor="end">{name}</text>'


def _bars(rows: list[list[MergedBar]], start_s: float, x: Scale, labels: bool = False) -> Iterator[str]:
    """Draw the bars of all rows; a bar too narrow to be seen beside the one before it is left out."""
    for number, row in enumerate(rows):
        top, reached = TOP + number * ROW_HEIGHT + 2, -math.inf
        for bar in row:
            left, right = max(x(start_s + bar.begin_s), reached), x(start_s + bar.end_s)
            if right <= reached:
                continue
            reached = max(right, left + LEAST_PIXELS)
            what = str(bar.name) if bar.count == 1 else f"{bar.count} x {bar.kind}"
            yield (
                f'<rect x="{left:.1f}" y="{top}" width="{reached - left:.1f}" height="{ROW_HEIGHT - 4}" '
                f'fill="{KINDS[bar.kind]}"><title>{escape(what)}: {format_seconds(bar.busy_s)}</title></rect>'
            )
            short = bar.name.short  # the colour tells the verb
            if labels and reached - left > 6.5 * len(short) + 8:
                yield f'<text class="on-bar" x="{left + 4:.1f}" y="{top + 17}">{escape(short)}</text>'


def _kind_legend(used: Iterable[str]) -> str:
    wanted = set(used)
    return legend((kind, fill) for kind, fill in KINDS.items() if kind in wanted)
