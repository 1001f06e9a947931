"""Traces that are written and read back: the same commands, programs and times."""

import json

import pytest

from flexengine.plan import Request
from flexengine.schedule.commands import BASE_STREAMS
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering import ChunkShape, RoundShape
from flexengine.schedule.programs import lower_round, lower_update
from flexengine.schedule.simulator import Timing
from flexengine.schedule.timeline import (
    MEASURED,
    SIMULATED,
    TimedRun,
    command_events,
    part_about,
    trace_json,
    track_events,
)
from flexengine.schedule.trace_reader import expanded, read_trace
from tests.schedule.small_plans import FLOAT32, resident_plan, small_model


@pytest.fixture(scope="module")
def programs():
    """A round and an update."""
    model = small_model(blocks=1)
    layout = Layout(model, resident_plan(model, Request(32, 128, 1 << 30, 1 << 40, numerics=FLOAT32)))
    shape = RoundShape((ChunkShape(64, 0), ChunkShape(64, 0)))
    return [lower_round(layout, shape, first=True), lower_update(layout)]


def timed(program, start_s):
    """Command i lasts i + 1 milliseconds; they follow each other."""
    ends = [(i + 1) * (i + 2) / 2000 for i in range(len(program.commands))]
    return TimedRun(program, start_s, list(zip([0.0, *ends[:-1]], ends, strict=True)))


def trace_of(runs, timeline=MEASURED, repeats=1):
    events, parts = track_events(), []
    for run in runs:
        events += command_events(run.program, run.timing, run.start_s)
        parts.append(part_about(run.program.name, repeats, run.program, run.timing, run.start_s))
    return json.loads(trace_json(events, {"timeline": timeline, "parts": parts}))


def test_times_of_a_run_as_a_simulation_gives_them(programs):
    run = timed(programs[0], 7.0)
    assert isinstance(run.timing, Timing)
    assert run.timing.total_s == max(end for _, end in run.spans_s)
    assert sum(run.timing.busy_s.values()) == pytest.approx(run.timing.total_s)
    assert set(run.timing.busy_s) == set(BASE_STREAMS)


def test_what_was_written_is_read(programs):
    runs = [timed(programs[0], 0.25), timed(programs[0], 100.0), timed(programs[1], 200.0)]
    trace = read_trace(trace_of(runs), "x.json", MEASURED)
    assert [part.name for part in trace.parts] == ["round", "round", "update"]
    assert trace.total_s == pytest.approx(200.0 + runs[2].timing.total_s)
    for part, run in zip(trace.parts, runs, strict=True):
        assert (part.repeats, part.start_s, part.seconds) == (1, run.start_s, run.timing.total_s)
        for found, command, (begin, end) in zip(part.commands, run.program.commands, run.spans_s, strict=True):
            assert (found.stream, found.kind, found.label) == (command.stream, command.kind, command.label)
            assert found.num_bytes == command.copy_bytes
            assert found.start_s == pytest.approx(run.start_s + begin)
            assert found.end_s == pytest.approx(run.start_s + end)


def test_parts_that_repeat_push_the_later_ones_back(programs):
    runs = [timed(programs[0], 0.0)]
    runs.append(timed(programs[1], runs[0].timing.total_s))
    trace = read_trace(trace_of(runs, SIMULATED, repeats=3), "x.json", SIMULATED)
    round_s, update_s = (run.timing.total_s for run in runs)
    assert trace.total_s == pytest.approx(3 * (round_s + update_s))
    starts = [part.start_s + later for part, later in expanded(trace)]
    expected = [0, round_s, 2 * round_s, 3 * round_s, 3 * round_s + update_s, 3 * round_s + 2 * update_s]
    assert starts == pytest.approx(expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("traceEvents"), "no trace of flexengine: it has no traceEvents"),
        (lambda t: t["metadata"].pop("timeline"), "no metadata of a flexengine timeline"),
        (lambda t: t["metadata"].update(parts=[]), "no metadata of a flexengine timeline"),
        (lambda t: t["metadata"].update(parts=[3]), "no metadata of a flexengine timeline"),
        (lambda t: t["metadata"].update(timeline=SIMULATED), "is a simulated step, not a measured one"),
        (lambda t: t["metadata"]["parts"][0].update(commands=1), r"holds \d+ commands, its parts name 1"),
        (lambda t: t["metadata"]["parts"][0].update(repeats=0), "a part runs 0 times, expected 1 to"),
        (lambda t: t["metadata"]["parts"][0].update(seconds=float("nan")), "seconds is 'nan', expected a number"),
        (lambda t: t["metadata"]["parts"][0].update(name=None), "name is 'None', expected a text"),
        (lambda t: t["traceEvents"][-1].update(tid=99), "an event is of no stream"),
        (lambda t: t["traceEvents"][-1].update(tid=[1]), "an event is of no stream"),
        (lambda t: t["traceEvents"][-1].update(args=None), "an event is of no stream, or has no args"),
        (lambda t: t["traceEvents"][-1].update(dur=-1), "dur is '-1', expected a number of at least 0"),
        (lambda t: t["traceEvents"][-1].update(dur=True), "dur is 'True', expected a number of at least 0"),
        (lambda t: t["traceEvents"][-1]["args"].update(bytes=10**400), "bytes is '1000"),
        (lambda t: t["traceEvents"][-1].update(cat=7), "cat is '7', expected a text"),
    ],
)
def test_what_is_no_trace_is_refused(programs, change, message):
    value = trace_of([timed(programs[0], 0.0)])
    change(value)
    with pytest.raises(ValueError, match=message):
        read_trace(value, "x.json", MEASURED)


@pytest.mark.parametrize("value", [None, 3, "x", [], {}, {"traceEvents": []}])
def test_values_that_are_no_traces(value):
    with pytest.raises(ValueError, match=r"^x\.json is no trace of flexengine"):
        read_trace(value, "x.json", MEASURED)
