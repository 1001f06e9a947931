"""Frozen weights on a drive are read in the checkpoint's own files, with the bits of memory and no copy of them."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import build_engine, make_plan, random_batch, same_bits, saved_model, streamed_plan, tiny_config
from family_configs import CASES

from flexengine import LoRA
from flexengine.models import blocks
from flexengine.models.lora import with_lora
from flexengine.models.registry import ModelSource, open_model
from flexengine.native.drive import DriveError
from flexengine.native.linked_files import Link, Region
from flexengine.optim import AdamW
from flexengine.plan import GroupPlan, Numerics, Plan
from flexengine.runtime.engine import Engine
from flexengine.runtime.engine_parts import EngineSettings
from flexengine.runtime.weights.linked_base import moved_regions
from flexengine.schedule.relocation import ByteRange, Move

SPLIT = Numerics("bfloat16", "split", "bfloat16", "float32")
CONFIGS = {
    "dense": tiny_config(hidden_size=48, intermediate_size=80, num_hidden_layers=3, head_dim=12, qkv_bias=True),
    "experts": CASES["qwen3_moe"],
}


def adapted(folder: Path, config: dict, dtype: torch.dtype = torch.bfloat16, **lora: Any) -> ModelSource:
    saved_model(folder, config, dtype, max_shard_size=30_000)
    source = open_model(str(folder))
    return source._replace(spec=with_lora(source.spec, LoRA(rank=2, **lora)))


def driven_plan(source: ModelSource) -> Plan:
    """All frozen blocks lie on the drive."""
    there, groups = GroupPlan(weights="drive", update="none"), source.spec.groups
    homes = [there if group.frozen and group.name.startswith("block.") else GroupPlan() for group in groups]
    return streamed_plan(source.spec, numerics=SPLIT, groups=homes)


def outcome(engine: Engine, vocab_size: int):
    batch = random_batch(3, (20, 9, 31), vocab_size)
    losses = [engine.train_step(batch)[0].loss for _ in range(2)]
    return losses, engine.evaluate(batch).loss, engine.state_dict()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "cached"])
def test_bits_of_memory(config, direct, tmp_path, monkeypatch):
    """What of the scratch file would be read holds NaN."""
    monkeypatch.setattr(blocks, "PART_ELEMENTS", 1)
    if not direct:
        monkeypatch.setattr(os, "O_DIRECT", 0)
        monkeypatch.setenv("FLEXENGINE_NATIVE", "0")
    source = adapted(tmp_path, config)
    with build_engine(source, make_plan(source.spec, numerics=SPLIT)) as engine:
        expected = outcome(engine, config["vocab_size"])
    with build_engine(source, driven_plan(source)) as engine:
        found = outcome(engine, config["vocab_size"])
        assert len(engine.arenas.regions) == config["num_hidden_layers"]
        files = {link.file for region in engine.arenas.regions for link in region.links}
        assert len(files) > 1
    assert found[:2] == expected[:2]
    same_bits(found[2], expected[2])


def test_the_scratch_file_holds_no_copy(tmp_path):
    source = adapted(tmp_path, CONFIGS["dense"])
    plan, settings = driven_plan(source), EngineSettings(offload_dir=str(tmp_path / "drive"))
    with Engine(source, plan, torch.device("cpu"), AdamW(), settings) as engine:
        drive, holes = engine.arenas.drive, sum(region.num_bytes for region in engine.arenas.regions)
        assert drive is not None
        assert holes > 3 * drive.num_bytes // 4
        engine.train_step(random_batch(3, (20, 9, 31), 67))
        engine.state_dict()
        assert os.fstat(drive.descriptor).st_blocks * 512 <= drive.num_bytes - holes + 2 * 4096


OTHERS = {"rounded": {"dtype": torch.float32}, "taken out": {"init": "pissa_niter_4"}}


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
def test_what_files_hold_otherwise_is_copied(options, tmp_path):
    source = adapted(tmp_path, CONFIGS["dense"], **options)
    with build_engine(source, make_plan(source.spec, numerics=SPLIT)) as engine:
        expected = outcome(engine, 67)
    with build_engine(source, driven_plan(source)) as engine:
        assert engine.arenas.regions == []
        found = outcome(engine, 67)
    assert found[:2] == expected[:2]


CHANGES = {
    "shorter": (lambda path: os.truncate(path, 4096), r"ends at byte|was changed"),
    "written": (lambda path: path.write_bytes(path.read_bytes()), "was changed"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_ends_the_run_with_one_message(change, tmp_path):
    source, (changes, says) = adapted(tmp_path, CONFIGS["dense"]), CHANGES[change]
    engine = build_engine(source, driven_plan(source))
    batch = random_batch(3, (20, 9, 31), 67)
    engine.train_step(batch)
    for link in engine.arenas.regions[0].links:
        changes(link.file)
    with pytest.raises(DriveError, match=rf"\.safetensors, of whose frozen weights .*({says}).*resume from the last"):
        engine.train_step(batch)
    engine.close()


def test_planes_of_files_stay_there_when_a_plan_changes():
    links = (Link(4096, 100, Path("a"), 8),)
    regions = [Region(4096, 4096, links), Region(8192, 4096, ())]
    there = [ByteRange("drive", 4096 * place, 4096) for place in range(8)]
    moves = [Move("a", there[1], there[5]), Move("b", there[3], there[1]), Move("a", there[5], there[3])]
    found, left = moved_regions(regions, moves)
    assert found == [Region(3 * 4096, 4096, (links[0]._replace(offset_bytes=3 * 4096),)), regions[1]]
    assert left == moves[1:2]
