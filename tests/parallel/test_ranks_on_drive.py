"""Ranks that share the drive of their node: proven together, and with the bits of one rank in memory."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from flexengine.models.freezing import with_frozen
from flexengine.plan import GroupPlan, Plan
from flexengine.schedule.checker import check_program
from flexengine.schedule.commands import Command, Program, Signal, Stream
from flexengine.schedule.layout import Layout
from flexengine.schedule.ranks.checker import check_runs
from flexengine.schedule.ranks.rank_run import RankRun
from flexengine.schedule.ranks.runs import runs_of_ranks
from tests.parallel.test_ranks_checker import is_rejected
from tests.parallel.test_split_transport import Change, changed
from tests.schedule.small_plans import full_round, random_plan, small_model


def on_drive(plan: Plan, random: Random | None = None, **changes: object) -> Plan:
    """The plan with what may lie there on a drive; random: of some groups only some planes, of others none."""

    def home(old: GroupPlan) -> GroupPlan:
        if random is not None and random.random() < 0.2:
            return old
        if not old.trained:
            return GroupPlan(weights="drive", update="none")
        weights = "host" if random is not None and random.random() < 0.4 else "drive"
        return GroupPlan(weights, "host", "drive", "cpu")

    return replace(plan, groups=tuple(map(home, plan.groups)), touched_only=False, **changes)


@pytest.mark.parametrize("transport", ["relay", "split"])
@pytest.mark.parametrize("seed", range(3))
def test_random_plans_are_proven(seed: int, transport: str):
    random = Random(seed)
    model = [small_model(), small_model(tied=True), with_frozen(small_model(), ["embed", "block.1"])][seed]
    plan = random_plan(random, model, sliced=seed == 1)
    plan = replace(plan, groups=tuple(GroupPlan(update="none" if g.frozen else "cpu") for g in model.groups))
    plan = replace(plan, request=replace(plan.request, ranks=2 + seed % 2), transport=transport)
    layout = Layout(model, on_drive(plan, random, drive_tile=4096, drive_slots=1 + seed))
    assert layout.drive_bytes > 0
    for num_rounds in (1, 2, 3):
        runs = runs_of_ranks(layout, full_round(layout), num_rounds)
        check_runs(layout, runs, num_rounds)
    for run in (run for rank in runs for run in rank):
        sizes = layout.gpu_bytes, layout.host_bytes, layout.node_bytes, layout.drive_bytes
        check_program(run.program, *sizes)


# -- programs with one thing changed ---------------------------------------------------------------------------------


def small_runs(transport: str) -> tuple[Layout, list[list[RankRun]]]:
    model = small_model(blocks=1)
    plan = on_drive(random_plan(Random(1), model, sliced=False), drive_tile=4096)
    plan = replace(plan, request=replace(plan.request, ranks=2), transport=transport)
    layout = Layout(model, plan)
    return layout, runs_of_ranks(layout, full_round(layout), 4)


def of_reads(awaits: tuple[Signal, ...] | None = None, **other: object) -> Change:
    """Reads of weights await nothing, or something else."""

    def change(command: Command) -> Command:
        if command.stream is not Stream.DRIVE_FETCH or not command.awaits:
            return command
        found = awaits if awaits is not None else tuple(signal._replace(**other) for signal in command.awaits)
        return replace(command, awaits=found)

    return change


def without_writes(command: Command) -> Command | None:
    return None if command.stream is Stream.DRIVE_OUT and command.signals else command


def told_before_the_write(program: Program) -> Program:
    """Others are told when the last tile is updated on the host, while it is on its way to the drive."""
    commands = list(program.commands)
    for index, command in enumerate(commands):
        if command.stream is Stream.DRIVE_OUT and command.signals:
            update = max(wait for wait in command.waits if commands[wait].stream is Stream.CPU)
            commands[update] = replace(commands[update], signals=command.signals)
            commands[index] = replace(command, signals=())
    return replace(program, commands=tuple(commands))


def to_the_tile_of_another(layout: Layout) -> Change:
    """What is updated is written over what another rank updates, too."""

    def other(slot: int) -> int:
        segment, _ = layout.slots[slot].key.within
        return layout.slot_of(layout.slots[slot].key._replace(within=(segment, 0)))

    def change(command: Command) -> Command:
        if command.stream is not Stream.DRIVE_OUT:
            return command
        return replace(command, copies=tuple(c._replace(target=other(c.target)) for c in command.copies))

    return change


@pytest.mark.parametrize("transport", ["relay", "split"])
def test_changes_are_noticed(transport: str):
    layout, runs = small_runs(transport)
    check_runs(layout, runs, 4)
    changes: dict[str, tuple[Change, int]] = {
        "a read before others have written": (of_reads(()), 0),
        "a read after own writes alone": (of_reads(of="own"), 0),
        "a read after the writes of the step before": (of_reads(lag=2), 0),
        "a write less": (without_writes, 1),
        "two writers": (to_the_tile_of_another(layout), 1),
    }
    for what, (change, rank) in changes.items():
        assert is_rejected(layout, changed(runs, change, (rank,))), what
    early = [[run._replace(program=told_before_the_write(run.program)) for run in rank] for rank in runs]
    assert is_rejected(layout, [runs[0], early[1]]), "told before the write"
