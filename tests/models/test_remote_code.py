"""Models whose code is in their folder: refused unasked; with trust trained, checked and exported with their code."""

import json
import shutil

import pytest
import transformers
from engine_helpers import relative_error, saved_model
from family_checks import last_logits
from opaque_configs import RANDOM, config_of

from flexengine import from_pretrained
from flexengine.commands import chat, evaluate, generate, serve
from flexengine.commands.check import check
from flexengine.models.registry import open_model

NAMED = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
CODE = {
    "configuration_own.py": """
from transformers import GPTJConfig

class OwnConfig(GPTJConfig):
    model_type = "own_gptj"
""",
    "modeling_own.py": """
from torch import nn
from transformers import GPTJForCausalLM
from .configuration_own import OwnConfig

class OwnForCausalLM(GPTJForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.transformer.h:
            layer.mlp.act = nn.ReLU()
""",
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """What transformers' own class has for the weights of the folder `own`, with the unit that its code takes."""
    folder = tmp_path_factory.mktemp("remote")
    model = saved_model(folder / "own", {**config_of("gptj"), "activation_function": "relu"}).eval()
    config = json.loads((folder / "own" / "config.json").read_text())
    config |= {
        "model_type": "own_gptj",
        "auto_map": NAMED,
        "activation_function": "gelu",
        "architectures": ["OwnForCausalLM"],
    }
    (folder / "own" / "config.json").write_text(json.dumps(config))
    for name, text in CODE.items():
        (folder / "own" / name).write_text(text)
    return folder / "own", model


def test_code_runs_where_it_is_trusted_and_goes_with_the_export(reference, tmp_path, caplog):
    folder, model = reference
    with pytest.raises(ValueError, match=r"configuration_own.py, modeling_own.py\).*give --trust-remote-code"):
        open_model(folder)
    options = {**RANDOM, "init": "checkpoint", "trust_remote_code": True}
    with from_pretrained(folder, **options) as engine:
        told = [record.message for record in caplog.records if "not flexengine's" in record.message]
        assert len(told) == 1
        assert f"configuration_own.py, modeling_own.py of {folder} (SHA-256" in told[0]
        tokens = [5, 7, 11, 2, 3]
        assert relative_error(engine.next_token_logits(tokens), last_logits(model, tokens)) <= 1e-5
        engine.train_step([tokens])
        logits = engine.next_token_logits(tokens)
        engine.save_pretrained(tmp_path / "out")
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert type(exported).__name__ == "OwnForCausalLM"
    assert relative_error(logits, last_logits(exported.eval(), tokens)) <= 1e-4
    assert not check(folder, trust_remote_code=True).first
    with pytest.raises(ValueError, match="give --trust-remote-code"):  # trust is for a call, not for the process
        open_model(folder)


@pytest.mark.parametrize("command", [generate, chat, serve, evaluate], ids=lambda module: module.__name__[20:])
def test_commands_that_ask_a_model_run_its_code_where_they_are_told_to(command, reference, monkeypatch):
    monkeypatch.setattr("flexengine.data.TokenizerProcess", lambda options: options)
    given = [str(reference[0]), *(["--tasks", "any"] if command is evaluate else [])]
    with pytest.raises(ValueError, match="give --trust-remote-code"):
        generate.opened(command._parser().parse_args(given))
    found = generate.opened(command._parser().parse_args([*given, "--trust-remote-code"]))
    assert (found.model.family, found.tokenizer.folder) == ("own_gptj", reference[0])


@pytest.mark.parametrize(
    ("named", "text", "message"),
    [
        ({"AutoConfig": NAMED["AutoConfig"]}, "", "names no AutoModelForCausalLM"),
        ({**NAMED, "AutoConfig": "some/one--configuration_own.OwnConfig"}, "", "another repository"),
        ({**NAMED, "AutoConfig": "absent.OwnConfig"}, "", "'absent.py', which .* lacks"),
        (NAMED, "raise OSError('not today')", "does not load here: OSError: not today"),
    ],
)
def test_code_that_cannot_run_is_refused(named, text, message, reference, tmp_path):
    folder = shutil.copytree(reference[0], tmp_path / "broken")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "broken_gptj", "auto_map": named}))
    if text:
        (folder / "modeling_own.py").write_text(text)
    with pytest.raises(ValueError, match=message):
        open_model(folder, trust_remote_code=True)


def test_code_of_the_hub_is_told_by_its_commit(reference, tmp_path, monkeypatch, caplog):
    commit = tmp_path / "models--some--one" / "snapshots" / ("0" * 40)
    shutil.copytree(reference[0], commit)
    monkeypatch.setattr("flexengine.checkpoint.hub_cache.cached_model", lambda *args: commit)
    monkeypatch.setattr("flexengine.checkpoint.hub_cache.cached_code", lambda *args: commit)
    source = open_model("some/one", trust_remote_code=True)
    assert source.spec.family == "own_gptj"
    assert f"modeling_own.py of some/one at commit {'0' * 40}" in caplog.text
