"""States on a drive: saved, resumed and moved between plans bit by bit, and a drive that fails ends in one message."""

from pathlib import Path

import pytest
from engine_helpers import build_engine, make_plan, random_batch, random_weights, same_bits, streamed_plan, tiny_config

from flexengine.native.drive import DriveError, DriveFile
from flexengine.plan import GroupPlan, Numerics, Plan

NUMERICS = {
    "bf16, exact master": Numerics("bfloat16", "split", "bfloat16", "float32"),
    "bf16, 8-bit states": Numerics("bfloat16", "stochastic", "bfloat16", "int8"),
}
ON_DRIVE = GroupPlan(states="drive", update="cpu")
SOURCE = random_weights(tiny_config(num_hidden_layers=1))
BATCHES = [random_batch(seed, (20, 9, 31), 67) for seed in range(3)]


def on_drive(numerics: Numerics) -> Plan:
    """Every second group; tiles as small as blocks of the drive allow."""
    homes = [ON_DRIVE if i % 2 else GroupPlan(update="cpu") for i in range(len(SOURCE.spec.groups))]
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


@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_drive_that_fails_loses_the_step_and_not_the_checkpoint(tmp_path: Path, monkeypatch, verb: str):
    def fails(self: DriveFile, pieces) -> None:
        raise DriveError(5, "the drive is gone")

    plan = on_drive(NUMERICS["bf16, exact master"])
    engine = build_engine(SOURCE, plan)
    engine.train_step(BATCHES[0])
    engine.save_checkpoint(tmp_path / "saved")
    expected = engine.train_step(BATCHES[1])[0].loss
    engine.evaluate(BATCHES[1])  # the update has ended
    with monkeypatch.context() as broken:
        broken.setattr(DriveFile, verb, fails)
        engine.train_step(BATCHES[2])  # the update goes on
        with pytest.raises(DriveError, match="the drive is gone"):
            engine.evaluate(BATCHES[2])
    with pytest.raises(DriveError, match="the drive is gone"):
        engine.close()
    with build_engine(SOURCE, plan) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        assert engine.train_step(BATCHES[1])[0].loss == expected


def test_a_plan_with_a_drive_needs_a_folder():
    with pytest.raises(ValueError, match="no folder is given; give offload_dir"):
        build_engine(SOURCE, on_drive(NUMERICS["bf16, exact master"]), offload_dir=None)
