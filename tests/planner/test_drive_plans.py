"""Plans with a drive: where nothing fits without, within all budgets, and what is told of them."""

from dataclasses import replace

import pytest

from flexengine.hardware.drive import drive_budget
from flexengine.hardware.drive_profile import DriveProfile, shared_drive
from flexengine.hardware.presets import preset
from flexengine.metrics import format_bytes, three_digits
from flexengine.models.freezing import with_frozen
from flexengine.models.keep_dtype import with_coded_inputs
from flexengine.plan import PlanError, PlanReason, Request
from flexengine.planner import planner
from flexengine.planner.cost.cost_model import step_seconds
from flexengine.planner.cost.memory import host_required_bytes
from flexengine.planner.cost.stream_loads import ON_DRIVE
from flexengine.planner.feasibility.shortage import Feasibility, ShortageError
from flexengine.planner.on_drive import memory_may_hold, planes_on_host
from flexengine.planner.problem import Problem
from flexengine.planner.variants import ALL_ON_DRIVE, KEPT_ON_DRIVE
from flexengine.reports.charts.streams import STREAM_NAMES
from flexengine.reports.picture import CAUSE_WORDS, Picture
from flexengine.reports.plan_data import shortage_json
from flexengine.reports.plan_page import html_page, shortage_page
from flexengine.reports.plan_text import describe, shortage_report
from flexengine.schedule.commands import Stream
from flexengine.schedule.drive import drive_bytes, drive_kinds
from flexengine.schedule.group_storage import group_storage
from flexengine.schedule.layout import Layout
from flexengine.schedule.step_parts import LIMIT_WORDS, limiter
from tests.schedule.small_plans import small_model

GIB, MIB = 2**30, 2**20
MODEL = small_model(blocks=2, hidden=512, vocab=2048)
PROFILE = preset("rtx4090")
REQUEST = Request(
    256, 512, 720 * MIB, 5 * GIB, chunk_tokens=256, round_tokens=512, recompute="full", segment_blocks=1, graphs="never"
)
"""Little GPU memory, and so few sizes and ways that searching takes no time."""


def test_a_drive_is_used_where_nothing_fits_without():
    plain = planner.make_plan(MODEL, REQUEST, PROFILE)
    driven = planner.make_plan(MODEL, replace(REQUEST, max_drive_bytes=GIB), PROFILE)
    assert driven.for_request(plain.request) == plain
    tight = replace(REQUEST, max_host_bytes=plain.predicted.host_bytes - 40 * MIB)
    with pytest.raises(PlanError, match=r"--offload-dir DIR --max-disk-gib"):
        planner.make_plan(MODEL, tight, PROFILE)
    request = replace(tight, max_drive_bytes=GIB)
    plan = planner.make_plan(MODEL, request, PROFILE)
    layout = Layout(MODEL, plan)
    assert 0 < layout.drive_bytes == plan.predicted.drive_bytes <= GIB
    assert host_required_bytes(layout, PROFILE) == plan.predicted.host_bytes <= request.max_host_bytes
    assert f"1000 steps {three_digits(layout.drive_bytes / 1e9)} TB" in describe(plan, MODEL)
    slow = PROFILE.changed(**shared_drive(1e6, 1e6).values())
    assert step_seconds(layout, slow).step_s > 1.9 * layout.drive_bytes / 1e6


def test_a_drive_that_is_too_small_is_what_is_missing():
    """As much as is missing is advised, and fits, and no budget is below the one that was given. With less host memory
    that is missing, too."""
    plain = planner.make_plan(MODEL, REQUEST, PROFILE)
    tight = replace(REQUEST, max_host_bytes=plain.predicted.host_bytes - 40 * MIB, max_drive_bytes=MIB)
    with pytest.raises(ShortageError, match=r"GiB on the drive, budget is 0.000977 GiB") as caught:
        planner.make_plan(MODEL, tight, PROFILE)
    error = caught.value
    assert (error.reason, error.budget_bytes) == (PlanReason.INSUFFICIENT_DRIVE, MIB)
    missing = format_bytes(error.required_bytes - MIB)
    assert f"{missing} on the drive missing" in shortage_page(error, PROFILE)
    assert f"of 1.0 MiB on the drive: {missing} are missing" in shortage_report(error, [])
    assert shortage_json(error)["smallest_plan"]["drive"]["missing_bytes"] == error.required_bytes - MIB
    assert all(remedy.request.max_host_bytes >= tight.max_host_bytes for remedy in error.remedies)
    [advised] = [remedy.request for remedy in error.remedies if remedy.flags.startswith("--max-disk-gib ")]
    assert error.required_bytes <= advised.max_drive_bytes <= 1.01 * error.required_bytes
    assert planner.make_plan(MODEL, advised, PROFILE).predicted.drive_bytes <= advised.max_drive_bytes
    with pytest.raises(ShortageError) as caught:
        planner.make_plan(MODEL, replace(tight, max_host_bytes=MIB), PROFILE)
    assert caught.value.reason is PlanReason.INSUFFICIENT_HOST_MEMORY
    assert "GiB on the drive, budget" in str(caught.value)


