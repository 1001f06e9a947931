"""A tokenizer and a template beside an adapter, or in another folder: the run, its exports and previews use these."""

import json
import shutil
from pathlib import Path

import pytest

from flexengine import cli
from flexengine.checkpoint.adapter_config import tokenizer_of
from flexengine.checkpoint.manifest import FOLDER_MANIFEST
from flexengine.checkpoint.writer import support_files
from flexengine.data.model_folder import find_templates, read_config
from flexengine.hardware.presets import preset
from flexengine.models.registry import ASSETS
from tests.failures.provoke import OPTIONS, arguments, write_model

MODELS = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
OWN = "{% for message in messages %}{{ message['role'][0] }}= {{ message['content'] }}<|end|>{% endfor %}"
CHAT = {"messages": [{"role": "user", "content": "What is 2 plus 2?"}, {"role": "assistant", "content": "It is 4."}]}


def add_tokenizer(folder, template_file=None, template=None):
    """The bundled tokenizer, with a template of its own in a file or among its options."""
    shutil.copy(ASSETS / "demo" / "tokenizer.json", folder)
    options = json.loads((ASSETS / "demo" / "tokenizer_config.json").read_text())
    if template is not None:
        options["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    if template_file is not None:
        (folder / "chat_template.jinja").write_text(template_file)


def template_of(folder):
    return find_templates(folder, read_config(folder / "tokenizer_config.json")).get("default")


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A model with a tokenizer and a template, and an adapter of it without."""
    monkeypatch.setattr("flexengine.api.probe", lambda *_, **__: preset("cpu-test"))
    monkeypatch.setenv("FLEXENGINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    add_tokenizer(write_model(tmp_path / "model", vocab_size=2944), MODELS)
    Path("chat.jsonl").write_text(f"{json.dumps(CHAT)}\n" * 4)
    return run(output_dir="first", mode="lora", lora_rank=2)


def run(**options):
    data = {"data_source": None, "dataset": "chat.jsonl", "model": "model", "max_seq_len": 64}
    both = {**OPTIONS, **data, "max_global_batch_tokens": 64, "save": True, **options}
    assert cli.main(["train", *arguments(**both)]) == 0
    return Path(both["output_dir"]) / "final"


@pytest.mark.parametrize("where", [{"template_file": OWN}, {"template": OWN}], ids=["in a file", "in the config"])
def test_all_that_follows_an_adapter_uses_its_template(folders, where, capsys):
    adapter = folders
    assert template_of(adapter) == template_of(Path("model"))  # what the model beneath has
    for name in ("chat_template.jinja", FOLDER_MANIFEST):
        (adapter / name).unlink()
    add_tokenizer(adapter, **where)
    capsys.readouterr()
    final = run(output_dir="second", adapter=adapter)
    assert f"tokenizer and chat template are those of the adapter {adapter}" in capsys.readouterr().out
    assert template_of(final) == OWN
    assert not (final / "config.json").exists()
    assert cli.main(["export", "--run", "second", "--format", "merged", "--out", "merged"]) == 0
    assert template_of(Path("merged")) == OWN
    assert (Path("merged") / "config.json").is_file()
    capsys.readouterr()
    flags = ["--model", "model", "--dataset", "chat.jsonl", "--max-seq-len", "64"]
    assert cli.main(["data", "preview", *flags, "--adapter", str(adapter)]) == 0
    assert "u= What is 2 plus 2?" in capsys.readouterr().out
    assert cli.main(["data", "preview", *flags]) == 0
    assert "u= What" not in capsys.readouterr().out


def test_an_adapter_without_a_tokenizer_leaves_the_model_its_own(folders):
    for path in [*folders.glob("tokenizer*"), *folders.glob("chat_template*")]:
        path.unlink()
    assert tokenizer_of(folders) is None
    assert support_files("model", None).keys() == support_files("model").keys() > {"chat_template.jinja"}
    (folders / "tokenizer_config.json").write_text(json.dumps({"chat_template": OWN}))
    with pytest.raises(ValueError, match="holds a chat template, but no tokenizer"):
        tokenizer_of(folders)


def test_a_folder_names_another_tokenizer(folders, capsys, tmp_path):
    Path("other").mkdir()
    add_tokenizer(Path("other"), OWN)
    final = run(output_dir="second", tokenizer="other")
    assert "; tokenizer and chat template are those of other" in capsys.readouterr().out
    assert template_of(final) == OWN
    flags = ["--model", "model", "--dataset", "chat.jsonl", "--max-seq-len", "64"]
    assert cli.main(["data", "preview", *flags, "--tokenizer", "other"]) == 0
    assert "u= What is 2 plus 2?" in capsys.readouterr().out
    assert cli.main(["data", "preview", *flags, "--tokenizer", "nowhere"]) == 2
    assert "tokenizer nowhere: no such folder; give a folder with a tokenizer's files" in capsys.readouterr().err
    assert cli.main(["data", "preview", *flags, "--tokenizer", str(tmp_path / "cache")]) == 2
    assert "no tokenizer.json or tokenizer.model in it" in capsys.readouterr().err
