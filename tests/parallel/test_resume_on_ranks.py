"""Runs of several ranks that are stopped and resumed by another number of ranks: bits are those of one that went on."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from ranks_helper import run_ranks, values_of
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from flexengine.checkpoint import state_writer
from flexengine.checkpoint.manifest import manifest_path
from flexengine.checkpoint.run_checkpoints import RunCheckpoint, checkpoint_folder, checkpoints_of, whole_checkpoints
from flexengine.hardware.presets import preset
from flexengine.options.train_config import TrainConfig
from flexengine.parallel.control import Control
from flexengine.parallel.ranks import Ranks
from flexengine.parallel.team import Team
from flexengine.run import saver as run_saver
from flexengine.run import trainer
from flexengine.run.resuming import ResumePoint, seen_by_all
from flexengine.run.state import DataPlace, RunState
from tests.failures.provoke import OPTIONS, fingerprint, half_written, write_model

STEPS = 5
KEPT = ("step", "loss", "grad_norm", "lr", "num_tokens")


@pytest.fixture(scope="module", autouse=True)
def known_machine():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("flexengine.api.probe", lambda *_, **__: preset("cpu-test"))
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("source") / "model")


def train(rank: int, model: Path, folder: Path, signals: dict[int, tuple[int, int]], options: dict) -> int:
    """Exit status of a run; signals: by rank, the step in which it receives which one."""
    numbers = {"chunk_tokens": 16, "round_tokens": 16} if "resume" not in options else {}
    given = {**OPTIONS, "max_global_batch_tokens": 96, "steps": STEPS, "dtype": "bfloat16", "lr": 1e-2, "save": True,
             "max_host_mem_gib": 8.0}  # fmt: skip
    take_step = trainer.take_step

    def taken(engine, batch, number, *more):
        if signals.get(rank, (0, 0))[0] == number:
            os.kill(os.getpid(), signals[rank][1])
        return take_step(engine, batch, number, *more)

    trainer.take_step = taken
    try:
        return trainer.train(
            TrainConfig(**{**given, "model": str(model), "output_dir": str(folder), **numbers, **options})
        )
    finally:
        trainer.take_step = take_step


def run(size: int, model: Path, folder: Path, signals: dict[int, tuple[int, int]] | None = None, **options) -> int:
    """Exit status of a run by so many ranks, which all ranks have."""
    if size == 1:
        return train(0, model, folder, signals or {}, options)
    statuses = values_of(run_ranks(train, size, model, folder, signals or {}, options))
    assert len(set(statuses)) == 1, statuses
    return statuses[0]


def shown(folder: Path) -> tuple[list[dict], dict[str, str]]:
    """What a run's log says but for times and memory, and the files of its model."""
    lines = [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]
    weights = {name: digest for name, digest in fingerprint(folder / "final").items() if name.endswith(".safetensors")}
    return [{name: line[name] for name in KEPT} for line in lines], weights


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """A run of two ranks that went through."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert run(2, model, folder) == 0
    assert len(shown(folder)[0]) == STEPS
    return shown(folder)


@pytest.fixture(scope="module")
def stopped(model, tmp_path_factory):
    """The folder of a run of two ranks, of which one received SIGTERM in step 3."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    assert run(2, model, folder, {1: (3, signal.SIGTERM)}, save_steps=2) == run_saver.STOPPED
    assert [found.step for found in whole_checkpoints(folder)] == [3, 2]
    return folder


@pytest.mark.parametrize("size", [1, 2, 4])
def test_goes_on_with_another_number_of_ranks(model, stopped, whole, tmp_path, size):
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    assert run(size, model, folder, resume="auto", save_steps=2) == 0
    assert shown(folder) == whole
    assert [found.step for found in checkpoints_of(folder)] == [5, 4]
    assert not half_written(folder)


