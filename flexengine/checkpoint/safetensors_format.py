"""The safetensors file format: parse and build headers, check every promise the format makes.

A file is: 8 bytes, the header length N as little-endian unsigned integer; N bytes of UTF-8 JSON that maps each tensor
name to {"dtype", "shape", "data_offsets": [begin, end]} plus an optional "__metadata__" of strings; then the data, to
which the offsets are relative. Tensors are row-major and little-endian; the data has no holes and no overlaps.
Source: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flexengine.wording import parse_json, shown

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # limit of the reference implementation, which guards against hostile headers
MAX_DIMENSIONS = 32  # published tensors have at most 5; a product over a longer list could take forever
HEADER_ALIGNMENT_BYTES = 8  # the header is padded with spaces so that the data starts aligned

DTYPE_OF_NAME: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
NAME_OF_DTYPE = {dtype: name for name, dtype in DTYPE_OF_NAME.items()}


class CheckpointError(ValueError):
    """A checkpoint on disk, or a request for it, is wrong; the message says what was asked, found, and what to do."""


class TensorEntry(NamedTuple):
    """Where one tensor lies: `num_bytes` at `offset_bytes` from the start of file `file` of the checkpoint folder."""

    name: str
    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset_bytes: int
    num_bytes: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class Header(NamedTuple):
    """One parsed file: its tensors in order of offset, and the strings of `__metadata__`."""

    entries: list[TensorEntry]
    metadata: dict[str, str]


def parse_json_object(text: bytes, where: Path) -> dict[str, Any]:
    """Parse a JSON object in which every key may occur once.

    Raises: CheckpointError naming `where` for text that is not UTF-8 JSON, not an object, or repeats a key (a tensor
    listed twice).
    """
    try:
        value = parse_json(text, where, unique=True)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: expected a JSON object, found {type(value).__name__}; fetch the file again.")
    return value


def read_header(descriptor: int, path: Path) -> Header:
    """Read and check the header of the open file `descriptor`; `path` is for messages and for `TensorEntry.file`.

    Raises: CheckpointError for a header that is absent, too long or malformed, an unknown dtype, offsets that overlap,
    leave holes or disagree with dtype and shape, and a file shorter or longer than its offsets say.
    """
    file_bytes = os.fstat(descriptor).st_size
    header_bytes = int.from_bytes(os.pread(descriptor, LENGTH_BYTES, 0), "little")
    if file_bytes < LENGTH_BYTES or not 2 <= header_bytes <= MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path}: not a safetensors file: {file_bytes} bytes long, its first {LENGTH_BYTES} bytes give a header of "
            f"{header_bytes} bytes (allowed: 2 to {MAX_HEADER_BYTES}). Fetch the file again; a Git LFS pointer or an "
            "HTML page saved under this name looks like this."
        )
    data_start = LENGTH_BYTES + header_bytes
    if data_start > file_bytes:
        raise CheckpointError(
            f"{path}: truncated: the header ends at byte {data_start}, the file at {file_bytes}; fetch it again."
        )
    fields = parse_json_object(os.pread(descriptor, header_bytes, LENGTH_BYTES), path)
    metadata = _metadata(fields.pop("__metadata__", {}), path)
    entries = [_entry(name, value, data_start, path) for name, value in fields.items()]
    entries.sort(key=lambda entry: (entry.offset_bytes, entry.num_bytes))
    _check_layout(entries, data_start, file_bytes, path)
    return Header(entries, metadata)


def _metadata(value: Any, path: Path) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise CheckpointError(
            f"{path}: __metadata__ must map strings to strings, found {shown(value)}; export the file again."
        )
    return value


def _entry(name: str, value: Any, data_start: int, path: Path) -> TensorEntry:
    dtype_name, shape, begin, end = None, [], 0, 0
    try:
        dtype_name, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
        well_formed = _are_sizes(shape) and _are_sizes([begin, end]) and begin <= end
    except (TypeError, KeyError, ValueError):
        well_formed = False
    if not well_formed:
        raise CheckpointError(
            f"{path}: tensor {shown(name)} needs dtype, shape (at most {MAX_DIMENSIONS} sizes) and data_offsets "
            f"[begin, end], found {shown(value)}; the header is damaged, fetch or export the file again."
        )
    dtype = DTYPE_OF_NAME.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise CheckpointError(
            f"{path}: tensor {shown(name)} has dtype {shown(dtype_name)}; known are {', '.join(DTYPE_OF_NAME)}. "
            "Convert the checkpoint to one of these first."
        )
    needed = math.prod(shape) * dtype.itemsize
    if end - begin != needed:
        raise CheckpointError(
            f"{path}: tensor {shown(name)} of shape {list(shape)} and dtype {dtype_name} needs {needed} bytes, its "
            f"offsets [{begin}, {end}] hold {end - begin}; the header is damaged, fetch or export the file again."
        )
    return TensorEntry(name, path.name, dtype, tuple(shape), data_start + begin, needed)


def _are_sizes(numbers: Any) -> bool:
    """Whether a decoded JSON value is a short list of whole numbers that fit in 63 bits."""
    if not isinstance(numbers, list) or len(numbers) > MAX_DIMENSIONS:
        return False
    return all(type(n) is int and 0 <= n < 1 << 63 for n in numbers)


def _check_layout(entries: list[TensorEntry], data_start: int, file_bytes: int, path: Path) -> None:
    """Check that the entries, sorted by offset, tile [data_start, file_bytes) exactly."""
    position, previous = data_start, "the header"
    for entry in entries:
        if entry.offset_bytes != position:
            what = "overlaps" if entry.offset_bytes < position else "leaves a hole after"
            raise CheckpointError(
                f"{path}: tensor {shown(entry.name)} starts at byte {entry.offset_bytes} and {what} {shown(previous)}, "
                f"which ends at byte {position}; the header is damaged, fetch or export the file again."
            )
        position, previous = entry.offset_bytes + entry.num_bytes, entry.name
    if position != file_bytes:
        what = "truncated" if file_bytes < position else "longer than its header says"
        raise CheckpointError(
            f"{path}: {what}: tensors end at byte {position}, the file at {file_bytes}; fetch or export it again."
        )


def build_header(
    tensors: list[tuple[str, torch.dtype, tuple[int, ...]]], metadata: dict[str, str]
) -> tuple[bytes, dict[str, int]]:
    """Header bytes (length prefix included) for `tensors` laid out back to back in the given order.

    Returns: the bytes that start the file, and for each name its absolute offset in the file, in bytes.
    Raises: CheckpointError for a dtype that the format has no name for.
    """
    fields: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    position, begin_of = 0, {}
    for name, dtype, shape in tensors:
        if dtype not in NAME_OF_DTYPE:
            raise CheckpointError(f"tensor {name!r}: safetensors has no name for {dtype}; cast it before writing.")
        begin_of[name], position = position, position + math.prod(shape) * dtype.itemsize
        offsets = [begin_of[name], position]
        fields[name] = {"dtype": NAME_OF_DTYPE[dtype], "shape": list(shape), "data_offsets": offsets}
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-(LENGTH_BYTES + len(text)) % HEADER_ALIGNMENT_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(f"header of {len(text)} bytes is over the {MAX_HEADER_BYTES} allowed; use more shards.")
    start = LENGTH_BYTES + len(text)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text, {name: start + begin for name, begin in begin_of.items()}
