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


def test_a_card_and_no_folder_of_this_machine(runs, tmp_path):
    assert runs(**LORA) == 0
    assert export("--format", "merged", "--out", "out") == 0
    for folder, library in (("run/final", "peft"), ("out", "transformers")):
        card = Path(folder, "README.md").read_text()
        assert card.startswith(f"---\nlibrary_name: {library}\n")
        assert "2 steps on synthetic tokens" in card
        assert "| max_gpu_mem_gib | 0.5 |" in card
        assert "GPU memory: " in card
        last = json.loads(Path("run/train_log.jsonl").read_text().splitlines()[-1])
        assert f"| 2 | {last['loss']:.4f} | {last['grad_norm']:.4g} |" in card
        for file in Path(folder).iterdir():
            assert str(tmp_path).encode() not in file.read_bytes()
    assert json.loads(Path("run/final/adapter_config.json").read_text())["base_model_name_or_path"] == "model"


def test_pushing_to_the_hub(runs, capsys, monkeypatch):
    assert runs() == 0
    assert export("--out", "out", "--push-to-hub", "no name") == 2
    assert "--push-to-hub no name: give the name of a repository on the hub, as ORG/NAME" in capsys.readouterr().err
    assert not Path("out").exists()

    def offline(*_, **__):
        raise OSError("offline mode is enabled")

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", offline)
    assert export("--out", "out", "--push-to-hub", "org/tuned") == 2
    assert "out is saved, but was not pushed to org/tuned" in (said := capsys.readouterr().err)
    assert "hf upload org/tuned out" in said
    pushed = []
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", lambda _, repo, **options: pushed.append((repo, options)))
    monkeypatch.setattr(
        "huggingface_hub.HfApi.upload_folder",
        lambda _, folder_path, **options: (
            pushed.append(sorted(path.name for path in Path(folder_path).iterdir()))
            or type("Commit", (), {"commit_url": "https://hub/org/tuned/commit/1"})
        ),
    )
    assert export("--out", "again", "--push-to-hub", "org/tuned") == 0
    assert pushed[0] == ("org/tuned", {"private": True, "exist_ok": True})
    assert pushed[1] == sorted(path.name for path in Path("out").iterdir())
    assert "pushed: https://hub/org/tuned/commit/1" in capsys.readouterr().out
