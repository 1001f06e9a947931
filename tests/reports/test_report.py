"""Reports: words, JSON, Chrome trace and HTML page of one small plan, checked by their structure."""

import json
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from flexengine.plan import GroupPlan, Plan, PlanReason, Request
from flexengine.planner.feasibility.remedies import Remedy
from flexengine.planner.feasibility.shortage import Feasibility, ShortageError
from flexengine.planner.planner import make_plan
from flexengine.planner.problem import Problem
from flexengine.reports.charts.memory_file import memory_svg
from flexengine.reports.charts.streams import kind_of, merged_bars
from flexengine.reports.charts.svg import ticks
from flexengine.reports.picture import Picture
from flexengine.reports.plan_data import as_json, shortage_json, step_timeline
from flexengine.reports.plan_page import html_page, shortage_page
from flexengine.reports.plan_text import describe, report, shortage_report
from flexengine.reports.text_format import align_columns, join_words
from flexengine.schedule.commands import BASE_STREAMS, Access, CommandName, CopyRegion, Stream
from flexengine.schedule.program_builder import ProgramBuilder
from flexengine.schedule.simulator import Timing
from flexengine.schedule.slots import Slot, SlotKey, overlapping_slots
from flexengine.schedule.step_parts import stalls
from tests.planner.oracle import slow_link
from tests.schedule.small_plans import FLOAT32, small_model

REQUEST = Request(32, 512, 2 << 20, 1 << 40, chunk_tokens=64, round_tokens=128, numerics=FLOAT32)
VOID_TAGS = {"meta", "br", "rect", "line", "path"}


@pytest.fixture(scope="module")
def picture() -> Picture:
    """Four rounds of a model that streams over a slow link."""
    model, profile = small_model(hidden=128), slow_link(1e9)
    least = Feasibility(Problem(model, replace(REQUEST, max_gpu_bytes=1 << 40), profile)).least_gpu().gpu_bytes
    request = replace(REQUEST, max_gpu_bytes=int(1.2 * least))
    return Picture(make_plan(model, request, profile), model, profile)


@pytest.fixture(scope="module")
def error() -> ShortageError:
    model, profile = small_model(hidden=128), slow_link(1e9)
    needs = Feasibility(Problem(model, replace(REQUEST, max_gpu_bytes=1 << 40), profile)).least_gpu()
    remedy = Remedy("--max-seq-len 16", replace(REQUEST, max_seq_len=16))
    request = replace(REQUEST, max_gpu_bytes=1000)
    return ShortageError(PlanReason.INSUFFICIENT_DEVICE_MEMORY, "too little", request, needs, (remedy,))


# ---- words -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("elements", "told"), [(4096, "4096"), (1 << 26, "67.1 M"), (1 << 27, "134 M")], ids=str)
def test_tiles_are_told_without_exponents(picture, elements, told):
    plan = replace(picture.plan, optimizer_tile=elements)
    assert f"tile(s) of {told} elements" in describe(plan, picture.model)


@pytest.mark.parametrize(("recompute", "told"), [("none", "nothing"), ("full", "the rest")])
def test_blocks_that_keep_all_recompute_nothing(recompute, told):
    model, profile = small_model(), slow_link(1e9)
    plan = make_plan(model, replace(REQUEST, recompute=recompute, segment_blocks=1), profile)
    found = set(re.findall(r"(\w+(?: \w+)?) is recomputed", describe(plan, model)))
    assert found == {told}


def test_no_others_are_told_where_the_cpu_updates_all(picture):
    by_cpu = replace(picture.plan, groups=tuple(GroupPlan(update="cpu") for _ in picture.plan.groups))
    assert "update: on the CPU" in describe(by_cpu, picture.model).splitlines()


def test_report_answers_first_and_holds_the_description(picture):
    text = report(picture)
    assert text.startswith("fits: ")
    for word in ("limited by: ", "hardware: ", "where the time of a step goes", "streams, busy", "speed of light: "):
        assert word in text
    for line in describe(picture.plan, picture.model).splitlines()[:5]:
        assert line in text
    for category, num_bytes in picture.plan.predicted.gpu_categories.items():
        assert num_bytes == 0 or category in text
    assert re.search(r"most in use at once: first round .*, accumulating round .*, update ", text)


def test_time_of_a_step_adds_up(picture):
    causes = picture.seconds_by_cause
    assert sum(causes.values()) == pytest.approx(picture.plan.predicted.step_s, rel=1e-2)
    assert any(name.startswith("waiting for") for name in causes)


def test_a_host_that_issues_slowly_is_named():
    """A model so small that the GPU waits for the next command; some of the commands also waited for a copy."""
    model, profile = small_model(), slow_link(1e12).changed(issue_s=1e-3)
    plan = make_plan(model, REQUEST, profile)
    picture = Picture(plan, model, profile)
    assert plan.predicted.limiter.startswith("the host, which issues commands, during ")
    assert f"limited by: {plan.predicted.limiter}" in report(picture)
    causes = as_json(picture)["predicted"]["seconds_by_cause"]
    issuing_s = sum(s for name, s in causes.items() if name.startswith("waiting for the host to issue commands during"))
    assert issuing_s > 0.9 * plan.predicted.step_s
    assert "waiting for the host to issue commands during backward" in html_page(picture)