def test_all_ranks_pass_over_a_damaged_checkpoint(model, stopped, whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    damaged = sorted(checkpoint_folder(folder, 3).glob("*.safetensors"))[0]
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    assert run(2, model, folder, resume="auto") == 0
    assert shown(folder) == whole


def test_a_disk_that_takes_no_checkpoint_does_not_end_the_run(model, whole, tmp_path, monkeypatch):
    """Rank 0 alone writes checkpoints; the others do not wait for what it cannot write."""
    folder, written = tmp_path / "run", state_writer._write_all

    def fills_up(descriptor, data):
        if checkpoint_folder(folder, 2).exists():
            raise OSError(28, "No space left on device")
        written(descriptor, data)

    monkeypatch.setattr(state_writer, "_write_all", fills_up)
    assert run(2, model, folder, {0: (4, signal.SIGUSR1)}, save_steps=2) == 128 + signal.SIGUSR1
    assert [found.step for found in checkpoints_of(folder)] == [2]
    assert not half_written(folder)
    monkeypatch.undo()
    monkeypatch.setattr("flexengine.api.probe", lambda *_, **__: preset("cpu-test"))
    assert run(2, model, folder, resume="auto") == 0
    assert shown(folder) == whole


def seen(rank: int, folder: Path) -> list[int] | str:
    """The steps of the checkpoints that ranks with folders of their own go on from."""
    os.chdir(folder / str(rank))
    ranks = Ranks.of_environment()
    team, run = Team(ranks, Control.open(ranks)), RunState(3, 5, DataPlace(0, 3, 0, "batches"), 0.0, 0, {})
    points = [ResumePoint(RunCheckpoint(step, Path(f"step-{step}")), {}, run) for step in (3, 2, 1)]
    try:
        return [point.checkpoint.step for point in seen_by_all(team, lambda: points)]
    except ValueError as error:
        return str(error)
    finally:
        team.close()


@pytest.mark.parametrize(
    ("of_second", "found"),
    [
        ({3: "a", 1: "c"}, [3, 1]),
        ({2: "b", 1: "c"}, "rank 1 finds no step-3, which rank 0 has; all nodes read a checkpoint"),
        ({3: "z", 2: "b"}, "rank 1 finds another step-3 than rank 0; all nodes read a checkpoint"),
    ],
    ids=["lacks an older one", "lacks the newest", "has another"],
)
def test_nodes_with_disks_of_their_own_go_on_from_what_all_have(tmp_path, of_second, found):
    """An older checkpoint, which a node may still have, would lose what was trained since."""
    for rank, manifests in enumerate(({3: "a", 2: "b", 1: "c"}, of_second)):
        for step, text in manifests.items():
            folder = tmp_path / str(rank) / f"step-{step}"
            folder.mkdir(parents=True)
            manifest_path(folder).write_text(text)
    for told in values_of(run_ranks(seen, 2, tmp_path, nodes=2)):
        assert told == found if isinstance(found, list) else found in told


def train_or_die(model: Path, folder: Path, options: dict) -> int:
    """Exit status of a rank; the first time, rank 1 is killed in step 4."""
    rank, first = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    Path(f"{folder}-started{os.environ['TORCHELASTIC_RESTART_COUNT']}").touch()
    return train(rank, model, folder, {1: (4, signal.SIGKILL)} if first else {}, options)


def test_torchruns_agent_starts_ranks_again_after_one_is_killed(model, whole, tmp_path, monkeypatch):
    """As `torchrun --max-restarts 1 ... --resume auto`, with ranks that are forked: loading torch takes seconds."""
    monkeypatch.setattr("torch.distributed.elastic.agent.server.api.logger.disabled", True)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = tmp_path / "run"
    options = {"save_steps": 2, "resume": "auto", "chunk_tokens": 16, "round_tokens": 16}
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, run_id="restarted", rdzv_backend="c10d", max_restarts=1,
        rdzv_endpoint="localhost:0", monitor_interval=0.1, start_method="fork",
    )  # fmt: skip
    assert elastic_launch(config, train_or_die)(model, folder, options) == {0: 0, 1: 0}
    assert [Path(f"{folder}-started{number}").exists() for number in range(3)] == [True, True, False]
    assert shown(folder) == whole
    assert [found.step for found in checkpoints_of(folder)] == [5, 4]
    assert not half_written(folder)
