"""Tokens on disk: what is written is read, records are cut as they say, and shards of tokens are understood."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexengine.data import store
from flexengine.data.records import IGNORE, TokenizedRecord
from flexengine.data.shards import open_shard
from flexengine.data.store import (
    StoredSequences,
    cut_records,
    default_cache,
    open_table,
    table_in_scratch,
    write_table,
)

RECORDS = [
    TokenizedRecord([1, 2, 3], [1, 2, 3]),
    TokenizedRecord([0, 5], [IGNORE, 5]),
    TokenizedRecord([7, 8, 9, 0], [IGNORE, IGNORE, 9, IGNORE]),
]


def sequences_of(table, max_seq_len=100, truncate_long=False):
    return list(StoredSequences([(table.file, cut_records(table, max_seq_len, truncate_long))]))


def test_what_is_written_is_read(tmp_path):
    write_table(tmp_path / "a" / "key", RECORDS, {"left_out": {"a reason": 2}, "notes": {}})
    table = open_table(tmp_path / "a" / "key")
    assert sequences_of(table) == RECORDS
    assert table.left_out == {"a reason": 2}
    assert (tmp_path / "a" / "key" / "tokens.bin").stat().st_size == 4 * 9
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["key"]


def test_where_tokens_are_kept(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.delenv("FLEXENGINE_CACHE", raising=False)
    assert default_cache() == Path("/xdg/flexengine/data")
    monkeypatch.setenv("FLEXENGINE_CACHE", "/own")
    assert default_cache() == Path("/own/data")


def test_damaged_table_is_none_and_written_again(tmp_path):
    folder = tmp_path / "key"
    assert open_table(folder) is None
    for name in ("tokens.bin", "index.npz", "counts.json"):
        write_table(folder, RECORDS, {"left_out": {}, "notes": {}})
        (folder / name).write_bytes((folder / name).read_bytes()[:-3])
        assert open_table(folder) is None


def test_flipped_bits_of_a_table_are_noticed(tmp_path, caplog):
    """Of tokens, of what counts as a target, of the index and of the counts: it is written again, not trained."""
    folder = tmp_path / "key"
    for name in ("tokens.bin", "index.npz", "counts.json"):
        write_table(folder, RECORDS, {"left_out": {"a reason": 2}, "notes": {}})
        data = (folder / name).read_bytes()
        digest = open_table(folder).sha256
        for at in range(0, len(data), 7):
            (folder / name).write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
            found = open_table(folder)
            assert found is None or (found.sha256, found.left_out) == (digest, {"a reason": 2}), (name, at)
            assert found is None or name == "index.npz"  # bytes of an archive that nothing depends on
    assert "is not what was written there; the data is tokenized again" in caplog.text


def test_a_large_shard_is_told_by_blocks_up_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "HASHED_BLOCK_BYTES", 8)
    monkeypatch.setattr(store, "MOST_HASHED_BYTES", 32)
    np.save(tmp_path / "a.npy", np.arange(39, dtype=np.int32))
    table = open_shard(tmp_path / "a.npy", 64)
    blocks = [block.tolist() for block in table.file.blocks(39)]
    assert len(blocks) == 4
    assert blocks[-1] == [38]
    monkeypatch.setattr(store, "MOST_HASHED_BYTES", 1000)
    assert np.concatenate(list(table.file.blocks(39))).tolist() == list(range(39))


def test_a_table_that_fails_leaves_nothing(tmp_path):
    def failing():
        yield RECORDS[0]
        raise ValueError("line 2 is no record")

    with pytest.raises(ValueError, match="line 2"):
        write_table(tmp_path / "key", failing(), {})
    assert not list(tmp_path.iterdir())


def test_long_texts_are_split_with_a_token_in_common():
    table = table_in_scratch([TokenizedRecord(ids, ids) for ids in ([0, 1, 2, 3, 4, 5, 6], [7, 8], [9])])
    cut = cut_records(table, 3, truncate_long=False)
    assert [row.input_ids for row in StoredSequences([(table.file, cut)])] == [[0, 1, 2], [2, 3, 4], [4, 5, 6], [7, 8]]
    assert (cut.num_split, cut.num_too_long, cut.num_without_targets) == (1, 0, 1)


@given(
    st.lists(st.tuples(st.integers(1, 12), st.sampled_from(["whole", "end", "none"])), max_size=12),
    st.integers(2, 6),
    st.booleans(),
)
def test_every_record_is_split_cut_or_counted(shapes, max_seq_len, truncate_long):
    records = []
    for n, (size, kind) in enumerate(shapes):
        ids = list(range(100 * n, 100 * n + size))
        labels = {"whole": ids, "end": [IGNORE] * (size - 1) + ids[-1:], "none": [IGNORE] * size}[kind]
        records.append(TokenizedRecord(ids, labels))
    table = table_in_scratch(records)
    cut = cut_records(table, max_seq_len, truncate_long)
    rows = list(StoredSequences([(table.file, cut)]))
    assert all(1 < len(row.input_ids) <= max_seq_len for row in rows)
    assert all(any(label != IGNORE for label in row.labels[1:]) for row in rows)
    learnt = [
        token for row in rows for token, label in zip(row.input_ids[1:], row.labels[1:], strict=True) if label >= 0
    ]
    whole = [token for record in records if record.labels == record.input_ids for token in record.input_ids[1:]]
    short = [r.input_ids[-1] for r in records if r.labels != r.input_ids and r.labels[-1] >= 0]
    short = [token for token in short if 0 < token % 100 < max_seq_len]
    assert sorted(learnt) == sorted(whole + short)
    kept = len({row.input_ids[0] // 100 for row in rows})
    assert kept + cut.num_too_long + cut.num_without_targets == len(records)


SHARDS = {
    "bare16": (np.arange(20, dtype=np.uint16).tobytes(), "a.bin", 1000),
    "bare32": (np.arange(20, dtype=np.uint32).tobytes(), "a.bin", 100_000),
    "llm_c": (
        np.array([20240520, 1, 20] + [0] * 253, np.int32).tobytes() + np.arange(20, dtype=np.uint16).tobytes(),
        "a.bin",
        100_000,
    ),
}


@pytest.mark.parametrize("name", SHARDS)
def test_shards(tmp_path, name):
    contents, file_name, vocab_size = SHARDS[name]
    (tmp_path / file_name).write_bytes(contents)
    rows = sequences_of(open_shard(tmp_path / file_name, vocab_size), max_seq_len=8)
    assert [row.input_ids for row in rows] == [list(range(8)), list(range(7, 15)), list(range(14, 20))]
    assert all(row.labels == row.input_ids for row in rows)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
def test_numpy_shards(tmp_path, dtype):
    np.save(tmp_path / "a.npy", np.arange(10, dtype=dtype))
    assert [row.input_ids for row in sequences_of(open_shard(tmp_path / "a.npy", 10))] == [list(range(10))]


def test_shards_that_are_none(tmp_path):
    np.save(tmp_path / "matrix.npy", np.zeros((2, 2), np.int32))
    (tmp_path / "text.npy").write_text("x")
    (tmp_path / "odd.bin").write_bytes(b"123")
    (tmp_path / "large.bin").write_bytes(np.full(4, 60000, np.uint16).tobytes())
    for name, message in {
        "matrix.npy": r"of shape \(2, 2\); token ids are a flat array",
        "text.npy": "cannot be read as a NumPy array",
        "odd.bin": "3 bytes are no whole number of uint16 tokens",
        "large.bin": "holds the token 60000, read as uint16, but the model's vocab_size is 50000",
    }.items():
        with pytest.raises(ValueError, match=message):
            open_shard(tmp_path / name, 50000)
