"""`flexengine data preview`: the words that people read before a run."""

import json
import re

import pytest

from flexengine import cli

TURNS = [
    {"role": "user", "content": "What is 2 plus 2?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXENGINE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "chats.jsonl"
    rows = [{"messages": TURNS, "source": "web"}, {"text": "the river is wide " * 40}]
    rows += [
        {"messages": TURNS, "tools": [{"name": "add"}]},
        {"messages": [TURNS[0], {**TURNS[1], "content": "4 " * 99}]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def preview(capsys, *arguments: object) -> str:
    assert cli.main(["data", "preview", "--model", "preset:demo", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_preview(capsys, data):
    out = preview(capsys, "--dataset", data, "--max-seq-len", 64, "--records", 1)
    assert "2 of 4 records" in out
    assert "1 split into sequences of --max-seq-len; 1 dropped as longer than --max-seq-len" in out
    assert "1 left out, since the chat template does not write the record's tools; 1 values of source not read" in out
    assert "What is 2 plus 2?<|end|>" in out
    assert "[[It is 4.<|end|>]]" in out
    assert "[[Yes.<|end|>]]" in out
    assert re.search(r"trained: \d+ of \d+ tokens \(\d+%\) of all \d+ sequences", out)
    assert re.search(r"33 to 64 +\d+  #+\n", out)


def test_train_on_last_and_weights(capsys, data):
    out = preview(capsys, "--dataset", f"{data}=2", "--max-seq-len", 64, "--records", 1, "--train-on", "last")
    assert "[[It is 4.<|end|>]]" not in out
    assert "[[Yes.<|end|>]]" in out
    assert "weight 2" in out


def test_bad_records_are_named(capsys, data):
    data.write_text(data.read_text() + "{\n")
    assert cli.main(["data", "preview", "--model", "preset:demo", "--dataset", str(data)]) == 2
    assert f"{data}, line 5: not valid JSON" in capsys.readouterr().err
    out = preview(capsys, "--dataset", data, "--bad-records", "skip")
    assert "3 of 5 records" in out
    assert "; 1 bad records left out (--bad-records skip); " in out
    assert f"\n  {data}, line 5: not valid JSON" in out


def test_clearing_the_cache_removes_tokens_alone(capsys, data, tmp_path):
    cache = tmp_path / "cache" / "data"
    preview(capsys, "--dataset", data, "--max-seq-len", 64)
    (table,) = cache.iterdir()
    (cache / f"hub-{table.name}").symlink_to(table.name)
    (cache / "notes.txt").write_text("mine")
    assert cli.main(["data", "clear-cache"]) == 0
    assert capsys.readouterr().out.startswith("removed ")
    assert [path.name for path in cache.iterdir()] == ["notes.txt"]
    assert cli.main(["data", "clear-cache", "--data-cache", str(tmp_path / "none")]) == 0
    assert capsys.readouterr().out.startswith("removed 0 bytes")


def test_options_are_checked_as_those_of_train(capsys, data):
    assert cli.main(["data", "preview", "--model", "preset:demo", "--dataset", str(data), "--max-seq-len", "0"]) == 2
    assert "--max-seq-len must be more than 0, got 0" in capsys.readouterr().err


def test_wrong_data_is_one_message(capsys, tmp_path):
    assert cli.main(["data", "preview", "--model", "preset:demo", "--dataset", str(tmp_path / "no.jsonl")]) == 2
    assert capsys.readouterr().err.startswith("flexengine data: data set ")
