"""A run as one HTML page that needs nothing else: the simulated step above the measured one, and the steps' figures."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from flexengine.metrics import format_bytes, format_seconds, format_tokens_per_s
from flexengine.plan import Plan
from flexengine.reports.charts.curves import Reference, curve_chart
from flexengine.reports.charts.page import figure, page, table, tiles
from flexengine.reports.charts.streams import (
    GAP_PIXELS,
    KINDS,
    STREAM_NAMES,
    Bar,
    bar_kind,
    bars_close_up,
    merged,
    strips_chart,
)
from flexengine.reports.charts.svg import LEFT, RIGHT, Mark
from flexengine.reports.plan_data import plan_digest
from flexengine.schedule.commands import STREAMS, Stream
from flexengine.schedule.trace_reader import Trace, TracePart, expanded

CLOSE_UP_SHARE = 0.05
"""Of a simulated round: the seconds that a close-up shows."""
HOW_TO_TRACE = "run train.py with --trace (and --trace-step N for another step than the second)"


class LoggedStep(NamedTuple):
    """What a line of train_log.jsonl tells: None where the value was no finite number, or was not measured.

    disturbed: the first step, which warms up, and steps that were timed or profiled, which slows them.
    """

    step: int
    step_s: float
    num_tokens: int
    loss: float | None
    gpu_peak_bytes: int | None
    host_peak_bytes: int | None
    disturbed: bool

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the step over its wall time."""
        return self.num_tokens / self.step_s


class RunRecord(NamedTuple):
    """What a run left in its folder; None or nothing for what is not there."""

    folder: str
    plan: Plan | None
    simulated: Trace | None
    measured: Trace | None
    steps: Sequence[LoggedStep]

    @property
    def steady(self) -> Sequence[LoggedStep]:
        """The steps whose speed counts: undisturbed ones, or all but the first, or what there is."""
        return [step for step in self.steps if not step.disturbed] or self.steps[1:] or self.steps

    @property
    def step_s(self) -> float | None:
        """Median wall seconds of the steady steps."""
        return statistics.median(step.step_s for step in self.steady) if self.steps else None

    @property
    def predicted_s(self) -> float | None:
        """Seconds that the plan, or else the simulated step, promises of a full step."""
        if self.plan is not None:
            return self.plan.predicted.step_s
        return self.simulated.total_s if self.simulated is not None else None


def run_page(run: RunRecord) -> str:
    """The report of a run."""
    model = run.plan.model if run.plan is not None else ""
    title = f"{model}: run {run.folder}" if model else f"run {run.folder}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="answer">{escape(_answer(run))}</p>',
        _tiles(run),
        "<h2>Where the time of a step went</h2>",
        *(f'<p class="soft">{escape(note)}</p>' for note in _notes(run)),
        *_timelines(run),
        "<h2>Predicted and measured</h2>",
        f'<div class="columns"><div>{_streams(run)}</div><div>{_kinds(run)}</div></div>',
        "<h2>Step by step</h2>",
        *_curves(run),
    ]
    return page(title, "\n".join(body))


# ---- the answer ------------------------------------------------------------------------------------------------


def _answer(run: RunRecord) -> str:
    if run.step_s is None:
        return "No step is logged yet." if run.predicted_s is None else f"Predicted {_s(run.predicted_s)} per step."
    counted = f"median of {len(run.steady)} of {len(run.steps)} steps"
    text = f"A step took {_s(run.step_s)} ({counted})"
    if run.predicted_s is None:
        return f"{text}."
    return f"{text}, {_s(run.predicted_s)} were predicted ({_off(run.predicted_s, run.step_s)})."


def _tiles(run: RunRecord) -> str:
    if not run.steps or run.step_s is None:
        return ""
    first, last = run.steps[0], run.steps[-1]
    speed = statistics.median(step.tokens_per_s for step in run.steady)
    return tiles(
        (
            (str(last.step), "steps taken", None),
            (_loss(last), f"loss; {_loss(first)} at step {first.step}", None),
            (format_tokens_per_s(speed), f"{_s(run.step_s)} a step", None),
            (format_bytes(last.gpu_peak_bytes), "peak GPU memory", None),
            (format_bytes(last.host_peak_bytes), "peak host memory", None),
        )
    )


def _loss(step: LoggedStep) -> str:
    return "not finite" if step.loss is None else f"{step.loss:.4f}"


