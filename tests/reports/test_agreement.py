"""Reports never contradict themselves: bounds are below what is predicted, and words, JSON and page have one figure."""

import json
import random
import re
from dataclasses import replace

import pytest
from thorough import cases

from flexengine.hardware.nodes import with_gpus
from flexengine.hardware.presets import PRESETS, preset
from flexengine.metrics import format_bytes, format_seconds, format_tokens_per_s
from flexengine.plan import PlanError, Request
from flexengine.planner.feasibility.shortage import Feasibility
from flexengine.planner.problem import Problem
from flexengine.planner.ranks.plan import plan_for_ranks
from flexengine.reports.picture import Picture
from flexengine.reports.plan_data import as_json
from flexengine.reports.plan_page import html_page
from flexengine.reports.plan_text import NO_BOUND, describe, report
from tests.planner.oracle import slow_link
from tests.schedule.small_plans import FLOAT32, small_model

SHAPES = ((1, 1, "auto"), (2, 1, "auto"), (2, 1, "relay"), (4, 1, "split"), (2, 1, "stages"), (2, 2, "relay"))
"""Ranks of a node, nodes, and how they share weights."""


def random_picture(dice: random.Random, shape: tuple[int, int, str]) -> Picture | None:
    """A plan of a small model on some machine, with a budget near the least one; None where none fits."""
    ranks, nodes, transport = shape
    model = small_model(hidden=dice.choice([16, 32, 128]))
    machine = dice.choice([slow_link(dice.choice([1e8, 1e9, 1e10])), preset(dice.choice(list(PRESETS)))])
    profile = with_gpus(machine, ranks)
    request = Request(
        32, dice.choice([128, 256, 512]), 1 << 40, 1 << 40, numerics=FLOAT32, chunk_tokens=dice.choice([None, 64]),
        clipping=dice.random() < 0.5, transport=transport, ranks=ranks, nodes=nodes,
    )  # fmt: skip
    least = Feasibility(Problem(model, request.of_rank, profile)).least_gpu().gpu_bytes
    request = replace(request, max_gpu_bytes=int(dice.choice([1.05, 1.2, 1.5, 3]) * least))
    try:
        return Picture(plan_for_ranks(model, request, profile), model, profile)
    except PlanError:
        return None


@pytest.mark.parametrize("number", cases(range(len(SHAPES)), (0, 3, 4, 5)), ids=lambda number: str(SHAPES[number]))
def test_reports_of_random_requests_agree(number):
    shape = SHAPES[number]
    dice = random.Random(f"agreement {shape}")
    found = [picture for _ in range(4) if (picture := random_picture(dice, shape)) is not None][:2]
    assert found
    for picture in found:
        check_bound(picture)
        check_figures(picture)
        check_waits(picture)


def check_bound(picture: Picture) -> None:
    """The bound is below what is predicted, or told nowhere."""
    plan, p = picture.plan, picture.plan.predicted
    assert p.speed_of_light_s <= p.step_s
    assert (p.speed_of_light_s > 0) is plan.is_bounded
    assert plan.is_bounded is (picture.bound is not None)
    if picture.bound is not None:
        assert picture.bound.seconds == pytest.approx(p.speed_of_light_s)
    texts = (report(picture), html_page(picture, ""), describe(plan, picture.model))
    assert all(("of the speed of light" in text) is plan.is_bounded for text in (texts[0], texts[2]))
    assert all((NO_BOUND in text.replace("&#x27;", "'")) is not plan.is_bounded for text in texts[:2])
    assert all((f"speed of light: {NO_BOUND}" in text) is not plan.is_bounded for text in texts[:1])


def check_waits(picture: Picture) -> None:
    """What a step is limited by takes as long in the table of its seconds."""
    found = re.search(r"during (\w+) \(compute waits for it (\d+)% of the step\)", picture.plan.predicted.limiter)
    if found:
        shares = [100 * s / picture.plan.predicted.step_s for s in picture.seconds_by_cause.values()]
        assert min(abs(share - float(found[2])) for share in shares) <= 1


def check_figures(picture: Picture) -> None:
    """What JSON says in full is what the words and the page say, rounded."""
    values = json.loads(json.dumps(as_json(picture)))
    predicted, memory, light = values["predicted"], values["memory"], values["speed_of_light"]
    figures = [
        format_seconds(predicted["step_s"]),
        format_tokens_per_s(predicted["tokens_per_s"]),
        *(format_bytes(memory[place]["bytes"]) for place in ("gpu", "host")),
        *(format_seconds(seconds) for seconds in predicted["seconds_by_cause"].values()),
    ]
    text, page = report(picture), html_page(picture, "")
    for figure in figures:
        assert figure in text, figure
        assert figure in page, figure
    shown = [re.findall(r"[sS]peed of light: (\S+ \S+) per step", text) for text in (text, page)]
    assert shown == ([[format_seconds(light["seconds"])]] * 2 if light else [[], []])
    shares = re.findall(r"(\d+)% of the speed of light|this one reaches (\d+)%", text)
    if light:
        assert {a or b for a, b in shares} == {f"{100 * light['share_reached']:.0f}"}
        assert f"of the limit of {format_seconds(light['seconds'])}" in page
