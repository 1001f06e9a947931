"""Draws simulated programs as a Chrome trace (open it in Perfetto or chrome://tracing).

Times are in microseconds, as the format has them; one row per stream, one complete event per command, and counters that
are drawn as charts. Source: "Trace Event Format", the Chromium project.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from flexengine.schedule.commands import STREAM_INDEX, STREAMS, Command, Program, Stream
from flexengine.schedule.simulator import Timing

Event = dict[str, Any]
PROCESS = 1
MICROSECONDS = 1e6


def trace_json(events: Iterable[Event], about: Mapping[str, Any] | None = None) -> str:
    """Events as a trace; `about` goes into its metadata, which Perfetto shows under "Info and stats"."""
    return json.dumps({"traceEvents": list(events), "displayTimeUnit": "ms", "metadata": dict(about or {})})


def track_events(process: str = "flexengine") -> list[Event]:
    """Names and order of the rows."""
    events: list[Event] = [_meta("process_name", 0, {"name": process})]
    for stream in STREAMS:
        events.append(_meta("thread_name", _thread(stream), {"name": str(stream)}))
        events.append(_meta("thread_sort_index", _thread(stream), {"sort_index": _thread(stream)}))
    return events


def command_events(program: Program, timing: Timing, start_s: float = 0.0) -> list[Event]:
    """One complete event per command; `start_s` is when the program starts."""
    return [_command_event(program, command, timing, start_s) for command in program.commands]


def counter_event(name: str, time_s: float, values: Mapping[str, float]) -> Event:
    """The values of a counter from `time_s` on; they are stacked in the order given."""
    return {"name": name, "ph": "C", "pid": PROCESS, "ts": time_s * MICROSECONDS, "args": dict(values)}


def _thread(stream: Stream) -> int:
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
        "tid": _thread(command.stream),
        "ts": (start_s + begin) * MICROSECONDS,
        "dur": (end - begin) * MICROSECONDS,
        "args": {
            "bytes": command.copy_bytes,
            "flops": command.work.flops,
            "waits": [program.commands[w].label for w in command.waits],
        },
    }
