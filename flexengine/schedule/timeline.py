"""Draws simulated and measured programs as a Chrome trace (open it in Perfetto or chrome://tracing).

Times are in microseconds, as the format has them; one row per stream, one complete event per command, and counters that
are drawn as charts. The metadata say what was drawn and how the commands, in order, divide into programs (`parts`);
`trace_reader.py` reads both back. Source: "Trace Event Format", the Chromium project.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from flexengine.schedule.commands import BASE_STREAMS, STREAM_INDEX, STREAMS, Command, Program, Stream, streams_of
from flexengine.schedule.simulator import Timing

Event = dict[str, Any]
PROCESS = 1
MICROSECONDS = 1e6
SIMULATED, MEASURED = "simulated", "measured"
"""What the metadata of a trace give under "timeline"."""


class TimedRun(NamedTuple):
    """A program that ran: when it began, and (start, end) of each command from then on, by index; in seconds."""

    program: Program
    start_s: float
    spans_s: Sequence[tuple[float, float]]

    @property
    def timing(self) -> Timing:
        """The times as a simulation gives them; a stream is busy from start to end of each of its commands."""
        busy_s = dict.fromkeys(streams_of(self.program), 0.0)
        for command, (start_s, end_s) in zip(self.program.commands, self.spans_s, strict=True):
            busy_s[command.stream] += end_s - start_s
        starts, ends = [start for start, _ in self.spans_s], [end for _, end in self.spans_s]
        return Timing(starts, ends, max(ends, default=0.0), busy_s)


def trace_json(events: Iterable[Event], about: Mapping[str, Any] | None = None) -> str:
    """Events as a trace; `about` goes into its metadata, which Perfetto shows under "Info and stats"."""
    return "".join(trace_pieces(events, about or {}))


def trace_pieces(events: Iterable[Event], about: Mapping[str, Any]) -> Iterator[str]:
    """The text of a trace event by event, a line each, for writers that have no memory for all of it."""
    yield '{"traceEvents": ['
    for number, event in enumerate(events):
        yield (",\n" if number else "\n") + json.dumps(event)
    yield f'\n], "displayTimeUnit": "ms", "metadata": {json.dumps(dict(about))}}}'


def track_events(
    process: str = "flexengine", streams: Iterable[Stream] = BASE_STREAMS, number: int = PROCESS
) -> list[Event]:
    """Names and order of the rows of a process, such as a rank: one for each stream."""
    events: list[Event] = [_meta("process_name", 0, {"name": process})]
    for stream in streams:
        events.append(_meta("thread_name", thread_of(stream), {"name": str(stream)}))
        events.append(_meta("thread_sort_index", thread_of(stream), {"sort_index": thread_of(stream)}))
    return [{**event, "pid": number} for event in events]


def drawn_streams(programs: Iterable[Program]) -> list[Stream]:
    """The streams that have a row of a trace."""
    used = {stream for program in programs for stream in streams_of(program)}
    return [stream for stream in STREAMS if stream in used]


def run_events(title: str, runs: Sequence[TimedRun], number: int) -> Iterator[Event]:
    """What a rank ran, as a process of a trace; title and number: those of the process."""
    yield from track_events(title, drawn_streams(run.program for run in runs), number)
    for run in runs:
        yield from command_events(run.program, run.timing, run.start_s, number)


def command_events(program: Program, timing: Timing, start_s: float = 0.0, number: int = PROCESS) -> Iterator[Event]:
    """One complete event per command; `start_s` is when the program starts, `number` that of its process."""
    return ({**_command_event(program, command, timing, start_s), "pid": number} for command in program.commands)


def part_about(name: str, repeats: int, program: Program, timing: Timing, start_s: float) -> dict[str, Any]:
    """A program in the metadata: it runs `repeats` times on end in a step, and is drawn once."""
    about = {"name": name, "repeats": repeats, "start_s": start_s, "seconds": timing.total_s}
    return {**about, "commands": len(program.commands)}


def counter_event(name: str, time_s: float, values: Mapping[str, float]) -> Event:
    """The values of a counter from `time_s` on; they are stacked in the order given."""
    return {"name": name, "ph": "C", "pid": PROCESS, "ts": time_s * MICROSECONDS, "args": dict(values)}


def thread_of(stream: Stream) -> int:
    """The row of a stream."""
    return STREAM_INDEX[stream] + 1  # row 0 is what some viewers keep for an idle thread


def _meta(name: str, thread: int, args: dict[str, Any]) -> Event:
    return {"name": name, "ph": "M", "pid": PROCESS, "tid": thread, "args": args}


def _command_event(program: Program, command: Command, timing: Timing, start_s: float) -> Event:
    begin, end = timing.start_s[command.index], timing.end_s[command.index]
    return {
        "name": command.label,
        "cat": command.kind,
        "ph": "X",
        "pid": PROCESS,
        "tid": thread_of(command.stream),
        "ts": max(0.0, start_s + begin) * MICROSECONDS,  # a GPU's clock has ticks of a microsecond
        "dur": (end - begin) * MICROSECONDS,
        "args": {
            **{field: value for field, value in command.name._asdict().items() if value not in ("", -1)},
            "bytes": command.copy_bytes,
            "flops": command.work.flops,
            "waits": [program.commands[w].label for w in command.waits],
        },
    }
