"""Damaged weights: every folder that is not a whole checkpoint of its config is refused before memory is taken."""

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from provoke import (
    INDEX,
    SHARDS,
    Case,
    arguments,
    cases,
    check_error,
    check_message,
    check_python_face,
    half_written,
    write_model,
)

from flexengine import cli, from_pretrained
from flexengine.checkpoint.atomic import sha256_of
from flexengine.checkpoint.manifest import FileRecord, write_manifest

FIRST, SECOND = SHARDS


def read_header(path: Path) -> tuple[dict, bytes]:
    """The header of a safetensors file as an object, and the bytes after it."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_header(path: Path, header: object, data: bytes, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def changed_entry(folder: Path, name: str, **changes: object) -> None:
    header, data = read_header(folder / FIRST)
    header[name] = {**header[name], **changes}
    write_header(folder / FIRST, header, data)


def changed_index(folder: Path, change: dict[str, str]) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"].update(change)
    (folder / INDEX).write_text(json.dumps(index))


def cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:-num_bytes])


def grow(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes() + b"x" * num_bytes)


def moved(folder: Path, num_bytes: int) -> None:
    """The tensor behind the embedding moves, into it or away from it."""
    header, data = read_header(folder / FIRST)
    end = header[EMBEDDING]["data_offsets"][1]
    name = next(n for n, entry in header.items() if n != "__metadata__" and entry["data_offsets"][0] == end)
    header[name]["data_offsets"] = [offset + num_bytes for offset in header[name]["data_offsets"]]
    write_header(folder / FIRST, header, data)


def tied(folder: Path) -> None:
    """The config says that the head is the embedding; both are stored, and differ."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))


def duplicate_key(folder: Path) -> None:
    header, data = read_header(folder / FIRST)
    name = EMBEDDING
    text = json.dumps(header)[:-1] + f', "{name}": {json.dumps(header[name])}}}'
    write_header(folder / FIRST, text.encode(), data)


def without_tensor(folder: Path) -> None:
    """A tensor is absent from shard and index alike: the checkpoint is consistent, but not of this config."""
    shutil.rmtree(folder)
    write_model(folder, num_hidden_layers=1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))


def unread_tensors(folder: Path) -> None:
    """The checkpoint has biases that config.json does not state."""
    shutil.rmtree(folder)
    write_model(folder, attention_bias=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_bias": False}))


def other_width(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 32}))


def as_integers(folder: Path) -> None:
    """Every size is right, so that only the dtype tells: as in a packed, quantised checkpoint."""
    header, _ = read_header(folder / FIRST)
    changed_entry(folder, next(name for name in header if name != "__metadata__"), dtype="I32")


def in_two_shards(folder: Path) -> None:
    header, _ = read_header(folder / FIRST)
    entry = {**header[EMBEDDING], "data_offsets": [0, 61 * 16 * 4]}
    write_header(folder / FIRST, {EMBEDDING: entry}, bytes(61 * 16 * 4))
    write_header(folder / SECOND, {EMBEDDING: entry}, bytes(61 * 16 * 4))
    (folder / INDEX).write_text(json.dumps({"weight_map": {EMBEDDING: FIRST, "x": SECOND}}))


