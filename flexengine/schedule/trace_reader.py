"""Reads back the Chrome traces of `timeline.py`: which command ran when, program by program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

from flexengine.schedule.commands import STREAMS, CommandName, Stream, Subject
from flexengine.schedule.timeline import MEASURED, MICROSECONDS, PROCESS, SIMULATED, thread_of

STREAM_OF_THREAD = {thread_of(stream): stream for stream in STREAMS}
MOST_REPEATS = 2**20
"""More rounds than any step has: a damaged number is named, not drawn."""
LARGEST = 1e18
"""No number in a trace is larger. Infinities are above it, and NaN is not below it, so one comparison refuses both."""


class TraceCommand(NamedTuple):
    """A command with its times in seconds from the beginning of the trace, and the bytes that it copied."""

    stream: Stream
    kind: str
    name: CommandName
    start_s: float
    end_s: float
    num_bytes: int

    @property
    def label(self) -> str:
        """Its name in words."""
        return str(self.name)


class TracePart(NamedTuple):
    """A program on a trace: drawn once from `start_s` on, it ran `repeats` times on end, `seconds` each time."""

    name: str
    repeats: int
    start_s: float
    seconds: float
    commands: tuple[TraceCommand, ...]


class Trace(NamedTuple):
    """A trace: what its metadata tell, and its programs in order."""

    about: Mapping[str, Any]
    parts: tuple[TracePart, ...]

    @property
    def total_s(self) -> float:
        """When the last program ends, every one drawn as often as it ran."""
        end_s = max((part.start_s + part.seconds for part in self.parts), default=0.0)
        return end_s + sum((part.repeats - 1) * part.seconds for part in self.parts)


def read_trace(value: object, where: object, timeline: str) -> Trace:
    """Read the trace in a JSON value that `trace_json` wrote; `where` names its file in messages.

    Of several ranks it is the first one's part.
    timeline: SIMULATED or MEASURED, whichever it has to be. Raises ValueError for what is no such trace.
    """
    about, events = _frame(value, where)
    if about["timeline"] != timeline:
        raise ValueError(f"{where} is a {about['timeline']} step, not a {timeline} one; {_REMEDY[timeline]}")
    commands = [_command(event, where) for event in events if _is_command(event)]
    parts, first = [], 0
    for part in about["parts"]:
        count = _number(part, "commands", where)
        members = tuple(commands[first : first + int(count)])
        first += int(count)
        repeats = int(_number(part, "repeats", where))
        if not 1 <= repeats <= MOST_REPEATS:
            raise ValueError(f"{where}: a part runs {repeats} times, expected 1 to {MOST_REPEATS}; {_REMEDY[timeline]}")
        start_s, seconds = _number(part, "start_s", where), _number(part, "seconds", where)
        parts.append(TracePart(_text(part, "name", where), repeats, start_s, seconds, members))
    if first != len(commands):
        raise ValueError(f"{where} holds {len(commands)} commands, its parts name {first}; {_REMEDY[timeline]}")
    return Trace(about, tuple(parts))


def expanded(trace: Trace) -> Iterator[tuple[TracePart, float]]:
    """Every run of every part, and by how many seconds it is later than the part is drawn in the trace."""
    later_s = 0.0
    for part in trace.parts:
        for repeat in range(part.repeats):
            yield part, later_s + repeat * part.seconds
        later_s += (part.repeats - 1) * part.seconds


_REMEDY = {
    SIMULATED: "`flexengine plan --timeline FILE` and every run write such a file",
    MEASURED: "run `flexengine train --trace` again",
}


def _frame(value: object, where: object) -> tuple[Mapping[str, Any], list[Any]]:
    """The metadata and the events of a trace of this package, as far as they can be told without reading them all."""
    about = value.get("metadata") if isinstance(value, dict) else None
    events = value.get("traceEvents") if isinstance(value, dict) else None
    known = isinstance(about, dict) and about.get("timeline") in (SIMULATED, MEASURED)
    if not (isinstance(about, dict) and known and isinstance(events, list) and _are_parts(about.get("parts"))):
        missing = "no traceEvents" if not isinstance(events, list) else "no metadata of a flexengine timeline"
        raise ValueError(f"{where} is no trace of flexengine: it has {missing}; {_REMEDY[MEASURED]}")
    return about, events


def _are_parts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _is_command(event: object) -> bool:
    return isinstance(event, dict) and event.get("ph") == "X" and event.get("pid", PROCESS) == PROCESS


def _command(event: Mapping[str, Any], where: object) -> TraceCommand:
    thread, args = event.get("tid"), event.get("args")
    stream = STREAM_OF_THREAD.get(thread) if isinstance(thread, int) else None
    if stream is None or not isinstance(args, dict):
        raise ValueError(f"{where}: an event is of no stream, or has no args; {_REMEDY[MEASURED]}")
    begin_s = _number(event, "ts", where) / MICROSECONDS
    return TraceCommand(
        stream=stream,
        kind=_text(event, "cat", where),
        name=_command_name(event, args, where),
        start_s=begin_s,
        end_s=begin_s + _number(event, "dur", where) / MICROSECONDS,
        num_bytes=int(_number(args, "bytes", where)),
    )


def _command_name(event: Mapping[str, Any], args: Mapping[str, Any], where: object) -> CommandName:
    """The fields of a command's name. A trace of an older version has only the label, which becomes the verb."""
    label = _text(event, "name", where)
    fields = {"verb": label, "subject": "", "owner": "", **args}
    verb, subject, owner = (_text(fields, field, where) for field in ("verb", "subject", "owner"))
    chunk = int(_number(args, "chunk", where)) if "chunk" in args else -1
    return CommandName(verb, cast("Subject", subject), owner, chunk)


def _number(values: Mapping[str, Any], key: str, where: object) -> float:
    """A finite number of at least 0 among values. Raises ValueError for anything else."""
    found = values.get(key)
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 <= found <= LARGEST:
        raise ValueError(f"{where}: {key} is {str(found)[:40]!r}, expected a number of at least 0; {_REMEDY[MEASURED]}")
    return float(found)


def _text(values: Mapping[str, Any], key: str, where: object) -> str:
    found = values.get(key)
    if not isinstance(found, str):
        raise ValueError(f"{where}: {key} is {str(found)[:40]!r}, expected a text; {_REMEDY[MEASURED]}")
    return found
