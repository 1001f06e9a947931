"""`train` on several ranks: rank 0 prints and writes, one rank tells of errors, `--gpus` starts the ranks."""

import json
import os
import subprocess
import sys
from dataclasses import make_dataclass
from pathlib import Path

from ranks_helper import run_ranks, values_of

from flexengine import launch, trainer
from flexengine.config import TrainConfig

OPTIONS = {
    "model": "preset:demo", "data_source": "synthetic", "steps": 2, "max_seq_len": 32, "max_global_batch_tokens": 128,
    "dtype": "float32", "device": "cpu", "chunk_tokens": 32, "round_tokens": 32, "max_gpu_mem_gib": 0.3,
    "max_host_mem_gib": 8.0, "save": True,
}  # fmt: skip


def train(rank: int, folder: str) -> str:
    printed = Path(folder, f"printed{rank}")
    with printed.open("w") as sys.stdout:
        status = trainer.train(TrainConfig(**OPTIONS, output_dir=str(Path(folder, "run")), replan=True))
    assert status == 0
    return printed.read_text()


def test_rank_0_prints_and_writes(tmp_path):
    first, second = values_of(run_ranks(train, 2, str(tmp_path)))
    assert "step 2/2" in first
    assert "the plan stays" in first or "changed the plan" in first
    assert second == ""
    lines = [json.loads(line) for line in (tmp_path / "run" / "train_log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert (tmp_path / "run" / "final" / "model.safetensors").is_file()
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["request"]["ranks"] == 2


def test_gpus_starts_ranks_and_gives_their_status(tmp_path):
    """Rank 0 refuses an option before anything is measured, so all end; one of them says so."""
    arguments = ["--gpus", "2", "--model", "preset:demo", "--data-source", "synthetic", "--resume", "nowhere"]
    command = [sys.executable, "-m", "flexengine", "train", *arguments, "--output-dir", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=dict(os.environ))
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("--resume nowhere: there is no such folder") == 1, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not (tmp_path / "run").exists()


def test_a_process_of_torchrun_is_a_rank():
    assert launch.is_rank({"WORLD_SIZE": "2"})
    assert not launch.is_rank({"WORLD_SIZE": "1"})
    assert not launch.is_rank({})


def test_ranks_have_time_to_save_whatever_torch_can_be_told():
    """torch 2.11 cannot be told for how long it waits, and kills 30 s after a signal."""
    waited = []

    class Context:
        def close(self, death_sig=None, timeout=30):
            waited.append((death_sig, timeout))

    class Asked(Exception):  # noqa: N818 - as torch's own
        pass

    assert launch._waits_for_saving(make_dataclass("New", ["shutdown_timeout"]), Context, Asked) == {
        "shutdown_timeout": launch.SHUTDOWN_S
    }
    assert launch._waits_for_saving(make_dataclass("Old", ["run_id"]), Context, Asked) == {}
    Context().close(15)
    try:
        raise Asked
    except Asked:
        Context().close(15)
    assert waited == [(15, 30), (15, launch.SHUTDOWN_S)]


def test_the_status_of_a_run_is_that_of_who_chose_one():
    assert launch._status({1: -15, 0: 2}) == 2
    assert launch._status({1: -9, 2: 1}) == 1
    assert launch._status({0: -15, 1: -9}) == 137
    assert launch._status({0: -15}) == 1


def test_rank_0_tells_a_launcher_that_was_asked_to_stop_how_the_run_ended(tmp_path, monkeypatch):
    told = tmp_path / "status"
    monkeypatch.setenv(launch.STATUS_VARIABLE, str(told))
    for rank, found in (("1", 143), ("0", 75)):
        monkeypatch.setenv("RANK", rank)
        assert launch.tell_status(75) == 75
        assert launch._told_status(told, otherwise=143) == found
