"""Planes on a drive: saved, resumed and moved between plans bit by bit, and a drive that fails ends in one message."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from engine_helpers import build_engine, make_plan, random_batch, random_weights, same_bits, streamed_plan, tiny_config

from bench.kill_on_drive import killed_runs
from bench.random_on_drive import compared
from flexengine.native.drive import DriveError
from flexengine.plan import GroupPlan, Numerics, Plan
from flexengine.runtime.engine import Engine
from flexengine.schedule.layout import Layout
from flexengine.schedule.relocation import relocation
from flexengine.schedule.slots import Memory

NUMERICS = {
    "bf16, exact master": Numerics("bfloat16", "split", "bfloat16", "float32"),
    "bf16, 8-bit states": Numerics("bfloat16", "stochastic", "bfloat16", "int8"),
}
ON_DRIVE = GroupPlan("drive", "drive", "drive", "cpu")
SOURCE = random_weights(tiny_config(num_hidden_layers=1))
BATCHES = [random_batch(seed, (20, 9, 31), 67) for seed in range(3)]


def on_drive(numerics: Numerics, home: GroupPlan = ON_DRIVE) -> Plan:
    """Every second group; tiles as small as blocks of the drive allow."""
    homes = [home if i % 2 else GroupPlan(update="cpu") for i in range(len(SOURCE.spec.groups))]
    return streamed_plan(SOURCE.spec, numerics=numerics, groups=homes, drive_tile=1, drive_slots=2)


@pytest.mark.parametrize("numerics", NUMERICS.values(), ids=NUMERICS)
def test_resumed_on_a_drive_and_off_it_bit_by_bit(tmp_path: Path, numerics: Numerics):
    resident, driven = make_plan(SOURCE.spec, numerics=numerics), on_drive(numerics)
    expected, last = [], {}
    with build_engine(SOURCE, resident) as engine:
        for batch in BATCHES:
            expected.append(engine.train_step(batch)[0].loss)
        last = engine.state_dict()
    found = []
    for step, plan in enumerate((driven, resident, driven)):
        with build_engine(SOURCE, plan, offload_dir=str(tmp_path / "drive")) as engine:
            if step:
                engine.load_checkpoint(tmp_path / f"step-{step}")
            found.append(engine.train_step(BATCHES[step])[0].loss)
            engine.save_checkpoint(tmp_path / f"step-{step + 1}")
            if step == 2:
                same_bits(engine.state_dict(), last)
    assert found == expected
    assert list((tmp_path / "drive").iterdir()) == []


def train_two(engine: Engine) -> None:
    """The update of a step goes on beside the next one, which waits for it."""
    for batch in BATCHES[1:]:
        engine.train_step(batch)


FAULTS = {
    "an error": (lambda drive: os.dup2(os.open("/proc/self/mem", os.O_RDWR), drive._descriptor), "Input/output error"),
    "a short read": (lambda drive: os.ftruncate(drive._descriptor, 0), "the file ends there"),
}
"""The kernel itself answers so: nothing lies at the first addresses of a process."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_drive_that_fails_loses_the_step_and_not_the_checkpoint(tmp_path: Path, fault: str):
    """One message, told once: `close` does not tell it again, and what was saved goes on with the same bits."""
    breaks, message = FAULTS[fault]
    plan = on_drive(NUMERICS["bf16, exact master"])
    engine = build_engine(SOURCE, plan)
    engine.train_step(BATCHES[0])
    engine.save_checkpoint(tmp_path / "saved")
    expected = engine.train_step(BATCHES[1])[0].loss
    engine.evaluate(BATCHES[1])  # the update has ended
    breaks(engine.arenas.drive)
    message = rf"could not be (read|written) at byte .*{message}.*resume from the last checkpoint"
    with pytest.raises(DriveError, match=message):
        train_two(engine)
    engine.close()
    with build_engine(SOURCE, plan) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        assert engine.train_step(BATCHES[1])[0].loss == expected


def test_close_tells_of_a_failure_that_no_call_has_told():
    engine = build_engine(SOURCE, on_drive(NUMERICS["bf16, exact master"], GroupPlan(states="drive", update="cpu")))
    engine.train_step(BATCHES[0])
    engine.executor.synchronize()
    FAULTS["a short read"][0](engine.arenas.drive)
    engine.train_step(BATCHES[1])
    with pytest.raises(DriveError, match="the file ends there"):
        engine.close()


def test_planes_do_not_move_between_memory_and_a_drive():
    plan = on_drive(NUMERICS["bf16, exact master"])
    off = replace(plan, groups=tuple(home.off_the_drive() for home in plan.groups))
    capacity: dict[Memory, int] = {"gpu": 1 << 30, "host": 1 << 30, "drive": 1 << 30}
    with pytest.raises(ValueError, match=r"between memory and a drive.*save a checkpoint"):
        relocation(Layout(SOURCE.spec, plan), Layout(SOURCE.spec, off), capacity)


def test_random_jobs_have_the_same_bits_with_planes_on_a_drive():
    assert compared((0, 4)) == {"same": 2}  # by one rank, and by two that split


def test_killed_at_any_time_it_goes_on_from_the_last_save(tmp_path: Path):
    assert sum(killed_runs(tmp_path, kills=3, seed=1).values()) == 3


def test_a_plan_with_a_drive_needs_a_folder():
    with pytest.raises(ValueError, match="no folder is given; give offload_dir"):
        build_engine(SOURCE, on_drive(NUMERICS["bf16, exact master"]), offload_dir=None)
