"""Tables of a run's page that compare the simulated step with the measured one, by stream and by kind of command."""

from __future__ import annotations

from html import escape
from typing import NamedTuple

from flexengine.metrics import format_seconds
from flexengine.reports.charts.page import table
from flexengine.reports.charts.streams import KINDS, STREAM_NAMES, bar_kind
from flexengine.reports.run_record import RunRecord
from flexengine.schedule.commands import BASE_STREAMS, STREAMS, Stream
from flexengine.schedule.trace_reader import Trace

FACTOR_FROM = 3.0
"""Measured seconds of at least this many times the predicted ones are told as a factor, others in percent."""


class Busy(NamedTuple):
    """The commands of one stream or kind in a whole step: how many, and their seconds from start to end."""

    count: int = 0
    seconds: float = 0.0


def busy_by(trace: Trace, by_kind: bool) -> dict[str, Busy]:
    """Add up a step's commands by kind of bar, or by stream."""
    found: dict[str, Busy] = {}
    for part in trace.parts:
        for command in part.commands:
            kind = bar_kind(command.kind, command.name, is_copy=command.num_bytes > 0)
            key = kind if by_kind else str(command.stream)
            count, seconds = found.get(key, Busy())
            found[key] = Busy(count + part.repeats, seconds + part.repeats * (command.end_s - command.start_s))
    return found


def stream_table(run: RunRecord) -> str:
    """Compare the seconds of a step and of every stream in it."""
    rows: list[tuple[str, ...]] = []
    if run.step_s is not None:
        rows.append(_row(f"step, median of {len(run.steady_steps)}", run.predicted_s, run.step_s))
    # The wall time has what no program has: the host between two rounds.
    measured_s = None if run.measured is None else _wall_s(run.measured)
    if run.measured is not None:
        rows.append(_row(f"step {run.measured.about.get('step', '')}, with time stamps", run.predicted_s, measured_s))
    pairs = _busy_pairs(run, by_kind=False)
    for stream in (s for s in STREAMS if s in BASE_STREAMS or str(s) in pairs):
        busy_s = [_seconds(busy) for busy in pairs.get(str(stream), (None, None))]
        rows.append(_row(f"{STREAM_NAMES[stream]}, busy", *busy_s))
        if stream is Stream.COMPUTE:  # only its waiting is lost time: the others wait for something to copy or update
            whole_s = (run.simulated.total_s if run.simulated is not None else None, measured_s)
            rows.append(_row(f"{STREAM_NAMES[stream]}, waiting", *map(_remainder, whole_s, busy_s)))
    if run.measured is not None:
        inside_s = sum(part.repeats * part.seconds for part in run.measured.parts)
        # A simulated step has no such time: its programs follow each other at once.
        rows.append(_row("between programs (host)", 0.0, _remainder(measured_s, inside_s)))
    return table(("seconds of a step", "predicted", "measured", "measured is"), rows)


def kind_table(run: RunRecord) -> str:
    """Compare seconds by kind of command, the longest first, in the colours of the timelines."""
    pairs = _busy_pairs(run, by_kind=True)
    rows = []
    for name, pair in sorted(pairs.items(), key=lambda item: -max(_seconds(busy) or 0.0 for busy in item[1])):
        counts = " / ".join(str(busy.count) for busy in pair if busy is not None)
        _, *cells = _row(name, *map(_seconds, pair))
        swatch = f'<i style="background:{KINDS[name]}"></i>{escape(name)}'
        rows.append((swatch, counts, *(escape(cell) for cell in cells)))
    head = ("kind of command", "how many", "predicted", "measured", "measured is")
    return table(head, rows, safe=True)


def _wall_s(measured: Trace) -> float:
    """Wall seconds of the measured step; a trace without them gives the end of its last command."""
    wall_s = measured.about.get("step_s")
    return float(wall_s) if isinstance(wall_s, (int, float)) else measured.total_s


def _busy_pairs(run: RunRecord, by_kind: bool) -> dict[str, tuple[Busy | None, Busy | None]]:
    """Pair simulated with measured commands by kind or stream; None stands for a missing trace."""
    simulated, measured = (
        None if trace is None else busy_by(trace, by_kind) for trace in (run.simulated, run.measured)
    )
    # A dict keeps the order of first appearance, which a set would lose.
    names = dict.fromkeys(name for groups in (simulated, measured) if groups is not None for name in groups)
    return {
        name: (
            None if simulated is None else simulated.get(name, Busy()),
            None if measured is None else measured.get(name, Busy()),
        )
        for name in names
    }


def _seconds(busy: Busy | None) -> float | None:
    return None if busy is None else busy.seconds


def _remainder(whole_s: float | None, part_s: float | None) -> float | None:
    """Subtract a part from the whole; None if either is unknown."""
    # Clocks of device and host differ by a little, so the difference may fall below zero.
    return None if whole_s is None or part_s is None else max(0.0, whole_s - part_s)


def _row(name: str, predicted_s: float | None, measured_s: float | None) -> tuple[str, str, str, str]:
    return name, seconds_text(predicted_s), seconds_text(measured_s), deviation(predicted_s, measured_s)


def seconds_text(seconds: float | None) -> str:
    """Format seconds; unknown ones give an empty text."""
    return "" if seconds is None else format_seconds(seconds) if seconds > 0 else "0 s"


def deviation(predicted_s: float | None, measured_s: float | None) -> str:
    """Tell how far the measured seconds are from the predicted ones: "+12%", or "4.0 x" for a large factor."""
    if not predicted_s or measured_s is None:
        return ""
    ratio = measured_s / predicted_s
    return f"{ratio:.1f} x" if ratio >= FACTOR_FROM else f"{100 * (ratio - 1):+.0f}%"