def _notes(run: RunRecord) -> Iterator[str]:
    """What is drawn, what is missing and how to get it, and where a comparison would mislead."""
    if run.simulated is not None:
        yield f"Above, {run.simulated.about.get('what', 'one simulated step')}, every part as often as it runs."
    else:
        yield "There is no simulated step: timeline.json is not in the run folder; every run of train.py writes it."
    measured = run.measured
    if measured is None:
        yield f"There is no measured step: to see where the time really went, {HOW_TO_TRACE}."
        return
    yield f"Below, {measured.about.get('what', 'one measured step')}, on the same time axis; its time stamps slow it."
    if measured.about.get("device") == "cpu":
        yield "On the CPU commands run one after the other, so no two streams are busy at once."
    tokens = measured.about.get("tokens")
    if run.plan is not None and isinstance(tokens, int) and tokens < run.plan.request.max_global_batch_tokens:
        full = run.plan.request.max_global_batch_tokens
        yield f"The measured step had {tokens} tokens, the simulated one has {full}; copies of weights are the same."
    digests = {trace.about.get("plan") for trace in (run.simulated, measured) if trace is not None}
    if run.plan is not None:
        digests.add(plan_digest(run.plan))
    if len(digests) > 1:
        yield "The plan changed after the measured step (--replan), so the two are not of one plan."


# ---- timelines -------------------------------------------------------------------------------------------------


def _timelines(run: RunRecord) -> Iterator[str]:
    """The traces that there are on one time axis, then the turn of a round of each in as many seconds."""
    named = [("Simulated", run.simulated), ("Measured", run.measured)]
    traces = [(name, trace) for name, trace in named if trace is not None]
    end_s = max((trace.total_s for _, trace in traces), default=0.0)
    for name, trace in traces:
        yield figure(f"{name}: {format_seconds(trace.total_s)}", _timeline(trace, end_s, f"{name} commands by stream"))
    rounds = [(name, _last_round(trace)) for name, trace in traces]
    width_s = CLOSE_UP_SHARE * max((part.seconds for _, part in rounds), default=0.0)
    for name, part in rounds:
        caption = f"{name}, close-up: the turn from forward to backward of {part.name}"
        yield figure(caption, bars_close_up(_bars(part), width_s, part.seconds))


def _timeline(trace: Trace, end_s: float, label: str) -> str:
    gap_s = GAP_PIXELS / (RIGHT - LEFT) * end_s
    lanes = {id(part): merged(_bars(part), gap_s) for part in trace.parts}
    runs = [(part, part.start_s + later_s) for part, later_s in expanded(trace)]
    marks = [
        Mark(f"round {number}" if "round" in part.name else part.name, start_s, part.seconds)
        for number, (part, start_s) in enumerate(runs, start=1)
    ]
    return strips_chart(((start_s, lanes[id(part)]) for part, start_s in runs), marks, end_s, label)


def _bars(part: TracePart) -> list[Bar]:
    """The commands of a part, in seconds since it began."""
    return [
        Bar(
            c.stream,
            bar_kind(c.kind, c.label, c.num_bytes > 0),
            c.label,
            c.start_s - part.start_s,
            c.end_s - part.start_s,
        )
        for c in part.commands
    ]


def _last_round(trace: Trace) -> TracePart:
    """The last part before the update: a round as most of them are."""
    rounds = [part for part in trace.parts if part.name != "update"]
    return rounds[-1] if rounds else trace.parts[0]


# ---- tables ----------------------------------------------------------------------------------------------------


class Busy(NamedTuple):
    """Commands of one group in a whole step: how many, and their seconds from start to end."""

    count: int = 0
    seconds: float = 0.0


def busy_by(trace: Trace, by_kind: bool) -> dict[str, Busy]:
    """Seconds of a step's commands by stream, or by kind of bar."""
    found: dict[str, Busy] = {}
    for part in trace.parts:
        for command in part.commands:
            kind = bar_kind(command.kind, command.label, command.num_bytes > 0)
            key = kind if by_kind else str(command.stream)
            count, seconds = found.get(key, Busy())
            found[key] = Busy(count + part.repeats, seconds + part.repeats * (command.end_s - command.start_s))
    return found


