"""A tokenizer in a process with bounds: the same tokens, and an end to what files ask for without end."""

import gzip
import json
import shutil
from pathlib import Path

import pytest
from thorough import cases

from flexengine.checkpoint import bounded_process
from flexengine.data import ChatTokenizer, TokenizerOptions, TokenizerProcess, parse_source, prepare_sources
from flexengine.models.registry import ASSETS

DEMO = ASSETS / "demo"
CHAT = {"messages": [{"role": "user", "content": "a" * 30}, {"role": "assistant", "content": "yes"}]}
VOCABULARY = 2944


@pytest.fixture
def folder(tmp_path):
    """A model folder with the bundled tokenizer, and chat.jsonl beside it."""
    (tmp_path / "model").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, tmp_path / "model")
    (tmp_path / "chat.jsonl").write_text(json.dumps(CHAT) + "\n")
    return tmp_path / "model"


@pytest.fixture
def soon(monkeypatch):
    """What takes one CPU second takes too long. Import what is imported once, which counts as well."""
    from transformers import AutoTokenizer  # noqa: F401, PLC0415

    monkeypatch.setattr(bounded_process, "ALLOWED_CPU_S", 1.0)


def change(folder: Path, **changes: object) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def prepared(folder: Path, place: str = "chat.jsonl", most_bytes: int = 2**29, cache: Path | None = None):
    tokenizer = TokenizerProcess(TokenizerOptions(folder, VOCABULARY), most_bytes)
    return prepare_sources([parse_source(str(folder.parent / place))], tokenizer, 64, False, cache)


def test_the_tokens_are_those_of_a_tokenizer_here(folder, tmp_path):
    options = TokenizerOptions(folder, VOCABULARY)
    here, there = ChatTokenizer.from_folder(folder), TokenizerProcess(options)
    for cache in (None, tmp_path / "cache", tmp_path / "cache"):
        source = parse_source(str(tmp_path / "chat.jsonl"))
        (mine,) = prepare_sources([source], here, 64, False, tmp_path / "another")
        (its,) = prepare_sources([source], there, 64, False, cache)
        assert list(mine.sequences) == list(its.sequences)
    assert there.stop_ids == here.stop_ids
    assert there.encode_prompt("naïve 🧮?") == here.encode_prompt("naïve 🧮?")
    assert there.encode_prompt("on", raw=True) == here.encode_prompt("on", raw=True)
    ids = here.encode_prompt("What is 2 plus 2?")
    assert there.decode(ids, skip_special_tokens=False) == here.decode(ids, skip_special_tokens=False)
    there.close()
    with pytest.raises(ValueError, match="closed"):
        there.decode(ids)


def test_what_is_wrong_with_records_and_folders_is_told_as_here(folder, tmp_path):
    (tmp_path / "chat.jsonl").write_text("{")
    with pytest.raises(ValueError, match=r"chat\.jsonl, line 1: not valid JSON"):
        prepared(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="no tokenizer"):
        prepared(folder)


def test_a_cache_that_cannot_be_written_is_done_without(folder, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    (found,) = prepared(folder, cache=tmp_path / "file")
    assert len(found.sequences) == 1
    assert "the data cache" in caplog.text


DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"normalizer": {"type": "Sequence", "normalizers": [DOUBLE] * 24}}, marks=pytest.mark.thorough),
        {"normalizer": {"type": "Sequence", "normalizers": [DOUBLE] * 60}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "(a|a|a|a)+(?=b)$"}, "content": ""}},
    ],
    ids=["24 doublings", "60 doublings", "a slow expression"],
)
def test_tokenizers_that_ask_for_too_much(folder, soon, changes):
    change(folder, **changes)
    with pytest.raises(ValueError, match=r"chat\.jsonl|model: it (did not end|takes|ended)|cannot encode"):
        prepared(folder)


@pytest.mark.parametrize(
    "template",
    cases(
        ["{{ 10**(10**8) }}", "{{ 'a' * 10**10 }}", "{{ 'a' | center(10**10) }}", "{{ '%1000000000d' | format(1) }}"],
        ["{{ 10**(10**8) }}", "{{ 'a' | center(10**10) }}"],
    ),
)
def test_templates_that_ask_for_too_much(folder, soon, template):
    (folder / "chat_template.jinja").write_text("{% if messages %}" + template + "{% endif %}")
    with pytest.raises(ValueError, match=r"chat\.jsonl, line 1: |model: it did not end within 1.07 CPU"):
        prepared(folder)


def columns(path: Path) -> None:
    """1,024 rows of 8 MiB each in a few kB."""
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415

    column = pa.DictionaryArray.from_arrays(pa.array([0] * 1024, pa.int32()), pa.array(["a" * 2**23]))
    pq.write_table(pa.table({"question": column, "answer": column}), path, compression="zstd")


DATA = {
    "newlines.jsonl.gz": lambda path: path.write_bytes(gzip.compress(b"\n" * 2**26, 1)),
    "field.csv.gz": lambda path: path.write_bytes(
        gzip.compress(b'question,answer\nq,"', 1) + gzip.compress(b"a" * 2**26, 1) * 8 + gzip.compress(b'"\n', 1)
    ),
    "rows.parquet": columns,
}


@pytest.mark.parametrize("name", DATA)
def test_data_that_asks_for_too_much(folder, soon, name):
    DATA[name](folder.parent / name)
    with pytest.raises(
        ValueError, match=rf"{name}.*(did not end|takes more|ended the process|longer than 64 MiB|field larger)"
    ):
        prepared(folder, name, most_bytes=2**28)
