"""Inputs that are made again: what runs, what it takes, when it is planned."""

from dataclasses import replace

import pytest

from flexengine.plan import LayerPlan, PlanError, Request
from flexengine.planner.feasibility.shortage import Feasibility
from flexengine.planner.planner import make_plan
from flexengine.planner.problem import Problem
from flexengine.schedule.checker import check_program
from flexengine.schedule.layout import Layout
from flexengine.schedule.packing import full_round
from flexengine.schedule.programs import lower_round
from tests.planner.oracle import slow_link
from tests.schedule.small_plans import FLOAT32, resident_plan, small_model

BLOCKS = 7


def in_segments(again, **kept):
    """A resident plan of seven blocks, those of some numbers with inputs made again."""
    model = small_model(BLOCKS)
    blocks = [LayerPlan(**kept, input_again=number in again) for number in range(BLOCKS)]
    plan = resident_plan(model, Request(32, 512, 1 << 30, 1 << 40, numerics=FLOAT32))
    return model, replace(plan, layers=(LayerPlan(), *blocks, LayerPlan()))


@pytest.mark.parametrize("home", ["gpu", "host"], ids=["device", "host"])
def test_blocks_below_run_again_just_before_a_segments_last(home):
    model, plan = in_segments({1, 2, 4}, input_home=home)
    layout = Layout(model, plan)
    shape = full_round(plan.request, plan.chunk_tokens, plan.chunks_per_round)
    program = lower_round(layout, shape, True)
    check_program(program, layout.gpu_bytes, layout.host_bytes)
    calls = [c.args for c in program.commands if c.kind in ("forward_again", "backward")]
    ran = [call.layer - 1 for call in calls if model.layers[call.layer].kind == "block"][:: len(shape.chunks)]
    assert ran == [6, 5, 3, 4, 3, 0, 1, 2, 1, 0]
    inputs = [s for s in layout.slots if s.key.role == "input" and s.memory == home]
    assert len(inputs) == (4 + 2) * plan.chunks_per_round  # four are kept, and two wait in a segment at the most


def chunk_by_chunk(model, plan, **changed):
    request = replace(plan.request, segment_order="chunks", segment_blocks=3)
    return Layout(model, replace(plan, request=request, **{"weight_slots": 3, **changed}))


def test_a_chunk_passes_a_segment_before_the_next_one_does():
    model, plan = in_segments({1, 2, 4}, keep_gpu=("rope",))
    layout = chunk_by_chunk(model, plan)
    shape = full_round(plan.request, plan.chunk_tokens, plan.chunks_per_round)
    program = lower_round(layout, shape, True)
    check_program(program, layout.gpu_bytes, layout.host_bytes)
    calls = [c.args for c in program.commands if c.kind in ("forward_again", "backward")]
    ran = [(call.layer - 1, call.chunk) for call in calls if model.layers[call.layer].kind == "block"]
    chunks = range(len(shape.chunks))[::-1]
    assert ran[: 2 * len(chunks)] == [(block, c) for block in (6, 5) for c in chunks]
    assert ran[2 * len(chunks) :][:3] == [(3, chunks[0]), (4, chunks[0]), (3, chunks[0])]
    assert ran[5 * len(chunks) :] == [(block, c) for c in chunks for block in (0, 1, 2, 1, 0)]
    kept = [s for s in layout.slots if s.category == "kept activations" and not s.key.within]
    assert len(kept) == (4 + 4) * plan.chunks_per_round + 2 + 2  # of what is made again, and kept then, one chunk's
    assert len(layout.ring("accumulator", "block")) == 3
    assert not layout.ring("grad_hidden")


@pytest.mark.usefixtures("quick_search")
def test_chunk_by_chunk_is_planned_for_the_first_blocks():
    model, profile = small_model(9), slow_link(1e9)
    segments = {"segment_blocks": 2, "segments": 3, "segment_order": "chunks"}
    request = Request(64, 1024, 1 << 40, 1 << 40, numerics=FLOAT32, **segments)
    least = Feasibility(Problem(model, request, profile)).least_gpu().gpu_bytes
    plan = make_plan(model, replace(request, max_gpu_bytes=2 * least), profile)
    assert [number for number, kept in enumerate(plan.layers) if kept.input_again] == [2, 4, 6]
    assert plan.chunk_tokens >= request.max_seq_len
    assert plan.predicted.speed_of_light_s <= plan.predicted.step_s
    layout = Layout(model, plan)
    program = lower_round(layout, full_round(plan.request, plan.chunk_tokens, plan.chunks_per_round), False)
    check_program(program, layout.gpu_bytes, layout.host_bytes)


