"""Places: a folder is read as the hub reads a copy of a repository, and what is no place is said."""

import json
import os

import pytest

from flexengine.data.sources import Reader, parse_source

GSM = {f"{config}/{split}-00000-of-00001.jsonl": 1 for config in ("main", "socratic") for split in ("train", "test")}


def write(folder, files, readme=None):
    """Files of one record each, whose question is the file's name."""
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"question": name, "answer": "a"}) + "\n")
    if readme is not None:
        (folder / "README.md").write_text(f"---\n{readme}\n---\n# text\n")
    return folder


def read(text):
    return [record.messages[0].content for record in Reader(parse_source(str(text))).records()]


def configs(*names):
    return "configs:\n" + "".join(
        f"- config_name: {name}\n  data_files:\n  - split: train\n    path: {name}/train-*\n"
        f"  - split: test\n    path:\n    - {name}/test-*\n"
        for name in names
    )


FOLDERS = {
    "a_configuration": (GSM, configs("main", "socratic"), ":socratic:train", ["socratic/train-00000-of-00001.jsonl"]),
    "its_test_split": (GSM, configs("main", "socratic"), ":main:test=2", ["main/test-00000-of-00001.jsonl"]),
    "the_only_one": (GSM, configs("main"), "", ["main/train-00000-of-00001.jsonl"]),
    "the_default": (
        GSM,
        configs("main", "socratic") + "  default: true\n",
        ":test",
        ["socratic/test-00000-of-00001.jsonl"],
    ),
    "a_part_of_the_files": (
        ["clean.jsonl", "raw.jsonl"],
        "configs:\n- config_name: default\n  data_files: clean.jsonl",
        "",
        ["clean.jsonl"],
    ),
    "data_dir": (
        ["en/train.jsonl", "en/test.jsonl", "de/train.jsonl"],
        "configs: [{config_name: en, data_dir: en}, {config_name: de, data_dir: de}]",
        ":en:test",
        ["en/test.jsonl"],
    ),
    "patterns_and_lists": (
        ["a/1.jsonl", "a/x/2.jsonl", "b/3.jsonl", "c/4.jsonl"],
        "configs: [{config_name: default, data_files: [{split: train, path: ['a/**', 'b/*.jsonl']}]}]",
        "",
        ["a/1.jsonl", "a/x/2.jsonl", "b/3.jsonl"],
    ),
    "a_split_of_another_name": (
        ["a.jsonl", "b.jsonl"],
        "configs: [{config_name: default, data_files: {train_sft: a.jsonl, test_sft: b.jsonl}}]",
        ":train_sft",
        ["a.jsonl"],
    ),
    "folders_in_place_of_a_card": (["en/train.jsonl", "de/train.jsonl"], None, ":de:train", ["de/train.jsonl"]),
    "a_card_without_configurations": (["train.jsonl", "test.jsonl"], "license: mit", ":test", ["test.jsonl"]),
    "hive_partitions": (
        ["dt=2024/p.jsonl", "dt=2025/p.jsonl"],
        None,
        "",
        ["dt=2024/p.jsonl", "dt=2025/p.jsonl"],
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folders(tmp_path, name):
    files, readme, behind, expected = FOLDERS[name]
    assert read(f"{write(tmp_path / 'd=1', files, readme)}{behind}") == expected


def test_the_hub_library_reads_the_same_files(tmp_path):
    import datasets  # noqa: PLC0415

    folder = write(tmp_path / "data", GSM, configs("main", "socratic"))
    for config, split in (("main", "train"), ("socratic", "test")):
        theirs = datasets.load_dataset(str(folder), config, split=split, cache_dir=str(tmp_path / "cache"))
        assert read(f"{folder}:{config}:{split}") == theirs["question"]


@pytest.mark.parametrize(
    ("files", "readme", "behind", "message"),
    [
        (GSM, configs("main", "socratic"), "", "has configurations main, socratic; none was asked for.*d:CONFIG:SPLIT"),
        (GSM, configs("main", "socratic"), ":train", "has configurations main, socratic; none was asked for"),
        (GSM, configs("main", "socratic"), ":man:train", "configurations main, socratic; 'man' was asked for"),
        (GSM, configs("main"), ":main:dev", "has: test, train. Choose one with --dataset .*d:main:SPLIT"),
        (GSM, configs("main", "gone"), ":gone:train", "README.md lists 'gone/train-\\*' for split 'train', no file"),
        (GSM, "configs: [}", "", "names configurations in a header that is no YAML"),
        (["en/a.jsonl"], None, ":de:train", r"no folder has that name \(folders: en\). Leave CONFIG out"),
    ],
)
def test_a_folder_that_leaves_open_what_is_meant_is_refused(tmp_path, files, readme, behind, message):
    with pytest.raises(ValueError, match=message):
        read(f"{write(tmp_path / 'd', files, readme)}{behind}")


@pytest.mark.parametrize(
    ("files", "readme", "aside"),
    [
        (["train.jsonl", "test.jsonl", "extra.jsonl"], None, ["extra.jsonl"]),
        (["train-1.jsonl", "train-2.jsonl.zst"], None, ["train-2.jsonl.zst"]),
        (["train-1.jsonl", "train-2.jsonl", "train.csv"], None, ["train.csv"]),
        (["clean.jsonl", "raw.jsonl"], "configs: [{config_name: a, data_files: clean.jsonl}]", ["raw.jsonl"]),
        (["train.jsonl", "test.jsonl"], None, []),
        (GSM, configs("main", "socratic") + "  default: true\n", []),
    ],
)
def test_files_that_nobody_reads_are_told(tmp_path, caplog, files, readme, aside):
    read(write(tmp_path, files, readme))
    told = f"{len(aside)} files are of no split, and are not read: {', '.join(aside)}; read are "
    assert (told in caplog.text) == bool(aside)
    assert bool(caplog.text) == bool(aside)


def test_names_with_colons_and_equals_signs(tmp_path):
    write(tmp_path, ["run-12:30.jsonl", "lr=3.jsonl", "a:b/test.jsonl", "dt=2024/p.jsonl"])
    for name, weight in (("run-12:30.jsonl", 1), ("run-12:30.jsonl:train", 1), ("run-12:30.jsonl=2", 2)):
        source = parse_source(f"{tmp_path}/{name}")
        assert (source.place, source.split, source.weight) == (f"{tmp_path}/run-12:30.jsonl", "train", weight)
    assert parse_source(f"{tmp_path}/lr=3.jsonl").weight == 1
    assert read(f"{tmp_path}/a:b:test") == ["a:b/test.jsonl"]
    assert parse_source(f"{tmp_path}/dt=2024=0.5").weight == 0.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a.jsonl:train[:ten]", "a part is written as"),
        ("a.jsonl:test", "a.jsonl is a file, which has no split test; leave :test out"),
        ("a.jsonl:main:train", "a.jsonl is a file, which has no split main:train"),
        ("a.jsonl=0,5", "no such file; a weight is a number behind =, such as =0.5"),
        ("a.jsonl=50%", "a weight is a number behind ="),
        ("*.jsonl", "the shell replaces patterns only outside of quotes"),
        ("~/a.jsonl", "the shell replaces ~ only outside of quotes"),
        ("-", "the standard input is not read. That can be read only once"),
        ("/dev/null", "/dev/null is a pipe or a device. That can be read only once"),
        ("s3://example/a.jsonl", "only https addresses are fetched; download the file first"),
        ("hf://datasets/org/name/a.parquet", "write ORG/NAME"),
        ("file:///a.jsonl", "write the path alone, without file://"),
        ("link.jsonl", "is a link to nothing.jsonl, which is not there"),
    ],
)
def test_what_is_no_place_is_said(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, ["a.jsonl"])
    (tmp_path / "link.jsonl").symlink_to("nothing.jsonl")
    with pytest.raises(ValueError, match=message):
        parse_source(text)


def test_pipes_and_files_in_other_forms(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")  # as process substitution makes one
    with pytest.raises(ValueError, match=r"pipe\.jsonl is a pipe or a device.*write them to a file first"):
        parse_source(str(tmp_path / "pipe.jsonl"))
    for name, contents, message in (
        ("a.jsonl.zst", b"\x28\xb5\x2f\xfd", "zst files are not read; unpack it, or compress the data as .gz"),
        ("a.zip", b"PK", "zip files are not read"),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a pointer of Git LFS"),
    ):
        (tmp_path / name).write_bytes(contents)
        with pytest.raises(ValueError, match=message):
            read(tmp_path / name)
