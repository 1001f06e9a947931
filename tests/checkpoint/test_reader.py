"""CheckpointReader against safetensors.torch, and every way in which a checkpoint folder can be wrong."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flexengine.checkpoint.reader import CheckpointError, CheckpointReader, ReadRequest
from flexengine.optim.rounding import join_fp32

SHAPES = [(), (1,), (7,), (3, 5), (2, 1, 9), (0, 4), (129, 33)]
DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
GARBAGE_BYTE = 0xA5


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * 3
    return values > 0 if dtype == torch.bool else values.abs().to(dtype) if dtype == torch.uint8 else values.to(dtype)


def garbage(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A destination whose stale contents would show."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.full((size,), GARBAGE_BYTE, dtype=torch.uint8).view(dtype).view(shape)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    raw_a, raw_b = (t.contiguous().view(-1).view(torch.uint8) for t in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw_a, raw_b)


def raw_file(path: Path, header: object, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def f32(begin: int, end: int, shape: list[int] | None = None) -> dict:
    return {"dtype": "F32", "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def write_sharded(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {name: random_tensor((4, 3), torch.float32, seed) for seed, name in enumerate("abc")}
    save_file({"a": tensors["a"]}, folder / "model-00001-of-00002.safetensors", metadata={"format": "pt"})
    save_file({"b": tensors["b"], "c": tensors["c"]}, folder / "model-00002-of-00002.safetensors")
    write_index(folder, {"a": 1, "b": 2, "c": 2})
    return tensors


def write_index(folder: Path, shard_of: dict[str, int]) -> None:
    weight_map = {name: f"model-{shard:05d}-of-00002.safetensors" for name, shard in shard_of.items()}
    index = {"metadata": {"total_size": 144}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_dtypes_give_the_bits_of_safetensors(tmp_path, dtype):
    tensors = {f"t{i}": random_tensor(shape, dtype, i) for i, shape in enumerate(SHAPES)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with CheckpointReader.open(tmp_path) as reader:
        assert reader.metadata == {"format": "pt"}
        assert set(reader.shard_of.values()) == {"model.safetensors"}
        for name, expected in tensors.items():
            assert reader.tensors[name].shape == tuple(expected.shape)
            assert reader.tensors[name].num_bytes == expected.nbytes
            dest = garbage(tuple(expected.shape), dtype)
            reader.read_into(name, dest)
            assert same_bits(dest, expected), name


@pytest.mark.parametrize("native", ["1", "0"], ids=["native", "torch"])
@pytest.mark.parametrize("source", FLOATS, ids=str)
@pytest.mark.parametrize("target", FLOATS, ids=str)
def test_conversion_equals_torch(tmp_path, monkeypatch, source, target, native):
    monkeypatch.setenv("FLEXENGINE_NATIVE", native)
    expected = random_tensor((13, 5), source)
    save_file({"w": expected}, tmp_path / "model.safetensors")
    with CheckpointReader.open(tmp_path) as reader:
        dest = garbage((13, 5), target)
        reader.read_into("w", dest)
        assert same_bits(dest, expected.to(target))
        rows = garbage((4, 5), target)
        reader.read_into("w", rows, row_start=7, num_rows=4)
        assert same_bits(rows, expected[7:11].to(target))


def test_rows_flat_and_unit_dimensions(tmp_path):
    expected = random_tensor((6, 1, 4), torch.bfloat16)
    save_file({"w": expected, "s": torch.tensor(2.5)}, tmp_path / "model.safetensors")
    with CheckpointReader.open(tmp_path) as reader:
        tail = garbage((2, 1, 4), torch.bfloat16)
        reader.read_into("w", tail, row_start=4)
        assert same_bits(tail, expected[4:])
        arena = garbage((40,), torch.bfloat16)  # a slot inside a larger region; neighbours stay as they were
        reader.read_into("w", arena[8:32])
        assert same_bits(arena[8:32], expected.view(-1))
        assert (arena.view(torch.uint8)[:16] == GARBAGE_BYTE).all()
        assert (arena.view(torch.uint8)[64:] == GARBAGE_BYTE).all()
        squeezed = garbage((6, 4), torch.bfloat16)
        reader.read_into("w", squeezed)
        assert same_bits(squeezed, expected[:, 0])
        scalar = garbage((1,), torch.float32)
        reader.read_into("s", scalar)
        assert scalar.item() == 2.5
        reader.read_into("w", torch.empty(0, 1, 4, dtype=torch.bfloat16), row_start=6)


def test_many_requests_at_once(tmp_path):
    """Parts of tensors in several files and dtypes, some converted, some split, in one call."""
    tensors = write_sharded(tmp_path)
    first, part = garbage((12,), torch.float32), garbage((5,), torch.bfloat16)
    whole, remainder = garbage((12,), torch.bfloat16), garbage((12,), torch.int16)
    with CheckpointReader.open(tmp_path) as reader:
        reader.read_many(
            [
                ReadRequest("a", first),
                ReadRequest("b", part, first_element=3),
                ReadRequest("c", whole, remainder),
                ReadRequest("b", garbage((0,), torch.float32), first_element=12),
            ]
        )
        assert same_bits(first, tensors["a"].view(-1))
        assert same_bits(part, tensors["b"].view(-1)[3:8].bfloat16())
        assert same_bits(join_fp32(whole, remainder), tensors["c"].view(-1))
        reader.read_many([])


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ReadRequest("a", torch.empty(5), first_element=8), r"a: asked for elements 8 to 13, it has 12"),
        (ReadRequest("a", torch.empty(5), first_element=-1), r"elements -1 to 4"),
        (ReadRequest("z", torch.empty(5)), "no tensor 'z'"),
        (ReadRequest("a", torch.empty(4, 3).t()), r"holds shape \[12\], the destination has \[3, 4\]"),
        (ReadRequest("a", torch.empty(4, dtype=torch.int8)), "no conversion from torch.float32"),
        (ReadRequest("a", torch.empty(4), torch.empty(4, dtype=torch.int16)), "remainder .* goes with a bfloat16"),
    ],
)
def test_wrong_requests_among_many(tmp_path, request_, message):
    write_sharded(tmp_path)
    untouched = garbage((12,), torch.float32)
    with CheckpointReader.open(tmp_path) as reader, pytest.raises(ValueError, match=message):
        reader.read_many([ReadRequest("b", untouched), request_])
    assert same_bits(untouched, garbage((12,), torch.float32))


def test_sharded_folder(tmp_path):
    tensors = write_sharded(tmp_path)
    with CheckpointReader.open(tmp_path) as reader:
        assert reader.shard_of["a"] == "model-00001-of-00002.safetensors"
        assert reader.metadata["total_size"] == "144"
        for name, expected in tensors.items():
            dest = garbage((4, 3), torch.float32)
            reader.read_into(name, dest)
            assert same_bits(dest, expected)


def test_reading_does_not_grow_the_resident_set(tmp_path):
    psutil = pytest.importorskip("psutil")
    save_file({"w": torch.ones(48 << 20, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    dest = torch.full((48 << 20,), 7, dtype=torch.uint8)  # touched, so that its pages are resident already
    with CheckpointReader.open(tmp_path) as reader:
        before_bytes = psutil.Process().memory_info().rss
        reader.read_into("w", dest)
        grown_bytes = psutil.Process().memory_info().rss - before_bytes
    assert (dest == 1).all()
    assert grown_bytes < 16 << 20


@pytest.mark.parametrize(
    ("name", "dest", "arguments", "message"),
    [
        ("nope", torch.empty(4, 3), {}, r"no tensor 'nope'.*a, b, c"),
        ("a", torch.empty(3, 4), {}, r"holds shape \[4, 3\], the destination has \[3, 4\]"),
        ("a", torch.empty(4, 3), {"num_rows": 2}, r"holds shape \[2, 3\], the destination has \[4, 3\]"),
        ("a", torch.empty(2, 3), {"row_start": 3, "num_rows": 2}, r"rows 3 to 5, shape \[4, 3\] has 4"),
        ("a", torch.empty(4, 3), {"row_start": -1}, "rows -1"),
        ("a", torch.empty(5, 3), {"row_start": 9}, "rows 9 to 4"),
        ("a", torch.empty(3, 4).t(), {}, "contiguous on the CPU, is strided"),
        ("a", torch.empty(4, 3, device="meta"), {}, "contiguous on the CPU"),
        ("a", torch.empty(4, 3, dtype=torch.int32), {}, "no conversion from torch.float32"),
    ],
)
def test_wrong_requests(tmp_path, name, dest, arguments, message):
    write_sharded(tmp_path)
    with CheckpointReader.open(tmp_path) as reader, pytest.raises(CheckpointError, match=message):
        reader.read_into(name, dest, **arguments)


def test_reading_after_close(tmp_path):
    save_file({"w": torch.ones(4)}, tmp_path / "model.safetensors")
    reader = CheckpointReader.open(tmp_path)
    reader.close()
    reader.close()
    for call in (reader.read_into, lambda *request: reader.read_many([ReadRequest(*request)])):
        with pytest.raises(CheckpointError, match="after close"):
            call("w", torch.empty(4))


@pytest.mark.parametrize("native", ["1", "0"], ids=["native", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["straight", "converted"])
def test_file_that_shrinks_while_open(tmp_path, monkeypatch, native, dtype):
    monkeypatch.setenv("FLEXENGINE_NATIVE", native)
    save_file({"v": torch.ones(10), "w": torch.ones(1000)}, tmp_path / "model.safetensors")
    with CheckpointReader.open(tmp_path) as reader:
        os.truncate(tmp_path / "model.safetensors", 200)
        with pytest.raises(CheckpointError, match=r"model\.safetensors: ended at byte 200 inside 'w'; it shrank"):
            reader.read_into("w", torch.empty(1000, dtype=dtype))


@pytest.mark.parametrize("native", ["1", "0"], ids=["native", "torch"])
def test_a_file_system_that_fails_is_named(tmp_path, monkeypatch, native):
    """A directory's descriptor opens but does not read: EISDIR, as EIO from a broken disk."""
    monkeypatch.setenv("FLEXENGINE_NATIVE", native)
    save_file({"w": torch.ones(1000)}, tmp_path / "model.safetensors")
    with CheckpointReader.open(tmp_path) as reader:
        folder = os.open(tmp_path, os.O_RDONLY)
        os.dup2(folder, reader._descriptors["model.safetensors"])
        os.close(folder)
        offset = reader.tensors["w"].offset_bytes
        with pytest.raises(IsADirectoryError, match=rf"reading 'w' failed at byte {offset} .*model\.safetensors"):
            reader.read_into("w", torch.empty(1000))


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{nonsense", b"", "not valid JSON"),
        (b"\xff\xfe", b"", "not valid JSON"),
        (b"[]", b"", "JSON object"),
        (b'{"__metadata__": {"a": 1}}', b"", "__metadata__"),
        ({"w": {"dtype": "F32", "shape": [1]}}, b"1234", "data_offsets"),
        ({"w": f32(0, 4, [-1])}, b"1234", "data_offsets"),
        ({"w": {"dtype": "F32", "shape": 3, "data_offsets": [0, 4]}}, b"1234", "data_offsets"),
        ({"w": {"dtype": "Q4", "shape": [4], "data_offsets": [0, 4]}}, b"1234", r"dtype 'Q4'; known are BOOL"),
        ({"w": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, b"1234", "has dtype"),
        ({"w": f32(0, 8, [3])}, b"12345678", r"needs 12 bytes, its offsets \[0, 8\] hold 8"),
        ({"v": f32(0, 8), "w": f32(4, 12)}, b"123456781234", "'w' starts at byte .* overlaps 'v'"),
        ({"v": f32(0, 4), "w": f32(8, 12)}, b"123456781234", "leaves a hole after 'v'"),
        ({"w": f32(0, 8)}, b"1234", "truncated: tensors end at byte"),
        ({"w": f32(0, 4)}, b"12345678", "longer than its header says"),
        (b'{"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "w": 3}', b"1", "'w' is listed twice"),
    ],
)
def test_damaged_file(tmp_path, header, data, message):
    raw_file(tmp_path / "model.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message):
        CheckpointReader.open(tmp_path)


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"", "not a safetensors file"),
        (b"abc", "not a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        ((100).to_bytes(8, "little") + b"{}", "truncated: the header ends at byte 108"),
    ],
)
def test_not_a_safetensors_file(tmp_path, contents, message):
    (tmp_path / "model.safetensors").write_bytes(contents)
    with pytest.raises(CheckpointError, match=message):
        CheckpointReader.open(tmp_path)


