"""`train` on several ranks: rank 0 prints and writes, one rank tells of errors, `--gpus` starts the ranks."""

import json
import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from ranks_helper import run_ranks, values_of

from flexengine.options.train_config import TrainConfig
from flexengine.run import launch, trainer

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


def listening() -> list[str]:
    """Addresses at which this process listens on any network: lines of the kernel's tables of its sockets."""
    own = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            own.add(os.readlink(f"/proc/self/fd/{name}"))
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/self/net/{name}").read_text().splitlines()]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]


def train_and_look(rank: int, folder: str, transport: str, device: str = "cpu") -> list[str]:
    """Where a rank listens while it takes a step."""
    found, take_step = [], trainer.take_step

    def taken(*arguments):
        found.extend(listening())
        return take_step(*arguments)

    trainer.take_step = taken
    options = {**OPTIONS, "max_global_batch_tokens": 256, "save": False, "device": device}
    if device == "cuda":
        os.environ["FLEXENGINE_PEER_COPIES"] = "0"  # NCCL moves bytes
        options["max_gpu_mem_gib"] = 4.0
    assert trainer.train(TrainConfig(**options, transport=transport, output_dir=str(Path(folder, "run")))) == 0
    return found


@pytest.mark.parametrize("transport", ["relay", "split"])
def test_no_rank_of_one_machine_listens_on_a_network(tmp_path, transport):
    assert values_of(run_ranks(train_and_look, 2, str(tmp_path), transport)) == [[]] * 2


def is_loopback(address: str) -> bool:
    return address.startswith(("0100007F:", "00000000000000000000000001000000:"))


def test_ranks_of_nodes_listen_where_the_others_reach_them(tmp_path):
    """Rank 0 has torch's own store beside, which torchrun has elsewhere."""
    _, second = values_of(run_ranks(train_and_look, 2, str(tmp_path), "auto", nodes=2))
    assert second
    assert all(map(is_loopback, second)), second  # as MASTER_ADDR is


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
def test_nccl_listens_on_loopback_alone(tmp_path):
    found = values_of(run_ranks(train_and_look, 2, str(tmp_path), "split", "cuda", anew=True))
    assert all(is_loopback(address) for told in found for address in told), found


def test_a_listening_socket_is_seen():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        assert listening() == []
        found.listen()
        assert listening() == [f"0100007F:{found.getsockname()[1]:04X}"]


def test_a_process_of_torchrun_is_a_rank():
    assert launch.is_rank({"WORLD_SIZE": "2"})
    assert not launch.is_rank({"WORLD_SIZE": "1"})
    assert not launch.is_rank({})
