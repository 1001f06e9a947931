"""The checker accepts every program of random plans and rejects programs with one thing wrong."""

from dataclasses import replace
from itertools import cycle
from random import Random

import pytest
from thorough import cases

from flexengine.plan import GroupPlan
from flexengine.schedule.checker import ProgramError, check_program
from flexengine.schedule.commands import (
    DRIVE_READS,
    DRIVE_STREAMS,
    DRIVE_WRITES,
    Access,
    CommandName,
    Program,
    Stream,
    UpdateTile,
)
from flexengine.schedule.layout import Layout
from flexengine.schedule.program_builder import ProgramBuilder
from flexengine.schedule.programs import lower_evaluation, lower_round, lower_update
from flexengine.schedule.slots import Slot, SlotKey, overlapping_slots
from tests.schedule.small_plans import full_round, random_plan, small_model

ON_DRIVE = [
    GroupPlan("drive", "drive", "drive", "cpu"),
    GroupPlan("host", "host", "drive", "cpu"),
    GroupPlan("drive", "host", "drive", "cpu"),
    GroupPlan("host", "drive", "drive", "cpu"),
]


def random_layout(seed: int) -> Layout:
    random = Random(seed)
    model = small_model(blocks=random.randint(1, 4), tied=random.random() < 0.5)
    plan = random_plan(random, model, sliced=seed % 3 == 0, hidden_home="host" if seed % 4 == 1 else "auto")
    by_cpu = cycle(ON_DRIVE if seed % 2 else [GroupPlan(update="cpu")])
    groups = tuple(next(by_cpu) if random.random() < 0.4 else group for group in plan.groups)
    layers = plan.layers
    if seed % 2:  # what waits on the host lies on a drive
        layers = tuple(
            replace(kept, on_drive=bool(kept.keep_host) or (kept.input_home == "host" and not kept.input_again))
            for kept in layers
        )
    return Layout(model, replace(plan, groups=groups, layers=layers, drive_tile=4096, drive_slots=1 + seed % 3))


def programs(layout: Layout) -> list[Program]:
    shape = full_round(layout)
    rounds = [lower_round(layout, shape, first, updates) for first in (True, False) for updates in ("none", "in_round")]
    return [*rounds, lower_evaluation(layout, shape), lower_update(layout)]


def check(program: Program, layout: Layout) -> None:
    check_program(program, layout.gpu_bytes, layout.host_bytes, drive_bytes=layout.drive_bytes)


@pytest.mark.parametrize("seed", range(30))
def test_programs_of_random_plans_are_accepted(seed):
    layout = random_layout(seed)
    for program in programs(layout):
        check(program, layout)


@pytest.mark.parametrize("seed", cases(range(6), range(4)))
def test_every_wait_is_necessary(seed):
    layout = random_layout(seed)
    for program in programs(layout):
        for command in program.commands:
            for wait in command.waits:
                fewer = replace(command, waits=tuple(w for w in command.waits if w != wait))
                broken = (*program.commands[: command.index], fewer, *program.commands[command.index + 1 :])
                with pytest.raises(ProgramError):
                    check(replace(program, commands=broken), layout)


@pytest.mark.parametrize("seed", range(6))
def test_slots_at_one_address_are_rejected(seed):
    """Activations that wait from forward to backward cannot lie over the scratch that every command writes."""
    layout = random_layout(seed)
    program = programs(layout)[0]
    scratch = layout.place("scratch")
    used = {access.slot for command in program.commands for access in (*command.reads, *command.writes)}
    waiting = ("kept activations", "resident weights")
    kept = [i for i in used if layout.slots[i].memory == "gpu" and layout.slots[i].category in waiting]
    for i in kept or [layout.slot("hidden", index=0)]:
        moved = tuple(s._replace(offset=scratch.offset) if j == i else s for j, s in enumerate(program.slots))
        with pytest.raises(ProgramError):
            check_program(replace(program, slots=moved), layout.gpu_bytes + (1 << 30), layout.host_bytes)


@pytest.mark.parametrize("seed", range(6))
def test_swapped_compute_commands_are_rejected(seed):
    layout = random_layout(seed)
    program = programs(layout)[0]
    blocks = [c.index for c in program.commands if c.kind == "backward" and c.args.layer in (1, 2)]
    first, last = blocks[0], blocks[-1]
    commands = list(program.commands)
    commands[first] = replace(program.commands[last], index=first, waits=program.commands[first].waits)
    commands[last] = replace(program.commands[first], index=last, waits=program.commands[last].waits)
    with pytest.raises(ProgramError):
        check(replace(program, commands=tuple(commands)), layout)


