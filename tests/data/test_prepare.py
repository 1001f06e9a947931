"""Sources of every kind become the same sequences, once; what is lost on the way is told."""

import csv
import gzip
import hashlib
import json
import tracemalloc

import numpy as np
import pytest

import flexengine.checkpoint.dataset_rows as rows
import flexengine.data.prepare as module
from flexengine.data import ChatTokenizer, GlobalBatches, Record, parse_source, prepare_sources
from flexengine.data.sources import Reader, Source
from flexengine.models.registry import ASSETS

ROWS = [{"question": f"What is {i} plus 2?", "answer": f"It is {i + 2}."} for i in range(5)]


@pytest.fixture
def chat():
    return ChatTokenizer.from_folder(ASSETS / "demo")


def write_lines(path, values=ROWS):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))


def write_csv(path):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ROWS[0])
        writer.writeheader()
        writer.writerows(ROWS)


def write_parquet(path):
    import datasets  # noqa: PLC0415

    datasets.Dataset.from_list(ROWS).to_parquet(path)


def write_saved(path):
    import datasets  # noqa: PLC0415

    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(path)


def write_folder(path):
    (path / "data").mkdir(parents=True)
    write_lines(path / "data" / "train-00000-of-00002.jsonl", ROWS[:2])
    write_lines(path / "data" / "train-00001-of-00002.jsonl", ROWS[2:])
    write_lines(path / "data" / "test-00000-of-00001.jsonl", ROWS[:1])


FORMS = {
    "a.jsonl": write_lines,
    "a.json": lambda path: path.write_text(json.dumps(ROWS, indent=1)),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress("\n".join(map(json.dumps, ROWS)).encode())),
    "a.json.gz": lambda path: path.write_bytes(gzip.compress(json.dumps({"data": ROWS}).encode())),
    "a.csv": write_csv,
    "a.parquet": write_parquet,
    "saved": write_saved,
    "folder": write_folder,
    "no_ending": write_lines,
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_holds_the_same_records(tmp_path, chat, name):
    FORMS[name](tmp_path / name)
    (found,) = prepare_sources([parse_source(str(tmp_path / name))], chat, 64, False, None)
    write_lines(tmp_path / "expected.jsonl")
    (expected,) = prepare_sources([parse_source(str(tmp_path / "expected.jsonl"))], chat, 64, False, None)
    assert list(found.sequences) == list(expected.sequences)
    assert found.describe().startswith(f"{tmp_path / name}: 5 of 5 records, ")


def test_tokenized_rows_of_an_arrow_file(tmp_path, chat):
    import datasets  # noqa: PLC0415

    datasets.Dataset.from_list([{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}]).save_to_disk(tmp_path / "saved")
    (found,) = prepare_sources([parse_source(str(tmp_path / "saved"))], chat, 64, False, None)
    assert list(found.sequences) == [([1, 2, 3], [-100, 2, 3])]


def test_typed_columns_add_no_nulls(tmp_path):
    import datasets  # noqa: PLC0415

    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    datasets.Dataset.from_list([{"messages": turns}]).to_parquet(tmp_path / "a.parquet")
    ((row, where),) = rows.read_rows(tmp_path / "a.parquet")
    assert row["messages"] == [turns[0], {"role": "assistant", "tool_calls": [call]}]
    assert where == f"{tmp_path / 'a.parquet'}, row 1"


class Hub:
    """Data sets of the hub as `datasets` gives them, from a file in place of the network."""

    def __init__(self, path, monkeypatch):
        import datasets  # noqa: PLC0415

        self.path, self.asked, self.is_offline = path, [], False
        self._open = datasets.load_dataset_builder
        monkeypatch.setattr(datasets, "load_dataset_builder", self.open)

    def open(self, name, config):
        self.asked.append((name, config))
        if self.is_offline:
            raise ConnectionError("no route to host")
        cache = str(self.path.parent / "datasets")
        files = {"train": str(self.path), "test": str(self.path)}
        builder = self._open("json", config or "default", data_files=files, cache_dir=cache)
        builder.hash = hashlib.sha256(self.path.read_bytes()).hexdigest()  # on the hub it is the commit
        return builder


@pytest.fixture
def hub(tmp_path, monkeypatch):
    write_lines(tmp_path / "rows.jsonl")
    return Hub(tmp_path / "rows.jsonl", monkeypatch)


def test_hub_ids_are_streamed_through_datasets(hub, chat, tmp_path):
    texts = ("org/name", "org/name:test", "org/name:main:test=0.5")
    prepared = prepare_sources([parse_source(text) for text in texts], chat, 64, False, None)
    assert hub.asked == [("org/name", None), ("org/name", None), ("org/name", "main")]
    assert [len(part.sequences) for part in prepared] == [5, 5, 5]
    assert prepared[2].weight == 0.5
    (expected,) = prepare_sources([parse_source(str(hub.path))], chat, 64, False, None)
    assert list(prepared[0].sequences) == list(expected.sequences)
    assert not list(tmp_path.glob("datasets/**/*.arrow"))  # nothing was written to the cache of the library


