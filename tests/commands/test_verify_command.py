"""`flexengine verify`: what is missing, altered or not listed is named, and what was changed on purpose is accepted."""

import json
import re

import pytest
import torch

from flexengine import cli
from flexengine.checkpoint.manifest import FOLDER_MANIFEST, ManifestError, check_acted_on, read_manifest, write_manifest
from flexengine.checkpoint.writer import TensorSource, write_checkpoint
from flexengine.models.registry import open_model
from flexengine.version import __version__

CONFIG = '{"model_type": "llama"}'
MADE_BY = {"source": "export", "made_from": {"steps": 3, "base": {"name": "small", "revision": "a" * 40}}}


@pytest.fixture
def model(tmp_path):
    """An export with a file of each kind."""
    tensor = TensorSource("a", torch.float32, (4,), lambda: torch.ones(4))
    beside = {"config.json": CONFIG, "tokenizer.json": "{}", "README.md": "# small"}
    write_checkpoint(tmp_path / "final", [tensor], beside=beside, with_manifest=True, made_by=MADE_BY)
    return tmp_path / "final"


def verify(*arguments):
    return cli.main(["verify", *map(str, arguments)])


def test_what_was_written_is_verified(model, capsys):
    assert verify(model) == 0
    said = capsys.readouterr().out
    assert f"{model}: 4 files as the manifest says" in said
    assert f"flexengine: {__version__}" in said
    assert '"revision": "aaaa' in said


def test_missing_altered_and_extra_files_are_named(model, capsys):
    (model / "tokenizer.json").unlink()
    (model / "README.md").write_text("# smaLl")
    (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes() + b"x")
    (model / "notes").mkdir()
    (model / "notes" / "mine.txt").write_text("mine")
    (model / ".model.safetensors.0123456789abcdef.flexengine.tmp").write_text("of a killed save")
    assert verify(model) == 2
    said = capsys.readouterr().err
    assert "4 files differ from flexengine_manifest.json" in said
    assert "tokenizer.json: missing" in said
    assert "README.md: SHA-256" in said
    assert re.search(r"model.safetensors: (\d+) bytes, expected \d+", said)
    assert "notes/mine.txt: not in the manifest" in said
    assert f"flexengine verify --accept {model}" in said


def test_changes_on_purpose_are_accepted_and_remembered(model, capsys):
    """A configuration that is edited by hand is refused, and read once it is accepted."""
    (model / "config.json").write_text(CONFIG.replace("llama", "lama"))
    with pytest.raises(ValueError, match=rf"config.json: 22 bytes, expected 23\n.*verify --accept {model}"):
        open_model(model)
    (model / "mine.txt").write_text("mine")
    assert verify("--accept", model) == 0
    assert "mine.txt: not in the manifest" in capsys.readouterr().out
    assert verify(model) == 0
    manifest = read_manifest(model)
    assert manifest["made_from"] == MADE_BY["made_from"]
    assert manifest["accepted"] == ["config.json: 22 bytes, expected 23", "mine.txt: not in the manifest"]
    with pytest.raises(ValueError, match="missing: a description of its block"):
        open_model(model)


def test_a_manifest_has_a_digest_of_itself(model, capsys):
    """Every byte counts: also what no JSON reader would see, and what a person would write in its place."""
    path, data = model / FOLDER_MANIFEST, (model / FOLDER_MANIFEST).read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(ManifestError, match="not a manifest"):
            read_manifest(model)
    assert verify(model) == 2
    assert "damaged, so not a manifest to compare with" in capsys.readouterr().err
    path.write_text(json.dumps(json.loads(data), indent=1))
    with pytest.raises(ManifestError):
        check_acted_on(model)
    path.unlink()
    check_acted_on(model)


def test_manifests_of_earlier_versions_are_read(model):
    old = {name: value for name, value in read_manifest(model).items() if name != "manifest_sha256"}
    (model / FOLDER_MANIFEST).write_text(json.dumps({**old, "format_version": 1}))
    assert verify(model) == 0


def test_a_checkpoint_is_not_accepted(model, capsys):
    write_manifest(model, {}, {"source": "checkpoint"})
    assert verify("--accept", model) == 2
    assert "must be what the run wrote; resume another" in capsys.readouterr().err


def test_a_run_folder_is_verified_part_by_part(model, capsys):
    run = model.parent
    saved = [run / "checkpoints" / "step-2", run / "checkpoints" / "step-10"]
    for folder in saved:
        folder.mkdir(parents=True)
        write_manifest(folder, {}, {"source": "checkpoint"})
    assert verify(run) == 0
    said = capsys.readouterr().out
    assert all(f"{folder}: " in said for folder in (model, *saved))
    (run / "checkpoints" / "step-2" / "x").write_text("")
    (model / "config.json").unlink()
    assert verify(run) == 2
    said = capsys.readouterr()
    assert f"{run}/checkpoints/step-10: 0 files as" in said.out
    assert "x: not in the manifest\nResume another checkpoint" in said.err
    assert "config.json: missing" in said.err


def test_nothing_to_compare_with(tmp_path, capsys):
    for folder, says in ((tmp_path, "has no flexengine_manifest.json"), (tmp_path / "x", "no such file or folder")):
        assert verify(folder) == 2
        assert says in capsys.readouterr().err
