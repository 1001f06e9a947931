"""What a first start begins before it imports: where no kernels of the model are remembered, and there is a card."""

import os
from pathlib import Path

import pytest

from flexengine.hardware import probe
from flexengine.hardware.cache import profile_path, write_remembered
from flexengine.hardware.host_memory import HostMemory
from flexengine.metrics import GIB
from flexengine.options.train_config import TrainConfig
from flexengine.run import first_start


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, ...]]:
    """The modules of every process that was begun; a card's driver is there, and the cache is empty."""
    found: list[tuple[str, ...]] = []
    monkeypatch.setattr(first_start.READY, "begin", lambda *modules: found.append(modules))
    monkeypatch.setattr(first_start, "DRIVERS", (tmp_path,))
    monkeypatch.setenv("FLEXENGINE_CACHE", str(tmp_path / "cache"))
    return found


@pytest.mark.parametrize("model", ["preset:llama-3.2-1b", "meta/Llama-3.2-1B@main", "/models/llama-3.2-1b/"])
def test_the_compiler_begins_until_kernels_of_the_model_are_remembered(begun, model: str):
    config = TrainConfig(model=model)
    first_start.begin_first_start(config, {})
    assert begun == [first_start.COMPILING]
    write_remembered(profile_path("llama-3.2-1b", ["any"], "kernels"), "compiled")
    first_start.begin_first_start(config, {})
    assert len(begun) == 1


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        ({"device": "cpu"}, {}),
        ({"dry_run": True}, {}),
        ({}, {"CUDA_VISIBLE_DEVICES": ""}),
        ({}, {"LOCAL_RANK": "1", "WORLD_SIZE": "2"}),
    ],
)
def test_nothing_begins_where_nothing_would_compile(begun, options: dict, environment: dict[str, str]):
    first_start.begin_first_start(TrainConfig(model="preset:llama-3.2-1b", **options), environment)
    assert begun == []


def test_nothing_begins_without_a_driver(begun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(first_start, "DRIVERS", (tmp_path / "none",))
    first_start.begin_first_start(TrainConfig(model="preset:llama-3.2-1b"), {})
    assert begun == []


def test_memory_of_the_process_that_compiles_counts_as_available(monkeypatch: pytest.MonkeyPatch):
    class Process:
        pid = os.getpid()

    monkeypatch.setattr(probe, "host_memory", lambda: HostMemory(64 * GIB, 8 * GIB))
    assert probe._host_memory() == HostMemory(64 * GIB, 8 * GIB)
    monkeypatch.setattr(probe.READY, "_process", Process())
    assert 8 * GIB < probe._host_memory().available_bytes <= 64 * GIB