def test_a_billion_tokens_take_a_window_of_memory(chat, tmp_path):
    """Their file is sparse: it takes no room on the disk either. What was 50 GiB is an index and a batch."""
    shard = np.lib.format.open_memmap(tmp_path / "shard.npy", "w+", np.int32, (10**9,))
    shard[-4:] = [1, 2, 3, 4]
    del shard
    tracemalloc.start()  # counts NumPy's arrays too
    try:
        prepared = prepare_sources([Source(str(tmp_path / "shard.npy"))], chat, 16384, False, tmp_path / "cache")
        batches = GlobalBatches.of_parts(prepared, 131072, seed=0)
        num_steps = batches.num_steps(None, None)
        sizes = [batch.num_tokens for batch in batches.batches(3)]
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert num_steps == 7630
    assert sizes == [131072] * 3
    assert peak_bytes < 100e6
    assert batches.sequences[len(batches.sequences) - 1].input_ids[-4:] == [1, 2, 3, 4]
    assert not (tmp_path / "cache").exists()  # shards are read where they are


def test_what_the_hub_refuses_names_the_command(hub):
    hub.is_offline = True
    command = "flexengine download dataset openai/gsm8k"
    with pytest.raises(ValueError, match=rf"no route to host\n.*{command} --split train --target gsm8k\.jsonl"):
        Reader(Source("openai/gsm8k"))
    with pytest.raises(ValueError, match=f"{command} --config main --split test"):
        Reader(parse_source("openai/gsm8k:main:test"))


def test_without_a_network_the_tokens_of_an_earlier_run_are_used(hub, chat, tmp_path, caplog):
    def sequences(text="org/name"):
        (found,) = prepare_sources([parse_source(text)], chat, 64, False, tmp_path / "cache")
        return list(found.sequences)

    before = sequences()
    write_lines(hub.path, ROWS[:2])
    assert len(now := sequences()) == 2 < len(before)
    hub.is_offline = True
    assert sequences() == now
    assert "no route to host" in caplog.text
    assert "an earlier run left" in caplog.text
    with pytest.raises(ValueError, match="no route to host"):
        sequences("org/name:test")


def test_a_stream_that_breaks_leaves_nothing(hub, chat, tmp_path):
    hub.path.write_text(json.dumps(ROWS[0]) + "\n{")
    with pytest.raises(ValueError, match=r"data set org/name \(split train\): the stream ended after \d+ rows: "):
        prepare_sources([parse_source("org/name")], chat, 64, False, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing.jsonl", "no such file; --dataset wants a JSON"),
        ("deep/er/than.a/hub/id", "no such file"),
        ("org/name.jsonl", "no such file"),
        ("org/name=0", "a weight must be more than 0"),
        ("org/name:a:b:c", "too many colons"),
    ],
)
def test_sources_that_are_none(text, message):
    with pytest.raises(ValueError, match=message):
        parse_source(text)


def test_a_split_that_a_folder_lacks(tmp_path, chat):
    write_folder(tmp_path / "data")
    with pytest.raises(ValueError, match=r"the data set has: test, train. Choose one with --dataset .*data:SPLIT"):
        Reader(parse_source(f"{tmp_path / 'data'}:validation"))


def test_records_are_tokenized_once(tmp_path, chat, monkeypatch):
    write_lines(tmp_path / "a.jsonl")
    source, cache = parse_source(str(tmp_path / "a.jsonl")), tmp_path / "cache"
    (first,) = prepare_sources([source], chat, 64, False, cache)
    with monkeypatch.context() as patched:
        patched.setattr(module, "encode_records", None)
        (again,) = prepare_sources([source], chat, 32, False, cache)  # another length cuts the same tokens otherwise
    assert list(again.sequences) == list(first.sequences)
    assert len(list(cache.iterdir())) == 1
    write_lines(tmp_path / "a.jsonl", ROWS[:4])
    assert len(prepare_sources([source], chat, 64, False, cache)[0].sequences) == 4
    chat.train_on = "all"
    prepare_sources([source], chat, 64, False, cache)
    assert len(list(cache.iterdir())) == 3


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, chat, caplog):
    write_lines(tmp_path / "a.jsonl")
    (tmp_path / "cache").write_text("a file")
    (found,) = prepare_sources([parse_source(str(tmp_path / "a.jsonl"))], chat, 64, False, tmp_path / "cache")
    assert len(found.sequences) == 5
    assert "cannot be used" in caplog.text


