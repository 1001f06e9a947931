import json

import pytest

from flexengine.data.records import Message, Record
from flexengine.data.sources import read_json_sft

PAIR = (Message("user", "2+2?"), Message("assistant", "4"))
FORMATS = {
    "messages": ({"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}, PAIR),
    "conversations": ({"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]}, PAIR),
    "instruction": ({"instruction": "2+2?", "output": "4"}, PAIR),
    "empty_input": ({"instruction": "2+2?", "input": "", "output": "4", "id": 7}, PAIR),
    "input": ({"instruction": "Add", "input": "2 2", "output": "4"}, (Message("user", "Add\n\n2 2"), PAIR[1])),
    "completion": ({"prompt": "2+2?", "completion": "4"}, PAIR),
    "response": ({"prompt": "2+2?", "response": "4"}, PAIR),
    "question": ({"question": "2+2?", "answer": "4"}, PAIR),
    "system": ({"system": "Be brief", "question": "2+2?", "answer": "4"}, (Message("system", "Be brief"), *PAIR)),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("layout", ["list", "lines"])
def test_known_formats(tmp_path, name, layout):
    raw, messages = FORMATS[name]
    path = tmp_path / "data.json"
    path.write_text(
        json.dumps([raw, raw], indent=1) if layout == "list" else f"{json.dumps(raw)}\n\n{json.dumps(raw)}\n"
    )
    assert read_json_sft(path) == [Record(messages=messages)] * 2


def test_text_and_unicode_line_separator(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"text": "a\u2028b"}, ensure_ascii=False) + "\r\n", encoding="utf-8")
    assert read_json_sft(path) == [Record(text="a\u2028b")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "x"}\n{"foo": 1, "bar": 2}\n', r"line 2: unknown record format with keys bar, foo"),
        ('{"text": "x"}\n{"text": \n', r"line 2: not valid JSON"),
        ('{"text": "x"}\n[1]\n', r"line 2: a record must be a JSON object, found list"),
        ('[{"text": "x"}, 3]', r"record 2: a record must be a JSON object, found int"),
        ('{"messages": []}', r"line 1: the conversation must be a list"),
        ('{"messages": [{"role": "user"}]}', r"line 1: a message needs the keys role and content, found role"),
        ('{"question": 3, "answer": "x"}', r"line 1: question must be a string, found int"),
        ("\n \n", r"holds no record"),
    ],
)
def test_errors_name_file_and_place(tmp_path, content, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"bad\.jsonl.*{message}"):
        read_json_sft(path)


def test_unknown_format_lists_the_known_ones(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"foo": 1}')
    with pytest.raises(ValueError, match=r"known formats: .*messages.*question.*text"):
        read_json_sft(path)


def test_missing_and_binary_file(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        read_json_sft(tmp_path / "nothing.jsonl")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_json_sft(tmp_path / "binary")


def test_record_is_one_of_two():
    with pytest.raises(ValueError, match="either"):
        Record()
    with pytest.raises(ValueError, match="either"):
        Record(messages=PAIR, text="x")
