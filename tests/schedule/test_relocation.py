"""Changing layouts in place: every plane arrives, nothing alive is overwritten, nothing grows."""

from dataclasses import replace
from random import Random

import pytest

from flexengine.plan import GroupPlan, Request
from flexengine.schedule.layout import Layout
from flexengine.schedule.relocation import ByteRange, _gap, _Plane, _step_aside, relocation
from tests.schedule.small_plans import FLOAT32, random_plan, resident_plan, small_model

STREAMED, RESIDENT = GroupPlan(), GroupPlan("gpu", "gpu", "gpu")


def homes(layout: Layout) -> dict[str, ByteRange]:
    spans = {}
    for group in range(len(layout.groups)):
        for kind in ("weights", "remainder", "exp_avg", "exp_avg_sq"):
            if layout.groups[group].plane_bytes.get(kind):
                slot = layout.slots[layout.plane_slot(kind, group)]
                name = f"{kind} of {layout.model.groups[group].name}"
                spans[name] = ByteRange(slot.memory, slot.offset, slot.num_bytes)
    return spans


def check(old: Layout, new: Layout, spare: int = 0) -> int:
    """Follow the moves in arenas just large enough but for `spare` bytes; returns how many planes stepped aside."""
    alive, goal = homes(old), homes(new)
    capacity = {m: max(getattr(old, f"{m}_bytes"), getattr(new, f"{m}_bytes")) + spare for m in ("gpu", "host")}
    moves = relocation(old, new, capacity)
    for move in moves:
        assert alive[move.name] == move.source
        assert move.target.num_bytes == move.source.num_bytes
        assert move.target.offset + move.target.num_bytes <= capacity[move.target.memory]
        others = [span for name, span in alive.items() if name != move.name]
        assert not any(move.target.overlaps(other) for other in others), move
        alive[move.name] = move.target
    assert alive == goal
    return sum(move.target != goal[move.name] for move in moves)


@pytest.mark.parametrize("seed", range(40))
def test_random_changes_keep_every_plane(seed):
    random, model = Random(seed), small_model(blocks=4, tied=seed % 2 == 0)
    old = Layout(model, random_plan(random, model, sliced=False))
    plan = random_plan(random, model, sliced=False)
    new = Layout(model, replace(plan, request=old.plan.request))
    check(old, new, spare=max(span.num_bytes for span in homes(old).values()))


def changed_places() -> tuple[Layout, Layout]:
    """The first block lives on the GPU and the second on the host, and the other way round."""
    model = small_model(blocks=2)
    plan = resident_plan(model, Request(32, 256, 1 << 30, 1 << 40, numerics=FLOAT32))
    embed, _, _, head = plan.groups
    layouts = [
        Layout(model, replace(plan, groups=(embed, *blocks, head)))
        for blocks in ((RESIDENT, STREAMED), (STREAMED, RESIDENT))
    ]
    return layouts[0], layouts[1]


def test_planes_that_wait_for_each_other_step_aside():
    old, new = changed_places()
    assert check(old, new) > 0
    assert check(old, old) == 0


def test_without_room_to_step_aside_it_says_so():
    left, right = ByteRange("gpu", 0, 10), ByteRange("gpu", 10, 10)
    planes = [_Plane("a", left, right), _Plane("b", right, left)]
    with pytest.raises(ValueError, match="no arena has 10 bytes free"):
        _step_aside(planes, planes, {"gpu": 20, "host": 9})
    mover, gap = _step_aside(planes, planes, {"gpu": 20, "host": 10})
    assert (mover.name, gap) == ("a", ByteRange("host", 0, 10))


def test_a_larger_layout_is_refused():
    old, new = changed_places()
    with pytest.raises(ValueError, match=f"of the host arena, which has {new.host_bytes - 1}"):
        relocation(old, new, {"gpu": 1 << 40, "host": new.host_bytes - 1})


def test_gaps_are_found_before_between_and_after():
    taken = [ByteRange("gpu", 10, 10), ByteRange("gpu", 30, 10), ByteRange("host", 0, 99)]
    assert _gap(10, "gpu", taken, 100) == ByteRange("gpu", 0, 10)
    assert _gap(11, "gpu", taken, 100) == ByteRange("gpu", 40, 11)
    assert _gap(61, "gpu", taken, 100) is None


def test_states_that_other_gpus_would_hold_are_refused_with_what_to_do():
    plan = random_plan(Random(1), small_model(), sliced=False)
    request, groups = replace(plan.request, ranks=2), tuple(GroupPlan() for _ in plan.groups)
    dealt = tuple(GroupPlan(states="dealt") for _ in groups)
    old, new = (Layout(small_model(), replace(plan, request=request, groups=homes)) for homes in (groups, dealt))
    with pytest.raises(ValueError, match=r"would lie on other GPUs than now.*save a checkpoint and resume"):
        relocation(old, new, {"gpu": 1 << 30, "host": 1 << 30, "node": 1 << 30})