def test_the_host_keeps_what_it_has_room_for():
    plan = planner.make_plan(MODEL, REQUEST, PROFILE)
    plan = replace(plan, groups=(ON_DRIVE,) * len(plan.groups))
    layout = Layout(MODEL, plan)
    first = sum(layout.groups[0].plane_bytes[kind] for kind in layout.groups[0].state_kinds)
    room = host_required_bytes(layout, PROFILE) + first + MIB
    problem = Problem(MODEL, replace(REQUEST, max_host_bytes=room, max_drive_bytes=GIB), PROFILE)
    found = planes_on_host(problem, plan)
    assert [home.states for home in found.groups] == ["host", *["drive"] * (len(plan.groups) - 1)]
    assert problem.fits(problem.layout(found))
    assert not Problem(MODEL, replace(problem.request, max_drive_bytes=MIB), PROFILE).fits(layout)


def test_frozen_blocks_are_read_from_a_drive():
    """As many as the host has no room for; within all budgets, with a bound below, and priced by the drive's rate."""
    model = with_frozen(small_model(blocks=10, hidden=512, vocab=512), ("blocks",))
    tight = replace(REQUEST, max_gpu_bytes=680 * MIB, max_drive_bytes=GIB)
    roomy = planner.make_plan(model, tight, PROFILE)
    assert not roomy.uses_drive
    tight = replace(tight, max_host_bytes=roomy.predicted.host_bytes - 16 * MIB)
    plan = planner.make_plan(model, tight, PROFILE)
    homes = [home.weights for home, group in zip(plan.groups, model.groups, strict=True) if group.frozen]
    assert 0 < homes.count("drive") < 10
    layout = Layout(model, plan)
    assert host_required_bytes(layout, PROFILE) <= tight.max_host_bytes
    rows = zip(layout.groups, plan.groups, strict=True)
    states = sum(drive_bytes(stored, drive_kinds(stored, home)) for stored, home in rows)
    assert (plan.predicted.drive_bytes, plan.predicted.drive_written_bytes) == (layout.drive_bytes, states)
    assert plan.predicted.speed_of_light_s <= plan.predicted.step_s
    frozen = replace(plan, predicted=replace(plan.predicted, drive_written_bytes=0))
    assert "which steps only read" in describe(frozen, model)
    slow = step_seconds(layout, PROFILE.changed(**shared_drive(1e6, 1e6).values()))
    assert slow.step_s > 1.9 * layout.drive_bytes / 1e6
    assert "the drive, which is read for the GPU" in limiter(slow)


def test_weights_and_gradients_lie_there_where_states_are_not_enough():
    """Of as many blocks as the host has no room for, within all budgets, and with a bound below."""
    model = small_model(blocks=10, hidden=512, vocab=512)
    tight = replace(REQUEST, max_gpu_bytes=700 * MIB, max_drive_bytes=GIB)
    least = Feasibility(Problem(model, tight, PROFILE, on_drive=True)).least_host()
    assert least is not None
    tight = replace(tight, max_host_bytes=least.host_bytes - 8 * MIB)
    found = ALL_ON_DRIVE.planned(Problem(model, tight, PROFILE), None)
    assert found is not None
    plan = found.plan
    layout = Layout(model, plan)
    blocks = [home for home, group in zip(plan.groups, model.groups, strict=True) if group.slot_class == "block"]
    assert {"host", "drive"} <= {home.weights for home in blocks}
    assert "drive" in {home.grads for home in blocks}
    assert host_required_bytes(layout, PROFILE) <= tight.max_host_bytes
    assert layout.drive_bytes <= tight.max_drive_bytes
    assert plan.predicted.speed_of_light_s <= plan.predicted.step_s
    slow = step_seconds(layout, PROFILE.changed(**shared_drive(1e6, 1e6).values()))
    assert slow.step_s > 1.9 * layout.drive_written_bytes / 1e6


