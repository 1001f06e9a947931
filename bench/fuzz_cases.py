"""Damaged inputs from seeds: config.json, headers of safetensors files, and shard indexes.

A case is one seed: it decides what is damaged and how, so that a failure is told in one number. Values are drawn where
parsers break: types, the edges of ranges, sizes that overflow, nesting, texts that are no text.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flexengine.checkpoint.layout import INDEX_FILE, SINGLE_FILE
from flexengine.checkpoint.writer import TensorSource, write_checkpoint
from flexengine.models.registry import build_model

KINDS = {"config": 5, "header": 4, "index": 1}
"""What is damaged -> weight of its choice."""
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 61,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.02,
}
ROPES: tuple[Any, ...] = (
    None,
    {"rope_type": "linear", "factor": 2.0},
    {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32, "mscale": 0.7},
)  # fmt: skip
NUMBERS = (
    0, 1, -1, 2, 3, 7, 255, 2**15, 2**16 + 1, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 10**12,
    10**30, -(2**63), 0.0, -0.0, 0.5, 1.0, 16.0, 1e-300, 1e-8, 1e30, 1e300, -1.5, float("nan"), float("inf"),
    float("-inf"),
)  # fmt: skip
TEXTS = ("", "llama", "Llama", "16", "0x10", "silu", "gelu", "yarn", "\x00", "\n\n\n", "\ud800", "é" * 50, "9" * 5000)
NAMES = ("", "../x", "a/b", ".", "x" * 300, "\ud800", "a\x00b", "\n", SINGLE_FILE, "model-00001-of-00002.safetensors")
DTYPES = ("F32", "I32", "U32", "F16", "BF16", "I64", "U8", "BOOL", "F8_E4M3", "C64", "F4", "f32", "", "F" * 10000)
DAMAGED_SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


class Damaged(NamedTuple):
    """The folder of a case, what was damaged (a key of KINDS), and how."""

    folder: Path
    kind: str
    how: str


class Originals:
    """Whole models to be damaged: one in a single file, one in two shards."""

    def __init__(self, folder: Path) -> None:
        self.single, self.sharded = folder / "single", folder / "sharded"
        write_model(self.single, None)
        write_model(self.sharded, DAMAGED_SHARDS)


def write_model(folder: Path, shards: tuple[str, str] | None, config: dict[str, Any] = CONFIG) -> None:
    """A whole checkpoint of `config` with zeros for weights, in one file or in two shards."""
    spec = build_model("original", config)
    shapes = {s.name: s.shape for group in spec.groups for param in group.params for s in param.sources}
    tensors = [TensorSource(n, torch.float32, s, lambda s=s: torch.zeros(s)) for n, s in shapes.items()]
    split = None if shards is None else {t.name: shards[i % 2] for i, t in enumerate(tensors)}
    write_checkpoint(folder, tensors, split, beside={"config.json": json.dumps(config)})


def damage(seed: int, originals: Originals, folder: Path) -> Damaged:
    """Write the model of case `seed` into an empty `folder`."""
    rng = random.Random(seed)
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    source = originals.sharded if kind == "index" else originals.single
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    how = {"config": damage_config, "header": damage_header, "index": damage_index}[kind](rng, folder)
    return Damaged(folder, kind, how)


# ---- values ---------------------------------------------------------------------------------------------------


def any_value(rng: random.Random, depth: int = 0) -> Any:
    """A JSON value of any type."""
    size = rng.choice((0, 1, 2, 40))
    ways: tuple[Callable[[], Any], ...] = (
        lambda: rng.choice(NUMBERS),
        lambda: rng.choice(NUMBERS),
        lambda: rng.choice((True, False, None)),
        lambda: rng.choice(TEXTS),
        lambda: rng.randint(-(2**65), 2**65),
        lambda: rng.uniform(-10, 100000),
        lambda: [any_value(rng, depth + 1) for _ in range(size)],
        lambda: {rng.choice(TEXTS): any_value(rng, depth + 1) for _ in range(size)},
    )
    return rng.choice(ways if depth < 3 else ways[:6])()


def changed_number(rng: random.Random, value: Any) -> Any:
    """A value near a number, or any other."""
    if type(value) not in (int, float):
        return any_value(rng)
    return rng.choice((value + 1, value - 1, -value, value * 2, value * 1000, value * 2**20, value / 3, str(value)))


def damaged_text(rng: random.Random, raw: bytes) -> tuple[bytes, str]:
    """A text of JSON cut, changed, stretched or wrapped, and what was done."""
    at = rng.randrange(len(raw) + 1)
    junk = bytes(rng.randrange(256) for _ in range(rng.choice((1, 3, 200))))
    ways: dict[str, Callable[[], bytes]] = {
        "cut": lambda: raw[:at],
        "bytes changed": lambda: raw[:at] + junk + raw[at + len(junk) :],
        "bytes inserted": lambda: raw[:at] + junk + raw[at:],
        "a byte removed": lambda: raw[:at] + raw[at + 1 :],
        "nested deep": lambda: b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        "a list": lambda: b"[" + raw + b"]",
        "no UTF-8": lambda: raw.replace(b'"', b'"\xff', 1),
        "UTF-16": lambda: raw.decode(errors="replace").encode("utf-16"),
        "a key twice": lambda: raw.rstrip()[:-1] + b"," + raw.lstrip()[1:],
        "empty": lambda: b"",
        "a number of 5000 digits": lambda: raw.replace(b":", b":" + b"7" * 5000 + b",", 1),
        "long": lambda: raw + b" " * 200_000,
    }
    how = rng.choice(list(ways))
    return ways[how](), how


# ---- config.json ----------------------------------------------------------------------------------------------


def damage_config(rng: random.Random, folder: Path) -> str:
    """One to three changes of fields, or a damaged text."""
    config = {**CONFIG, "rope_scaling": rng.choice(ROPES)}
    if rng.random() < 0.2:
        raw, how = damaged_text(rng, json.dumps(config).encode())
        (folder / "config.json").write_bytes(raw)
        return how
    done = [change_field(rng, config) for _ in range(rng.randint(1, 3))]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return ", ".join(done)


def change_field(rng: random.Random, config: dict[str, Any]) -> str:
    """Change one field in place; returns what was done."""
    name = rng.choice(list(config))
    rope = config.get("rope_scaling")
    way = rng.randrange(7)
    if way == 0:
        config.pop(name, None)
        return f"{name} removed"
    if way == 1:
        config[rng.choice(TEXTS) + "_extra"] = any_value(rng)
        return "a field added"
    if way == 2:
        config[rng.choice(("quantization_config", "rope_parameters", "partial_rotary_factor"))] = any_value(rng)
        return "another option"
    if way == 3 and isinstance(rope, dict) and rope:
        key = rng.choice(list(rope))
        config["rope_scaling"] = {**rope, key: rng.choice((any_value(rng), changed_number(rng, rope[key])))}
        return f"rope {key}"
    config[name] = changed_number(rng, config[name]) if way == 4 else any_value(rng)
    return name


# ---- safetensors headers --------------------------------------------------------------------------------------


def damage_header(rng: random.Random, folder: Path) -> str:
    """A file whose length, header or data are wrong."""
    path = folder / SINGLE_FILE
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    text, data = raw[8 : 8 + length], raw[8 + length :]
    way = rng.randrange(5)
    if way == 0:
        length = rng.choice((0, 1, 2, length - 1, length + 1, len(raw), 10**8, 10**8 + 1, 2**40, 2**63, 2**64 - 1))
        how = "length"
    elif way == 1:
        text, how = damaged_text(rng, text)
        length = len(text)
    elif way == 2:
        data, how = rng.choice(((data[: rng.randrange(len(data))], "data cut"), (data + b"x" * 9, "data longer")))
    else:
        header = json.loads(text)
        how = ", ".join(change_entry(rng, header) for _ in range(rng.randint(1, 3)))
        text = json.dumps(header).encode()
        length = len(text)
    path.write_bytes(struct.pack("<Q", length) + text + data)
    return how


def change_entry(rng: random.Random, header: dict[str, Any]) -> str:
    """Change the header of a file in place; returns what was done."""
    name = rng.choice(list(header) or [""])
    entry = header.get(name)
    way = rng.randrange(8)
    if way == 0:
        header.pop(name, None)
        return "a tensor removed"
    if way == 1:
        header[rng.choice(NAMES)] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
        return "a tensor added"
    if way == 2:
        count = rng.choice((10, 1000, 20_000))
        header.update({f"t{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(count)})
        return f"{count} tensors added"
    if way == 3:
        header["__metadata__"] = any_value(rng)
        return "metadata"
    if way == 4 or not isinstance(entry, dict):
        header[name] = any_value(rng)
        return "an entry replaced"
    field = rng.choice(("dtype", "shape", "data_offsets"))
    entry[field] = any_field(rng, field)
    if rng.random() < 0.1:
        del entry[field]
    return field


def any_field(rng: random.Random, field: str) -> Any:
    """A value for a field of a tensor's entry."""
    if rng.random() < 0.3:
        return any_value(rng)
    if field == "dtype":
        return rng.choice(DTYPES)
    if field == "shape":
        return [rng.choice(NUMBERS) for _ in range(rng.choice((0, 1, 2, 3, 33, 3000)))]
    begin = rng.choice((0, 4, 8, 10**6, -4, 2**62))
    return [begin, begin + rng.choice((0, 64, -64, 2**40, 2**63))]


# ---- shard indexes --------------------------------------------------------------------------------------------


def damage_index(rng: random.Random, folder: Path) -> str:
    """An index that does not belong to its shards."""
    path = folder / INDEX_FILE
    if rng.random() < 0.4:
        raw, how = damaged_text(rng, path.read_bytes())
        path.write_bytes(raw)
        return f"index {how}"
    index = json.loads(path.read_text())
    weights = index["weight_map"]
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(list(weights) or [""])
        way = rng.randrange(5)
        if way == 0:
            weights.pop(name, None)
        elif way == 1:
            weights[name] = rng.choice((*NAMES, *DAMAGED_SHARDS))
        elif way == 2:
            weights[name] = any_value(rng)
        elif way == 3:
            weights[rng.choice(NAMES)] = rng.choice(DAMAGED_SHARDS)
        else:
            index[rng.choice(("weight_map", "metadata"))] = any_value(rng)
            break
    path.write_text(json.dumps(index))
    return "index entries"
