"""write_checkpoint against safetensors.torch and transformers; nothing half-written whatever happens."""

import json
import os
import time

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from flexengine.checkpoint.atomic import STALE_AFTER_S, atomic_file, temporary_name
from flexengine.checkpoint.layout import RUN_FILE
from flexengine.checkpoint.manifest import verify_manifest
from flexengine.checkpoint.reader import CheckpointError, CheckpointReader
from flexengine.checkpoint.writer import TensorSource, support_files, write_checkpoint

MIXED = {
    "odd": torch.arange(7, dtype=torch.uint8),
    "matrix": torch.randn(5, 3, generator=torch.Generator().manual_seed(1)).bfloat16(),
    "scalar": torch.tensor(3.25, dtype=torch.float64),
    "empty": torch.empty(0, 4, dtype=torch.float16),
    "mask": torch.tensor([True, False, True]),
    "ünïcode": torch.ones(2, 2),
}


def sources(tensors: dict[str, torch.Tensor]) -> list[TensorSource]:
    return [TensorSource(name, t.dtype, tuple(t.shape), lambda t=t: t) for name, t in tensors.items()]


def assert_same(loaded: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor), name


def test_single_file_round_trip(tmp_path):
    paths = write_checkpoint(tmp_path / "new", sources(MIXED))
    assert [path.name for path in paths] == ["model.safetensors"]
    assert_same(load_file(paths[0]), MIXED)
    with safe_open(paths[0], "pt") as file:
        assert file.metadata() == {"format": "pt"}
    with CheckpointReader.open(tmp_path / "new") as reader:
        assert all(entry.offset_bytes % entry.dtype.itemsize == 0 for entry in reader.tensors.values())


def test_split_by_size(tmp_path):
    tensors = {f"layer.{i}": torch.full((i + 1, 10), float(i)) for i in range(5)}  # 40, 80, ... 200 bytes
    paths = write_checkpoint(tmp_path, sources(tensors), max_shard_bytes=130)
    shards = [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]
    assert [path.name for path in paths] == [*shards, "model.safetensors.index.json"]
    index = json.loads(paths[-1].read_text())
    assert index["metadata"]["total_size"] == 600
    assert index["weight_map"]["layer.1"] == shards[0]
    assert_same({k: v for path in paths[:-1] for k, v in load_file(path).items()}, tensors)


def test_source_split_is_reproduced(tmp_path):
    tensors = {name: torch.randn(3, 2) for name in "abcd"}
    names = {"a": "model-00002-of-00002.safetensors", "b": "model-00001-of-00002.safetensors"}
    shards = {"a": names["a"], "b": names["b"], "c": names["a"], "d": names["b"]}
    write_checkpoint(tmp_path / "one", sources(tensors), shards)
    with CheckpointReader.open(tmp_path / "one") as reader:
        assert reader.shard_of == shards
        write_checkpoint(tmp_path / "two", sources(tensors), reader.shard_of)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_a_checkpoint_can_be_replaced_in_place(tmp_path):
    write_checkpoint(tmp_path, sources({"a": torch.zeros(4)}))
    write_checkpoint(tmp_path, sources({"a": torch.ones(4)}))
    assert_same(load_file(tmp_path / "model.safetensors"), {"a": torch.ones(4)})
    with pytest.raises(CheckpointError, match=r"already holds model\.safetensors"):
        write_checkpoint(tmp_path, sources({"a": torch.ones(4), "b": torch.ones(4)}), max_shard_bytes=16)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_what_tells_of_an_earlier_run_does_not_stay(tmp_path):
    write_checkpoint(tmp_path, sources({"a": torch.zeros(4)}), beside={RUN_FILE: "{}"})
    assert (tmp_path / RUN_FILE).exists()
    write_checkpoint(tmp_path, sources({"a": torch.ones(4)}))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_views_strides_and_parameters_are_written_by_value(tmp_path):
    base = torch.arange(12.0).view(3, 4)
    tensors = {"t": base.t(), "row": base[1], "parameter": torch.nn.Parameter(base.clone())}
    write_checkpoint(tmp_path, sources(tensors))
    assert_same(load_file(tmp_path / "model.safetensors"), {k: v.detach() for k, v in tensors.items()})


