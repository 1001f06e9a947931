"""More memory is never slower: budgets of both sides, raised in steps, on seeded models and machines.

Every budget is searched for itself, so this is no identity. The tolerance is what plans may lose against the best: what
fits a smaller budget fits a larger one, so a plan within 2% of the best is at most 2% slower than one of a smaller
budget.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from thorough import cases

from flexengine.hardware.presets import preset
from flexengine.hardware.profile import HardwareProfile
from flexengine.models.registry import open_model
from flexengine.models.spec import ModelSpec
from flexengine.plan import Numerics, Request
from flexengine.planner.feasibility.shortage import Feasibility
from flexengine.planner.planner import make_plan
from flexengine.planner.problem import Problem
from tests.planner.oracle import slow_link
from tests.schedule.small_plans import FLOAT32, mixed_model, small_model

GIB, ROOMY = 1 << 30, 1 << 40
TOLERANCE = 1.02
RAISES = ((1.0, 1.05, 2.0), (1.0, 1.35, 4.0))
"""Factors of the least budget, for even and odd seeds."""


def steps_s(model: ModelSpec, requests: list[Request], profile: HardwareProfile) -> list[float]:
    return [make_plan(model, request, profile).predicted.step_s for request in requests]


def assert_never_slower(seconds: list[float]) -> None:
    best_s = float("inf")
    for step_s in seconds:
        assert step_s <= TOLERANCE * best_s, [f"{s:.6g}" for s in seconds]
        best_s = min(best_s, step_s)


def drawn(seed: int) -> tuple[ModelSpec, Request, HardwareProfile]:
    """A small model, a request without limits, and a machine."""
    random = Random(seed)
    blocks, tied, hidden = random.choice([2, 3, 5, 8]), random.random() < 0.3, random.choice([64, 128])
    model = mixed_model(blocks) if seed % 4 == 3 else small_model(blocks, tied, hidden)
    numerics = random.choice([FLOAT32, Numerics()])
    request = Request(random.choice([32, 64, 128]), random.choice([256, 512]), ROOMY, ROOMY, numerics=numerics)
    return model, request, slow_link(10 ** random.uniform(8, 10.2))


@pytest.mark.parametrize("seed", cases(range(4), [1]))
def test_more_gpu_memory_is_never_slower(seed):
    model, request, profile = drawn(seed)
    least = Feasibility(Problem(model, request, profile)).least_gpu().gpu_bytes
    requests = [replace(request, max_gpu_bytes=int(least * factor)) for factor in RAISES[seed % 2]]
    assert_never_slower(steps_s(model, requests, profile))


@pytest.mark.parametrize("seed", cases(range(4), [0]))
def test_more_host_memory_is_never_slower(seed):
    model, request, profile = drawn(seed)
    profile = profile.changed(host_base_bytes=0)
    least_gpu = Feasibility(Problem(model, request, profile)).least_gpu().gpu_bytes
    request = replace(request, max_gpu_bytes=int(1.3 * least_gpu))
    least = Feasibility(Problem(model, request, profile)).least_host()
    assert least is not None
    requests = [replace(request, max_host_bytes=int(least.host_bytes * factor)) for factor in RAISES[seed % 2]]
    assert_never_slower(steps_s(model, requests, profile))


@pytest.mark.long
@pytest.mark.thorough
def test_more_memory_is_never_slower_for_a_model_of_a_billion_parameters():
    model, profile = open_model("preset:llama-3.2-1b").spec, preset("rtx-4090")
    requests = [Request(2048, 65536, gib * GIB, 60 * GIB, 8192, 32768, graphs="never") for gib in (4, 8, 24)]
    assert_never_slower(steps_s(model, requests, profile))
