"""What ranks tell each other, as bytes: JSON, and the contents of arrays behind it. Nothing in it is ever code.

A value of None, truth, number or text is itself in JSON, a list a list; everything else is an object with one key that
says what it is. Records (named tuples, dataclasses) come back where the reader names their classes, and no others; one
whose to_json makes text, from which from_json makes it again, crosses as that.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

_LENGTH = struct.Struct("<Q")
_NUMBERS = "biuf"  # kinds of elements, as numpy names them: truth, integers, floats


def encode(value: Any) -> bytes:
    """A value that ranks may tell each other, as bytes. Raises: TypeError for one of another type."""
    buffers: list[bytes] = []
    tree = _tree(value, buffers)
    text = json.dumps([tree, [len(buffer) for buffer in buffers]]).encode()
    return b"".join((_LENGTH.pack(len(text)), text, *buffers))


def decode(data: bytes, records: Collection[type] = ()) -> Any:
    """The value that `encode` made the bytes from; records: the classes that may be in it.

    Raises: ValueError for bytes that hold no such value.
    """
    try:
        (length,) = _LENGTH.unpack_from(data)
        end = _LENGTH.size + length
        tree, lengths = json.loads(data[_LENGTH.size : end])
        buffers = []
        for count in lengths:
            buffers.append(data[end : end + count])
            end += count
        return _value(tree, buffers, {record.__name__: record for record in records})
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError, struct.error) as error:
        raise ValueError(f"what another rank sent cannot be read: {type(error).__name__}: {error}") from error


def _tree(value: Any, buffers: list[bytes]) -> Any:
    """JSON of a value. Its bytes go into `buffers`."""
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_tree(item, buffers) for item in value]
    if isinstance(value, bytes):
        buffers.append(value)
        return {"bytes": len(buffers) - 1}
    kind, contents = _contents(value)
    return {kind: _tree(contents, buffers)}


def _contents(value: Any) -> tuple[str, Any]:
    """What a value is, and what it is made from again: text or a list."""
    text = value.to_json() if hasattr(value, "to_json") else None
    if isinstance(value, Path):
        found = "path", str(value)
    elif isinstance(value, (set, frozenset)):
        found = "set", list(value)
    elif isinstance(value, Mapping):
        found = "dict", [list(pair) for pair in value.items()]
    elif isinstance(value, np.ndarray) and value.dtype.kind in _NUMBERS:
        found = "array", [value.dtype.str, list(value.shape), value.tobytes()]
    elif type(value) is tuple:
        found = "tuple", list(value)
    elif isinstance(text, str):
        found = "record", [type(value).__name__, text]
    elif isinstance(value, tuple):
        found = "record", [type(value).__name__, list(value)]
    elif is_dataclass(value):
        found = "record", [type(value).__name__, [getattr(value, field.name) for field in fields(value)]]
    else:
        raise TypeError(f"ranks tell each other no values of type {type(value).__name__}")
    return found


def _value(tree: Any, buffers: list[bytes], records: Mapping[str, Any]) -> Any:
    if isinstance(tree, list):
        return [_value(item, buffers, records) for item in tree]
    if not isinstance(tree, dict):
        return tree
    [(kind, packed)] = tree.items()
    if kind == "bytes":
        return buffers[packed]
    contents = _value(packed, buffers, records)
    return _record(contents, records) if kind == "record" else _MAKERS[kind](contents)


def _array(contents: list[Any]) -> np.ndarray:
    dtype, shape, data = contents
    if np.dtype(dtype).kind not in _NUMBERS:
        raise ValueError(f"an array of {dtype}")
    return np.frombuffer(bytearray(data), dtype).reshape(shape)


def _record(contents: list[Any], records: Mapping[str, Any]) -> Any:
    name, made_from = contents
    return records[name].from_json(made_from) if isinstance(made_from, str) else records[name](*made_from)


_MAKERS: dict[str, Callable[[Any], Any]] = {
    "path": Path,
    "set": frozenset,
    "dict": dict,
    "array": _array,
    "tuple": tuple,
}
