"""`flexengine export`: forms of what a run trained, from its checkpoints and from the adapters that it saved."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flexengine import cli
from flexengine.hardware.presets import preset
from tests.failures.provoke import arguments, write_model

LORA = {"mode": "lora", "lora_rank": 4, "lora_targets": "all-linear", "lora_init": "pissa"}


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Trains into a folder, and exports; both return the exit status."""
    monkeypatch.setattr("flexengine.api.probe", lambda *_, **__: preset("cpu-test"))
    monkeypatch.chdir(tmp_path)
    model = write_model(tmp_path / "model")

    def train(**options):
        defaults = {"model": model, "steps": 2, "dtype": "float32", "lr": 1e-2, "save": True, "output_dir": "run"}
        return cli.main(["train", *arguments(**{**defaults, **options})])

    return train


def export(*options):
    return cli.main(["export", "--run", "run", *options])


def tensors_of(folder):
    files = Path(folder).glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("saves", [{}, {"save_steps": 2}], ids=["from final/", "from a checkpoint"])
def test_formats_of_adapters(runs, saves, capsys):
    assert runs(**LORA, **saves) == 0
    for form in ("adapter", "merged", "hf"):
        assert export("--format", form, "--out", form) == 0
    assert "model" in capsys.readouterr().out
    saved, again = (load_file(Path(folder) / "adapter_model.safetensors") for folder in ("run/final", "adapter"))
    assert saved.keys() == again.keys()
    assert not Path("adapter/config.json").exists()
    config = json.loads(Path("adapter/adapter_config.json").read_text())
    base, merged = tensors_of("model"), tensors_of("merged")
    assert all(torch.equal(tensor, merged[name]) for name, tensor in tensors_of("hf").items())
    assert base.keys() == merged.keys()
    scale = config["lora_alpha"] / config["r"]
    for name, tensor in base.items():
        key = f"base_model.model.{name.removesuffix('.weight')}"
        change = torch.zeros_like(tensor, dtype=torch.float32)
        if f"{key}.lora_A.weight" in again:
            change = scale * again[f"{key}.lora_B.weight"] @ again[f"{key}.lora_A.weight"]
        assert (merged[name].float() - tensor.float() - change).abs().max() <= 1e-2 * tensor.float().abs().max()
        assert torch.equal(merged[name], tensor) != bool(change.abs().max())
    assert sum(f"base_model.model.{n.removesuffix('.weight')}.lora_A.weight" in again for n in base) == len(again) // 2


def test_a_model_without_adapters_has_none_to_export(runs, capsys):
    assert runs(save_steps=2) == 0
    assert export("--format", "adapter", "--out", "out") == 2
    assert "--format adapter is for runs that train adapters" in capsys.readouterr().err
    assert export("--format", "hf", "--out", "out") == 0
    trained = tensors_of("run/final")
    assert all(torch.equal(trained[name], tensor) for name, tensor in tensors_of("out").items())
