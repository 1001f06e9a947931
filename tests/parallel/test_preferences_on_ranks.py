"""Preferences, rewards and a teacher on two ranks: losses and weights have the bits of one."""

import json
from pathlib import Path

import pytest
from engine_helpers import same_bits
from ranks_helper import run_ranks, values_of
from safetensors.torch import load_file
from thorough import cases

from flexengine.options.train_config import TrainConfig
from flexengine.run import trainer

OPTIONS = {
    "model": "preset:demo", "objective": "dpo", "steps": 2, "max_seq_len": 48, "max_global_batch_tokens": 192,
    "dtype": "float32", "device": "cpu", "chunk_tokens": 48, "round_tokens": 48, "max_gpu_mem_gib": 0.3,
    "max_host_mem_gib": 8.0, "save": True, "mode": "lora", "lr": 1e-3, "val_fraction": 0.2,
    "round_multiple": 2,
}  # fmt: skip
PAIRS = [{"prompt": f"What is {i}?", "chosen": f"It is {i}.", "rejected": f"{i + 1}, or {i + 2}."} for i in range(16)]


ANSWERED = [{"question": pair["prompt"], "answer": pair["chosen"]} for pair in PAIRS]
REWARDS = (
    "def low(completion_ids):\n    return [sum(token < 999 for token in row) / len(row) for row in completion_ids]\n"
)
KINDS = {
    "dpo": (PAIRS, {}, ("reward_margin", "reward_accuracy")),
    "grpo": (
        ANSWERED,
        {"rewards": "rewards.py:low", "num_generations": 2, "max_completion_length": 4, "beta": 0.1},
        ("reward", "completion_tokens"),
    ),
    **{kind: (PAIRS, {}, ("reward_margin", "reward_accuracy")) for kind in ("ipo", "kto", "orpo", "simpo", "reward")},
    "distill": (ANSWERED, {"teacher": "preset:demo", "teacher_top_k": 8, "seed": 3}, ()),
}


def train(rank: int, folder: str, kind: str) -> str:
    above = Path(folder).parent
    own = {**OPTIONS, **KINDS[kind][1], "objective": kind}
    if kind == "grpo":
        own["rewards"] = (f"{above}/rewards.py:low",)
    options = {**own, "dataset": str(above / "data.jsonl"), "data_cache": str(Path(folder, "cache"))}
    assert trainer.train(TrainConfig(**options, output_dir=str(Path(folder, "run")))) == 0
    return "done"


@pytest.mark.parametrize("kind", cases(KINDS, ("dpo", "grpo")))
def test_two_ranks_learn_what_one_learns(tmp_path, kind):
    records, _, details = KINDS[kind]
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    found = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        assert values_of(run_ranks(train, ranks, str(folder), kind)) == ["done"] * ranks
        lines = [json.loads(line) for line in (folder / "run" / "train_log.jsonl").read_text().splitlines()]
        lines += [json.loads(line) for line in (folder / "run" / "eval_log.jsonl").read_text().splitlines()]
        found.append(([[line[name] for name in ("loss", *details)] for line in lines], folder / "run" / "final"))
    (alone, own), (together, shared) = found
    assert together == alone
    same_bits(*(load_file(folder / "adapter_model.safetensors") for folder in (shared, own)))
