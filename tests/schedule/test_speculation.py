"""Rounds in which the CPU updates before the norm is known: accepted, and rejected when they would lose a value."""

from dataclasses import replace
from random import Random
from typing import get_args

import pytest

from flexengine.plan import GroupPlan
from flexengine.planner.speculation import completed_order
from flexengine.schedule.checker import check_program
from flexengine.schedule.commands import Access, Program, Stream
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering.kinds import UpdateKind, UpdateWay
from flexengine.schedule.programs import lower_round, lower_update
from flexengine.schedule.second_planes import second_kinds
from flexengine.schedule.slots import overlapping_slots
from flexengine.schedule.speculation_checker import SpeculationError, check_speculation
from tests.schedule.small_plans import full_round, random_plan, small_model

SPECULATIVE = GroupPlan(update="cpu", speculative=True)
ON_DRIVE = GroupPlan("drive", "drive", "drive", "cpu", speculative=True)


def speculating_program(home: GroupPlan = SPECULATIVE) -> tuple[Program, Layout]:
    """A last round in which the CPU updates all groups but the first before the norm is known."""
    model = small_model(blocks=2)
    plan = random_plan(Random(0), model, sliced=False)
    groups = [replace(home, speculative=group > 0) for group in range(len(model.groups))]
    layout = Layout(model, replace(plan, groups=tuple(groups), drive_tile=4096))
    return lower_round(layout, full_round(layout), first=True, updates="speculative"), layout


@pytest.mark.parametrize("seed", range(12))
def test_programs_of_random_plans_are_accepted_on_both_sides(seed):
    random = Random(seed)
    model = small_model(blocks=random.randint(1, 3), tied=seed % 2 == 1)
    plan = random_plan(random, model, sliced=seed % 3 == 0)
    homes = (SPECULATIVE, ON_DRIVE, replace(ON_DRIVE, grads="host"))
    by_cpu = [replace(homes[(seed + i) % 3], speculative=random.random() < 0.7) for i in range(len(plan.groups))]
    groups = [cpu if random.random() < 0.6 else home for cpu, home in zip(by_cpu, plan.groups, strict=True)]
    layout = Layout(model, replace(plan, groups=(*groups[:-1], SPECULATIVE)))
    for side in (layout, layout.swapped()):
        shape = full_round(side)
        rounds = [lower_round(side, shape, first, updates="speculative") for first in (True, False)]
        updates = [lower_update(side, UpdateKind(way)) for way in get_args(UpdateWay)]
        for program in (*rounds, *updates):
            check_program(program, side.gpu_bytes, side.host_bytes, drive_bytes=side.drive_bytes)


def test_factors_that_the_last_round_left_are_not_computed_again():
    _, layout = speculating_program()
    after_norm, rolled_back = (
        [c.kind for c in lower_update(layout, UpdateKind(way)).commands] for way in ("after_norm", "rolled_back")
    )
    assert after_norm == ["clip", *rolled_back]
    assert "update" in rolled_back
    everything = Layout(layout.given, replace(layout.plan, groups=(SPECULATIVE,) * 4))
    nothing_left = lower_update(everything, UpdateKind("committed"))
    assert [c.kind for c in nothing_left.commands] == ["clip"]  # every program has a command


def test_a_speculation_may_be_kept_or_thrown_away():
    program, layout = speculating_program()
    check_program(program, layout.gpu_bytes, layout.host_bytes)
    swapped = layout.swapped()
    other = replace(program, slots=(*swapped.slots, *program.slots[len(swapped.slots) :]))
    check_program(other, layout.gpu_bytes, layout.host_bytes)
    assert swapped.swapped().slots == layout.slots
    updates = [c for c in program.commands if c.kind == "update"]
    for group in range(1, len(layout.groups)):
        stored, own = layout.groups[group], [c.args for c in updates if c.args.group == group]
        assert [args.segment for args in own] == [segment.name for segment in stored.segments]
        for kind in second_kinds(stored):  # whole, and where the planes of the other side lie
            first, second = layout.slots[layout.plane_slot(kind, group)], layout.slots[layout.second_slot(kind, group)]
            assert swapped.slots[swapped.plane_slot(kind, group)].offset == second.offset != first.offset
    assert {c.args.group for c in updates} == set(range(1, len(layout.groups)))
    assert program.commands[-1].label == "offload scalars"


@pytest.mark.parametrize("where", ["in place", "elsewhere", "read early"])
def test_rejects_what_a_speculation_would_lose(where):
    program, _ = speculating_program()
    index = next(c.index for c in program.commands if c.kind == "update")
    command = program.commands[index]
    targets, planes = command.args.targets, command.args.planes
    if where == "in place":
        args = command.args._replace(targets={kind: planes[kind] for kind in targets})
        changed = {index: replace(command, args=args)}
    elif where == "elsewhere":
        kind, place = next(iter(targets.items()))
        args = command.args._replace(targets={**targets, kind: place._replace(offset=place.offset + 64)})
        changed = {index: replace(command, args=args)}
    else:
        norm = program.commands[-1]
        changed = {norm.index: replace(norm, reads=(*norm.reads, *command.writes))}
    broken = replace(program, commands=tuple(changed.get(c.index, c) for c in program.commands))
    with pytest.raises(SpeculationError):
        check_speculation(broken, overlapping_slots(broken.slots))


@pytest.mark.parametrize("grads", ["drive", "host"])
def test_rejects_what_a_speculation_on_a_drive_would_lose(grads):
    """A tile written where it was read, to another tile's place, and a second plane that is read, for every tile."""
    program, layout = speculating_program(replace(ON_DRIVE, grads=grads))
    check_program(program, layout.gpu_bytes, layout.host_bytes, drive_bytes=layout.drive_bytes)
    writes = [c for c in program.commands if c.stream is Stream.DRIVE_OUT]
    assert {c.args.group for c in writes} == set(range(1, len(layout.groups)))
    keys, norm = {slot.key: i for i, slot in enumerate(program.slots)}, program.commands[-1]
    for command, other in zip(writes, [*writes[1:], writes[0]], strict=True):
        first = [c._replace(target=keys[program.slots[c.target].key._replace(index=-1)]) for c in command.copies]
        elsewhere = [a._replace(target=b.target) for a, b in zip(command.copies, other.copies, strict=True)]
        wrong = [replace(command, copies=tuple(copies)) for copies in (first, elsewhere)]
        wrong = [replace(c, writes=tuple(Access(r.target, "x") for r in c.copies)) for c in wrong]
        for changed in (*wrong, replace(norm, reads=(*norm.reads, command.writes[0]))):
            commands = tuple(changed if c.index == changed.index else c for c in program.commands)
            with pytest.raises(SpeculationError):
                check_speculation(replace(program, commands=commands), overlapping_slots(program.slots))


@pytest.mark.parametrize("tied", [False, True])
def test_groups_are_taken_in_the_order_of_the_program(tied):
    model = small_model(blocks=3, tied=tied)
    layout = Layout(model, replace(random_plan(Random(1), model, False), groups=(SPECULATIVE,) * len(model.groups)))
    program = lower_round(layout, full_round(layout), first=True, updates="speculative")
    updated = dict.fromkeys(c.args.group for c in program.commands if c.kind == "update")
    assert list(updated) == completed_order(model)
