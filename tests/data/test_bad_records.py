"""Records that cannot be read: the first ends a run, or all are left out, counted and named. Never in silence."""

import csv
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import flexengine.checkpoint.dataset_rows as rows
from flexengine.data import ChatTokenizer, parse_source, prepare_sources
from flexengine.data.bad_records import SHOWN
from flexengine.models.registry import ASSETS

GOOD = {"question": "What is 2 plus 2?", "answer": "It is 4."}
TURN = {"role": "user", "content": "a"}


@pytest.fixture(scope="module")
def chat():
    return ChatTokenizer.from_folder(ASSETS / "demo")


def prepared(path, chat, policy="skip", cache=None):
    (found,) = prepare_sources([parse_source(str(path))], chat, 64, False, cache, policy)
    return found


def as_lines(*lines):
    return "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines).encode()


FILES = {
    "a.jsonl": (
        as_lines(GOOD, {"question": None, "answer": None}, GOOD, '{"question": "a', "3", GOOD, "\0\0\0"),
        ["line 2: the record is empty", "line 4: not valid JSON", "line 5: a record must be", "line 7: not valid JSON"],
    ),
    "twice.jsonl": (
        as_lines(GOOD, '{"question": "first", "question": "second", "answer": "a"}', GOOD, GOOD),
        ["line 2: 'question' is listed twice"],
    ),
    "latin.jsonl": (as_lines(GOOD, GOOD, GOOD) + b'\n{"text": "caf\xe9"}', ["line 4: not UTF-8 text"]),
    "array.json": (
        b"[" + b",".join([as_lines(GOOD), b'{"a": {"b": 1, "b": 2}}', b"null", as_lines(GOOD), as_lines(GOOD)]) + b"]",
        ["record 2: 'b' is listed twice", "record 3: a record must be a JSON object, found NoneType"],
    ),
    "a.csv": (
        b"question,answer\nq,a\nq\nq,a,b\nq,a\nq,a\n",
        ["line 3: unknown record format with keys question", "line 4: more fields than the header names"],
    ),
    "turns.jsonl": (
        as_lines(
            GOOD, {"messages": [TURN, {"role": "assistant", "content": None, "refusal": "no"}]},
            GOOD, {"messages": [TURN, {"role": "tool", "content": {"temp": 20}}]}, GOOD,
            {"messages": [TURN, {"role": "assistant", "content": "a", "loss_scale": 0.5}]}, {"input_ids": [True, 2]},
        ),
        ["line 2: content must be a string, found null beside a refusal",
         "line 4: content must be a string, found dict", "line 6: loss_scale of a message",
         "line 7: input_ids must be a flat list of integers"],
    ),
    "ids.jsonl": (
        as_lines(GOOD, {"input_ids": [1, 10**7]}, GOOD, {"input_ids": [1, 2**70]}, GOOD),
        ["line 2: input_ids hold 10000000, the tokenizer's largest id", "line 4: input_ids hold"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_bad_records_are_left_out_counted_and_named(tmp_path, chat, name):
    contents, bad = FILES[name]
    (tmp_path / name).write_bytes(contents)
    found = prepared(tmp_path / name, chat)
    assert len(found.sequences) == 3
    assert f"3 of {3 + len(bad)} records" in found.describe()
    assert f"{len(bad)} bad records left out (--bad-records skip)" in found.describe()
    for line, said in zip(found.bad_lines, bad, strict=True):
        assert line.startswith(f"{tmp_path / name}, {said}")
    with pytest.raises(ValueError, match=rf"{name}, {bad[0].split(':')[0]}: (.*\n)+  correct it, .*--bad-records skip"):
        prepared(tmp_path / name, chat, "stop")


def test_null_rows_of_a_table(tmp_path, chat):
    turns = [TURN, {"role": "assistant", "content": "b"}]
    pq.write_table(pa.table({"messages": pa.array([turns, None, [], turns])}), tmp_path / "a.parquet")
    found = prepared(tmp_path / "a.parquet", chat)
    assert len(found.sequences) == 2
    assert [line.partition("row ")[2][:5] for line in found.bad_lines] == ["2: th", "3: th"]


def test_a_template_that_refuses_some_conversations(tmp_path, chat):
    picky = "{% if messages[0].role != 'user' %}{{ raise_exception('a question first') }}{% endif %}" + chat.template
    picky_chat = ChatTokenizer(chat.tokenizer, picky, chat.bos_token, chat.eos_token)
    odd = {"messages": [{"role": "assistant", "content": "a"}, TURN]}
    (tmp_path / "a.jsonl").write_bytes(as_lines(GOOD, odd, GOOD))
    (line,) = prepared(tmp_path / "a.jsonl", picky_chat).bad_lines
    assert line.startswith(
        f"{tmp_path / 'a.jsonl'}, line 2: the chat template refuses a conversation of assistant, user"
    )


def test_tokens_of_a_run_that_skipped_do_not_silence_one_that_stops(tmp_path, chat):
    (tmp_path / "a.jsonl").write_bytes(as_lines(GOOD, "{", GOOD))
    cache = tmp_path / "cache"
    first = prepared(tmp_path / "a.jsonl", chat, "skip", cache)
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: not valid JSON.*\n.*--bad-records skip"):
        prepared(tmp_path / "a.jsonl", chat, "stop", cache)
    (tmp_path / "a.jsonl").rename(tmp_path / "moved.jsonl")
    again = prepared(tmp_path / "moved.jsonl", chat, "skip", cache)
    assert len(list(cache.iterdir())) == 1
    assert list(again.sequences) == list(first.sequences)
    assert again.bad_lines[0].startswith(f"{tmp_path / 'moved.jsonl'}, line 2: ")


def test_only_the_first_are_named_and_nothing_but_bad_records_is_an_error(tmp_path, chat):
    (tmp_path / "a.jsonl").write_bytes(as_lines(GOOD, *["{}"] * 9))
    found = prepared(tmp_path / "a.jsonl", chat)
    assert len(found.bad_lines) == SHOWN + 1
    assert found.bad_lines[-1] == f"and {9 - SHOWN} more"
    (tmp_path / "b.jsonl").write_bytes(as_lines(*["{}"] * 9))
    said = r"no record is left to train on: of 9,.*\n  9 cannot be read:\n    .*b\.jsonl, line 1: the record is empty"
    with pytest.raises(ValueError, match=rf"{said}(.*\n)*    and {9 - SHOWN} more"):
        prepared(tmp_path / "b.jsonl", chat)


def test_a_file_that_ends_in_the_middle_ends_the_run_also_where_bad_records_are_skipped(tmp_path, chat):
    (tmp_path / "a.json").write_bytes(b"[" + as_lines(GOOD) + b", {")
    with pytest.raises(ValueError, match=r"a\.json: not valid JSON"):
        prepared(tmp_path / "a.json", chat)


def test_columns_of_one_name_and_another_separator(tmp_path):
    for name, text, message in (
        ("a.csv", "question,answer,answer\nq,a,b\n", "a.csv, line 1: the column 'answer' is there twice"),
        ("semi.csv", "question;answer\nq;a\n", "the header is one column, 'question;answer'; save the file with ','"),
        ("comma.tsv", "question,answer\nq,a\n", "the header is one column, 'question,answer'"),
    ):  # fmt: skip
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=message):
            list(rows.read_rows(tmp_path / name))
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet.*the column 'text' is there twice"):
        list(rows.read_rows(tmp_path / "a.parquet"))


def test_empty_answers_are_said(tmp_path, chat):
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["question", "answer"], ["q", ""], ["q", "a"], ["q", " "]])
    found = prepared(tmp_path / "a.csv", chat, "stop", tmp_path / "cache")
    assert "3 of 3 records" in found.describe()
    assert "2 answers are empty, so that the model learns to say nothing" in found.describe()
    assert prepared(tmp_path / "a.csv", chat, "stop", tmp_path / "cache").describe() == found.describe()
