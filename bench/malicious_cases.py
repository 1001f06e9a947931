"""A hundred inputs that were made to do harm: each writes files into a folder and names the command that reads them."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench.fuzz_cases import CONFIG as FUZZED
from bench.fuzz_cases import write_model
from flexengine.models.registry import ASSETS

MIB = 2**20
CONFIG = {**FUZZED, "vocab_size": 2944}
ROW = {"question": "q", "answer": "a"}
MARKER = "was-run"
"""A file of this name tells that code out of an input was run."""
LAUGHS = "\n".join(
    ["a0: &a0 [x,x,x,x,x,x,x,x,x]", *(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10))]
)
Make = Callable[[Path], list[str]]


def original(folder: Path) -> None:
    """Write a whole model of 2 layers with the bundled tokenizer."""
    write_model(folder, None, CONFIG)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ASSETS / "demo" / name, folder)


def train(model: Path, *more: str) -> list[str]:
    return [
        "train", "--model", str(model), "--data-source", "synthetic", "--device", "cpu", "--dtype", "float32",
        "--max-seq-len", "32", "--max-global-batch-tokens", "64", "--steps", "1", "--max-gpu-mem-gib", "0.5",
        "--max-host-mem-gib", "1.5", "--output-dir", str(model.parent / "run"), *more,
    ]  # fmt: skip


def preview(model: Path, dataset: Path) -> list[str]:
    return ["data", "preview", "--model", str(model), "--dataset", str(dataset), "--max-seq-len", "64"]


# ---- what is written where ------------------------------------------------------------------------------------------


def in_config(change: dict[str, Any] | str | bytes, **also: Any) -> Make:
    """Changes of config.json, or its whole text."""

    def make(folder: Path) -> list[str]:
        if isinstance(change, dict):
            text = json.dumps({**CONFIG, **change, **also}).encode()
        else:
            text = change.encode("utf-8", "surrogatepass") if isinstance(change, str) else change
        (folder / "model" / "config.json").write_bytes(text)
        return ["plan", "--model", str(folder / "model"), "--gpu", "rtx4090", "--max-seq-len", "64"]

    return make


def in_file(name: str, contents: bytes | Callable[[bytes], bytes], command: Callable[[Path], list[str]]) -> Make:
    """Other contents of a file of the model."""

    def make(folder: Path) -> list[str]:
        path = folder / "model" / name
        path.write_bytes(contents if isinstance(contents, bytes) else contents(path.read_bytes()))
        return command(folder / "model")

    return make


def in_place_of(name: str, kind: str, command: Callable[[Path], list[str]]) -> Make:
    """A pipe, a device or a link to itself instead of a file of the model."""

    def make(folder: Path) -> list[str]:
        path = folder / "model" / name
        path.unlink(missing_ok=True)
        put(path, kind)
        return command(folder / "model")

    return make


def put(path: Path, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path.name if kind == "loop" else f"/dev/{kind}")


def data(name: str, contents: bytes | Callable[[Path], object]) -> Make:
    """A data file, to be previewed with the original model."""

    def make(folder: Path) -> list[str]:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(contents, bytes):
            path.write_bytes(contents)
        else:
            contents(path)
        return preview(folder / "model", path if "/" not in name else path.parent)

    return make


def chat(model: Path) -> list[str]:
    """Preview of a conversation, which the chat template renders."""
    path = model.parent / "chat.jsonl"
    turns = [{"role": "user", "content": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!"}, {"role": "assistant", "content": "yes"}]
    path.write_text(json.dumps({"messages": turns}) + "\n")
    return preview(model, path)


def template(text: str) -> Make:
    return in_file("chat_template.jinja", text.encode(), chat)


def tokenizer(**changes: Any) -> Make:
    """Changes of tokenizer.json; those of `model` are merged into it."""

    def change(contents: bytes) -> bytes:
        value = json.loads(contents)
        for key, new in changes.items():
            value[key] = {**value["model"], **new} if key == "model" else new
        return json.dumps(value).encode()

    return in_file("tokenizer.json", change, chat)


def header(value: Any, size: int | None = None, tail: bytes = b"\0" * 64) -> bytes:
    """A safetensors file with this header; size: the length that it claims."""
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + tail


def weights(contents: bytes) -> Make:
    return in_file("model.safetensors", contents, train)


def index(value: Any) -> Make:
    def make(folder: Path) -> list[str]:
        (folder / "model" / "model.safetensors").rename(folder / "model" / "a.safetensors")
        text = value if isinstance(value, bytes) else json.dumps(value).encode()
        (folder / "model" / "model.safetensors.index.json").write_bytes(text)
        return train(folder / "model")

    return make


def adapter(
    change: dict[str, Any] | bytes, tensors: bytes | None = None, name: str = "adapter_model.safetensors"
) -> Make:
    def make(folder: Path) -> list[str]:
        (folder / "adapter").mkdir()
        config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
        text = change if isinstance(change, bytes) else json.dumps({**config, **change}).encode()
        (folder / "adapter" / "adapter_config.json").write_bytes(text)
        (folder / "adapter" / name).write_bytes(header({}) if tensors is None else tensors)
        return train(folder / "model", "--mode", "lora", "--adapter", str(folder / "adapter"))

    return make


def options(text: bytes) -> Make:
    def make(folder: Path) -> list[str]:
        (folder / "options.yaml").write_bytes(text)
        return ["train", "--config", str(folder / "options.yaml")]

    return make


def zipped(pieces: Iterable[bytes]) -> bytes:
    return b"".join(gzip.compress(piece) for piece in pieces)


def parquet(path: Path) -> None:
    """A few kB that decode to 1,024 rows of 8 MiB each."""
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415

    column = pa.DictionaryArray.from_arrays(pa.array([0] * 1024, pa.int32()), pa.array(["a" * (8 * MIB)]))
    pq.write_table(pa.table({"question": column, "answer": column}), path, compression="zstd")


def arrow(path: Path) -> None:
    import pyarrow as pa  # noqa: PLC0415

    column = pa.DictionaryArray.from_arrays(pa.array([0] * 2**20, pa.int32()), pa.array(["a" * MIB]))
    table = pa.table({"question": column, "answer": column})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def pickled(path: Path) -> bytes:
    """The bytes of a pickle that would make a file beside the input."""
    return b"cos\nsystem\n(S'touch " + str(path).encode() + b"'\ntR."


def pickled_array(path: Path) -> None:
    described = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }\n"
    path.write_bytes(
        b"\x93NUMPY\x01\x00" + struct.pack("<H", len(described)) + described + pickled(path.parent / MARKER)
    )


def pickled_adapter(folder: Path) -> list[str]:
    return adapter({}, pickled(folder / MARKER), "adapter_model.bin")(folder)


def code_beside(folder: Path) -> list[str]:
    """A configuration that wants code of its own to be loaded."""
    marker = folder / MARKER
    (folder / "model" / "configuration_x.py").write_text(f"open({str(marker)!r}, 'w')\n")
    return in_config({"model_type": "x", "auto_map": {"AutoConfig": "configuration_x.XConfig"}})(folder)


DEEP = 100_000
REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
TENSOR = "model.embed_tokens.weight"
CASES: dict[str, Make] = {
    # config.json
    "config: width of 2**62": in_config({"hidden_size": 2**62}),
    "config: a billion layers": in_config({"num_hidden_layers": 10**9}),
    "config: infinitely many layers": in_config({"num_hidden_layers": float("inf")}),
    "config: fewer than no layers": in_config({"num_hidden_layers": -5}),
    "config: vocabulary of 2**45": in_config({"vocab_size": 2**45}),
    "config: a million kinds of layers": in_config({"layer_types": ["full_attention"] * 10**6}),
    "config: a hundred million experts": in_config({"model_type": "mixtral", "num_local_experts": 10**8}),
    "config: deep nesting": in_config("[" * DEEP),
    "config: deep nesting in a value": in_config('{"model_type": ' + "[" * DEEP + "]" * DEEP + "}"),
    "config: a number of a million digits": in_config('{"model_type": "llama", "hidden_size": ' + "9" * 10**6 + "}"),
    "config: a lone surrogate": in_config({"model_type": "\ud800" * 10}),
    "config: a type of 10 MB": in_config({"model_type": "x" * 10**7}),
    "config: 64 MiB of blanks": in_config(b" " * (64 * MIB)),
    "config: no UTF-8": in_config(b"\xff\xfe" * 1000),
    "config: rope's factor is no number": in_config({"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}),
    "config: a million rope factors": in_config(
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 10**6, "long_factor": [1.0] * 10**6}}
    ),
    "config: code beside it": code_beside,
    "config: a pipe": in_place_of("config.json", "pipe", train),
    "config: zeros without end": in_place_of("config.json", "zero", train),
    "config: a link to itself": in_place_of("config.json", "loop", train),
    # safetensors
    "weights: a header of 2**63 bytes": weights(header({}, 2**63 - 1)),
    "weights: a header of 2**40 bytes": weights(header({}, 2**40)),
    "weights: no header": weights(b""),
    "weights: a header of nothing": weights(header(b"")),
    "weights: deep nesting": weights(header(b"[" * DEEP)),
    "weights: a number of a million digits": weights(header(b'{"a": ' + b"9" * 10**6 + b"}")),
    "weights: 2**80 elements": weights(
        header({TENSOR: {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 64]}})
    ),
    "weights: a million dimensions": weights(
        header({TENSOR: {"dtype": "F32", "shape": [1] * 10**6, "data_offsets": [0, 4]}})
    ),
    "weights: offsets before the file": weights(
        header({TENSOR: {"dtype": "F32", "shape": [2944, 16], "data_offsets": [-(2**40), 64]}})
    ),
    "weights: offsets behind the file": weights(
        header({TENSOR: {"dtype": "F32", "shape": [2944, 16], "data_offsets": [2**50, 2**50 + 188416]}})
    ),
    "weights: 100,000 names": weights(
        header({f"x{i}": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for i in range(10**5)})
    ),
    "weights: a pipe": in_place_of("model.safetensors", "pipe", train),
    "weights: zeros without end": in_place_of("model.safetensors", "zero", train),
    "weights: noise without end": in_place_of("model.safetensors", "urandom", train),
    # indexes
    "index: out of the folder": index({"weight_map": {TENSOR: "../../../../etc/passwd"}}),
    "index: an absolute path": index({"weight_map": {TENSOR: "/etc/passwd"}}),
    "index: itself": index({"weight_map": {TENSOR: "model.safetensors.index.json"}}),
    "index: a device": index({"weight_map": {TENSOR: "/dev/zero"}}),
    "index: a map of lists": index({"weight_map": {TENSOR: ["a"] * 10}}),
    "index: a million tensors": index({"weight_map": {f"x{i}": "a.safetensors" for i in range(10**6)}}),
    "index: deep nesting": index(b'{"weight_map": ' + b"[" * DEEP),
    "index: a pipe": in_place_of("model.safetensors.index.json", "pipe", train),
    # chat templates
    "template: a billion turns": template("{% for i in range(10**9) %}{% endfor %}"),
    "template: loops in loops": template("{% for i in range(9999) %}" * 3 + "{% endfor %}" * 3),
    "template: a power": template("{{ 10**(10**8) }}"),
    "template: a power of a power": template("{{ 9**9**9**9 }}"),
    "template: a long text": template("{{ 'a' * 10**10 }}"),
    "template: a long list": template("{{ ([1] * 10**9) | length }}"),
    "template: a wide number": template("{{ '%1000000000d' | format(1) }}"),
    "template: a wide text": template("{{ 'a' | center(10**10) }}"),
    "template: doubling": template(
        "{% set n = namespace(t='aa') %}{% for i in range(60) %}{% set n.t = n.t + n.t %}{% endfor %}{{ n.t }}"
    ),
    "template: a macro that calls itself": template("{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}"),
    "template: out of the sandbox": template("{{ ''.__class__.__mro__[1].__subclasses__() }}"),
    "template: another file": template("{% include '/etc/passwd' %}"),
    "template: a long complaint": template("{{ raise_exception('x' * 10**8) }}"),
    "template: 20 MB": template("{{ 1 }}" * 3_000_000),
    "template: deep nesting": template("{% if 1 %}" * 5000 + "{% endif %}" * 5000),
    "template: zeros without end": in_place_of("chat_template.jinja", "zero", chat),
    # tokenizers
    "tokenizer: 24 doublings": tokenizer(normalizer={"type": "Sequence", "normalizers": [REPLACE] * 24}),
    "tokenizer: 60 doublings": tokenizer(normalizer={"type": "Sequence", "normalizers": [REPLACE] * 60}),
    "tokenizer: a slow expression": tokenizer(
        pre_tokenizer={
            "type": "Split",
            "pattern": {"Regex": "(a|aa)+(?=$x)(?<=y)"},
            "behavior": "Isolated",
            "invert": False,
        }
    ),
    "tokenizer: a slower expression": tokenizer(
        normalizer={"type": "Replace", "pattern": {"Regex": "((a*)*)*[b-z]$"}, "content": ""}
    ),
    "tokenizer: no tokens": tokenizer(model={"vocab": {}, "merges": []}),
    "tokenizer: ids of 2**31": tokenizer(model={"vocab": {"a": 2**31}, "merges": []}),
    "tokenizer: ids of 2**70": tokenizer(model={"vocab": {"a": 2**70}, "merges": []}),
    "tokenizer: merges of nothing": tokenizer(model={"merges": ["x y"] * 10**5}),
    "tokenizer: a token of 10 MB": tokenizer(
        added_tokens=[
            {
                "id": 0,
                "content": "a" * 10**7,
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
        ]
    ),
    "tokenizer: another kind": tokenizer(model={"type": "Nonsense"}),
    "tokenizer: deep nesting": in_file("tokenizer.json", b'{"model": ' + b"[" * DEEP, chat),
    "tokenizer: a pipe": in_place_of("tokenizer.json", "pipe", chat),
    "tokenizer: zeros without end": in_place_of("tokenizer.json", "zero", chat),
    # data
    "data: 4 GiB of newlines": data("x.jsonl.gz", lambda path: path.write_bytes(zipped([b"\n" * (64 * MIB)] * 64))),
    "data: 4 GiB of zeros": data("x.jsonl.gz", lambda path: path.write_bytes(zipped([b"\0" * (64 * MIB)] * 64))),
    "data: a field of 2 GiB": data(
        "x.csv.gz",
        lambda path: path.write_bytes(zipped([b'question,answer\nq,"', *[b"a" * (64 * MIB)] * 32, b'"\n'])),
    ),
    "data: fields of 2 GiB without quotes": data(
        "x.tsv.gz",
        lambda path: path.write_bytes(zipped([b"question\tanswer\nq\t", *[b"a" * (64 * MIB)] * 32])),
    ),
    "data: a million columns": data("x.csv", (",".join(f"c{i}" for i in range(10**6)) + "\n").encode()),
    "data: deep nesting": data("x.jsonl", b'{"question": ' + b"[" * DEEP + b"\n"),
    "data: deep nesting in an array": data("x.json", b"[" * DEEP),
    "data: a number of a million digits": data("x.jsonl", b'{"question": ' + b"9" * 10**6 + b"}\n"),
    "data: 40,000 turns": data(
        "x.jsonl",
        json.dumps({"messages": [{"role": r, "content": "x"} for r in ("user", "assistant")] * 20_000}).encode(),
    ),
    "data: a million keys": data("x.jsonl", json.dumps({f"k{i}": 1 for i in range(10**6)}).encode()),
    "data: a text of 40 MB": data("x.jsonl", json.dumps({"text": "a" * (40 * 10**6)}).encode()),
    "data: ids of 2**70": data("x.jsonl", json.dumps({"input_ids": [2**70]}).encode()),
    "data: a bomb of Parquet": data("x.parquet", parquet),
    "data: a bomb of Arrow": data("x.arrow", arrow),
    "data: cut Parquet": data("x.parquet", b"PAR1" + b"\xff" * 1000 + b"PAR1"),
    "data: a pickle as an array": data("x.npy", pickled_array),
    "data: an array of 2**60": data(
        "x.npy",
        b"\x93NUMPY\x01\x00v\x00"
        + b"{'descr': '<i4', 'fortran_order': False, 'shape': (1152921504606846976,), }".ljust(117)
        + b"\n",
    ),
    "data: a pipe": data("x.jsonl", lambda path: put(path, "pipe")),
    "data: zeros without end": data("x.jsonl", lambda path: put(path, "zero")),
    "data: noise without end": data("x.jsonl", lambda path: put(path, "urandom")),
    "data: a folder in itself": data("d/loop", lambda path: path.symlink_to(path.parent)),
    "data: a README that grows": data(
        "d/README.md",
        lambda path: (
            (path.with_name("a.jsonl").write_text(json.dumps(ROW)), path.write_text(f"---\n{LAUGHS}\n---\n"))
        ),
    ),
    "data: a slow pattern": data(
        "d/README.md",
        lambda path: (
            (
                path.with_name("a" * 200 + ".jsonl").write_text(json.dumps(ROW)),
                path.write_text("---\nconfigs:\n- config_name: default\n  data_files: '" + "*a" * 40 + "*b'\n---\n"),
            )
        ),
    ),
    # adapters
    "adapter: rank of 10**12": adapter({"r": 10**12}),
    "adapter: a slow expression": adapter({"target_modules": "(.*.*)*(.*.*)*(.*.*)*x"}),
    "adapter: a million targets": adapter({"target_modules": [f"x{i}" for i in range(10**6)]}),
    "adapter: alpha is no number": adapter({"lora_alpha": float("nan")}),
    "adapter: a slow rank pattern": adapter({"rank_pattern": {"(.*.*)*(.*.*)*x": 8}}),
    "adapter: deep nesting": adapter(b"[" * DEEP),
    "adapter: a pickle": pickled_adapter,
    "adapter: a header of 2**63 bytes": adapter({}, header({}, 2**63 - 1)),
    # YAML
    "yaml: laughs": options(LAUGHS.encode()),
    "yaml: laughs as an option": options((LAUGHS + "\nmodel: *a9\n").encode()),
    "yaml: code": options(b"!!python/object/apply:os.system ['touch was-run']\n"),
    "yaml: deep nesting": options(b"[" * DEEP),
    "yaml: a long number": options(b"steps: " + b"9" * 10**6 + b"\n"),
    "yaml: 20 MB of one option": options(b"model: " + b"x" * (20 * 10**6) + b"\n"),
    "yaml: no text": options(b"\0\xff" * 1000),
    "yaml: a list without end": options(b"a: &a [*a]\nmodel: *a\n"),
}
