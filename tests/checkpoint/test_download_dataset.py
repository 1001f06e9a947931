"""Data set downloads: which files make up a split, what becomes of their rows, and the manifest."""

import gzip
import json
import sys
from pathlib import Path

import pytest

from flexengine.checkpoint.dataset_files import glob_regex, select_data_files
from flexengine.checkpoint.dataset_rows import write_json_lines
from flexengine.checkpoint.download import DownloadError, main, verify_manifest

ROWS = [{"text": "grüße", "n": 1}, {"text": "b", "n": None}, {"text": 'quote " and\nline', "n": 2.5}]
REPO = "org/data"


def lines(rows: list) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def read_lines(path: Path) -> list:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def fetch(hub, target: Path, *arguments: str) -> int:
    return main(["dataset", REPO, "--target", str(target), "--endpoint", hub.url, "--retries", "0", *arguments])


@pytest.fixture
def repo(hub):
    files = {"README.md": b"# data", "train.jsonl": lines(ROWS), "test.jsonl": lines(ROWS[:1])}
    hub.repos[f"datasets/{REPO}"] = files
    return files


def test_json_lines(hub, repo, tmp_path):
    target = tmp_path / "new" / "data.jsonl"
    assert fetch(hub, target) == 0
    assert read_lines(target) == ROWS
    assert sorted(path.name for path in target.parent.iterdir()) == ["data.jsonl", "data.jsonl.manifest.json"]
    manifest = verify_manifest(target)
    assert (manifest["revision"], manifest["split"], manifest["num_rows"]) == (hub.commit, "train", 3)
    assert manifest["source_files"]["train.jsonl"]["size"] == len(repo["train.jsonl"])
    hub.requests.clear()
    assert fetch(hub, target) == 0
    assert hub.requests == []
    assert fetch(hub, target, "--split", "test") == 0
    assert read_lines(target) == ROWS[:1]
    assert main(["verify", str(target)]) == 0


def test_csv(hub, repo, tmp_path):
    hub.repos[f"datasets/{REPO}"] = {"data/train.csv": b'\xef\xbb\xbfprompt,answer\r\n"a, ""b""\r\nc",1\r\nd\r\n'}
    assert fetch(hub, tmp_path / "x.jsonl") == 0
    assert read_lines(tmp_path / "x.jsonl") == [
        {"prompt": 'a, "b"\r\nc', "answer": "1"},
        {"prompt": "d", "answer": None},
    ]


def test_unknown_split_and_damaged_rows_leave_the_old_file(hub, repo, tmp_path, capsys):
    target = tmp_path / "x.jsonl"
    target.write_text("mine\n")
    assert fetch(hub, target, "--split", "validation") == 1
    assert "split 'validation' was asked for, the data set has: test, train" in capsys.readouterr().err
    repo["train.jsonl"] = lines(ROWS) + b"{broken\n"
    assert fetch(hub, target) == 1
    assert "train.jsonl, line 4: not valid JSON" in capsys.readouterr().err
    assert target.read_text() == "mine\n"
    assert not (tmp_path / "x.jsonl.manifest.json").exists()


def test_resume_keeps_finished_files(hub, repo, tmp_path):
    hub.repos[f"datasets/{REPO}"] = {
        f"data/train-{i:05d}-of-00002.jsonl": lines([{"i": i, "text": "x" * 5000}]) for i in range(2)
    }
    last = "data/train-00001-of-00002.jsonl"
    hub.drop_after[last] = 1000
    assert fetch(hub, tmp_path / "x.jsonl", "--workers", "1") == 1
    assert not (tmp_path / "x.jsonl").exists()
    hub.drop_after.clear()
    hub.requests.clear()
    assert fetch(hub, tmp_path / "x.jsonl") == 0
    assert [(request.path, request.start) for request in hub.requests] == [(last, 1000)]
    assert [row["i"] for row in read_lines(tmp_path / "x.jsonl")] == [0, 1]