def test_what_cannot_go_chunk_by_chunk_is_refused():
    model, plan = in_segments({1, 2, 4})
    with pytest.raises(ValueError, match="weight_slots=2"):
        chunk_by_chunk(model, plan, weight_slots=2)
    with pytest.raises(ValueError, match=r"keeps on the host what block\.1 makes again"):
        chunk_by_chunk(*in_segments({1}, input_home="host"))
    with pytest.raises(ValueError, match="chunks of whole sequences"):
        chunk_by_chunk(model, replace(plan, request=replace(plan.request, max_seq_len=64), chunk_tokens=32))
    with pytest.raises(ValueError, match="segment_blocks is not above 1"):
        replace(plan.request, segment_order="chunks")


def test_segments_take_turns_in_slots_of_what_they_keep_only_then():
    model, plan = in_segments({1, 3, 5}, keep_gpu=("rope",), input_home="host")
    slots = Layout(model, plan).slots
    kept = [s for s in slots if s.category == "kept activations" and not s.key.within]
    assert len(kept) == (4 + 1) * plan.chunks_per_round


def test_what_no_block_can_make_is_refused():
    for again in ({0}, {0, 1}):
        with pytest.raises(ValueError, match=r"makes the input of block.0 of small again"):
            Layout(*in_segments(again))


@pytest.mark.usefixtures("quick_search")
@pytest.mark.parametrize("seq_len", [64, 256], ids=["packed", "sliced"])
def test_where_inputs_do_not_fit_they_are_made_again(seq_len):
    model, profile = small_model(9), slow_link(1e9)
    request = Request(seq_len, 1024, 1 << 40, 1 << 40, 64, 1024, numerics=FLOAT32)
    request = replace(request, max_gpu_bytes=Feasibility(Problem(model, request, profile)).least_gpu().gpu_bytes)

    def least_host(blocks):
        asked = replace(request, segment_blocks=blocks)
        return Feasibility(Problem(model, asked, profile)).least_host().host_bytes

    assert least_host(3) < least_host(2) < least_host(1)
    tight = replace(request, max_host_bytes=least_host(2))
    plan = make_plan(model, tight, profile)
    assert plan.makes_inputs_again
    assert Problem(model, tight, profile).fits(Layout(model, plan))
    assert plan.predicted.speed_of_light_s <= plan.predicted.step_s
    for changed in ({"segment_blocks": 1}, {"recompute": "none"}):
        with pytest.raises(PlanError):
            make_plan(model, replace(tight, **changed), profile)


@pytest.mark.usefixtures("quick_search")
def test_hidden_states_wait_on_the_host_where_the_gpu_has_no_room_for_a_rounds():
    model, profile = small_model(3), slow_link(1e9)
    request = Request(2048, 2048, 1 << 20, 1 << 40, 64, 2048, numerics=FLOAT32)
    least = {
        home: Feasibility(Problem(model, replace(request, hidden_home=home), profile)).least_gpu().gpu_bytes
        for home in ("auto", "host")
    }
    assert least["host"] < least["auto"]
    plan = make_plan(model, replace(request, max_gpu_bytes=least["host"]), profile)
    assert plan.request.hidden_on_host
    assert plan.predicted.gpu_bytes <= least["host"]
    with pytest.raises(PlanError, match=r"(?s)smallest plan needs .*fits with") as refused:
        make_plan(model, replace(request, max_gpu_bytes=least["host"] // 2), profile)
    assert refused.value.needs.gpu_bytes <= least["host"]


def test_hidden_states_on_the_host_are_of_one_rank_and_of_whole_blocks():
    model, plan = in_segments(set(), input_home="host")
    request = replace(plan.request, hidden_home="host")
    slots = Layout(model, replace(plan, request=request)).slots
    assert sum(s.key.role == "hidden" and s.memory == "host" for s in slots) == plan.chunks_per_round
    with pytest.raises(ValueError, match="on one rank"):
        replace(request, ranks=2)
    with pytest.raises(ValueError, match="cannot wait on the host"):
        Layout(model, replace(plan, request=request, in_parts=True))
