"""Resumed runs of every kind of training, also within another budget: logs, weights and exports have the same bits."""

import json
import os
import signal
from pathlib import Path

import pytest
from thorough import cases

from flexengine import cli
from flexengine.checkpoint.run_checkpoints import whole_checkpoints
from flexengine.hardware.presets import preset
from flexengine.metrics import GIB
from flexengine.run import saver as run_saver
from flexengine.run import trainer
from tests.failures.provoke import arguments, check_message, fingerprint, write_model

STEPS, STOP_AFTER = 5, 3
LORA = {"mode": "lora", "lora_rank": 4}
KINDS = {
    "lora": LORA,
    "lora with dropout on nf4": {**LORA, "lora_dropout": 0.2, "base_dtype": "nf4"},
    "lora on int8, bf16 masters": {**LORA, "base_dtype": "int8", "master_dtype": "bfloat16"},
    "frozen blocks in nf4": {"freeze": "blocks", "base_dtype": "nf4"},
    "8-bit adamw": {"optimizer_state_dtype": "int8"},
    "muon": {"optimizer": "muon"},
    "muon, 8-bit states, bf16 masters": {
        "optimizer": "muon", "optimizer_state_dtype": "int8", "master_dtype": "bfloat16"
    },
    "lion": {"optimizer": "lion"},
    "reproducible": {"reproducible": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("source") / "model", hidden_size=64, intermediate_size=64)


def train(model, folder, **options):
    """Exit status of `train` into a folder."""
    defaults = {"model": model, "steps": STEPS, "dtype": "bfloat16", "lr": 1e-2, "save": True, "output_dir": folder}
    return cli.main(["train", *arguments(**{**defaults, **options})])


def stopped_after(step, monkeypatch):
    """Make a run receive SIGTERM in a step."""
    take_step = trainer.take_step

    def taken(engine, batch, number, *more):
        if number == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return take_step(engine, batch, number, *more)

    monkeypatch.setattr(trainer, "take_step", taken)


def result(folder):
    """What the log says of every step but for times and memory, and the files of the model."""
    kept = ("step", "loss", "grad_norm", "lr", "num_tokens")
    lines = map(json.loads, (Path(folder) / "train_log.jsonl").read_text().splitlines())
    files = {name: digest for name, digest in fingerprint(Path(folder) / "final").items() if "safetensors" in name}
    assert files
    return [{name: line[name] for name in kept} for line in lines], files


def gpu_bytes_of(folder):
    """What a run's plan takes of GPU memory."""
    return json.loads((Path(folder) / "plan.json").read_text())["predicted"]["gpu_bytes"]


WITH_ALL_TESTS = (
    "lora with dropout on nf4", "frozen blocks in nf4", "muon, 8-bit states, bf16 masters", "lion", "reproducible",
)  # fmt: skip


@pytest.mark.parametrize("kind", cases(KINDS, WITH_ALL_TESTS))
def test_resumed_bit_by_bit_within_another_budget(model, tmp_path, monkeypatch, kind):
    options = KINDS[kind]
    monkeypatch.setattr("flexengine.api.probe", lambda *_, **__: preset("cpu-test"))
    monkeypatch.chdir(tmp_path)
    assert train(model, "whole", **options) == 0
    with monkeypatch.context() as patched:
        stopped_after(STOP_AFTER, patched)
        assert train(model, "run", **options) == run_saver.STOPPED
    assert [found.step for found in whole_checkpoints(Path("run"))] == [STOP_AFTER]
    smaller = 0.8 * gpu_bytes_of("run") / GIB
    assert train(model, "run", **options, max_gpu_mem_gib=smaller, resume="auto") == 0
    assert gpu_bytes_of("run") < gpu_bytes_of("whole")
    assert result("run") == result("whole")


OTHERS = {
    "adapters_of_another_scale": (LORA, {"lora_alpha": 32.0}, "lora was rank=4 scale=4.0, is rank=4 scale=8.0"),
    "adapters_of_other_modules": (LORA, {"lora_targets": "q_proj"}, "the checkpoint has .* as .* needs None"),
    "more_is_frozen": ({"freeze": "block.0"}, {"freeze": "blocks"}, "frozen layers or adapters of the run"),
    "less_is_frozen": ({"freeze": "embed"}, {"freeze": None}, "weights/model.embed_tokens.weight as None"),
}


@pytest.mark.parametrize(("options", "changes", "says"), OTHERS.values(), ids=OTHERS)
def test_what_trained_something_else_is_refused(model, tmp_path, monkeypatch, capsys, options, changes, says):
    monkeypatch.setattr("flexengine.api.probe", lambda *_, **__: preset("cpu-test"))
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patched:
        stopped_after(1, patched)
        assert train(model, "run", **options) == run_saver.STOPPED
    before = fingerprint(Path("run/checkpoints"))
    assert train(model, "run", **{**options, **changes}, resume="auto") == cli.BAD_INPUT
    check_message(capsys.readouterr().err, (says,))
    assert fingerprint(Path("run/checkpoints")) == before