def test_folder_without_a_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="an empty folder"):
        CheckpointReader.open(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        CheckpointReader.open(tmp_path / "nowhere")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"found pytorch_model.bin.*converted"):
        CheckpointReader.open(tmp_path)


def test_index_and_shards_that_disagree(tmp_path):
    write_sharded(tmp_path)
    write_index(tmp_path, {"a": 1, "b": 2, "c": 2, "d": 2})
    with pytest.raises(CheckpointError, match=r"'d'.*no shard holds it"):
        CheckpointReader.open(tmp_path)
    write_index(tmp_path, {"a": 1, "b": 1, "c": 2})
    with pytest.raises(CheckpointError, match="it is in model-00002"):
        CheckpointReader.open(tmp_path)
    write_index(tmp_path, {"a": 1, "b": 2})
    with CheckpointReader.open(tmp_path) as reader:
        assert reader.unlisted == ("c",)
        assert set(reader.tensors) == {"a", "b"}
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"'b' is in model-00001.* and in model-00002"):
        CheckpointReader.open(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="names 2 shards, 1 are missing: model-00002"):
        CheckpointReader.open(tmp_path)


@pytest.mark.parametrize(
    "index", [{}, {"weight_map": {}}, {"weight_map": {"a": 3}}, {"weight_map": {"a": "../model.safetensors"}}, []]
)
def test_bad_index(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"index\.json"):
        CheckpointReader.open(tmp_path)


def test_failing_to_open_leaks_no_descriptor(tmp_path):
    raw_file(tmp_path / "model.safetensors", {"w": f32(0, 8)}, b"1234")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError):
        CheckpointReader.open(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