def test_tensors_are_read_one_at_a_time(tmp_path):
    alive = []

    def read(index: int) -> torch.Tensor:
        import gc  # noqa: PLC0415 - counts what is alive at this moment only
        import weakref  # noqa: PLC0415

        gc.collect()
        assert not any(reference() is not None for reference in alive)
        tensor = torch.full((4,), float(index))
        alive.append(weakref.ref(tensor))
        return tensor

    write_checkpoint(tmp_path, [TensorSource(f"t{i}", torch.float32, (4,), lambda i=i: read(i)) for i in range(4)])
    assert len(alive) == 4


def test_a_tensor_may_come_in_pieces(tmp_path):
    tensor = torch.randn(7, 3)
    pieces = TensorSource("a", torch.float32, (7, 3), lambda: iter(tensor.flatten().split(5)))
    write_checkpoint(tmp_path / "pieces", [pieces])
    write_checkpoint(tmp_path / "whole", sources({"a": tensor}))
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("pieces", "whole"))
    assert one == other


@pytest.mark.parametrize("failing", ["a", "c"])
@pytest.mark.parametrize("exists", [True, False])
def test_failure_midway_leaves_nothing(tmp_path, failing, exists):
    folder = tmp_path / "out"
    if exists:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        write_checkpoint(folder, sources({"a": torch.ones(4), "z": torch.ones(4)}), max_shard_bytes=16)
    before = {path.name: path.read_bytes() for path in folder.glob("*")}

    def explode() -> torch.Tensor:
        raise RuntimeError("lost the GPU")

    broken = [
        source._replace(read=explode) if source.name == failing else source
        for source in sources({name: torch.zeros(4) for name in "abc"})
    ]
    with pytest.raises(RuntimeError, match="lost the GPU"):
        write_checkpoint(folder, broken, max_shard_bytes=16)
    assert {path.name: path.read_bytes() for path in folder.glob("*")} == before
    assert folder.exists() == exists


@pytest.mark.parametrize(
    ("tensors", "arguments", "message"),
    [
        ([], {}, "without tensors"),
        (sources({"a": torch.ones(1)}) * 2, {}, "'a' is given twice"),
        (sources({"__metadata__": torch.ones(1)}), {}, "reserved"),
        (sources({"a": torch.ones(1)}), {"shards": {}}, r"1 tensors without a shard \['a'\]"),
        (sources({"a": torch.ones(1)}), {"shards": {"a": "x.safetensors", "b": "x"}}, r"without a tensor \['b'\]"),
        (sources({"a": torch.ones(1)}), {"shards": {"a": "../x.safetensors"}}, "plain name"),
        ([TensorSource("a", torch.float32, (2,), lambda: torch.ones(3))], {}, r"declared \[2\].*returned \[3\]"),
        ([TensorSource("a", torch.float32, (2,), lambda: torch.ones(2).half())], {}, r"returned \[2\] torch.float16"),
        ([TensorSource("a", torch.float32, (2, 2), lambda: [torch.ones(2)])], {}, r"declared \[2, 2\].*2 elements"),
        ([TensorSource("a", torch.complex128, (2,), lambda: torch.ones(2))], {}, "no name for torch.complex128"),
        ([TensorSource("a", torch.uint8, (1 << 60,), lambda: torch.ones(1))], {}, r"needs 1073741824.00 GiB"),
    ],
)
def test_wrong_requests(tmp_path, tensors, arguments, message):
    with pytest.raises(CheckpointError, match=message):
        write_checkpoint(tmp_path / "out", tensors, **arguments)
    assert not (tmp_path / "out").exists()


PROCESSOR_FILES = [
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
]


@pytest.mark.parametrize("again", [False, True], ids=["new folder", "second save"])
@pytest.mark.parametrize("in_place", [False, True], ids=["exchanged", "file by file"])
def test_files_of_processors_are_exported(tmp_path, monkeypatch, in_place, again):
    """A model that takes images keeps them, and so does one with further chat templates; other folders' files stay."""
    source, target = tmp_path / "source", tmp_path / "target"
    for name in [*PROCESSOR_FILES, "onnx/preprocessor_config.json", "additional_chat_templates/notes.txt"]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    assert list(support_files(source)) == sorted(PROCESSOR_FILES)
    if again:
        write_checkpoint(target, sources({"a": torch.zeros(4)}), beside=dict.fromkeys(PROCESSOR_FILES, "old"))
    if in_place:
        target.mkdir(exist_ok=True)
        monkeypatch.chdir(target)
    write_checkpoint(target, sources({"a": torch.ones(4)}), beside=support_files(source), with_manifest=True)
    found = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
    assert found == {*PROCESSOR_FILES, "model.safetensors", "flexengine_manifest.json"}
    assert all((target / name).read_text() == name for name in PROCESSOR_FILES)
    assert PROCESSOR_FILES[-1] in verify_manifest(target)["files"]