def test_a_wait_is_split_at_the_end_of_what_was_waited_for():
    slots = (Slot(SlotKey("a", memory="gpu"), 0, 16, "test"), Slot(SlotKey("b", memory="host"), 0, 16, "test"))
    builder = ProgramBuilder("waits", slots, overlapping_slots(slots))
    builder.copy(CommandName("fetch"), Stream.H2D, "x", [CopyRegion(1, 0, 0, 0, 16)])
    builder.add("forward", CommandName("forward"), Stream.COMPUTE, [Access(0, "x")], [Access(0, "y")])
    builder.add("backward", CommandName("backward"), Stream.COMPUTE, [], [])
    program = builder.build()
    timing = Timing([0.0, 5.0, 8.0], [3.0, 6.0, 9.0], 9.0, {})
    found = {key: seconds for key, seconds in stalls(program, timing).items() if seconds}
    assert found == {("h2d", "forward"): 3.0, ("issue", "forward"): 2.0, ("issue", "backward"): 2.0}


def test_simulated_step_is_the_predicted_one(picture):
    assert picture.step.total_s == pytest.approx(picture.plan.predicted.step_s)
    assert [part.repeats for part in picture.step.parts] == [1, picture.plan.num_rounds - 1, 1]
    assert picture.step.about == f"first round, accumulating round (1 of {picture.plan.num_rounds - 1} alike), update"
    assert picture.plan.predicted.speed_of_light_s <= picture.plan.predicted.step_s


def test_shortage_report_shows_what_is_missing_and_what_fits(error, picture):
    text = shortage_report(error, [picture.plan])
    assert "does not fit" in text
    assert re.search(r"GPU memory: .* are missing", text)
    for category, num_bytes in error.needs.gpu_categories.items():
        assert num_bytes == 0 or category in text
    assert re.search(r"--max-seq-len 16 +planned: .* per step, .* tokens/s", text)


def test_columns_are_aligned():
    assert align_columns([("a", "1"), ("long", "23")]) == ["a      1", "long  23"]
    assert align_columns([("a", "x"), ("b", "long")], left=(0, 1)) == ["a  x", "b  long"]
    assert align_columns([]) == []
    assert [join_words(parts) for parts in ([], ["a"], ["a", "b", "c"])] == ["nothing", "a", "a, b and c"]


# ---- JSON ------------------------------------------------------------------------------------------------------


def test_json_says_what_the_plan_says(picture):
    values = json.loads(json.dumps(as_json(picture)))
    plan, p = picture.plan, picture.plan.predicted
    assert values["fits"] is True
    assert values["predicted"]["step_s"] == p.step_s
    assert values["predicted"]["tokens_per_s"] == pytest.approx(512 / p.step_s)
    assert values["request"] == json.loads(json.dumps(asdict(plan.request)))
    assert set(values["predicted"]["busy_s"]) == {str(stream) for stream in BASE_STREAMS}
    assert values["speed_of_light"]["share_reached"] == pytest.approx(p.speed_of_light_s / p.step_s)
    assert [row["name"] for row in values["layers"]] == [layer.name for layer in picture.model.layers]
    for row, kept in zip(values["layers"], plan.layers, strict=True):
        if row["kind"] == "block":
            assert (row["gpu"], row["host"], row["input"]) == (
                list(kept.keep_gpu),
                list(kept.keep_host),
                kept.input_home,
            )
            assert not set(row["recomputed"]) & {*row["gpu"], *row["host"]}
    for row, home in zip(values["groups"], plan.groups, strict=True):
        assert (row["weights"], row["gradients"], row["states"]) == (home.weights, home.grads, home.states)


@pytest.mark.parametrize("memory", ["gpu", "host"], ids=["device", "host"])  # the word gpu would mark it
def test_json_has_memory_over_time(picture, memory):
    values = as_json(picture)["memory"][memory]
    series = values["over_time"]
    assert 10 < len(series["times_s"]) <= 330
    totals = [sum(row) for row in zip(*series["bytes"].values(), strict=True)]
    assert len(totals) == len(series["times_s"])
    assert max(totals) <= values["bytes"] <= values["budget_bytes"]
    assert sum(part["seconds"] for part in series["parts"]) == pytest.approx(series["end_s"])


def test_shortage_as_json(error):
    values = json.loads(json.dumps(shortage_json(error)))
    assert (values["fits"], values["reason"]) == (False, "INSUFFICIENT_DEVICE_MEMORY")
    assert values["smallest_plan"]["gpu"]["missing_bytes"] == error.needs.gpu_bytes - 1000
    assert values["smallest_plan"]["host"]["missing_bytes"] == 0
    assert values["fits_with"][0]["request"]["max_seq_len"] == 16


# ---- Chrome trace ----------------------------------------------------------------------------------------------


