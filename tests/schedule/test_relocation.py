"""Changing layouts in place: every plane arrives, nothing alive is overwritten, nothing grows."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from flexengine.models.freezing import with_frozen
from flexengine.optim.rules import IN_BLOCKS
from flexengine.plan import GroupPlan, Numerics, Plan, Request
from flexengine.schedule.layout import Layout
from flexengine.schedule.relocation import ByteRange, _Plane, _Room, _step_aside, relocation
from flexengine.schedule.shares import Share
from flexengine.schedule.slots import Memory
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
        _step_aside(planes, planes, _Room({"gpu": 20, "host": 9}))
    mover, gap = _step_aside(planes, planes, _Room({"gpu": 20, "host": 10}))
    assert (mover.name, gap) == ("a", ByteRange("host", 0, 10))


def test_a_larger_layout_is_refused():
    old, new = changed_places()
    with pytest.raises(ValueError, match=f"of the host arena, which has {new.host_bytes - 1}"):
        relocation(old, new, {"gpu": 1 << 40, "host": new.host_bytes - 1})


def test_states_that_nodes_would_divide_otherwise_are_refused():
    model = small_model()
    plan = random_plan(Random(0), model, sliced=False)
    request, groups = replace(plan.request, nodes=2), tuple(GroupPlan(update="cpu") for _ in plan.groups)
    whole = replace(plan, request=request, groups=groups)
    divided = replace(whole, groups=tuple(replace(home, states="nodes") for home in groups))
    old, new = Layout(model, divided), Layout(model, whole)
    capacity: dict[Memory, int] = {"gpu": 1 << 40, "host": 1 << 40, "node": 1 << 40}
    assert relocation(old, Layout(model, divided), capacity) == ()
    with pytest.raises(ValueError, match="nodes would divide the optimizer states otherwise than now; save"):
        relocation(old, new, capacity)


def test_gaps_are_found_before_between_and_after():
    taken = [ByteRange("gpu", 10, 10), ByteRange("gpu", 30, 10), ByteRange("host", 0, 99)]
    room = _Room({"gpu": 100, "node": 100}, cuts=[15])
    assert room.gap(10, "gpu", taken) == ByteRange("gpu", 0, 10)
    assert room.gap(11, "gpu", taken) == ByteRange("gpu", 40, 11)
    assert room.gap(61, "gpu", taken) is None
    assert room.gap(16, "node", taken) == ByteRange("node", 15, 16)  # no copy crosses the cut


def planes_on(rank: int, layout: Layout, memories: dict[str, np.ndarray], wholes: dict[tuple[str, int], bytes]):
    """For each segment of each plane, the bytes where a rank has it, and those that belong there."""
    share = Share(rank, layout.plan.request.ranks)
    for (kind, group), whole in wholes.items():
        slot = layout.slots[layout.plane_slot(kind, group)]
        place = memories[slot.memory][slot.offset : slot.offset + slot.num_bytes]
        for segment in layout.groups[group].segments:
            for plane in (plane for plane in segment.planes if plane.kind == kind):
                start, first, count = plane.start, 0, segment.numel
                if layout.is_dealt(kind, group):
                    start, first, count = layout.dealt_states(layout.groups[group]).place(segment, plane, share)
                begin, num_bytes = plane.start + plane.num_bytes(first), plane.num_bytes(count)
                yield place[start : start + num_bytes], np.frombuffer(whole[begin : begin + num_bytes], np.uint8)


def divided_plan(random: Random, ranks: int, numerics: Numerics) -> Plan:
    """Ranks divide the states of any groups; one group is frozen, on the GPU or not."""
    model = with_frozen(small_model(), ["block.1"])
    plan = random_plan(random, model, sliced=False)
    groups = [GroupPlan(states=random.choice(["dealt", "host"])) for _ in model.groups]
    groups[2] = GroupPlan(weights=random.choice(["gpu", "host"]), update="none")
    request = replace(plan.request, ranks=ranks, numerics=numerics)
    return replace(plan, request=request, groups=tuple(groups), optimizer_tile=random.choice([1 << 10, 1 << 14]))


@pytest.mark.parametrize("seed", range(20))
def test_ranks_divide_states_otherwise_than_before(seed):
    random, ranks = Random(seed), 2 + seed % 2
    numerics = random.choice([FLOAT32, Numerics(), Numerics(optimizer="muon"), Numerics(state=IN_BLOCKS)])
    model = with_frozen(small_model(), ["block.1"])
    old, new = (Layout(model, divided_plan(random, ranks, numerics)) for _ in range(2))
    wholes = {
        (kind, group): random.randbytes(num_bytes)
        for group, stored in enumerate(old.groups)
        for kind, num_bytes in stored.plane_bytes.items()
        if kind != "grad" and num_bytes
    }
    capacity = {m: max(getattr(old, f"{m}_bytes"), getattr(new, f"{m}_bytes")) for m in ("gpu", "host", "node")}
    capacity["node"] += max(map(len, wholes.values()))
    node = np.zeros(capacity["node"], np.uint8)
    own = [{m: np.zeros(capacity[m], np.uint8) for m in ("gpu", "host")} | {"node": node} for _ in range(ranks)]
    for rank in range(ranks):
        for place, expected in planes_on(rank, old, own[rank], wholes):
            place[:] = expected
    for move in relocation(old, new, capacity):
        for rank in random.sample(range(ranks), ranks):
            for source, target in move.copies(rank):
                taken = own[rank][source.memory][source.offset : source.offset + source.num_bytes].copy()
                own[rank][target.memory][target.offset : target.offset + target.num_bytes] = taken
    for rank in range(ranks):
        for place, expected in planes_on(rank, new, own[rank], wholes):
            assert np.array_equal(place, expected)


def test_states_are_divided_otherwise_only_where_they_fit_whole_into_the_node():
    plan = random_plan(Random(1), small_model(), sliced=False)
    request = replace(plan.request, ranks=2, numerics=Numerics(optimizer="muon"))
    plan = replace(plan, request=request, groups=tuple(GroupPlan(states="dealt") for _ in plan.groups))
    old, new = (Layout(small_model(), replace(plan, optimizer_tile=tile)) for tile in (1 << 10, 1 << 14))
    capacity = {"gpu": max(old.gpu_bytes, new.gpu_bytes), "host": old.host_bytes, "node": old.node_bytes}
    with pytest.raises(ValueError, match=r"would divide momentum of block.0 otherwise.*save a checkpoint and resume"):
        relocation(old, new, capacity)