def test_unknown_repository_and_folder_as_target(hub, tmp_path, capsys):
    assert fetch(hub, tmp_path / "x.jsonl") == 1
    assert "dataset 'org/data' at revision 'main'" in (message := capsys.readouterr().err)
    assert "not found" in message
    assert fetch(hub, tmp_path) == 1
    assert "is a file such as" in capsys.readouterr().err


def test_parquet_without_pyarrow_names_the_remedy(hub, repo, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    hub.repos[f"datasets/{REPO}"] = {"data/train-00000-of-00001.parquet": b"PAR1"}
    assert fetch(hub, tmp_path / "x.jsonl") == 1
    assert "pip install pyarrow" in capsys.readouterr().err
    assert hub.requests == []


def test_parquet(hub, repo, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["a", "b"], "n": [[1], []]}), tmp_path / "t.parquet")
    hub.repos[f"datasets/{REPO}"] = {"data/train-00000-of-00001.parquet": (tmp_path / "t.parquet").read_bytes()}
    assert fetch(hub, tmp_path / "x.jsonl") == 0
    assert read_lines(tmp_path / "x.jsonl") == [{"text": "a", "n": [1]}, {"text": "b", "n": []}]


def test_images_come_along_in_the_records(hub, repo, tmp_path, capsys):
    """Bytes of the image feature, and images of the web, so that training needs no network."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    hub.repos["models/org/pictures"] = {"a.png": b"\x89PNG of the web"}
    url = f"{hub.url}/org/pictures/resolve/{hub.commit}/a.png"
    images = [{"bytes": b"\xff\xd8 a JPEG", "path": "b.jpg"}, {"bytes": None, "path": "c.jpg"}]
    turns = [[{"content": [{"type": "image_url", "image_url": {"url": url}}]}], [{"content": [{"type": "text"}]}]]
    parquet.write_table(pyarrow.table({"image": images, "messages": turns}), tmp_path / "t.parquet")
    hub.repos[f"datasets/{REPO}"] = {"data/train-00000-of-00001.parquet": (tmp_path / "t.parquet").read_bytes()}
    assert fetch(hub, tmp_path / "x.jsonl") == 0
    first, second = read_lines(tmp_path / "x.jsonl")
    assert first["image"] == "data:image/jpeg;base64,/9ggYSBKUEVH"
    assert first["messages"][0]["content"][0]["image_url"]["url"] == "data:image/png;base64,iVBORyBvZiB0aGUgd2Vi"
    assert second["image"] == {"path": "c.jpg"}
    del hub.repos["models/org/pictures"]["a.png"]
    assert fetch(hub, tmp_path / "y.jsonl") == 1
    assert "data/train-00000-of-00001.parquet".rpartition("/")[2] + ", row 1: the image http" in capsys.readouterr().err
    assert not (tmp_path / "y.jsonl").exists()


@pytest.mark.parametrize(
    ("name", "contents"),
    [
        ("a.jsonl.gz", gzip.compress(lines(ROWS), mtime=0)),
        ("a.ndjson", lines(ROWS).replace(b"\n", b"\r\n\r\n")),
        ("a.json", json.dumps(ROWS, indent=2).encode()),
        ("a.json.gz", gzip.compress(json.dumps(ROWS).encode(), mtime=0)),
        ("a.json", lines(ROWS)),
        ("a.json", json.dumps({"version": 1, "data": ROWS}, indent=1).encode()),
        ("a.json", json.dumps({"version": 1, "data": ROWS}).encode() + b"\n \n"),
        ("a.json", b"\n" + lines(ROWS).replace(b"\n", b"\n\n")),
        ("a.json", b"[\n" + b",\n".join(lines(ROWS).splitlines()) + b"\n]\n"),
    ],
)
def test_json_forms(tmp_path, name, contents):
    (tmp_path / name).write_bytes(contents)
    record, num_rows = write_json_lines([tmp_path / name], tmp_path / "out.jsonl")
    assert read_lines(tmp_path / "out.jsonl") == ROWS
    assert (num_rows, record.num_bytes) == (3, (tmp_path / "out.jsonl").stat().st_size)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"conversations": [{"from": "human", "value": "a"}]},
        {"a": [{"n": 1}], "b": [{"n": 2}]},
    ],
)
def test_a_lone_object_that_is_a_row(tmp_path, row):
    (tmp_path / "a.json").write_bytes(lines([row]))
    assert write_json_lines([tmp_path / "a.json"], tmp_path / "out.jsonl")[1] == 1
    assert read_lines(tmp_path / "out.jsonl") == [row]


def test_lone_surrogate_survives(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"t": "\\ud83d"}\n')
    write_json_lines([tmp_path / "a.jsonl"], tmp_path / "out.jsonl")
    assert read_lines(tmp_path / "out.jsonl") == [{"t": "\ud83d"}]


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("a.jsonl", b'"text"\n', "row 1: expected a JSON object, found str"),
        ("a.jsonl", b"\n\n", "no rows"),
        ("a.json", b"{,}", "neither one JSON value nor JSON lines"),
        ("a.csv", b"a,b\n1,2,3\n", "line 2: more fields"),
        ("a.csv", b'a,b\n"1"2,3\n', "after line 1: not CSV"),
        ("a.jsonl", b'{"a": "\xff"}\n', "not UTF-8"),
        ("a.jsonl", b'{"a": 1}\n' + b"[" * 200_000, "a.jsonl, line 2: .* nested too deep"),
        ("a.jsonl", b'{"a": ' + b"1" * 5000 + b"}", "a.jsonl, line 1: .* a number of more than 4300 digits"),
        ("a.json", b'{"a": 1}\n\n{"a": ' + b"[" * 200_000, "a.json, line 3: .* nested too deep"),
        ("a.json", b"[" * 200_000, "a.json: .* nested too deep"),
        ("a.json", b'{"a": ' + b"1" * 5000 + b"}", "a.json: .* a number of more than 4300 digits"),
        ("a.jsonl", b'{"a": NaN}', "row 1: .*not JSON compliant"),
        ("a.json", b'[{"a": 1}, {"a": [-Infinity]}]', "row 2: .*not JSON compliant"),
        ("a.jsonl", b'{"a": 1e999, "b": "\\ud83d"}', "row 1: .*not JSON compliant"),
        ("a.jsonl.gz", b"plain", "damaged gzip"),
        ("a.jsonl.gz", gzip.compress(lines(ROWS), mtime=0)[:-9], "damaged gzip"),
    ],
)
def test_unreadable_rows(tmp_path, name, contents, message):
    (tmp_path / name).write_bytes(contents)
    with pytest.raises(DownloadError, match=message):
        write_json_lines([tmp_path / name], tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


SHARDED = [
    "data/train-00000-of-00002.parquet",
    "data/train-00001-of-00002.parquet",
    "data/test_sft-00000-of-00001.parquet",
]
CARD = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: "main/train-*.jsonl"
  - split: test
    path: [main/test.jsonl]
- config_name: extra
  data_dir: extra
  data_files: "*.jsonl"
---
# text
"""
CARD_FILES = ["README.md", "main/train-1.jsonl", "main/train-2.jsonl", "main/deep/train-3.jsonl", "main/test.jsonl"]
CARD_FILES += ["extra/all.jsonl"]