def _streams(run: RunRecord) -> str:
    """Seconds of a step and of every stream in it."""
    rows: list[tuple[str, ...]] = []
    if run.step_s is not None:
        rows.append(_row(f"step, median of {len(run.steady)}", run.predicted_s, run.step_s))
    total_s = None
    if run.measured is not None:
        wall_s = run.measured.about.get("step_s")
        total_s = float(wall_s) if isinstance(wall_s, (int, float)) else run.measured.total_s
        rows.append(_row(f"step {run.measured.about.get('step', '')}, with time stamps", run.predicted_s, total_s))
    pairs = _busy_pairs(run, by_kind=False)
    for stream in STREAMS:
        busy_s = [_seconds(busy) for busy in pairs.get(str(stream), (None, None))]
        rows.append(_row(f"{STREAM_NAMES[stream]}, busy", *busy_s))
        if stream is Stream.COMPUTE:
            whole_s = (run.simulated.total_s if run.simulated is not None else None, total_s)
            rows.append(_row(f"{STREAM_NAMES[stream]}, waiting", *map(_rest, whole_s, busy_s)))
    if run.measured is not None and total_s is not None:
        inside_s = sum(part.repeats * part.seconds for part in run.measured.parts)
        rows.append(_row("between programs (host)", 0.0, _rest(total_s, inside_s)))
    return table(("seconds of a step", "predicted", "measured", "measured is"), rows)


def _kinds(run: RunRecord) -> str:
    """Seconds by kind of command, the longest first, in the colours of the timelines."""
    pairs = _busy_pairs(run, by_kind=True)
    rows = []
    for name, pair in sorted(pairs.items(), key=lambda item: -max(_seconds(busy) or 0.0 for busy in item[1])):
        counts = " / ".join(str(busy.count) for busy in pair if busy is not None)
        _, *cells = _row(name, *map(_seconds, pair))
        swatch = f'<i style="background:{KINDS[name]}"></i>{escape(name)}'
        rows.append((swatch, counts, *(escape(cell) for cell in cells)))
    head = ("kind of command", "how many", "predicted", "measured", "measured is")
    return table(head, rows, safe=True)


def _busy_pairs(run: RunRecord, by_kind: bool) -> dict[str, tuple[Busy | None, Busy | None]]:
    """Simulated and measured commands by group; None where there is no such trace."""
    found = [None if trace is None else busy_by(trace, by_kind) for trace in (run.simulated, run.measured)]
    names = dict.fromkeys(name for groups in found if groups is not None for name in groups)
    first, second = found
    return {
        name: (None if first is None else first.get(name, Busy()), None if second is None else second.get(name, Busy()))
        for name in names
    }


def _seconds(busy: Busy | None) -> float | None:
    return None if busy is None else busy.seconds


def _rest(whole_s: float | None, part_s: float | None) -> float | None:
    """What is left of the first beside the second, as far as both are known."""
    return None if whole_s is None or part_s is None else max(0.0, whole_s - part_s)


def _row(name: str, predicted_s: float | None, measured_s: float | None) -> tuple[str, str, str, str]:
    both = predicted_s is not None and measured_s is not None
    return name, _s(predicted_s), _s(measured_s), _off(predicted_s, measured_s) if both else ""


def _s(seconds: float | None) -> str:
    return "" if seconds is None else format_seconds(seconds) if seconds > 0 else "0 s"


def _off(predicted_s: float | None, measured_s: float | None) -> str:
    """By how much the second is more than the first: percent, or a factor where that is large."""
    if not predicted_s or measured_s is None:
        return ""
    ratio = measured_s / predicted_s
    return f"{ratio:.1f} x" if ratio >= 3 else f"{100 * (ratio - 1):+.0f}%"


# ---- curves ----------------------------------------------------------------------------------------------------


def _curves(run: RunRecord) -> Iterator[str]:
    if not run.steps:
        yield '<p class="soft">There is no step in train_log.jsonl: train.py writes a line when a step has ended.</p>'
        return
    losses = [(step.step, step.loss) for step in run.steps]
    yield figure("Loss", curve_chart(losses, "loss by step", KINDS["weights"]))
    speeds = [(step.step, step.tokens_per_s) for step in run.steps]
    reference = None
    if run.plan is not None and run.plan.predicted.step_s > 0:
        promised = run.plan.request.max_global_batch_tokens / run.plan.predicted.step_s
        reference = Reference(promised, f"predicted {format_tokens_per_s(promised)}")
    yield figure("Tokens per second", curve_chart(speeds, "tokens per second by step", KINDS["activations"], reference))
