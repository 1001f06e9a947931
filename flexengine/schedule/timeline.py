"""Draws a simulated program as a Chrome trace (open it in Perfetto or chrome://tracing)."""

from __future__ import annotations

import json

from flexengine.schedule.commands import STREAM_INDEX, STREAMS, Program
from flexengine.schedule.simulator import Timing


def chrome_trace(program: Program, timing: Timing, start_s: float = 0.0) -> str:
    """Trace Event Format JSON text: one row per stream, one complete event per command, times in microseconds.

    Source: "Trace Event Format", the Chromium project.
    """
    events: list[dict] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": STREAM_INDEX[s], "args": {"name": str(s)}} for s in STREAMS
    ]
    for command in program.commands:
        begin, end = timing.start_s[command.index], timing.end_s[command.index]
        events.append(
            {
                "name": command.label,
                "cat": command.kind,
                "ph": "X",
                "pid": 0,
                "tid": STREAM_INDEX[command.stream],
                "ts": (start_s + begin) * 1e6,
                "dur": (end - begin) * 1e6,
                "args": {
                    "bytes": command.copy_bytes,
                    "flops": command.work.flops,
                    "waits": [program.commands[w].label for w in command.waits],
                },
            }
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