def test_dropped_copy_is_rejected():
    layout = random_layout(1)
    program = programs(layout)[1]
    copies = [c.index for c in program.commands if c.kind == "copy"]
    assert copies
    read_later = {a.slot for c in program.commands for a in c.reads}
    needed = [i for i in copies if any(a.slot in read_later for a in program.commands[i].writes)]
    assert {program.commands[i].stream for i in copies} >= {"h2d", *DRIVE_STREAMS}
    noticed = [i for i in needed if program.commands[i].stream in ("h2d", *DRIVE_READS)]
    for dropped in (*noticed, *(i for i in copies if program.commands[i].stream in DRIVE_WRITES)):
        kept = [c for c in program.commands if c.index != dropped]
        numbers = {c.index: i for i, c in enumerate(kept)}
        renumbered = tuple(
            replace(c, index=numbers[c.index], waits=tuple(numbers[w] for w in c.waits if w in numbers)) for c in kept
        )
        with pytest.raises(ProgramError):
            check(replace(program, commands=renumbered), layout)


def with_command(program: Program, index: int, **changes) -> Program:
    changed = replace(program.commands[index], **changes)
    return replace(program, commands=(*program.commands[:index], changed, *program.commands[index + 1 :]))


def test_mutated_copies_are_rejected():
    """Ends swapped, cut short, or taken from another slot."""
    layout = random_layout(1)
    a_round, *_, update = programs(layout)
    of_drive = [(update, command) for command in update.commands if command.stream in DRIVE_STREAMS]
    assert of_drive
    for program, command in (*((a_round, command) for command in a_round.commands if command.copies), *of_drive):
        r = command.copies[0]
        hosts = [i for i, s in enumerate(program.slots) if s.memory == "host" and s.num_bytes >= r.num_bytes]
        other = next(i for i in hosts if i != r.source)
        swapped = r._replace(source=r.target, target=r.source, source_offset=0, target_offset=0)
        for mutant in (swapped, r._replace(num_bytes=4), r._replace(source=other, source_offset=0)):
            with pytest.raises(ProgramError):
                check(with_command(program, command.index, copies=(mutant, *command.copies[1:])), layout)


@pytest.mark.parametrize("seed", [1, 3, 5])
def test_changed_copies_of_a_drive_are_rejected(seed):
    """A plane left out, two planes in each other's place, one of them twice, what is read or left not declared, and no
    wait."""
    layout, found, found_kept = random_layout(seed), set[Stream](), False
    for program in (lower_round(layout, full_round(layout), False), lower_update(layout)):
        for command in (command for command in program.commands if command.stream in DRIVE_STREAMS):
            first, *others = command.copies
            wrong = [{"copies": tuple(others)}, {"writes": ()}, {"reads": ()}]
            wrong += [{"waits": ()}] if command.waits else []
            found_kept |= command.name.subject in ("input", "save")
            if others and command.stream in (Stream.DRIVE_IN, Stream.DRIVE_OUT):
                end = "target" if command.stream is Stream.DRIVE_OUT else "source"
                second = others[0]
                swapped = first._replace(**{end: getattr(second, end)}), second._replace(**{end: getattr(first, end)})
                wrong += [{"copies": (*pair, *others[1:])} for pair in (swapped, (swapped[0], second))]
            for changes in wrong:
                with pytest.raises(ProgramError):
                    check(with_command(program, command.index, **changes), layout)
            found.add(command.stream)
    assert found == set(DRIVE_STREAMS)
    assert found_kept


def test_arguments_bound_to_other_slots_are_rejected():
    layout = random_layout(2)
    program = programs(layout)[0]
    calls = [c for c in program.commands if c.kind in ("forward", "backward")]
    for command in calls:
        for area, slot in command.args.areas.items():
            used = {a.slot for a in (*command.reads, *command.writes)}
            other = next(i for i, s in enumerate(program.slots) if s.memory == "gpu" and i != slot and i not in used)
            args = replace(command.args, areas={**command.args.areas, area: other})
            with pytest.raises(ProgramError):
                check(with_command(program, command.index, args=args), layout)


def test_slot_beyond_the_arena_is_rejected():
    layout = random_layout(2)
    with pytest.raises(ProgramError, match="arena"):
        check_program(programs(layout)[0], layout.gpu_bytes - 1024, layout.host_bytes)


def test_updates_by_the_cpu_of_different_groups_may_not_conflict():
    slots = tuple(Slot(SlotKey(f"host{i}", memory="host"), 16 * i, 16, "") for i in range(2))
    for second, fine in ((0, True), (1, False)):
        b = ProgramBuilder("updates", slots, overlapping_slots(slots))
        b.holds(0, "x")
        for group, content in ((0, "x"), (second, "y")):
            args = UpdateTile(group, "matrix", 0, 1, {})
            b.add(
                "update", CommandName(f"update {group}"), Stream.CPU, [Access(0, content)], [Access(0, "y")], args=args
            )
        program = b.build()
        if fine:
            check_program(program, 32, 32)
        else:
            with pytest.raises(ProgramError, match=r"update 1 and update 0 are of different groups.* slot host.host0"):
                check_program(program, 32, 32)
