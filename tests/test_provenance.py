"""What exports and checkpoints say of their making, and that what they are made from is noticed when it changes."""

import json
import shutil
from pathlib import Path

import pytest

from flexengine import cli
from flexengine.checkpoint.atomic import sha256_of
from flexengine.checkpoint.manifest import FileRecord, read_manifest, verify_manifest, write_manifest
from flexengine.checkpoint.provenance import base_of
from flexengine.hardware.presets import preset
from flexengine.models.registry import ASSETS
from flexengine.run import trainer
from flexengine.wording import without_folders
from tests.failures.provoke import arguments, write_model

REVISION = "a" * 40


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Trains a downloaded model on a file of records, in tmp_path; returns the exit status."""
    monkeypatch.setattr("flexengine.api.probe", lambda *_, **__: preset("cpu-test"))
    monkeypatch.chdir(tmp_path)
    model = write_model(tmp_path / "secret" / "model", vocab_size=3000)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ASSETS / "demo" / name, model)
    records = {path.name: FileRecord(path.stat().st_size, sha256_of(path)) for path in model.iterdir()}
    write_manifest(model, records, {"repo": "org/model", "repo_type": "model", "revision": REVISION})
    write_data([str(2 * i) for i in range(9)])

    def train(**options):
        defaults = {"data_source": None, "dataset": data_file(), "model": model, "data_cache": tmp_path / "cache"}
        changes = {**defaults, "max_seq_len": 64, "max_global_batch_tokens": 64, "output_dir": "run", **options}
        return cli.main(["train", *arguments(**changes)])

    return train


def data_file():
    return Path.cwd() / "secret" / "data.jsonl"


def write_data(answers):
    rows = [{"question": f"What is {i} plus {i}?", "answer": answer} for i, answer in enumerate(answers)]
    data_file().write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_manifests_say_what_was_made_from(train, capsys):
    """Plan, base with its revision, data; the same in an export of the checkpoint; and no local place."""
    assert train(save=True, save_steps=2) == 0
    assert cli.main(["export", "--run", "run", "--out", "exported"]) == 0
    made = [read_manifest(Path(name))["made_from"] for name in ("run/final", "run/checkpoints/step-2", "exported")]
    for one in made:
        assert (one["base"]["repo"], one["base"]["revision"]) == ("org/model", REVISION)
        assert one["base"]["manifest_sha256"] == sha256_of(Path("secret/model/flexengine_manifest.json"))
        assert one["steps"] == 2
        assert [part["name"] for part in one["data"]] == ["data.jsonl"]
    assert made[0]["plan_sha256"] == made[1]["plan_sha256"] == sha256_of(Path("run/plan.json"))
    assert made[0]["data"] == made[1]["data"] == made[2]["data"]
    for path in (*Path("run/final").iterdir(), *Path("exported").iterdir()):
        assert b"secret" not in path.read_bytes(), path
    for folder in ("run/final", "exported"):
        assert "flexengine_run.json" in verify_manifest(folder)["files"]
    assert cli.main(["verify", "run"]) == 0
    assert '"name": "data.jsonl"' in capsys.readouterr().out


def test_adapters_have_a_manifest(train, capsys):
    """Every file that PEFT reads is in it, and one that was edited is not trained on."""
    assert train(save=True, mode="lora", lora_rank=2) == 0
    final = Path("run/final")
    assert {path.name for path in final.iterdir()} == {*read_manifest(final)["files"], "flexengine_manifest.json"}
    config = final / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": ', '"lora_alpha": 1'))
    assert train(adapter=final, output_dir="more") == 2
    assert "adapter_config.json: " in capsys.readouterr().err
    assert cli.main(["verify", str(final), "--accept"]) == 0
    assert train(adapter=final, output_dir="more", save=True) == 0
    assert "accepted" in read_manifest(final)
    base = read_manifest(Path("more/final"))["made_from"]["adapter"]
    assert base["manifest_sha256"] == sha256_of(final / "flexengine_manifest.json")
    (final / "adapter_model.safetensors").write_bytes((final / "adapter_model.safetensors").read_bytes()[:-1] + b"?")
    assert train(adapter=final, output_dir="again") == 2
    assert "adapter_model.safetensors: SHA-256" in capsys.readouterr().err


@pytest.mark.parametrize("changed", [3, 5])
def test_data_that_changed_within_is_not_resumed_on(train, capsys, changed):
    """As many records and tokens, neither the first, the middle nor the last one: it is other data all the same."""
    assert train(steps=2, save_steps=2) == 0
    answers = [str(2 * i) for i in range(9)]
    answers[changed] = str(2 * changed - 2)
    write_data(answers)
    assert train(steps=3, resume="auto") == 2
    assert "was saved on other data" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["tokenizer.json", "model-00002-of-00002.safetensors"])
def test_a_base_that_changes_while_it_is_trained(train, capsys, monkeypatch, name):
    """The trained model is saved, and what it holds of the base is said to be another."""
    take_step, path = trainer.take_step, Path("secret/model") / name

    def taken(*all_of_it):
        path.write_bytes(path.read_bytes() + b" " if name == "tokenizer.json" else path.read_bytes()[:-1] + b"?")
        return take_step(*all_of_it)

    monkeypatch.setattr(trainer, "take_step", taken)
    assert train(steps=1, save=True) == 0
    said = capsys.readouterr().err
    assert "files of the model changed while it was trained, and are exported as they are now" in said
    assert name in said
    verify_manifest("run/final")


def test_an_export_says_where_options_differ(train, capsys):
    """config.yaml of a run may be edited; a checkpoint knows the options that it was saved with."""
    assert train(save_steps=2) == 0
    path = Path("run/config.yaml")
    path.write_text(path.read_text().replace("train_on: null", "train_on: all"))
    assert cli.main(["export", "--run", "run"]) == 0
    assert "other options than the checkpoint's run: --train-on not given -> all" in capsys.readouterr().out


def test_a_base_is_named_by_what_others_can_look_up(tmp_path):
    snapshot = tmp_path / "hub" / "models--org--small-1b" / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    digest = sha256_of(snapshot / "config.json")
    named = {"name": "org/small-1b", "repo": "org/small-1b", "revision": REVISION, "config_sha256": digest}
    assert base_of(snapshot, "x") == named
    (tmp_path / "mine").mkdir()
    assert base_of(tmp_path / "mine", "x") == {"name": "mine"}
    assert base_of(None, "demo") == {"name": "demo"}


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("/home/ann/data/train.jsonl", "train.jsonl"),
        ("../shared/part=3/train.jsonl:train=0.5", "train.jsonl:train=0.5"),
        ("~/models/small/", "small"),
        ("org/name:main:train=2", "org/name:main:train=2"),
        ("preset:llama-3.2-1b", "preset:llama-3.2-1b"),
        ("here/small", "small"),
        (".", "place"),
    ],
)
def test_names_without_folders(tmp_path, monkeypatch, place, name):
    (tmp_path / "place" / "here" / "small").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "place")
    assert without_folders(place) == name
