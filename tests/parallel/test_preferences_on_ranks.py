"""Preferences on two ranks: losses and weights have the bits of one."""

import json
from pathlib import Path

from engine_helpers import same_bits
from ranks_helper import run_ranks, values_of
from safetensors.torch import load_file

from flexengine.options.train_config import TrainConfig
from flexengine.run import trainer

OPTIONS = {
    "model": "preset:demo", "objective": "dpo", "steps": 2, "max_seq_len": 48, "max_global_batch_tokens": 192,
    "dtype": "float32", "device": "cpu", "chunk_tokens": 48, "round_tokens": 48, "max_gpu_mem_gib": 0.3,
    "max_host_mem_gib": 8.0, "save": True, "mode": "lora", "lr": 1e-3, "val_fraction": 0.2,
    "round_multiple": 2,
}  # fmt: skip
PAIRS = [{"prompt": f"What is {i}?", "chosen": f"It is {i}.", "rejected": f"{i + 1}, or {i + 2}."} for i in range(16)]


def train(rank: int, folder: str) -> str:
    options = {**OPTIONS, "dataset": str(Path(folder).parent / "pairs.jsonl"), "data_cache": str(Path(folder, "cache"))}
    assert trainer.train(TrainConfig(**options, output_dir=str(Path(folder, "run")))) == 0
    return "done"


def test_two_ranks_learn_what_one_learns(tmp_path):
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    found = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        assert values_of(run_ranks(train, ranks, str(folder))) == ["done"] * ranks
        lines = [json.loads(line) for line in (folder / "run" / "train_log.jsonl").read_text().splitlines()]
        lines += [json.loads(line) for line in (folder / "run" / "eval_log.jsonl").read_text().splitlines()]
        names = ("loss", "reward_margin", "reward_accuracy")
        found.append(([[line[name] for name in names] for line in lines], folder / "run" / "final"))
    (alone, own), (together, shared) = found
    assert together == alone
    same_bits(*(load_file(folder / "adapter_model.safetensors") for folder in (shared, own)))
