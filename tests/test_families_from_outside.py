"""Families from outside of the package: the tutorial as it stands, files, entry points, and what is refused."""

import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from engine_helpers import tiny_config

import flexengine
from flexengine.commands import models as models_command
from flexengine.models import outside, registry
from flexengine.models.llama import build as build_llama
from flexengine.models.registry import build_model

TUTORIAL = Path(__file__).parents[1] / "docs" / "families.md"
REGISTERS = """
import flexengine
from flexengine.models import llama
flexengine.register_family("ember", lambda name, config: llama.build(name, config), checkpoints="Ember")
"""


@pytest.fixture(autouse=True)
def only_own_families(monkeypatch, tmp_path):
    """Whatever a test registers is gone after it."""
    monkeypatch.setattr(registry, "FAMILIES", {**registry.FAMILIES})
    monkeypatch.setattr(models_command, "FAMILIES", registry.FAMILIES)
    monkeypatch.setattr(outside, "_loaded", set())
    monkeypatch.chdir(tmp_path)


def test_the_tutorial_goes_from_a_config_to_a_trained_model(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", TUTORIAL.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 6
    known = {"__name__": "tutorial"}
    for block in blocks:
        exec(compile(block, str(TUTORIAL), "exec"), known)
    assert (tmp_path / "lantern-trained" / "model.safetensors").is_file()
    names = (name for name, _ in known["model"].named_parameters())
    assert any(name.endswith("q_norm.weight") for name in names)
    with pytest.raises(ValueError, match="a lantern model has 'silu'"):
        build_model("m", {**known["config"], "hidden_act": "relu"})


def test_a_file_and_an_entry_point_register_families(tmp_path, monkeypatch, capsys):
    config = {**tiny_config(), "model_type": "ember"}
    with pytest.raises(ValueError, match=r"model_type 'ember' in config.json is not supported"):
        build_model("m", config)
    (tmp_path / "ember.py").write_text(REGISTERS)
    monkeypatch.setenv(outside.FILES, str(tmp_path / "ember.py"))
    assert build_model("m", config).num_parameters == build_model("m", tiny_config()).num_parameters
    point = EntryPoint("glow", "tests.test_families_from_outside:register_glow", outside.GROUP)
    monkeypatch.setattr(outside, "entry_points", lambda group: [point] if group == outside.GROUP else [])
    assert build_model("m", {**config, "model_type": "glow"}).blocks
    assert models_command.main([]) == 0
    assert "ember: Ember\n    not compared with transformers here" in capsys.readouterr().out


def register_glow():
    flexengine.register_family("glow", build_llama)


def test_what_cannot_be_registered(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="the package has this family"):
        flexengine.register_family("llama", build_llama)
    with pytest.raises(ValueError, match="give the model_type and a function"):
        flexengine.register_family("", build_llama)
    config = {**tiny_config(), "model_type": "ember"}
    monkeypatch.setenv(outside.FILES, "nowhere.py")
    with pytest.raises(ValueError, match=r"FLEXENGINE_FAMILIES=nowhere.py: no such file"):
        build_model("m", config)
    (tmp_path / "bad.py").write_text("1 / 0")
    monkeypatch.setenv(outside.FILES, "bad.py")
    with pytest.raises(ValueError, match=r"bad.py failed, so its families are unknown: ZeroDivisionError"):
        build_model("m", config)
