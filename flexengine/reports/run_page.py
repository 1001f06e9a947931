"""A run as one self-contained HTML page: the simulated step above the measured one, and figures of every step."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from html import escape

from flexengine.metrics import describe_slow_card, format_bytes, format_seconds, format_tokens_per_s
from flexengine.reports.charts.curves import Reference, curve_chart
from flexengine.reports.charts.page import figure, page, tiles
from flexengine.reports.charts.streams import (
    GAP_PIXELS,
    KINDS,
    Bar,
    bar_kind,
    bars_close_up,
    merge_bars,
    programs_chart,
)
from flexengine.reports.charts.svg import LEFT, RIGHT, Mark
from flexengine.reports.plan_data import plan_digest
from flexengine.reports.run_record import LoggedStep, RunRecord
from flexengine.reports.run_tables import deviation, kind_table, seconds_text, stream_table
from flexengine.schedule.trace_reader import Trace, TracePart, expanded

CLOSE_UP_SHARE = 0.05
"""A close-up shows this share of the longest round drawn: enough to read single commands, and both phases."""
HOW_TO_TRACE = "run flexengine train with --trace (and --trace-step N for another step than the second)"


def run_page(run: RunRecord) -> str:
    """Draw the page of a run from whatever its folder holds; the page says what is missing."""
    model = run.plan.model if run.plan is not None else ""
    title = f"{model}: run {run.folder}" if model else f"run {run.folder}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="answer">{escape(_answer(run))}</p>',
        _tiles(run),
        "<h2>Step by step</h2>",
        *_curves(run),
        "<h2>Where the time of a step went</h2>",
        *(f'<p class="soft">{escape(note)}</p>' for note in _notes(run)),
        *_timelines(run),
        "<h2>Predicted and measured</h2>",
        f'<div class="columns"><div>{stream_table(run)}</div><div>{kind_table(run)}</div></div>',
    ]
    return page(title, "\n".join(body))


# ---- the answer ------------------------------------------------------------------------------------------------


def _answer(run: RunRecord) -> str:
    if run.step_s is None:
        return (
            "No step is logged yet."
            if run.predicted_s is None
            else f"Predicted {seconds_text(run.predicted_s)} per step."
        )
    counted = f"median of {len(run.steady_steps)} of {len(run.steps)} steps"
    text = f"A step took {seconds_text(run.step_s)} ({counted})"
    if run.predicted_s is not None:
        text += f", {seconds_text(run.predicted_s)} were predicted ({deviation(run.predicted_s, run.step_s)})"
    slow = describe_slow_card(run.steady_steps)
    return f"{text}. {slow}." if slow else f"{text}."


def _tiles(run: RunRecord) -> str:
    if not run.steps or run.step_s is None:
        return ""
    # Peaks are those since the run began, so the last line of the log has them.
    first, last = run.steps[0], run.steps[-1]
    speed = statistics.median(step.tokens_per_s for step in run.steady_steps)
    return tiles(
        (
            (str(last.step), "steps taken", None),
            (_loss(last), f"loss; {_loss(first)} at step {first.step}", None),
            (format_tokens_per_s(speed), f"{seconds_text(run.step_s)} a step", None),
            (format_bytes(last.gpu_peak_bytes), "peak GPU memory", None),
            (format_bytes(last.host_peak_bytes), "peak host memory", None),
        )
    )


def _loss(step: LoggedStep) -> str:
    return "not finite" if step.loss is None else f"{step.loss:.4f}"


def _notes(run: RunRecord) -> Iterator[str]:
    """Tell what is drawn, what is missing and how to get it, and where a comparison would mislead."""
    if run.simulated is not None:
        yield f"Above, {run.simulated.about.get('what', 'one simulated step')}, every part as often as it runs."
    else:
        yield "There is no simulated step: the run folder has no timeline.json, which every flexengine train writes."
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
    # --replan may change the plan after the traced step; the traces and plan.json then tell of different ones.
    digests = {trace.about.get("plan") for trace in (run.simulated, measured) if trace is not None}
    if run.plan is not None:
        digests.add(plan_digest(run.plan))
    if len(digests) > 1:
        yield "The plan changed after the measured step (--replan), so the two are not of one plan."


# ---- timelines -------------------------------------------------------------------------------------------------


def _timelines(run: RunRecord) -> Iterator[str]:
    """Draw each trace on one time axis, then a close-up of one round of each over equally many seconds."""
    named = [("Simulated", run.simulated), ("Measured", run.measured)]
    traces = [(name, trace) for name, trace in named if trace is not None]
    # One axis for both, or a slower step would look as long as the predicted one.
    end_s = max((trace.total_s for _, trace in traces), default=0.0)
    for name, trace in traces:
        yield figure(f"{name}: {format_seconds(trace.total_s)}", _timeline(trace, end_s, f"{name} commands by stream"))
    rounds = [(name, _last_round(trace)) for name, trace in traces]
    width_s = CLOSE_UP_SHARE * max((part.seconds for _, part in rounds), default=0.0)
    for name, part in rounds:
        caption = f"{name}, close-up: from forward to backward in {part.name}"
        yield figure(caption, bars_close_up(_bars(part), width_s, part.seconds))


def _timeline(trace: Trace, end_s: float, label: str) -> str:
    gap_s = GAP_PIXELS / (RIGHT - LEFT) * end_s
    # Every part is merged once and drawn as often as it ran.
    rows = {id(part): merge_bars(_bars(part), gap_s) for part in trace.parts}
    runs = [(part, part.start_s + later_s) for part, later_s in expanded(trace)]
    marks = [
        Mark(f"round {number}" if "round" in part.name else part.name, start_s, part.seconds)
        for number, (part, start_s) in enumerate(runs, start=1)
    ]
    return programs_chart(((start_s, rows[id(part)]) for part, start_s in runs), marks, end_s, label)


def _bars(part: TracePart) -> list[Bar]:
    """Give the commands of a part as bars, in seconds since the part began."""
    return [
        Bar(
            c.stream,
            bar_kind(c.kind, c.name, is_copy=c.num_bytes > 0),
            c.name,
            c.start_s - part.start_s,
            c.end_s - part.start_s,
        )
        for c in part.commands
    ]


def _last_round(trace: Trace) -> TracePart:
    """Pick the last round before the update: unlike the first one, it is like most rounds."""
    rounds = [part for part in trace.parts if part.name != "update"]
    return rounds[-1] if rounds else trace.parts[0]


# ---- curves ----------------------------------------------------------------------------------------------------


def _curves(run: RunRecord) -> Iterator[str]:
    if not run.steps:
        yield '<p class="soft">There is no step in train_log.jsonl, which gets a line when a step has ended.</p>'
        return
    # All steps are drawn, disturbed ones too: only averages leave them out.
    losses = [(step.step, step.loss) for step in run.steps]
    yield figure("Loss", curve_chart(losses, "loss by step", KINDS["weights"]))
    if run.evaluations:
        evaluated = [(evaluation.step, evaluation.loss) for evaluation in run.evaluations]
        yield figure("Validation loss", curve_chart(evaluated, "validation loss by step", KINDS["weights"]))
    for name, label, points in (
        ("Gradient norm before clipping", "gradient norm by step", [(step.step, step.grad_norm) for step in run.steps]),
        ("Learning rate", "learning rate by step", [(step.step, step.lr) for step in run.steps]),
    ):
        if any(value is not None for _, value in points):
            yield figure(name, curve_chart(points, label, KINDS["other"]))
    speeds = [(step.step, step.tokens_per_s) for step in run.steps]
    reference = None
    if run.plan is not None and run.plan.predicted.step_s > 0:
        promised = run.plan.request.max_global_batch_tokens / run.plan.predicted.step_s
        reference = Reference(promised, f"predicted {format_tokens_per_s(promised)}")
    yield figure("Tokens per second", curve_chart(speeds, "tokens per second by step", KINDS["activations"], reference))
    yield from _card_curves(run)


def _card_curves(run: RunRecord) -> Iterator[str]:
    """Draw how the GPU ran, where its driver told it."""
    told = [(step.step, step.card) for step in run.steps if step.card is not None]
    if not told:
        return
    usual_mhz = told[-1][1].usual_clock_mhz
    reference = Reference(usual_mhz, f"the probe saw {usual_mhz:,.0f} MHz") if usual_mhz else None
    clocks = [(step, card.clock_mhz) for step, card in told]
    yield figure("Clock of the GPU in MHz", curve_chart(clocks, "SM clock by step", KINDS["other"], reference))
    for name, values in (
        ("Power of the GPU in W", [(step, card.power_w) for step, card in told]),
        ("Temperature of the GPU in C", [(step, card.temperature_c) for step, card in told]),
    ):
        if any(value is not None for _, value in values):
            yield figure(name, curve_chart(values, f"{name} by step", KINDS["other"]))
