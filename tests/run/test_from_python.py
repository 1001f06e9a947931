"""Training from Python: `train` with objects, and `FlexTrainer` with the arguments of others."""

import json
from pathlib import Path

import datasets
import peft
import pytest
import torch
import trl
from torch.utils.data import DataLoader

import flexengine
from flexengine import Callback, FlexTrainer, LoRA, TrainConfig, plan, train
from flexengine.run.given_data import place_of

ROWS = [{"prompt": f"What is {n} plus one?", "completion": f"It is {n + 1}."} for n in range(12)]
SMALL = {"max_seq_len": 64, "max_global_batch_tokens": 128, "dtype": "float32", "device": "cpu", "max_gpu_mem_gib": 0.5}


def small_config(folder: Path, **changes) -> TrainConfig:
    return TrainConfig(
        model="preset:demo", output_dir=str(folder), max_host_mem_gib=4.0, **{**SMALL, "steps": 2, **changes}
    )


def written(given, tmp_path) -> list[dict]:
    path = Path(place_of(given, "dataset", str(tmp_path)))
    return [json.loads(line) for line in path.read_text().splitlines()]


TOKENS = [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"input_ids": [4, 5, 6], "labels": [4, 5, 6]}]


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        pytest.param(ROWS, ROWS, id="list"),
        pytest.param((row for row in ROWS), ROWS, id="generator"),
        pytest.param(datasets.Dataset.from_list(ROWS), ROWS, id="datasets"),
        pytest.param(DataLoader(ROWS, batch_size=5), ROWS, id="loader of records"),
        pytest.param(DataLoader(ROWS, batch_size=5, collate_fn=list), ROWS, id="loader of lists"),
        pytest.param(
            DataLoader(datasets.Dataset.from_list(TOKENS).with_format("torch"), batch_size=2),
            TOKENS,
            id="loader of tokens",
        ),
        pytest.param(["a text"], [{"text": "a text"}], id="texts"),
        pytest.param([torch.tensor([1, 2]), [3, 4]], [{"input_ids": [1, 2]}, {"input_ids": [3, 4]}], id="ids"),
        pytest.param(
            [[{"role": "user", "content": "a"}]], [{"messages": [{"role": "user", "content": "a"}]}], id="chat"
        ),
    ],
)
def test_objects_become_records_of_a_file(given, rows, tmp_path):
    assert written(given, tmp_path) == rows


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"train": ROWS, "test": ROWS}, "dataset is a mapping of train, test; give one of its data sets"),
        ([1.5], "dataset, item 1 is float; give records"),
        ([{"text": {1, 2}}], "dataset, row 1: a value of type set is no part of a record"),
        (7, "dataset is int; give records"),
    ],
)
def test_what_holds_no_records_is_named(given, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        place_of(given, "dataset", str(tmp_path))
    assert not [path for path in tmp_path.iterdir() if path.is_file()]


def test_objects_train_to_the_bits_of_their_file_and_the_config_runs_again(tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    of_file = train(small_config(tmp_path / "file", dataset=str(file)))
    seen = []

    class Watch(Callback):
        def on_step(self, metrics):
            seen.append(metrics.step)

    given = train(small_config(tmp_path / "given"), ROWS, ROWS[:2], [Watch()], eval_steps=1)
    assert [step.loss for step in given.steps] == [step.loss for step in of_file.steps]
    assert (given.global_step, given.exit_status, seen, len(given.evaluations)) == (2, 0, [1, 2], 2)
    config = TrainConfig.from_yaml((tmp_path / "given" / "config.yaml").read_text())
    assert Path(config.dataset[0]).is_file()
    with pytest.raises(ValueError, match="dataset is given twice"):
        train(config, ROWS)


def test_three_statements_train(tmp_path, capsys):
    trainer = FlexTrainer(
        "preset:demo",
        trl.SFTConfig(
            str(tmp_path / "run"), per_device_train_batch_size=2, max_length=64, max_steps=2, learning_rate=1e-3,
            logging_steps=1, bf16=False, report_to="none", use_cpu=True,
        ),
        train_dataset=ROWS,
        peft_config=peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], lora_dropout=0.1),
        dtype="float32", device="cpu", max_gpu_mem_gib=0.5, max_host_mem_gib=4.0,
    )  # fmt: skip
    result = trainer.train()
    config = TrainConfig.from_yaml((tmp_path / "run" / "config.yaml").read_text())
    assert (config.max_global_batch_tokens, config.lr, config.steps, config.mode) == (128, 1e-3, 2, "lora")
    assert (config.lora_rank, config.lora_alpha, config.lora_targets) == (4, 8.0, ("q_proj",))
    assert "logging_steps is passed over: every step is logged" in capsys.readouterr().out
    trainer.save_model(tmp_path / "copy")
    assert (tmp_path / "copy" / "adapter_config.json").is_file()
    assert result.training_loss == pytest.approx(sum(step.loss for step in result.steps) / 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": torch.nn.Linear(1, 1)}, "model is a Linear; give its folder or id"),
        ({"compute_metrics": print}, "compute_metrics is not taken: on_eval of a Callback"),
        ({"callbacks": [print]}, "callbacks: builtin_function_or_method is none of flexengine"),
        ({"args": {"neftune_noise_alpha": 5}}, "neftune_noise_alpha is not an option: noise on embeddings"),
        ({"args": small_config(Path("x"))}, "args is a TrainConfig"),
        ({"args": {"max_global_batch_tokens": 64, "gradient_accumulation_steps": 2}}, "both say how large a step is"),
        (
            {"peft_config": peft.LoraConfig(target_modules=["q_proj"], init_lora_weights="gaussian")},
            "'gaussian' is not",
        ),
    ],
)
def test_what_has_no_counterpart_is_answered(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        FlexTrainer(**{"model": "preset:demo", **arguments}).train()


def test_planning_is_one_call_and_the_module_of_plans_stays_one():
    found = plan("preset:demo", hardware="rtx4090", lora=LoRA(rank=8))
    assert isinstance(found.plan, flexengine.plan.Plan)
    assert found.job.lora_rank == 8
