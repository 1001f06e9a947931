"""Parts of a split as `datasets` writes them, and columns whose names are guessed."""

import json

import datasets
import pytest

from flexengine.data import sources
from flexengine.data.parts import read_part
from flexengine.data.sources import HubRows, Reader, Source, parse_source

ROWS = [{"prompt": str(n), "completion": "x"} for n in range(37)]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def prompts(reader: Reader) -> list[str]:
    return [record.messages[0].content for record in reader.records()]


@pytest.mark.parametrize("part", [":10", "5:", "5:9", ":10%", "10%:25%", "90%:", "-7:", ":-30", "-30%:-10%", ":50"])
def test_parts_are_those_of_datasets(part, file):
    """The library refuses limits beyond the end, which here are the end."""
    wanted = datasets.ReadInstruction.from_spec(f"train[{part}]") if part != ":50" else None
    reader = Reader(parse_source(f"{file}:train[{part}]"))
    if wanted is None:
        assert prompts(reader) == [row["prompt"] for row in ROWS]
        return
    absolute = wanted.to_absolute({"train": len(ROWS)})[0]
    assert prompts(reader) == [row["prompt"] for row in ROWS[absolute.from_ : absolute.to]]


def test_a_part_is_named_by_place_or_split_has_a_weight_and_a_key_of_its_own(file):
    assert parse_source(f"{file}[:5]=0.5") == Source(str(file), weight=0.5, part=":5")
    assert parse_source("org/name:main:test[10%:20%]") == Source("org/name", "test", "main", part="10%:20%")
    keys = {Reader(parse_source(f"{file}{part}")).key() for part in ("", "[:5]", "[:6]")}
    assert len(keys) == 3
    with pytest.raises(ValueError, match=r"a.jsonl\[50:\] holds no record"):
        prompts(Reader(parse_source(f"{file}[50:]")))


@pytest.mark.parametrize("part", ["", "5", "a:b", "%:", "10%:200%", "1:2:3", "3:40%"])
def test_what_is_no_part_is_named(part, file):
    with pytest.raises(ValueError, match=r"data set .*(a part is written as|is no part of a split|mixes)"):
        parse_source(f"{file}:train[{part}]")
    with pytest.raises(ValueError, match=r"."):
        read_part(part)


@pytest.mark.parametrize(("part", "read"), [(":3", 3), ("10%:20%", 20), ("-90:-88", 12)])
def test_a_part_of_the_hub_reads_no_further_than_it_must(monkeypatch, part, read):
    seen = []

    def stream():
        for n in range(100):
            seen.append(n)
            yield {"text": str(n)}

    monkeypatch.setattr(sources, "open_on_hub", lambda source: HubRows(stream(), "key", 100))
    found = [record.text for record in Reader(Source("org/name", part=part)).records()]
    bounds = read_part(part).bounds(100)
    assert found == [str(n) for n in range(*bounds)]
    assert len(seen) == read


@pytest.mark.parametrize(
    ("row", "messages", "guess"),
    [
        ({"source": "a", "target": "b"}, ["a", "b"], "prompt=source, completion=target"),
        ({"Question": "a", "Answer": "b"}, ["a", "b"], "question=Question, answer=Answer"),
        (
            {"Instruction": "a", "Input": "c", "Output": "b"},
            ["a\n\nc", "b"],
            "instruction=Instruction, output=Output, input=Input",
        ),
        ({"inputs": "a", "targets": "b", "task": "t"}, ["a", "b"], "prompt=inputs, completion=targets"),
        ({"document": "a", "summary": "b"}, ["a", "b"], "prompt=document, completion=summary"),
        ({"turns": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, ["a", "b"], "messages=turns"),
        ({"body": "a"}, "a", "text=body"),
    ],
)  # fmt: skip
def test_columns_are_guessed_and_told(tmp_path, row, messages, guess):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row) + "\n")
    reader = Reader(Source(str(path)))
    (record,) = reader.records()
    assert (record.text if isinstance(messages, str) else [turn.content for turn in record.messages]) == messages
    assert reader.remarks[f"records whose columns are guessed as {guess} (--columns gives others)"] == 1


@pytest.mark.parametrize(
    "row", [{"prompt": "a", "completion": "b", "source": "c", "target": "d"}, {"text": "a", "body": "b"}]
)
def test_names_that_are_known_are_not_guessed(tmp_path, row):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row) + "\n")
    reader = Reader(Source(str(path)))
    assert len(list(reader.records())) == 1
    assert not reader.remarks


def test_given_columns_are_not_guessed(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"source": "a", "target": "b"}) + "\n")
    with pytest.raises(ValueError, match="unknown record format"):
        list(Reader(Source(str(path), columns=(("prompt", "question"),))).records())
