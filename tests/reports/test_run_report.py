"""The page of a run: both timelines on one axis, tables that add up, curves, and what it says of what is missing."""

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from flexengine.metrics import CardHealth, format_seconds
from flexengine.plan import Request
from flexengine.planner.planner import make_plan
from flexengine.reports.charts.curves import Reference, curve_chart
from flexengine.reports.picture import Picture
from flexengine.reports.plan_data import measured_timeline, plan_digest, step_timeline
from flexengine.reports.run_page import run_page
from flexengine.reports.run_record import LoggedEvaluation, LoggedStep, RunRecord
from flexengine.reports.run_tables import busy_by
from flexengine.schedule.timeline import MEASURED, SIMULATED, TimedRun
from flexengine.schedule.trace_reader import read_trace
from tests.planner.oracle import slow_link
from tests.schedule.small_plans import FLOAT32, small_model

REQUEST = Request(32, 512, 1 << 40, 1 << 40, chunk_tokens=64, round_tokens=128, numerics=FLOAT32)
SLOWER, GAP_S = 1.5, 0.001
"""The measured step of these tests: every command takes so much longer, and so long passes between programs."""


@pytest.fixture(scope="module")
def picture() -> Picture:
    """Four rounds of a small model."""
    model, profile = small_model(), slow_link(1e9)
    return Picture(make_plan(model, REQUEST, profile), model, profile)


@pytest.fixture(scope="module")
def run(picture) -> RunRecord:
    runs, now = [], 0.0
    for part in picture.step.parts:
        spans = [(SLOWER * a, SLOWER * b) for a, b in zip(part.timing.start_s, part.timing.end_s, strict=True)]
        for _ in range(part.repeats):
            runs.append(TimedRun(part.program, now, spans))
            now += SLOWER * part.timing.total_s + GAP_S
    about = {"what": "one measured step: step 2 of the run", "step": 2, "step_s": now, "tokens": 512, "device": "cuda"}
    measured = read_trace(json.loads("".join(measured_timeline(picture.plan, runs, about))), "trace.json", MEASURED)
    simulated = read_trace(json.loads(step_timeline(picture)), "timeline.json", SIMULATED)
    steps = [LoggedStep(n, 9.0 if n <= 2 else 2.0, 512, 4.0 - 0.1 * n, 1 << 30, 1 << 31, n <= 2) for n in range(1, 9)]
    return RunRecord("here", picture.plan, simulated, measured, steps)


def charts_of(text):
    return [ElementTree.fromstring(chart) for chart in re.findall(r"<svg .*?</svg>", text, re.DOTALL)]


def cells_of(text):
    """First cell -> the other cells of every table row, without tags."""
    rows = [re.findall(r"<td.*?>(.*?)</td>", row) for row in re.findall(r"<tr>(<td.*?)</tr>", text)]
    return {re.sub("<.*?>", "", row[0]): row[1:] for row in rows}


def test_the_page_needs_nothing_else(run):
    text = run_page(run)
    assert text.startswith("<!DOCTYPE html>")
    assert not re.search(r"https?://|@import|url\(|<(link|img|iframe|script)|src=|href=", text)
    assert re.findall("<h2>(.*?)</h2>", text) == [
        "Step by step",
        "Where the time of a step went",
        "Predicted and measured",
    ]
    assert len(charts_of(text)) == 6
    assert run_page(run._replace(folder="<b>")).count("run &lt;b&gt;") == 2


def test_both_timelines_share_one_axis_and_draw_every_round(run):
    simulated, measured = charts_of(run_page(run))[2:4]
    ends = [
        max(float(r.get("x")) + float(r.get("width")) for r in c.iter("rect") if r.get("fill"))
        for c in (simulated, measured)
    ]
    scale = (ends[0] - 66) / run.simulated.total_s
    assert (ends[1] - 66) / run.measured.total_s == pytest.approx(scale, rel=0.01)
    assert ends[1] == pytest.approx(1206, abs=1)
    for chart in (simulated, measured):
        marks = [line for line in chart.iter("line") if line.get("class") == "edge"]
        assert len(marks) == len(run.measured.parts) - 1
        names = [text.text for text in chart.iter("text")]
        assert [name for name in names if "round" in name] == ["round 1", "round 2", "round 3", "round 4"]


def test_tables_compare_the_whole_step(run, picture):
    busy = busy_by(run.simulated, by_kind=False)
    expected = {name: seconds for name, seconds in picture.plan.predicted.busy_s.items() if seconds}
    assert {name: seconds for name, (_, seconds) in busy.items()} == pytest.approx(expected)
    for by_kind in (False, True):
        planned, real = busy_by(run.simulated, by_kind), busy_by(run.measured, by_kind)
        assert planned.keys() == real.keys()
        for name, (count, seconds) in planned.items():
            assert real[name].count == count
            assert real[name].seconds == pytest.approx(SLOWER * seconds)
    cells = cells_of(run_page(run))
    assert cells["compute, busy"][2] == "+50%"
    waiting_s = run.measured.about["step_s"] - busy_by(run.measured, by_kind=False)["compute"].seconds
    assert cells["compute, waiting"][1] == format_seconds(waiting_s)
    assert cells["forward"][3] == "+50%"
    assert cells["forward"][0] == " / ".join([str(busy_by(run.measured, by_kind=True)["forward"].count)] * 2)
    assert cells["step, median of 6"][1] == "2.00 s"
    assert cells["between programs (host)"][1] == format_seconds(GAP_S * len(run.measured.parts))
    assert "A step took 2.00 s (median of 6 of 8 steps)" in run_page(run)