def test_what_is_left_out_is_told(tmp_path, chat):
    tool = {"type": "function", "function": {"name": "get_weather"}}
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    write_lines(tmp_path / "a.jsonl", [{"messages": turns, "tools": [tool]}, {"messages": turns, "source": "web"}])
    (found,) = prepare_sources([parse_source(str(tmp_path / "a.jsonl"))], chat, 64, False, tmp_path / "cache")
    told = "1 of 2 records, {} tokens; 1 left out, since the chat template does not write the record's tools; "
    tokens = sum(len(row.input_ids) for row in found.sequences)
    assert found.describe() == f"{tmp_path / 'a.jsonl'}: {told.format(tokens)}1 values of source not read"
    write_lines(tmp_path / "b.jsonl", [{"messages": turns, "tools": [tool]}])
    with pytest.raises(ValueError, match=r"no record is left.*\n  1 left out, since the chat template does not write"):
        prepare_sources([parse_source(str(tmp_path / "b.jsonl"))], chat, 64, False, None)


def test_long_documents_beside_short_ones_are_kept(tmp_path, chat):
    write_lines(tmp_path / "a.jsonl", [{"text": "the river is wide " * 1700}, {"text": "short and whole"}])
    (found,) = prepare_sources([parse_source(str(tmp_path / "a.jsonl"))], chat, 64, False, None)
    whole = chat.encode_record(Record(text="the river is wide " * 1700)).input_ids
    *parts, last = [row.input_ids for row in found.sequences]
    assert parts[0] + [token for part in parts[1:] for token in part[1:]] == whole
    assert last == chat.encode_record(Record(text="short and whole")).input_ids
    assert "1 split into sequences" in found.describe()


def test_a_text_beyond_what_a_tokenizer_takes_is_refused_early(tmp_path, chat, monkeypatch):
    monkeypatch.setattr("flexengine.data.encoding.LONGEST_TEXT", 1000)
    write_lines(tmp_path / "a.jsonl", [{"text": "a"}, {"text": "b " * 1000}])
    with pytest.raises(ValueError, match=r"a.jsonl, line 2: a text of 2000 characters; the longest is 1000: split"):
        prepare_sources([parse_source(str(tmp_path / "a.jsonl"))], chat, 64, False, None)


@pytest.mark.parametrize("indent", [None, 2])
def test_arrays_are_read_a_piece_at_a_time(tmp_path, monkeypatch, indent):
    values = [{"text": "ä" * n + ' ",]}{[\\', "n": [n, -1.5e3, True, None]} for n in range(40)]
    (tmp_path / "a.json").write_text(json.dumps(values, indent=indent))
    for size in (1, 7, 64):
        monkeypatch.setattr(rows, "READ_BYTES", max(size, 4))
        assert [row for row, _ in rows.read_rows(tmp_path / "a.json")] == values


@pytest.mark.parametrize(
    "text", ['[{"a": 1} {"a": 2}]', '[{"a": 1}, {"a": tru}]', '[{"a": 1}, {"a": 2}', '[{"a": 1}] x']
)
def test_damaged_arrays(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=r"a\.json: not valid JSON"):
        list(rows.read_rows(tmp_path / "a.json"))


def test_rows_above_the_window_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "MAX_ROW_BYTES", 2**20)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "' + "b" * 2**21 + '"}\n')
    with pytest.raises(ValueError, match=r"a.jsonl, line 2: longer than 1 MiB; split it into several records"):
        list(rows.read_rows(tmp_path / "a.jsonl"))
    (tmp_path / "a.json").write_text('[{"text": "a"}, {"text": "' + "b" * 2**22 + '"}]')
    with pytest.raises(ValueError, match=r"a.json, record 2: longer than 1 MiB; split it"):
        list(rows.read_rows(tmp_path / "a.json"))


def test_weights_say_how_often_an_epoch_sees_a_source(tmp_path, chat):
    for name, count in (("a", 4), ("b", 3)):
        write_lines(tmp_path / f"{name}.jsonl", [{"input_ids": [ord(name), n, n]} for n in range(count)])
    texts = [f"{tmp_path / 'a.jsonl'}=0.5", f"{tmp_path / 'b.jsonl'}=2"]
    prepared = prepare_sources([parse_source(text) for text in texts], chat, 64, False, None)
    data = GlobalBatches.of_parts(prepared, 9, seed=0)
    epoch = [row[:2] for batch in data.batches(data.num_steps(None, None)) for row in batch.input_ids]
    assert sorted(epoch).count([ord("b"), 1]) == 2
    assert sum(name == ord("a") for name, _ in epoch) == 2
    other = [row[:2] for batch in GlobalBatches.of_parts(prepared, 9, seed=1).batches(3) for row in batch.input_ids]
    assert epoch[: len(other)] != other


def test_code_is_part_of_the_key(chat, tmp_path, monkeypatch):
    write_lines(tmp_path / "a.jsonl")
    reader = Reader(parse_source(str(tmp_path / "a.jsonl")))
    before = module._key(reader, chat)
    monkeypatch.setattr(module, "_code_key", lambda: "another version")
    assert module._key(reader, chat) != before


def test_shards_are_a_source(tmp_path, chat):
    np.save(tmp_path / "a.npy", np.arange(100, dtype=np.uint16))
    (found,) = prepare_sources([parse_source(str(tmp_path / "a.npy"))], chat, 16, False, None)
    assert sum(len(row.input_ids) - 1 for row in found.sequences) == 99
