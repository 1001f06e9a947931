"""Memory over time: what is in use when, never above the plan, and kept whole when thinned."""

from random import Random

import numpy as np
import pytest

from flexengine.hardware.presets import preset
from flexengine.planner.cost.memory import gpu_required_bytes, host_required_bytes
from flexengine.reports.memory_over_time import (
    MemorySeries,
    merge_intervals,
    part_memory,
    slot_intervals,
    step_memory,
    thinned,
)
from flexengine.reports.simulated_step import simulate_step
from flexengine.schedule.commands import Access, CommandName, CopyRegion, Stream
from flexengine.schedule.layout import Layout
from flexengine.schedule.program_builder import ProgramBuilder
from flexengine.schedule.simulator import Timing
from flexengine.schedule.slots import Slot, SlotKey, overlapping_slots
from flexengine.schedule.step_parts import StepPart
from tests.planner.oracle import slow_link
from tests.schedule.small_plans import random_plan, small_model


class TwoSlots:
    """As much of a layout as the series needs: a ring slot on the GPU and its home on the host."""

    slots = (
        Slot(SlotKey("ring", memory="gpu"), 0, 256, "hidden states"),
        Slot(SlotKey("home", memory="host"), 0, 256, "offloaded activations"),
    )


def made_by_hand() -> StepPart:
    """Write the ring (0-1 s), send it home (2-4), write it anew (5-6), fetch (7-9), read (10-12)."""
    builder = ProgramBuilder("hand", TwoSlots.slots, overlapping_slots(TwoSlots.slots))
    builder.add("forward", CommandName("write"), Stream.COMPUTE, [], [Access(0, "a")])
    builder.copy(CommandName("send a"), Stream.D2H, "a", [CopyRegion(0, 0, 1, 0, 256)])
    builder.add("forward", CommandName("write again"), Stream.COMPUTE, [], [Access(0, "b")])
    builder.copy(CommandName("fetch a"), Stream.H2D, "a", [CopyRegion(1, 0, 0, 0, 256)])
    builder.add("backward", CommandName("read"), Stream.COMPUTE, [Access(0, "a")], [])
    timing = Timing([0, 2, 5, 7, 10], [1, 4, 6, 9, 12], 12.0, {})
    return StepPart("by hand", 1, builder.build(), timing)


def test_a_slot_is_in_use_from_its_writer_to_its_last_reader():
    part, layout = made_by_hand(), TwoSlots()
    assert slot_intervals(part, layout, "gpu") == {0: [(0, 4), (5, 6), (7, 12)]}
    assert slot_intervals(part, layout, "host") == {1: [(2, 9)]}
    series = part_memory(part, layout, "gpu", {"batch": 100})
    assert (series.categories, series.times_s) == (("batch", "hidden states"), (0, 4, 5, 6, 7, 12))
    assert series.num_bytes.tolist() == [[100, 256], [100, 0], [100, 256], [100, 0], [100, 256], [100, 0]]
    assert (series.totals.max(), series.peaks) == (356, {"batch": 100, "hidden states": 256})


def test_spans_that_touch_are_one():
    assert merge_intervals([(3, 4), (0, 1), (1, 2), (3.5, 6)]) == [(0, 2), (3, 6)]


@pytest.mark.parametrize("seed", range(16))
def test_never_above_what_the_plan_takes(seed):
    random = Random(seed)
    model = small_model(random.randint(1, 4), seed % 2 == 0)
    profile = slow_link(random.choice([1e7, 1e9])) if seed % 4 else preset("rtx-4090")
    plan = random_plan(random, model, sliced=seed % 3 == 0)
    step, layout = simulate_step(plan, model, profile), Layout(model, plan)
    for memory, required in (("gpu", gpu_required_bytes), ("host", host_required_bytes)):
        series = step_memory(step, memory, max_points=10_000)
        assert series.totals.max() <= required(layout, profile)
        assert (series.num_bytes >= 0).all()
        assert list(series.times_s) == sorted(series.times_s)
        assert series.end_s == pytest.approx(step.shown_s)
        rings = {s.category for s in layout.slots if s.memory == memory and s.num_bytes} - {"optimizer slots"}
        assert rings <= set(series.categories)


def test_thinning_keeps_the_peak_and_what_lasts():
    times = np.arange(1000.0)
    rows = np.zeros((1000, 2), dtype=np.int64)
    rows[:, 0] = 10
    rows[500:, 1], rows[123, 1] = 5, 99
    series = thinned(MemorySeries(("a", "b"), tuple(times), rows, 1000.0), 40)
    assert len(series.times_s) == 40
    assert series.totals.max() == 109
    held = dict(zip(series.times_s, series.num_bytes[:, 1].tolist(), strict=True))
    assert {held[t] for t in held if t < 100 or 150 <= t < 500} == {0}
    assert {held[t] for t in held if t >= 500} == {5}


def test_a_quiet_stretch_holds_what_was_left():
    series = MemorySeries(("a",), (0.0, 1.0, 1.5, 2.0, 90.0), np.array([[1], [9], [2], [3], [4]]), 100.0)
    assert thinned(series, 4).num_bytes[:, 0].tolist() == [9, 3, 3, 4]