def test_the_page_draws_how_the_card_ran(run):
    steps = [step._replace(card=CardHealth(1980.0 - 100 * step.step, 1980.0, 400.0)) for step in run.steps]
    text = run_page(run._replace(steps=steps))
    assert len(charts_of(text)) == len(charts_of(run_page(run))) + 2  # no temperature is told
    assert "the probe saw 1,980 MHz" in text
    assert "The GPU ran slowly in 6 of 6 steps; in step 8: SM clock 1,180 MHz" in text


def test_a_run_without_a_trace_says_how_to_get_one(run):
    text = run_page(run._replace(measured=None))
    assert "run flexengine train with --trace" in text
    assert len(charts_of(text)) == 4
    assert cells_of(text)["compute, busy"][1:] == ["", ""]


@pytest.mark.parametrize("missing", ["plan", "simulated", "steps"])
def test_what_is_missing_is_left_out(run, missing):
    text = run_page(run._replace(**{missing: [] if missing == "steps" else None}))
    assert text.count("<table>") == 2
    if missing == "simulated":
        assert "There is no simulated step" in text
    if missing == "steps":
        assert "There is no step in train_log.jsonl" in text
    empty = RunRecord("x", None, None, None, [])
    assert "No step is logged yet." in run_page(empty)


def test_steps_of_different_plans_or_sizes_are_told(run, picture):
    assert "The plan changed" not in run_page(run)
    other = replace(picture.plan, weight_slots=picture.plan.weight_slots + 1)
    assert plan_digest(other) != plan_digest(picture.plan)
    assert plan_digest(replace(picture.plan, predicted=replace(picture.plan.predicted, step_s=1.0))) == plan_digest(
        picture.plan
    )
    assert "The plan changed after the measured step" in run_page(run._replace(plan=other))
    fewer = run.measured._replace(about={**run.measured.about, "tokens": 100})
    assert "The measured step had 100 tokens, the simulated one has 512" in run_page(run._replace(measured=fewer))
    assert "On the CPU" not in run_page(run)


def test_steps_that_count(run):
    assert [step.step for step in run.steady_steps] == [3, 4, 5, 6, 7, 8]
    assert [step.step for step in run._replace(steps=run.steps[:2]).steady_steps] == [2]
    assert [step.step for step in run._replace(steps=run.steps[:1]).steady_steps] == [1]


def test_losses_that_are_not_finite_leave_a_gap(run):
    steps = [step._replace(loss=None) if step.step in (3, 8) else step for step in run.steps]
    text = run_page(run._replace(steps=steps))
    assert "not finite" in text
    root = ElementTree.fromstring(curve_chart([(s.step, s.loss) for s in steps], "loss", "#000"))
    assert len(list(root.iter("path"))) == 2


@pytest.mark.parametrize(
    "values",
    [[1.0], [0.0, 0.0], [None], [5.0, None, 5.0], [1e30, -1e30], [1.0, 1.0 + 1e-15], [1e-12, 2e-12], [3.0, 2.9, 2.95]],
    ids=str,
)
def test_curves_of_any_values_stay_inside(values):
    root = ElementTree.fromstring(
        curve_chart(list(enumerate(values, start=1)), "x", "#123456", Reference(2.5, "as planned"))
    )
    width, height = (float(edge) for edge in root.get("viewBox").split()[2:])
    places = [(float(c.get("cx")), float(c.get("cy"))) for c in root.iter("circle")]
    for path in root.iter("path"):
        places += [tuple(map(float, pair.split(","))) for pair in path.get("d")[1:].split("L")]
    assert len(places) == sum(value is not None for value in values)
    assert all(0 <= x <= width and 0 <= y <= height for x, y in places)
    assert any(text.text == "as planned" for text in root.iter("text"))


def test_long_curves_keep_their_peaks():
    """Four points a pixel at the most, the highest and the lowest among them."""
    points = [(step, 1000.0 if step == 77_777 else 1.0 + step % 2) for step in range(1, 100_001)]
    path = next(iter(ElementTree.fromstring(curve_chart(points, "x", "#000")).iter("path"))).get("d")
    heights = [float(pair.split(",")[1]) for pair in path[1:].split("L")]
    assert len(heights) <= 4 * 1141
    assert sum(height < 60 for height in heights) == 1


def test_curves_of_evaluation_norm_and_rate(run):
    steps = [step._replace(grad_norm=1.5, lr=1e-4) for step in run.steps]
    text = run_page(run._replace(steps=steps, evaluations=[LoggedEvaluation(4, 3.5), LoggedEvaluation(8, None)]))
    captions = re.findall("<figcaption>(.*?)</figcaption>", text)
    assert captions[:5] == [
        "Loss", "Validation loss", "Gradient norm before clipping", "Learning rate", "Tokens per second",
    ]  # fmt: skip
