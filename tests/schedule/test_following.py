"""Programs that follow each other while the CPU works on."""

from dataclasses import replace
from itertools import product
from random import Random

import pytest

from flexengine.plan import GroupPlan, Request
from flexengine.schedule.commands import Access, CommandName, CopyRegion, Program, Stream
from flexengine.schedule.following import cpu_commands, cpu_waits, followed
from flexengine.schedule.layout import Layout
from flexengine.schedule.program_builder import ProgramBuilder
from flexengine.schedule.programs import lower_round, lower_update
from flexengine.schedule.simulator import Rates, simulate
from flexengine.schedule.slots import Memory, Slot, SlotKey, overlapping_slots
from tests.schedule.small_plans import full_round, random_plan, resident_plan, small_model

SLOTS = (
    *(Slot(SlotKey(f"gpu{i}", memory="gpu"), 16 * i, 16, "") for i in range(2)),
    *(Slot(SlotKey(f"host{i}", memory="host"), 16 * i, 16, "") for i in range(4)),
    Slot(SlotKey("host 0 and half of 1", memory="host"), 0, 24, ""),
)
GPU0, GPU1, HOST0, HOST1, HOST2, HOST3, WIDE = range(7)


def builder(name: str) -> ProgramBuilder:
    return ProgramBuilder(name, SLOTS, overlapping_slots(SLOTS))


def working():
    """The CPU makes host1 of host0, then host2 of host1."""
    b = builder("before")
    b.copy(CommandName("send"), Stream.D2H, "x", [CopyRegion(GPU0, 0, HOST0, 0, 16)])
    b.add("work", CommandName("first"), Stream.CPU, [Access(HOST0, "x")], [Access(HOST1, "y")])
    b.add("work", CommandName("second"), Stream.CPU, [Access(HOST1, "y")], [Access(HOST2, "z")])
    return b.build()


@pytest.mark.parametrize(
    ("stream", "source", "target", "waits"),
    [
        (Stream.H2D, HOST0, GPU0, set()),  # both read
        (Stream.H2D, HOST1, GPU0, {1}),
        (Stream.H2D, HOST2, GPU0, {2}),
        (Stream.H2D, HOST3, GPU0, set()),
        (Stream.D2H, GPU0, HOST0, {1}),  # what the first reads
        (Stream.D2H, GPU0, HOST1, {1, 2}),  # what the first writes and the second reads
        (Stream.D2H, GPU0, HOST3, set()),
        (Stream.H2D, WIDE, GPU0, {1}),  # a part of what the first writes
    ],
)
def test_commands_wait_for_what_touches_the_same_bytes(stream, source, target, waits):
    b = builder("after")
    b.copy(CommandName("copy"), stream, "c", [CopyRegion(source, 0, target, 0, 16)])
    assert cpu_waits(working(), b.build()) == ({0: waits} if waits else {})


def test_commands_wait_for_what_threads_do_on_a_drive():
    """What an update writes there, and gradients; the same addresses of the host are others."""
    places: list[tuple[Memory, int]] = [("host", 0), ("drive", 0), ("drive", 16), ("gpu", 0)]
    slots = tuple(Slot(SlotKey(f"slot{i}", memory=memory), start, 16, "") for i, (memory, start) in enumerate(places))
    b = ProgramBuilder("before", slots, overlapping_slots(slots))
    b.copy(CommandName("send"), Stream.D2H, "x", [CopyRegion(3, 0, 0, 0, 16)])
    b.copy(CommandName("write"), Stream.DRIVE_STORE, "x", [CopyRegion(0, 0, 1, 0, 16)])
    before = b.build()
    for stream, source, target, waits in (
        (Stream.DRIVE_FETCH, 1, 0, {1}),
        (Stream.DRIVE_FETCH, 2, 0, {1}),  # for the slot of the host
        (Stream.DRIVE_IN, 2, 3, set()),
        (Stream.D2H, 3, 0, {1}),
        (Stream.H2D, 0, 3, set()),
    ):
        b = ProgramBuilder("after", slots, overlapping_slots(slots))
        b.copy(CommandName("copy"), stream, "c", [CopyRegion(source, 0, target, 0, 16)])
        assert cpu_waits(before, b.build()) == ({0: waits} if waits else {})


def taking_turns(random: Random) -> Program:
    """Threads read tiles from a drive into few places of the host, work on them and write them back, in turns."""
    b = builder("before")
    b.copy(CommandName("send"), Stream.D2H, "x", [CopyRegion(GPU0, 0, HOST0, 0, 16)])
    b.add("work", CommandName("first"), Stream.CPU, [Access(HOST0, "x")], [Access(HOST1, "y")])
    host = (HOST0, HOST1, HOST2, HOST3, WIDE)
    for _ in range(20):
        stream = random.choice((Stream.CPU, Stream.CPU, Stream.DRIVE_IN, Stream.DRIVE_OUT))
        reads, writes = (random.sample(host, random.randrange(3)) for _ in range(2))
        b.add("work", CommandName("turn"), stream, [Access(s, "y") for s in reads], [Access(s, "y") for s in writes])
    return b.build()