@pytest.mark.parametrize(
    ("paths", "readme", "split", "config", "expected"),
    [
        (SHARDED, None, "train", None, SHARDED[:2]),
        (SHARDED, None, "test_sft", None, SHARDED[2:]),
        (["train/a.jsonl", "test/train.jsonl"], None, "train", None, ["train/a.jsonl"]),
        (["x/my-train.jsonl", "dev.jsonl"], None, "train", None, ["x/my-train.jsonl"]),
        (["train.jsonl", "dev.jsonl"], None, "validation", None, ["dev.jsonl"]),
        (["train.jsonl", "dev.jsonl"], None, "val", None, ["dev.jsonl"]),
        (["training1.csv", "restrain.csv"], None, "train", None, ["training1.csv"]),
        (["b.jsonl", "a.jsonl", "README.md", "dataset_infos.json"], None, "train", None, ["a.jsonl", "b.jsonl"]),
        (["chat.jsonl", "train.jsonl"], None, "chat", None, ["chat.jsonl"]),
        (["en/train.csv", "de/train.csv"], None, "train", "de", ["de/train.csv"]),
        (["train.json", "train-1.jsonl", "train-2.jsonl"], None, "train", None, ["train-1.jsonl", "train-2.jsonl"]),
        (CARD_FILES, CARD, "train", "main", ["main/train-1.jsonl", "main/train-2.jsonl"]),
        (CARD_FILES, CARD, "test", "main", ["main/test.jsonl"]),
        (CARD_FILES, CARD, "train", "extra", ["extra/all.jsonl"]),
        (CARD_FILES, CARD.replace("name: main", "name: default"), "test", None, ["main/test.jsonl"]),
        (CARD_FILES, CARD.replace("name: main", "name: m\n  default: true"), "test", None, ["main/test.jsonl"]),
        (["a.jsonl"], "---\nconfigs: [}\n---\n", "train", None, ["a.jsonl"]),
        (["a.jsonl"], "---\nlicense: mit\n---", "train", None, ["a.jsonl"]),
        (["a.jsonl"], "---\nconfigs: " + "[" * 5000 + "\n---", "train", None, ["a.jsonl"]),
        (["a.jsonl"], "---\nversion: " + "1" * 5000 + "\n---", "train", None, ["a.jsonl"]),
        (["a.jsonl"], "---\ndate: 2024-99-99\n---", "train", None, ["a.jsonl"]),
    ],
)
def test_select_data_files(paths, readme, split, config, expected):
    assert select_data_files(paths, readme, split, config) == expected


