"""Ranks that share the drive of their node: proven together, and with the bits of one rank in memory."""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from rank_cases import BF16, LENGTHS, Case, bf16, steps_of, streamed, tied_in_shared_slots
from ranks_helper import run_ranks, values_of
from test_several_ranks import opened

from flexengine.checkpoint.manifest import verify_manifest
from flexengine.hardware.drive_profile import shared_drive
from flexengine.hardware.presets import preset
from flexengine.models.freezing import with_frozen
from flexengine.native.drive import DriveError
from flexengine.parallel.signals import RankLost
from flexengine.plan import GroupPlan, Plan, PlanError, Request
from flexengine.planner.ranks.plan import plan_for_ranks
from flexengine.planner.ranks.price import priced_together
from flexengine.reports.plan_text import describe
from flexengine.runtime.engine import Engine
from flexengine.schedule.checker import check_program
from flexengine.schedule.commands import (
    DRIVE_READS,
    DRIVE_WRITES,
    Command,
    CommandName,
    CopyRegion,
    DriveCopy,
    Program,
    Signal,
    Stream,
)
from flexengine.schedule.layout import Layout
from flexengine.schedule.program_builder import ProgramBuilder
from flexengine.schedule.ranks.checker import check_runs
from flexengine.schedule.ranks.rank_run import RankRun
from flexengine.schedule.ranks.runs import runs_of_ranks
from flexengine.schedule.ranks.simulator import simulate_runs
from flexengine.schedule.simulator import Rates
from flexengine.schedule.slots import Slot, SlotKey, overlapping_slots
from tests.parallel.test_ranks_checker import is_rejected
from tests.parallel.test_split_transport import Change, changed
from tests.runtime.test_drive_planes import FAULTS
from tests.runtime.test_linked_base import CONFIGS, adapted
from tests.schedule.small_plans import full_round, random_plan, small_model

MIB = 2**20


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


def train_linked(rank: int, size: int, case: Case, folder: Path) -> tuple[int, list[float]]:
    with opened(rank, size, case, offload_dir=str(folder)) as engine:
        return len(engine.arenas.regions), [engine.train_step(step[0])[0].loss for step in case.steps]


def test_ranks_read_frozen_weights_in_the_files_of_a_checkpoint(tmp_path: Path):
    source = adapted(tmp_path, CONFIGS["experts"])
    case = Case(source, streamed(source, numerics=BF16), steps_of(source.spec.vocab_size, LENGTHS))
    alone = train_linked(0, 1, case, tmp_path)
    found = values_of(run_ranks(train_linked, 2, 2, case._replace(drive=True, split=True), tmp_path))
    assert alone[0] == 0
    assert found[0][0] > 0
    assert [losses for _, losses in found] == [alone[1]] * 2


@pytest.mark.parametrize(("seed", "transport"), [(0, "split"), (1, "relay"), (2, "split")])
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


# -- prices ----------------------------------------------------------------------------------------------------------

DRIVE_RATES = {way: (10.0, 5.0) for way in DRIVE_READS} | {way: (5.0, 2.5) for way in DRIVE_WRITES}
"""Bytes a second alone and beside the other way."""


def moves(stream: Stream) -> list[RankRun]:
    """A run that reads, or writes, 100 bytes."""
    slots = Slot(SlotKey("weights", memory="drive"), 0, 100, ""), Slot(SlotKey("staged", memory="host"), 0, 100, "")
    builder = ProgramBuilder("paper", slots, overlapping_slots(slots))
    source = int(stream in DRIVE_WRITES)
    builder.copy(CommandName("move"), stream, "c", [CopyRegion(source, 0, 1 - source, 0, 100)], DriveCopy(0))
    return [RankRun(builder.build(), 0, 0, updates=False)]


def test_ranks_share_the_rates_of_a_drive():
    """On paper: two that read take turns; beside one that writes both are slower, until one has ended."""
    link = {Stream.H2D: 1.0, Stream.D2H: 1.0}
    rates = Rates(lambda command: 0.0, link, link, 0.0, drive_bytes_per_s=DRIVE_RATES)
    for streams, ends in (
        ([Stream.DRIVE_FETCH], [10.0]),
        ([Stream.DRIVE_FETCH, Stream.DRIVE_IN], [20.0, 20.0]),
        ([Stream.DRIVE_FETCH, Stream.DRIVE_OUT], [20.0, 30.0]),
    ):
        found = simulate_runs([moves(stream) for stream in streams], len(streams), rates)
        assert [rank[0].timing.total_s for rank in found] == pytest.approx(ends)