@pytest.mark.parametrize("seed", range(8))
def test_whoever_waits_for_the_last_turns_has_waited_for_all(seed):
    """Of commands that take turns in some bytes only those are named that no other one named implies."""
    random = Random(seed)
    before = taking_turns(random)
    ended: dict[int, set[int]] = {}  # what has ended before each command ends
    for command in before.commands:
        ended[command.index] = {command.index}.union(*(ended[wait] for wait in command.waits))
    named = all_of_them = 0
    for place, writing in product((HOST0, HOST1, HOST2, HOST3, WIDE), (False, True)):
        b = builder("after")
        access = [Access(place, "y")]
        b.add("other", CommandName("other"), Stream.D2H, *(([], access) if writing else (access, [])))
        waits = cpu_waits(before, b.build()).get(0, frozenset())
        overlapping = {slot for slot in range(len(SLOTS)) if slot in b.overlaps[place]}
        touching = {
            c.index
            for c in before.commands
            if c.stream is not Stream.D2H
            and overlapping & {slot for slot, _ in ((*c.reads, *c.writes) if writing else c.writes)}
        }
        assert touching <= set().union(*(ended[wait] for wait in waits))
        assert waits <= touching
        named, all_of_them = named + len(waits), all_of_them + len(touching)
    assert named < all_of_them


def test_work_of_the_cpu_waits_for_the_gpu_and_is_waited_for_by_none():
    b = builder("no wait")
    b.add("work", CommandName("work"), Stream.CPU, [], [Access(HOST1, "y")])
    with pytest.raises(AssertionError, match="work waits for nothing"):
        cpu_commands(b.build())
    b = builder("waited for")
    b.copy(CommandName("send"), Stream.D2H, "x", [CopyRegion(GPU0, 0, HOST0, 0, 16)])
    b.add("work", CommandName("work"), Stream.CPU, [Access(HOST0, "x")], [Access(HOST1, "y")])
    b.copy(CommandName("fetch"), Stream.H2D, "y", [CopyRegion(HOST1, 0, GPU1, 0, 16)])
    with pytest.raises(AssertionError, match="fetch waits for the CPU"):
        cpu_commands(b.build())


def test_what_does_not_touch_the_work_overlaps_it():
    b = builder("after")
    b.copy(CommandName("fetch other"), Stream.H2D, "c", [CopyRegion(HOST3, 0, GPU0, 0, 16)])
    b.copy(CommandName("fetch first"), Stream.H2D, "y", [CopyRegion(HOST1, 0, GPU1, 0, 16)])
    both = followed(working(), b.build())
    alone = {Stream.H2D: 16.0, Stream.D2H: 16.0}
    timing = simulate(both, Rates(lambda c: 0.0, alone, alone, 0.0, cpu_s=lambda c: 4.0))
    # what comes after starts with the end of the copy that the first program ends with on the GPU
    assert timing.start_s == pytest.approx([0, 1, 5, 1, 5])
    assert timing.total_s == pytest.approx(9)


@pytest.mark.parametrize("seed", range(6))
def test_every_fetch_of_updated_weights_waits(seed):
    """Plans at random: every fetch of a group that the CPU updates waits for that, and the joined program ends."""
    random = Random(seed)
    model = small_model(blocks=4)
    plan = random_plan(random, model, sliced=seed % 2 == 0)
    groups = tuple(GroupPlan(update="cpu") if random.random() < 0.7 else g for g in plan.groups)
    layout = Layout(model, replace(plan, groups=(GroupPlan(update="cpu"), *groups[1:])))
    update, after = lower_update(layout), lower_round(layout, full_round(layout), first=True)
    waits = cpu_waits(update, after)
    last = {c.args.group: c.index for c in cpu_commands(update)}
    for command in after.commands:
        for region in command.copies:
            for group, index in last.items():
                if region.source == layout.plane_slot("weights", group):
                    assert index in waits[command.index]
    both = followed(update, after)
    rate = {Stream.H2D: 1e9, Stream.D2H: 1e9}
    rates = Rates(lambda c: 1e-5, rate, rate, 1e-6, cpu_s=lambda c: 1e-4)
    together, one, other = (simulate(p, rates).total_s for p in (both, update, after))
    assert max(one, other) <= together <= (one + other) * (1 + 1e-9)


def test_nothing_waits_where_the_gpu_updates():
    model = small_model()
    layout = Layout(model, resident_plan(model, Request(32, 128, 1 << 30, 1 << 40)))
    assert cpu_waits(lower_update(layout), lower_round(layout, full_round(layout), first=True)) == {}
