"""Files of token shards: llm.c's, NumPy's, and bare numbers."""

import os
from pathlib import Path

import numpy as np

from flexengine.data.store import WHOLE, TokenFile, TokenTable

SHARD_SUFFIXES = (".bin", ".npy")
LLM_C_MAGIC = {20240520: np.uint16, 20240801: np.uint32}
"""First number of the 256 that open llm.c's shards (https://github.com/karpathy/llm.c, dev/data) -> dtype of tokens."""
LLM_C_HEADER_BYTES = 1024
LARGEST_UINT16_VOCABULARY = 2**16


def open_shard(path: Path, vocab_size: int) -> TokenTable:
    """A .bin or .npy file of token ids as one long record.

    .bin: llm.c's shards by their header, else bare numbers, of 16 bits where the vocabulary fits in them and of 32
    elsewhere. Raises ValueError for other contents and for ids outside of the vocabulary (the first million are read).
    """
    dtype, offset_bytes, num_tokens = _npy_layout(path) if path.suffix == ".npy" else _bin_layout(path, vocab_size)
    table = TokenTable(
        TokenFile(os.open(path, os.O_RDONLY), dtype, offset_bytes, signed=False),
        np.array([num_tokens], np.int64),
        np.array([WHOLE], np.int32),
    )
    ids = table.file.numbers(0, min(num_tokens, 10**6))
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise ValueError(
            f"{path}: holds the token {ids.max()}, read as {dtype}, but the model's vocab_size is {vocab_size}; it is"
            " of another tokenizer, or of another number format: write shards as .npy"
        )
    return table


def _npy_layout(path: Path) -> tuple[np.dtype, int, int]:
    try:
        array = np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as a NumPy array ({error}); write it with numpy.save") from None
    if not isinstance(array, np.memmap) or array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"{path}: holds {array.dtype} of shape {array.shape}; token ids are a flat array of integers")
    return array.dtype, array.offset, len(array)


def _bin_layout(path: Path, vocab_size: int) -> tuple[np.dtype, int, int]:
    num_bytes = path.stat().st_size
    magic = int.from_bytes(path.open("rb").read(4), "little")
    if magic in LLM_C_MAGIC and num_bytes >= LLM_C_HEADER_BYTES:
        dtype, offset_bytes = np.dtype(LLM_C_MAGIC[magic]), LLM_C_HEADER_BYTES
    else:
        dtype, offset_bytes = np.dtype(np.uint16 if vocab_size <= LARGEST_UINT16_VOCABULARY else np.uint32), 0
    if (num_bytes - offset_bytes) % dtype.itemsize:
        raise ValueError(f"{path}: {num_bytes} bytes are no whole number of {dtype} tokens; write shards as .npy")
    return dtype, offset_bytes, (num_bytes - offset_bytes) // dtype.itemsize
