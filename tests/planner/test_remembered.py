"""Plans of earlier starts are found again by all that they depend on, and by nothing else."""

from dataclasses import replace

import pytest

from flexengine.hardware.presets import preset
from flexengine.models.lora import with_lora
from flexengine.models.registry import open_model
from flexengine.options.job import Job
from flexengine.options.lora import LoRA
from flexengine.plan import PlanError, PlanReason, Request
from flexengine.planner import remembered
from flexengine.planner.planner import make_plan
from flexengine.planner.remembered import BASE_STEP_BYTES, MOST_SPARE_BYTES, plan_path, remembered_plan
from flexengine.request import make_request, system_room

GIB = 2**30
MODEL = open_model("preset:tiny-llama3-50m").spec
PROFILE = preset("rtx-4090")
REQUEST = Request(512, 4096, 2 * GIB, 8 * GIB, chunk_tokens=1024, round_tokens=4096)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXENGINE_CACHE", str(tmp_path))


@pytest.fixture(scope="module")
def plan(quick_search_in_module):
    return make_plan(MODEL, REQUEST, PROFILE)


class Finder:
    """Gives a plan, and keeps what it was asked with; with less than `room_bytes` for the process nothing fits."""

    def __init__(self, plan, room_bytes=GIB):
        self.plan, self.room_bytes, self.bases = plan, room_bytes, []

    def __call__(self, model, request, profile):
        self.bases.append(profile.memory.host_base_bytes)
        if self.bases[-1] > self.room_bytes:
            raise PlanError(PlanReason.INSUFFICIENT_HOST_MEMORY, "no room")
        return self.plan


def with_base(num_bytes):
    return PROFILE.changed(host_base_bytes=num_bytes, host_available_bytes=PROFILE.memory.host_available_bytes - 5)


def test_the_same_request_is_planned_once(plan):
    find = Finder(plan)
    most = 9 * BASE_STEP_BYTES
    for base in (most, most - 1, most - BASE_STEP_BYTES + 1, most - MOST_SPARE_BYTES):
        again = open_model("preset:tiny-llama3-50m").spec
        assert remembered_plan(find, again, REQUEST, with_base(base)) == plan
    assert find.bases == [most]


@pytest.mark.parametrize("second", [9 * BASE_STEP_BYTES + 1, 9 * BASE_STEP_BYTES - MOST_SPARE_BYTES - BASE_STEP_BYTES])
def test_a_process_that_holds_more_or_far_less_is_planned_anew(plan, second):
    find = Finder(plan)
    for base in (9 * BASE_STEP_BYTES, second, second):
        remembered_plan(find, MODEL, REQUEST, with_base(base))
    assert find.bases == [9 * BASE_STEP_BYTES, -(-second // BASE_STEP_BYTES) * BASE_STEP_BYTES]


def test_budgets_that_are_found_differ_in_steps_alone():
    job, step, room = Job(max_seq_len=64, max_global_batch_tokens=64), GIB, 8 * GIB
    base = PROFILE.memory.host_base_bytes

    def found(free):
        profile = PROFILE.changed(host_total_bytes=200 * GIB, host_available_bytes=free + room - base)
        budget = make_request(job, profile, "cuda").max_host_bytes
        assert system_room(profile, "cuda")[1] == free + room - budget
        return budget

    assert found(100 * GIB) == found(101 * GIB - 1) == 100 * GIB
    assert found(101 * GIB) - found(100 * GIB) == step
    assert found(128 * GIB - 1) == 127 * GIB
    assert found(129 * GIB) == 128 * GIB


def test_whatever_a_plan_depends_on_tells_it_apart(monkeypatch):
    adapters, more = (with_lora(MODEL, LoRA(rank=rank)) for rank in (8, 16))
    cases = [
        (MODEL, REQUEST, PROFILE),
        (adapters, REQUEST, PROFILE),
        (more, REQUEST, PROFILE),
        (MODEL, replace(REQUEST, max_gpu_bytes=3 * GIB), PROFILE),
        (MODEL, replace(REQUEST, numerics=replace(REQUEST.numerics, grad="float32")), PROFILE),
        (MODEL, REQUEST, PROFILE.changed(h2d_bytes_per_s=PROFILE.link.h2d_bytes_per_s + 1)),
        (MODEL, REQUEST, PROFILE.changed(gpu_context_bytes=1)),
        (MODEL, REQUEST, preset("rtx-3090")),
    ]
    paths = [plan_path(*case) for case in cases]
    assert None not in paths
    monkeypatch.setattr(remembered, "_code", lambda: ("another state",))
    assert len({*paths, plan_path(*cases[0])}) == len(cases) + 1


def test_what_cannot_be_written_down_is_planned_anew():
    model = replace(MODEL, layers=(*MODEL.layers[:-1], replace(MODEL.layers[-1], name=object())))
    assert plan_path(model, REQUEST, PROFILE) is None


def test_a_file_that_is_no_plan_is_planned_anew(plan):
    find, asked = Finder(plan), (MODEL, REQUEST, with_base(BASE_STEP_BYTES))
    remembered_plan(find, *asked)
    path = plan_path(*asked)
    assert path is not None
    path.write_text(path.read_text()[:-20])
    assert [remembered_plan(find, *asked) for _ in range(2)] == [plan, plan]
    assert len(find.bases) == 2


def test_a_budget_that_only_the_exact_bytes_fit_is_planned_with_them(plan, tmp_path):
    find = Finder(plan, BASE_STEP_BYTES + 1)
    assert remembered_plan(find, MODEL, REQUEST, with_base(BASE_STEP_BYTES + 1)) == plan
    assert find.bases == [2 * BASE_STEP_BYTES, BASE_STEP_BYTES + 1]
    assert not list(tmp_path.rglob("*.json"))


def test_only_the_latest_plans_are_kept(plan, tmp_path, monkeypatch):
    monkeypatch.setattr(remembered, "MOST_PLANS", 2)
    for gib in range(4, 8):
        remembered_plan(Finder(plan), MODEL, replace(REQUEST, max_gpu_bytes=gib * GIB), with_base(0))
    assert len(list(tmp_path.rglob("*.json"))) == 2