def test_timeline_is_a_valid_trace_of_the_whole_step(picture):
    trace = json.loads(step_timeline(picture))
    events = trace["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert sorted(rows.values()) == sorted(str(stream) for stream in BASE_STREAMS)
    assert {e["ph"] for e in events} == {"M", "X", "C"}
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == sum(len(part.program.commands) for part in picture.step.parts)
    for event in spans:
        assert set(event) >= {"name", "cat", "pid", "tid", "ts", "dur"}
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert event["tid"] in rows
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(1e6 * picture.step.shown_s)
    assert "1 of 3 alike" in trace["metadata"]["what"]


def test_timeline_rows_do_not_overlap(picture):
    spans = [e for e in json.loads(step_timeline(picture))["traceEvents"] if e["ph"] == "X"]
    for row in {e["tid"] for e in spans}:
        ordered = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if e["tid"] == row)
        for (_, end), (begin, _) in pairwise(ordered):
            assert begin >= end - 1e-3


def test_timeline_counts_memory(picture):
    counters = [e for e in json.loads(step_timeline(picture))["traceEvents"] if e["ph"] == "C"]
    assert {e["name"] for e in counters} == {"GPU memory (MiB)", "host memory (MiB)"}
    most = max(sum(e["args"].values()) for e in counters if e["name"].startswith("GPU"))
    assert most <= picture.plan.predicted.gpu_bytes / 2**20


# ---- HTML ------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Checks nesting while reading; collects tags, attributes and the text of headings."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.headings: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID_TAGS or tag in ("rect", "path"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        while self.open[-1] in VOID_TAGS and self.open[-1] != tag:
            self.open.pop()
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("h1", "h2"):
            self.headings.append(data)


def test_page_is_whole_and_needs_nothing_else(picture):
    text = html_page(picture, "python -m flexengine plan --model <x>")
    page = Page(text)
    assert not page.open
    assert len(text) < 2_000_000
    assert page.headings == [
        f"{picture.plan.model} on {picture.profile.name}",
        "Memory and streams over a step",
        "Decisions by layer",
        "Numbers",
        "Request and machine",
    ]
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object"), "nothing is loaded"
        assert not {"src", "href"} & set(attributes)
    assert not re.search(r"https?://|@import|url\(", text)
    assert "--model &lt;x&gt;" in text


def test_charts_are_well_formed_and_named(picture):
    charts = re.findall(r"<svg .*?</svg>", html_page(picture), re.DOTALL)
    assert len(charts) == 5
    for chart in charts:
        root = ElementTree.fromstring(chart)
        assert root.get("aria-label")
        width = float(root.get("viewBox").split()[2])
        for rect in root.iter("rect"):
            assert 0 <= float(rect.get("x")) <= float(rect.get("x")) + float(rect.get("width")) <= width + 1


def test_memory_charts_show_the_budget_line_and_their_data(picture):
    text = html_page(picture)
    assert text.count('class="budget"') + text.count("above this chart") == 2
    for identity in ("gpu-data", "host-data"):
        found = re.search(rf'<script type="application/json" id="{identity}">(.*?)</script>', text)
        assert found
        data = json.loads(found[1])
        assert len(data["times"]) == len(data["mib"])
        assert {len(row) for row in data["mib"]} == {len(data["names"])}
        assert f'<figure data-chart="{identity}">' in text


def test_page_of_a_shortage(error):
    text = shortage_page(error, slow_link(1e9))
    page = Page(text)
    assert not page.open
    assert "Does not fit" in text
    assert "--max-seq-len 16" in text


def test_bars_merge_neighbours_of_a_kind(picture):
    part = picture.step.parts[1]
    single, merged = merged_bars(part, 0.0), merged_bars(part, part.timing.total_s)
    assert sum(len(lane) for lane in single) == len(part.program.commands)
    for many, few in zip(single, merged, strict=True):
        assert sum(span.count for span in few) == len(many)
        assert sum(span.busy_s for span in few) == pytest.approx(sum(span.busy_s for span in many))
        assert all(a.kind != b.kind for a, b in pairwise(few))
    assert "other" not in {kind_of(command) for command in part.program.commands}
    name = CommandName("backward", owner="block.3", chunk=0)
    assert (str(name), name.short) == ("backward block.3 chunk 0", "block.3 0")


def test_axis_marks_are_round():
    assert ticks(23.4, 5) == [0, 5, 10, 15, 20]
    assert ticks(0.9, 8) == [0, 0.2, 0.4, 0.6, 0.8]


def test_json_of_the_plan_is_unchanged_by_reports(picture):
    assert Plan.from_json(picture.plan.to_json()) == picture.plan


def test_the_picture_of_memory_is_a_file_of_its_own(picture):
    """Both memories and their budgets, every category with its colour and peak, nothing from elsewhere."""
    text = memory_svg(picture)
    root = ElementTree.fromstring(text)
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    said = ["".join(element.itertext()) for element in root.iter() if element.tag.endswith("text")]
    assert sum(text.startswith("budget ") for text in said) == 2
    assert {"GPU memory over one step", "host memory over one step"} <= set(said)
    assert any(name.startswith("weight slots ") for name in said)
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    boxes = [element.attrib for element in root.iter() if element.tag.endswith("rect")]
    assert all(float(box.get("x", 0)) + float(box["width"]) <= width for box in boxes)
    assert height < 1000