def test_support_files(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    wanted = ["config.json", "tokenizer.json", "tokenizer.model", "vocab.txt", "merges.txt", "chat_template.jinja"]
    for name in [*wanted, "model.safetensors", "README.md", "optimizer.pt"]:
        (source / name).write_text(name)
    assert list(support_files(source)) == sorted(wanted)
    beside = support_files(source) | {"config.json": "{}"}
    write_checkpoint(target, sources({"a": torch.ones(4)}), beside=beside)
    expected = {name: name for name in wanted} | {"config.json": "{}"}
    found = {path.name: path.read_text() for path in target.iterdir() if path.name != "model.safetensors"}
    assert found == expected


@pytest.mark.parametrize("failing", ["tokenizer.json", "a tensor"])
def test_files_beside_appear_with_the_tensors_or_not_at_all(tmp_path, failing):
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    beside = support_files(source) | {"tokenizer.json": source / "absent" if failing == "tokenizer.json" else "{}"}
    wrong = TensorSource("a", torch.float32, (2,), lambda: torch.ones(2 if failing == "tokenizer.json" else 3))
    with pytest.raises((OSError, CheckpointError), match=r"absent|returned \[3\]"):
        write_checkpoint(tmp_path / "new" / "out", [wrong], beside=beside)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_folder_in_the_place_of_a_file_leaves_the_others_as_they_were(tmp_path):
    (tmp_path / "tokenizer.json").mkdir()
    (tmp_path / "config.json").write_text("old")
    beside = {"config.json": "new", "tokenizer.json": "{}"}
    with pytest.raises(IsADirectoryError, match=r"tokenizer\.json'"):
        write_checkpoint(tmp_path, sources({"a": torch.ones(4)}), beside=beside)
    assert (tmp_path / "config.json").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "tokenizer.json"]


def test_folder_that_appears_while_files_are_written(tmp_path):
    def read() -> torch.Tensor:
        (tmp_path / "model.safetensors").mkdir()
        return torch.ones(4)

    (tmp_path / "config.json").write_text("old")
    with pytest.raises(IsADirectoryError, match=r"model\.safetensors'"):
        write_checkpoint(tmp_path, [TensorSource("a", torch.float32, (4,), read)], beside={"config.json": "new"})
    assert (tmp_path / "config.json").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def write_one_file(folder):
    with atomic_file(folder / "log") as file:
        file.write(b"x")


@pytest.mark.parametrize(
    "write", [lambda folder: write_checkpoint(folder, sources({"a": torch.ones(4)})), write_one_file]
)
def test_leftovers_of_killed_writers_are_removed_by_the_next(tmp_path, write):
    stale, live = temporary_name(tmp_path / "model-00001-of-00002.safetensors"), temporary_name(tmp_path / "log")
    mine = [tmp_path / name for name in (".notes.tmp", "notes.0123456789abcdef.flexengine.tmp")]
    for path in (stale, live, *mine):
        path.write_bytes(b"half")
    folder = temporary_name(tmp_path / "folder")
    folder.mkdir()
    long_ago = time.time() - STALE_AFTER_S - 60
    for path in (stale, folder, *mine):
        os.utime(path, (long_ago, long_ago))
    write(tmp_path)
    assert not stale.exists()
    assert all(path.exists() for path in (live, folder, *mine))


def test_two_writers_never_share_a_temporary_name(tmp_path):
    """Process numbers repeat between containers that share a folder."""
    assert len({temporary_name(tmp_path / "log") for _ in range(100)}) == 100


def test_transformers_loads_single_and_sharded(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=32
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    state = model.state_dict()
    for folder, limit in ((tmp_path / "single", 1 << 30), (tmp_path / "sharded", 4096)):
        config.save_pretrained(folder)
        write_checkpoint(folder, sources(state), max_shard_bytes=limit)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert_same(loaded.state_dict(), state)