@pytest.mark.parametrize(
    ("paths", "readme", "split", "config", "message"),
    [
        (CARD_FILES, CARD, "train", None, "configurations main, extra; none was asked for"),
        (CARD_FILES, CARD, "train", "nope", "'nope' was asked for"),
        (CARD_FILES[:1], CARD, "train", "main", "no file matches"),
        (CARD_FILES, CARD, "dev", "main", "has: test, train"),
        (
            CARD_FILES,
            CARD.replace("main/train-*.jsonl", "data/[z-a].json"),
            "train",
            "main",
            r"data/\[z-a\].json.*range",
        ),
        (CARD_FILES, "---\nconfigs: [{data_files: 5}]\n---", "train", None, "lists '5'"),
        (["en/a.csv"], None, "train", "de", r"no folder has that name \(folders: en\)"),
        (["data.tar", ".gitattributes", "README.md"], None, "train", None, "consists of data.tar; readable are"),
        (["README.md"], None, "train", None, "has: train"),
    ],
)
def test_select_nothing(paths, readme, split, config, message):
    with pytest.raises(DownloadError, match=message):
        select_data_files(paths, readme, split, config)


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("data/*.csv", "data/a.csv", True),
        ("data/*.csv", "data/x/a.csv", False),
        ("data/**/*.csv", "data/a.csv", True),
        ("data/**/*.csv", "data/x/y/a.csv", True),
        ("**", "x/y", True),
        ("a[0-9]?.csv", "a1b.csv", True),
        ("a[!0-9].csv", "a1.csv", False),
        ("a.csv", "aXcsv", False),
    ],
)
def test_globs(pattern, path, matches):
    assert bool(glob_regex(pattern).fullmatch(path)) == matches