def test_a_plan_of_two_ranks_lies_on_a_drive_where_nothing_fits_without():
    """Within all budgets, above its bound, and no faster than the drive's share of the step allows."""
    model, profile = small_model(blocks=2, hidden=512, vocab=2048), preset("rtx4090")
    sizes = {"chunk_tokens": 256, "round_tokens": 512, "recompute": "full", "graphs": "never", "transport": "relay"}
    request = Request(256, 1024, 692 * MIB, 9 << 30, ranks=2, **sizes)
    roomy = plan_for_ranks(model, replace(request, max_drive_bytes=1 << 30), profile)
    assert not roomy.uses_drive
    tight = replace(request, max_host_bytes=roomy.predicted.host_bytes - 16 * MIB)
    with pytest.raises(PlanError, match=r"--offload-dir DIR --max-disk-gib"):
        plan_for_ranks(model, tight, profile)
    tight = replace(tight, max_drive_bytes=1 << 30)
    plan = plan_for_ranks(model, tight, profile)
    layout = Layout(model, plan)
    assert 0 < layout.drive_bytes == plan.predicted.drive_bytes
    assert plan.predicted.host_bytes <= tight.max_host_bytes
    assert 0 < plan.predicted.speed_of_light_s <= plan.predicted.step_s
    assert "once for all GPUs" in describe(plan, model)
    slow = priced_together(layout, plan.predicted, profile.changed(**shared_drive(1e7, 1e7).values()))
    assert 1.8 < slow.step_s / (layout.drive_written_bytes / 1e7) < 2.1  # read and written once, each half the time


# -- a drive that fails, and ranks that are killed -------------------------------------------------------------------

DRIVEN = bf16()._replace(drive=True)


def train_steps(engine: Engine, batch: Any, folders: Sequence[Path | None]) -> None:
    """As many steps as there are folders, beside each of which a checkpoint is written, unless it is None."""
    for folder in folders:
        if folder is not None:
            engine.start_checkpoint(folder)
        engine.train_step(batch)


def fail_in_a_step(rank: int, case: Case) -> tuple[str, str]:
    engine = opened(rank, 2, case)
    engine.train_step(case.steps[0][0])
    engine.evaluate(case.steps[0][0])  # the update has ended
    if rank == 1:
        FAULTS["an error"][0](engine.arenas.drive)
    with pytest.raises((RankLost, DriveError)) as caught:
        train_steps(engine, case.steps[1][0], [None] * 2)  # the update goes on beside the next step
    engine.close()
    return caught.type.__name__, str(caught.value)


@pytest.mark.parametrize("split", [False, True], ids=["relay", "split"])
def test_a_drive_that_fails_one_rank_ends_all_with_one_message(split: bool):
    first, second = values_of(run_ranks(fail_in_a_step, 2, DRIVEN._replace(split=split)))
    assert (first[0], second[0]) == ("RankLost", "DriveError")
    assert first[1] == f"rank 1: DriveError: {second[1]}"
    assert re.search("could not be (read|written) at byte .*Input/output error.*resume from the last", second[1])


def open_on_a_full_drive(rank: int, folder: Path) -> str:
    if rank == 0:
        os.posix_fallocate = no_space
    with pytest.raises(DriveError) as caught:
        opened(rank, 2, DRIVEN, offload_dir=str(folder))
    return str(caught.value)


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, "full")


def test_a_full_drive_is_told_on_all_ranks_before_the_first_step(tmp_path: Path):
    first, second = values_of(run_ranks(open_on_a_full_drive, 2, tmp_path / "drive"))
    assert "No space left on device. Free some, name another folder" in first
    assert second == f"rank 0: {first}"
    assert list((tmp_path / "drive").iterdir()) == []


def go_on_until_killed(rank: int, case: Case, folder: Path, after_s: float) -> None:
    """Train and save beside that, step after step, from the first checkpoint on; rank 1 is killed meanwhile."""
    engine = opened(rank, 2, case, watched=True, offload_dir=str(folder / "drive"))
    engine.train_step(case.steps[0][0])
    engine.save_checkpoint(folder / "step-0")
    if rank == 1:
        threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    with pytest.raises(RankLost):
        train_steps(engine, case.steps[1][0], [folder / f"step-{step}" for step in range(1, 1000)])


def losses_from(folder: Path, case: Case, count: int) -> list[float]:
    engine = opened(0, 1, case)
    engine.load_checkpoint(folder)
    found = [engine.train_step(case.steps[1][0])[0].loss for _ in range(count)]
    engine.close()
    return found


def test_a_rank_that_is_killed_leaves_whole_checkpoints_and_no_file(tmp_path: Path):
    """Any that was begun is whole or not there, and goes on with the losses of a run that nobody killed."""
    case = tied_in_shared_slots()._replace(drive=True, split=True)
    outcomes = run_ranks(go_on_until_killed, 2, case, tmp_path, 0.3)
    assert [outcome.error for outcome in outcomes] == [None, "ended"]
    assert list((tmp_path / "drive").iterdir()) == []
    saved = sorted(tmp_path.glob("step-*"), key=lambda path: int(path.name[5:]))
    for checkpoint in saved:
        verify_manifest(checkpoint)
    last = min(len(saved) - 1, 3)
    expected = losses_from(saved[0], case, max(2, last + 1))
    assert losses_from(saved[last], case, 2) == expected[max(0, last - 1) :][:2]