def test_kept_activations_lie_there_where_planes_are_not_enough():
    """Within all budgets, counted among what is written, with a bound below and a page that shows them."""
    model = small_model(blocks=4, hidden=512, vocab=512)
    asked = replace(REQUEST, max_global_batch_tokens=8192, round_tokens=8192, max_drive_bytes=GIB)
    least = Feasibility(Problem(model, asked, PROFILE, on_drive=True, all_on_drive=True)).least_host()
    assert least is not None
    asked = replace(asked, max_host_bytes=least.host_bytes - 8 * MIB)
    with pytest.raises(PlanError, match=r"--max-disk-gib"):
        planner.make_plan(model, replace(asked, max_drive_bytes=0), PROFILE)
    found = KEPT_ON_DRIVE.planned(Problem(model, asked, PROFILE), None)
    assert found is not None
    plan, layout = found.plan, Layout(model, found.plan)
    assert any(kept.on_drive for kept in plan.layers)
    assert host_required_bytes(layout, PROFILE) == plan.predicted.host_bytes <= asked.max_host_bytes
    assert layout.drive_bytes <= asked.max_drive_bytes
    on_host = replace(plan, layers=tuple(replace(kept, on_drive=False) for kept in plan.layers))
    kept = sum(kept.on_drive for kept in plan.layers) * 8192 * 512 * 2
    assert layout.drive_written_bytes - Layout(model, on_host).drive_written_bytes == kept
    assert plan.predicted.speed_of_light_s <= plan.predicted.step_s
    assert "drive keeps input" in describe(plan, model)
    assert "on the drive" in html_page(Picture(plan, model, PROFILE), "flexengine plan")
    slow = step_seconds(layout, PROFILE.changed(**shared_drive(1e6, 1e6).values()))
    assert slow.step_s > 1.9 * layout.drive_written_bytes / 1e6


def test_what_no_memory_holds_is_not_searched():
    """Worked by hand: weights and states but for what a drive has; two inputs and hidden states of a long sequence."""
    planes = [group_storage(group, REQUEST.numerics).plane_bytes for group in MODEL.groups]
    blocks = [group.slot_class == "block" for group in MODEL.groups]
    weights = [plane["weights"] for plane in planes]
    states = sum(n for plane in planes for kind, n in plane.items() if kind not in ("weights", "grad"))
    edges, inputs = sum(n for n, block in zip(weights, blocks, strict=True) if not block), 3 * 4096 * 512 * 2
    for num_bytes, states_there, all_there, kept_there in (
        (sum(weights) + states + inputs, False, False, False),
        (sum(weights) + inputs, True, False, False),
        (edges + inputs, True, True, False),
        (edges, True, True, True),
    ):
        for lack, holds in ((0, True), (1, False)):
            asked = replace(REQUEST, max_seq_len=4096, max_global_batch_tokens=4096, round_tokens=4096)
            asked = replace(asked, max_gpu_bytes=1, max_host_bytes=num_bytes - 1 - lack, max_drive_bytes=GIB)
            flags = {"on_drive": states_there, "all_on_drive": all_there, "kept_on_drive": kept_there}
            problem = replace(Problem(MODEL, asked, PROFILE), **flags)
            assert memory_may_hold(problem) == holds
            assert memory_may_hold(replace(problem, request=replace(asked, max_drive_bytes=0)))


def test_inputs_in_fp8_count_as_what_they_are():
    """Three of a long sequence, in half the bytes and their scales."""
    model = with_coded_inputs(MODEL, "fp8-inputs")
    assert model.hidden.num_bytes(4096, 2) == 4096 * (512 + 16)
    edges = sum(
        group_storage(group, REQUEST.numerics).plane_bytes["weights"]
        for group in model.groups
        if group.slot_class != "block"
    )
    for lack, holds in ((0, True), (1, False)):
        most = edges + 3 * 4096 * (512 + 16) - 1 - lack
        asked = replace(REQUEST, max_seq_len=4096, max_global_batch_tokens=4096, round_tokens=4096)
        asked = replace(asked, max_gpu_bytes=1, max_host_bytes=most, max_drive_bytes=GIB)
        assert memory_may_hold(Problem(model, asked, PROFILE, on_drive=True, all_on_drive=True)) == holds


def test_every_stream_has_its_words():
    names = {stream.value for stream in Stream}
    assert names <= CAUSE_WORDS.keys()
    assert names <= LIMIT_WORDS.keys()
    assert set(Stream) == STREAM_NAMES.keys()


def test_seconds_of_a_drive():
    """Worked by hand: 12 bytes in and out. Both at once until the faster way ends, then the other alone."""
    assert shared_drive(6.0, 4.0).seconds(12) == pytest.approx(12 / 6 + 12 / 4)
    assert DriveProfile(6.0, 4.0, 6.0, 4.0).seconds(12) == pytest.approx(12 / 4)
    assert DriveProfile().seconds(7e9) == pytest.approx(1 + 7 / 5)


def test_budgets_of_a_drive(tmp_path):
    assert drive_budget(None, None) == 0
    assert drive_budget(str(tmp_path / "later"), 0.5) == GIB // 2
    assert drive_budget(str(tmp_path / "later"), None) > 0
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file"):
        drive_budget(str(tmp_path / "file" / "x"), None)