def no_weights(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()


def converted_weights(folder: Path) -> None:
    no_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(b"PK")


def changed_since_the_manifest(folder: Path) -> None:
    """One bit of a weight, which no header tells of."""
    records = {path.name: FileRecord(path.stat().st_size, sha256_of(path)) for path in folder.iterdir()}
    write_manifest(folder, records, {})
    data = bytearray((folder / SECOND).read_bytes())
    data[-1] ^= 1
    (folder / SECOND).write_bytes(data)


EMBEDDING = "model.embed_tokens.weight"
DAMAGE = (
    Case("missing_shard", lambda f: (f / SECOND).unlink(), ("names 2 shards, 1 are missing: " + SECOND, "download")),
    Case("truncated_shard", lambda f: cut(f / SECOND, 100), (SECOND, "truncated.*at byte \\d+.*at \\d+", "fetch")),
    Case("shard_with_trailing_garbage", lambda f: grow(f / FIRST, 5), ("longer than its header.*byte \\d+", "fetch")),
    Case("empty_shard", lambda f: (f / FIRST).write_bytes(b""), (FIRST, "not a safetensors file: 0 bytes", "Fetch")),
    Case(
        "git_lfs_pointer_in_place_of_a_shard",
        lambda f: (f / FIRST).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 497\n"),
        ("not a safetensors file: \\d+ bytes", "Git LFS pointer"),
    ),
    Case(
        "header_longer_than_the_file",
        lambda f: write_header(f / FIRST, {}, b"", length=5000),
        (FIRST, "truncated: the header ends at byte 5008, the file at 10", "fetch"),
    ),
    Case(
        "header_of_an_exabyte",
        lambda f: write_header(f / FIRST, {}, b"", length=2**63),
        ("header of 9223372036854775808 bytes \\(allowed: 2 to 100000000\\)", "Fetch"),
    ),
    Case(
        "header_that_is_no_json", lambda f: write_header(f / FIRST, b"{oops", b""), (FIRST, "not valid JSON", "fetch")
    ),
    Case("header_that_is_a_list", lambda f: write_header(f / FIRST, [1, 2], b""), (FIRST, "found list", "fetch")),
    Case(
        "header_nested_too_deep",
        lambda f: write_header(f / FIRST, b'{"a":' + b"[" * 100000, b""),
        (FIRST, "nested too deep", "fetch"),
    ),
    Case("header_with_a_tensor_twice", duplicate_key, (FIRST, f"'{EMBEDDING}' is listed twice", "fetch")),
    Case("tensors_overlap", lambda f: moved(f, -4), (FIRST, f"byte \\d+ and overlaps '{EMBEDDING}'", "fetch")),
    Case("hole_between_tensors", lambda f: moved(f, 4), (FIRST, f"byte \\d+ and leaves a hole after '{EMBEDDING}'")),
    Case(
        "offsets_out_of_range",
        lambda f: changed_entry(f, EMBEDDING, shape=[2**40, 16], data_offsets=[0, 2**46]),
        (FIRST, "byte \\d+", "fetch"),
    ),
    Case(
        "negative_offsets",
        lambda f: changed_entry(f, EMBEDDING, data_offsets=[-8, 0]),
        (EMBEDDING, "data_offsets", "fetch"),
    ),
    Case(
        "shape_of_many_sizes",
        lambda f: changed_entry(f, EMBEDDING, shape=[2**62] * 100000),
        (EMBEDDING, "at most 32 sizes", "fetch"),
    ),
    Case(
        "dtype_unknown",
        lambda f: changed_entry(f, EMBEDDING, dtype="F3"),
        (f"'{EMBEDDING}' has dtype 'F3'", "known are BOOL", "Convert"),
    ),
    Case(
        "offsets_that_disagree_with_the_shape",
        lambda f: changed_entry(f, EMBEDDING, shape=[61, 17]),
        ("shape \\[61, 17\\].*needs 4148 bytes.* hold 3904", "fetch"),
    ),
    Case(
        "tensor_missing_from_the_checkpoint", without_tensor, ("lacks \\d+ of the model's \\d+ tensors", "incomplete")
    ),
    Case(
        "tensors_that_nothing_reads",
        unread_tensors,
        ("nothing in a llama model reads \\d+ of the checkpoint's", "q_proj.bias", "another model", "Give config.json"),
    ),
    Case(
        "tensor_of_another_shape",
        other_width,
        ("shape \\[24, 16\\] in the checkpoint.*asks for \\[32, 16\\]", "Fetch config.json and the weights"),
    ),
    Case(
        "tied_head_that_differs",
        tied,
        ("lm_head.weight that differs from model.embed_tokens.weight", "Set tie_word_embeddings to false"),
    ),
    Case("integers_in_place_of_weights", as_integers, ("holds torch.int32", "floats of 16 to 64 bits.*Give")),
    Case("tensor_in_two_shards", in_two_shards, (EMBEDDING, f"is in {FIRST} and in {SECOND}", "again")),
    Case(
        "index_naming_a_missing_file",
        lambda f: changed_index(f, {EMBEDDING: "model-00009-of-00009.safetensors"}),
        ("1 are missing: model-00009-of-00009.safetensors", "download"),
    ),
    Case(
        "index_naming_the_wrong_shard",
        lambda f: changed_index(f, {EMBEDDING: SECOND}),
        (f"lists tensor '{EMBEDDING}' in {SECOND}, but it is in {FIRST}", "fetch"),
    ),
    Case(
        "index_naming_a_tensor_that_no_shard_has",
        lambda f: changed_index(f, {"model.extra": FIRST}),
        ("lists tensor 'model.extra'.*no shard holds it", "fetch"),
    ),
    Case(
        "index_naming_a_path_outside",
        lambda f: changed_index(f, {EMBEDDING: "../secret.safetensors"}),
        ("'../secret.safetensors', which is no name of a file", "fetch"),
    ),
    Case(
        "index_naming_a_file_longer_than_any",
        lambda f: changed_index(f, {EMBEDDING: "x" * 300}),
        (INDEX, "'xxx.*xxx', which is no name of a file", "fetch"),
    ),
    Case(
        "index_naming_half_of_a_character",
        lambda f: changed_index(f, {EMBEDDING: "\ud800"}),
        (INDEX, "'.ud800', which is no name of a file", "fetch"),
    ),
    Case(
        "index_naming_nothing",
        lambda f: changed_index(f, {EMBEDDING: ""}),
        (INDEX, "lies in '', which is no name of a file", "fetch"),
    ),
    Case(
        "index_with_a_name_of_many_letters",
        lambda f: changed_index(f, {"x" * 10000: SECOND}),
        (INDEX, "lists tensor 'xxx.*\\.\\.\\.xxx.*no shard holds it", "fetch"),
    ),
    Case(
        "index_with_a_number_of_5000_digits",
        lambda f: (f / INDEX).write_text('{"a": ' + "9" * 5000),
        (INDEX, "4300 digits"),
    ),
    Case("index_that_is_no_json", lambda f: (f / INDEX).write_text("{"), (INDEX, "not valid JSON", "fetch")),
    Case(
        "index_without_weight_map", lambda f: (f / INDEX).write_text("{}"), (INDEX, "non-empty 'weight_map'", "fetch")
    ),
    Case("folder_without_weights", no_weights, ("no \\*.safetensors file", "flexengine download model")),
    Case("folder_with_pickled_weights", converted_weights, ("found pytorch_model.bin, which must be converted",)),
)


@cases(*DAMAGE)
def test_command_line(case, model, command, known_machine, tmp_path):
    case.provoke(model)
    outcome = command("train", *arguments(model=model, output_dir=tmp_path / "run", save=True))
    assert outcome.status == case.status
    check_message(outcome.err, case.says)
    assert not (tmp_path / "run").exists()


def test_random_weights_in_place_of_those_of_a_folder(model, command, known_machine, tmp_path):
    outcome = command("train", *arguments(model=model, output_dir=tmp_path / "run", init="random"))
    assert outcome.status == cli.BAD_INPUT
    check_message(outcome.err, ("init is random, but model folder .* has weights", "leave --init out"))


CHANGED = Case(
    "weights_that_changed",
    changed_since_the_manifest,
    ("1 files differ from flexengine_manifest.json", f"{SECOND}: SHA-256 \\w+, expected \\w+", "fetch or export"),
)


def test_weights_that_changed_since_the_manifest(model, command, known_machine, tmp_path):
    """Every byte is compared while weights are read, when the run folder exists already."""
    changed_since_the_manifest(model)
    outcome = command("train", *arguments(model=model, output_dir=tmp_path / "run", save=True))
    assert outcome.status == cli.BAD_INPUT
    check_message(outcome.err, CHANGED.says)
    assert half_written(tmp_path / "run") == []
    assert not (tmp_path / "run" / "final").exists()


@pytest.mark.parametrize("case", [*DAMAGE[::4], CHANGED], ids=lambda case: case.name)
def test_python_face(case, model):
    check_python_face(case, model)


def with_nan_in_the_embedding(model: Path) -> None:
    header, data = read_header(model / FIRST)
    begin, end = header[EMBEDDING]["data_offsets"]
    nan = torch.full(((end - begin) // 4,), float("nan")).numpy().tobytes()
    write_header(model / FIRST, header, data[:begin] + nan + data[end:])


def test_nan_in_the_weights_ends_as_a_diverged_run(model, command, known_machine, tmp_path):
    """The update is skipped and said so, nothing is exported as if it were trained, and the status tells."""
    with_nan_in_the_embedding(model)
    outcome = command("train", *arguments(model=model, output_dir=tmp_path / "run", save=True))
    assert outcome.status == 1
    assert outcome.status != cli.BAD_INPUT
    check_message(outcome.err, ("step 1 skipped its update: the gradient norm is nan", "loss.*nan", "not exported"))
    assert not (tmp_path / "run" / "final").exists()
    log = [json.loads(line) for line in (tmp_path / "run" / "train_log.jsonl").read_text().splitlines()]
    assert [entry["loss"] for entry in log] == [None, None]


def test_steps_that_train_nothing_end_a_run(model, command, known_machine, tmp_path):
    with_nan_in_the_embedding(model)
    flags = arguments(model=model, output_dir=tmp_path / "run", save=True, steps=9, max_skipped_steps=3)
    outcome = command("train", *flags)
    assert outcome.status == 1
    says = (
        "loss of the last step is nan: the run diverged at step 1 of 3 and ended after 3 such steps",
        f"the weight {EMBEDDING} holds NaN or infinity: fetch or export it again",
        "not exported",
    )
    check_message(outcome.err, says)
    assert not (tmp_path / "run" / "final").exists()


def test_export_of_a_weight_that_is_not_finite(model, tmp_path):
    with_nan_in_the_embedding(model)
    engine = from_pretrained(model, device="cpu", dtype="float32", hardware="cpu-test", max_seq_len=16)
    says = (f"{EMBEDDING} holds values that are not finite in torch.float32, so nothing is exported; load an earlier",)
    check_error(lambda: engine.save_pretrained(tmp_path / "out"), says)
    assert not (tmp_path / "out").exists()
    engine.close()
