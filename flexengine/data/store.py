"""Tokens on disk: records tokenized once into a compact file, and files of token shards, read by position.

Four bytes a token: the id as a signed integer, with all its bits flipped (so negative) where the token has no loss. Two
numbers a record stand beside it. Tokens are read with positioned reads rather than through a mapping, whose pages would
count as resident memory of the process: what a run holds is the index and one batch.
"""

import hashlib
import json
import logging
import math
import os
import re
import shutil
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flexengine.data.kept_images import KeptImage, PicturedRecord, unpacked
from flexengine.data.prompts import TokenizedPrompt, prompt_of
from flexengine.data.records import IGNORE, TokenizedRecord
from flexengine.data.token_columns import TokenizedPair, ValuedRecord

logger = logging.getLogger(__name__)

WHOLE = -1
"""In place of a record's first target: all its tokens are targets, so that the record may be split."""
TABLE_NAME = re.compile(r"(hub-|web-|given-)?[0-9a-f]{32}(\..*)?")
"""What lies in a cache: folders by their key, links of the hub to them, files of the web, records that a program gave,
and what is being written."""
TOKENS_FILE, INDEX_FILE, COUNTS_FILE = "tokens.bin", "index.npz", "counts.json"

HASHED_BLOCK_BYTES, MOST_HASHED_BYTES = 1 << 20, 4 << 30
"""Shards have any size: hashing more than this at the start of a run would hold it up for half a minute and more."""


class TokenFile:
    """A file of token ids, read by position; `signed` ones say with their sign which tokens have a loss."""

    def __init__(self, file: int, dtype: np.dtype, offset_bytes: int = 0, signed: bool = True) -> None:
        """file: descriptor, owned from here on."""
        self._file, self._dtype, self._offset_bytes, self._signed = file, dtype, offset_bytes, signed

    def __del__(self) -> None:
        os.close(self._file)

    def numbers(self, start: int, length: int) -> np.ndarray:
        """Numbers start..start+length of the file as they are stored."""
        size = self._dtype.itemsize
        raw = os.pread(self._file, length * size, self._offset_bytes + start * size)
        tokens = np.frombuffer(raw, self._dtype)
        if len(tokens) != length:
            raise ValueError(f"a file of tokens ends {length - len(tokens)} tokens early; it changed while it was read")
        return tokens

    def blocks(self, num_tokens: int) -> Iterator[np.ndarray]:
        """The first num_tokens numbers, some at a time; of a large shard, blocks at even distances up to its end."""
        size = HASHED_BLOCK_BYTES // self._dtype.itemsize
        num_blocks = -(-num_tokens // size)
        stride = 1 if self._signed else max(1, math.ceil(num_blocks * HASHED_BLOCK_BYTES / MOST_HASHED_BYTES))
        for block in range((num_blocks - 1) % stride if num_blocks else 0, num_blocks, stride):
            yield self.numbers(block * size, min(size, num_tokens - block * size))

    def read(self, start: int, length: int) -> TokenizedRecord:
        """Tokens start..start+length of the file with their labels."""
        tokens = self.numbers(start, length)
        if not self._signed or (tokens >= 0).all():
            ids = tokens.tolist()  # one list for both: numbers of Python take nine times their bytes in the file
            return TokenizedRecord(ids, ids)
        ids, labels = np.where(tokens < 0, ~tokens, tokens), np.where(tokens < 0, IGNORE, tokens)
        return TokenizedRecord(ids.tolist(), labels.tolist())


@dataclass(frozen=True)
class TokenTable:
    """Records in a file of tokens: where each ends, and its first token with a loss (after the first of all) or WHOLE.

    left_out and notes count, by reason, what the records lost on the way here; num_bad records could not be read, the
    first of which `bad` names, each with what follows the name of the source (", line 3: ..."). values: those of all
    records (float64), None where all are 0.
    """

    file: TokenFile
    ends: np.ndarray
    first_targets: np.ndarray
    left_out: dict[str, int] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)
    num_bad: int = 0
    bad: Sequence[str] = ()
    values: np.ndarray | None = None

    @cached_property
    def sha256(self) -> str:
        """A digest of what the records are as tokens and labels; of a shard over MOST_HASHED_BYTES, of parts of it."""
        digest = hashlib.sha256()
        for index in (self.ends, self.first_targets):
            digest.update(np.ascontiguousarray(index, np.int64).data)
        if self.values is not None:
            digest.update(self.values.data)
        for block in self.file.blocks(int(self.ends[-1]) if len(self.ends) else 0):
            digest.update(block.data)
        return digest.hexdigest()


class Cut(NamedTuple):
    """Sequences of one table, as positions in its file, and what became of its records. Counts are in records.

    splits: of pairs, which lie one behind the other, the tokens of each one's first sequence; None of single ones.
    behind: the numbers that follow each: its images, or of prompts its columns and images. placed: tokens of each that
    stand for images, None where these are not read. values: those of the sequences or pairs, None where all are 0.
    """

    starts: np.ndarray
    lengths: np.ndarray
    num_records: int
    num_too_long: int
    num_truncated: int
    num_split: int
    num_without_targets: int
    longest: int
    splits: np.ndarray | None = None
    values: np.ndarray | None = None
    behind: np.ndarray | None = None
    placed: np.ndarray | None = None
    of_prompts: bool = False

    @property
    def sizes(self) -> np.ndarray:
        """Numbers of each sequence in the file."""
        return self.lengths if self.behind is None else self.lengths + self.behind


def cut_records(table: TokenTable, max_seq_len: int, truncate_long: bool) -> Cut:
    """Sequences of at most max_seq_len tokens, in the order of the records.

    A longer record is split where all of it is trained, each part beginning with the last token of the one before, so
    that every token but the first is predicted once; others are dropped, or cut with truncate_long. A record without a
    token to learn is dropped.
    """
    begins = np.concatenate((np.zeros(1, np.int64), table.ends[:-1]))[: len(table.ends)]
    sizes = table.ends - begins
    whole, is_long = table.first_targets == WHOLE, sizes > max_seq_len
    has_target = np.where(whole, sizes > 1, table.first_targets < np.minimum(sizes, max_seq_len))
    too_long = is_long & ~whole & (not truncate_long)
    kept = has_target & ~too_long
    stride = max(max_seq_len - 1, 1)
    num_parts = np.where(kept, np.where(is_long & whole, -(-(sizes - 1) // stride), 1), 0)
    record = np.repeat(np.arange(len(sizes), dtype=np.int32), num_parts)
    starts = np.arange(len(record))  # arrays of this length fill the memory of a run: they are changed in place
    starts -= np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
    starts *= stride
    lengths = np.minimum(sizes[record] - starts, max_seq_len).astype(np.int32)
    starts += begins[record]
    return Cut(
        starts=starts,
        lengths=lengths,
        num_records=len(sizes),
        num_too_long=int(too_long.sum()),
        num_truncated=int((kept & is_long & ~whole).sum()),
        num_split=int((kept & is_long & whole).sum()),
        num_without_targets=int((~has_target & ~too_long).sum()),
        longest=int(sizes.max(initial=0)),
        values=None if table.values is None else table.values[record],
    )


def cut_pairs(table: TokenTable, max_seq_len: int, images: bool = False) -> Cut:
    """Pairs of records in their order. One whose longer record exceeds max_seq_len is dropped, as is one with a record
    without a token to learn. images: whether those of each pair follow it."""
    sizes, each = np.diff(table.ends, prepend=0), 3 if images else 2
    has_target = np.where(table.first_targets == WHOLE, sizes > 1, table.first_targets < sizes)
    has_targets, of_pairs = has_target.reshape(-1, each)[:, :2], sizes.reshape(-1, each)[:, :2]
    kept, cut = _kept_whole(table, each, of_pairs, np.asarray(has_targets.all(1)), max_seq_len)
    cut = cut._replace(splits=of_pairs[:, 0][kept].astype(np.int32))
    return cut._replace(behind=sizes[2::3][kept], placed=_placed(table, 3, kept)) if images else cut


def cut_followed(table: TokenTable, max_seq_len: int, images: bool, prompts: bool = False) -> Cut:
    """Records in their order, each followed by its images, or prompts by their columns and images.

    None is cut, since that would cut an image's tokens. Prompts need no token to learn.
    """
    sizes = np.diff(table.ends, prepend=0).reshape(-1, 2)
    first, lengths = table.first_targets[0::2], sizes[:, 0]
    has_target = np.where(first == WHOLE, lengths > 1 - prompts, first < lengths)
    kept, cut = _kept_whole(table, 2, sizes[:, :1], has_target, max_seq_len)
    placed = _placed(table, 2, kept) if images else None
    return cut._replace(behind=sizes[:, 1][kept], placed=placed, of_prompts=prompts)


def _kept_whole(
    table: TokenTable, each: int, sizes: np.ndarray, has_target: np.ndarray, max_seq_len: int
) -> tuple[np.ndarray, Cut]:
    """Which rows of `each` records are kept, and these. sizes: tokens [rows, n] of the n first records of every row."""
    too_long, lengths = (sizes > max_seq_len).any(1), sizes.sum(1)
    kept = has_target & ~too_long
    cut = Cut(
        starts=np.concatenate((np.zeros(1, np.int64), table.ends))[:-1][0::each][kept],
        lengths=lengths[kept].astype(np.int32),
        num_records=len(sizes),
        num_too_long=int(too_long.sum()),
        num_truncated=0,
        num_split=0,
        num_without_targets=int((~has_target & ~too_long).sum()),
        longest=int(sizes.max(initial=0)),
        values=None if table.values is None else table.values[0::each][kept],
    )
    return np.asarray(kept), cut


def _placed(table: TokenTable, each: int, kept: np.ndarray) -> np.ndarray:
    """Tokens that stand for images: the value of what follows every record, the last of `each`."""
    values = np.zeros(len(table.ends)) if table.values is None else table.values
    return values[each - 1 :: each][kept].astype(np.int64)


AnyRecord = TokenizedRecord | ValuedRecord
Stored = AnyRecord | TokenizedPair | TokenizedPrompt | PicturedRecord


class StoredSequences(Sequence[Stored]):
    """Sequences of several tables, read from disk when asked for. lengths in tokens, of all of them in order."""

    def __init__(self, parts: Sequence[tuple[TokenFile, Cut]]) -> None:
        self._parts = parts
        self._ends = np.cumsum([len(cut.lengths) for _, cut in parts])
        self.lengths = parts[0][1].lengths if len(parts) == 1 else np.concatenate([cut.lengths for _, cut in parts])

    @property
    def image_tokens(self) -> np.ndarray | None:
        """Tokens of each sequence that stand for images; None where these are not trained with."""
        if all(cut.placed is None for _, cut in self._parts):
            return None
        none = (np.zeros(len(cut.lengths), np.int64) if cut.placed is None else cut.placed for _, cut in self._parts)
        return np.concatenate(list(none))

    def sha256(self) -> str:
        """A digest of the tokens and labels of all sequences; reads them all."""
        digest = hashlib.sha256()
        for file, cut in self._parts:
            for column in (cut.lengths, cut.splits) if cut.splits is not None else (cut.lengths,):
                digest.update(np.ascontiguousarray(column, np.int64).data)
            digest.update(b"" if cut.values is None else cut.values.tobytes())
            for start, length in zip(cut.starts.tolist(), cut.sizes.tolist(), strict=True):
                digest.update(file.numbers(start, length).data)
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> Stored:  # pyright: ignore[reportIncompatibleMethodOverride], no slices
        if not 0 <= i < len(self):
            raise IndexError(i)
        part = int(np.searchsorted(self._ends, i, side="right"))
        file, cut = self._parts[part]
        at = i - int(self._ends[part]) + len(cut.lengths)
        start, length = int(cut.starts[at]), int(cut.lengths[at])
        found, images = file.read(start, length), list[KeptImage]()
        if cut.behind is not None:
            behind = file.numbers(start + length, int(cut.behind[at]))
            if cut.of_prompts:
                return prompt_of(found.input_ids, behind)
            images = unpacked(behind)
        value = 0.0 if cut.values is None else float(cut.values[at])
        if cut.splits is None and cut.behind is not None:
            return PicturedRecord(*found, images, value)
        if cut.splits is None:
            return found if cut.values is None else ValuedRecord(*found, value)
        split = int(cut.splits[at])
        halves = slice(split), slice(split, None)
        first, second = (TokenizedRecord(found.input_ids[half], found.labels[half]) for half in halves)
        return TokenizedPair(first, second, first.labels[0] != IGNORE, value, images)


# ---- tokenized once --------------------------------------------------------------------------------------------


def default_cache() -> Path | None:
    """data/ of $FLEXENGINE_CACHE, else of flexengine/ in the XDG cache folder; None for a user without a home."""
    if folder := os.environ.get("FLEXENGINE_CACHE"):
        return Path(folder) / "data"
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flexengine" / "data"
    except RuntimeError:
        return None


class Index(NamedTuple):
    """What a table has of each record, as `TokenTable` says."""

    ends: np.ndarray
    first_targets: np.ndarray
    values: np.ndarray | None


def write_tokens(records: Iterable[AnyRecord], file: int) -> Index:
    """Writes records to an open file; returns where each ends, its first target and its value (TokenTable)."""
    ends, first_targets, values, total = array("q"), array("i"), array("d"), 0
    with open(file, "wb", closefd=False, buffering=2**20) as out:
        for ids, labels, *value in records:
            tokens = np.array(ids, np.int32)
            first = WHOLE
            if labels is not ids:
                ignored = np.array(labels, np.int32) == IGNORE
                np.invert(tokens, out=tokens, where=ignored)
                if ignored.any():
                    first = len(tokens) if ignored[1:].all() else 1 + int(np.argmin(ignored[1:]))
            out.write(tokens.data)
            total += len(tokens)
            ends.append(total)
            first_targets.append(first)
            values.append(*value or (0.0,))
    own = np.array(values) if any(values) else None
    return Index(np.array(ends, np.int64), np.array(first_targets, np.int32), own)


def table_in_scratch(records: Iterable[AnyRecord]) -> TokenTable:
    """A table in a file without a name, which the system removes with the process."""
    with tempfile.TemporaryFile() as file:
        index = write_tokens(records, file.fileno())
        return TokenTable(TokenFile(os.dup(file.fileno()), np.dtype(np.int32)), *index[:2], values=index.values)


def open_table(folder: Path) -> TokenTable | None:
    """The table that an earlier run left in a folder of the cache; None where there is none, or a damaged one."""
    try:
        counts = json.loads((folder / COUNTS_FILE).read_text())
        seal = counts.pop("sha256")
        with np.load(folder / INDEX_FILE) as index:
            found = Index(index["ends"], index["first_targets"], index.get("values"))
        file = TokenFile(os.open(folder / TOKENS_FILE, os.O_RDONLY), np.dtype(np.int32))
        table = TokenTable(file, *found[:2], **counts, values=found.values)
        if _seal(table, counts) == seal:
            return table
    except FileNotFoundError:
        return None
    except Exception:  # readers of archives and arrays stumble over damaged ones in ways of their own
        logger.debug("traceback", exc_info=True)
    logger.warning("%s is not what was written there; the data is tokenized again", folder)
    return None


def _seal(table: TokenTable, counts: Mapping[str, Any]) -> str:
    """A digest of all that a table in the cache says. Raises: ValueError where the file of tokens is too short."""
    return hashlib.sha256(f"{table.sha256} {json.dumps(counts)}".encode()).hexdigest()


def write_table(folder: Path, records: Iterable[AnyRecord], counts: dict[str, Any]) -> None:
    """Writes a table beside `folder` and gives it that name when it is whole; counts are read when records end."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        file = os.open(partial / TOKENS_FILE, os.O_WRONLY | os.O_CREAT)
        try:
            index = write_tokens(records, file)
        finally:
            os.close(file)
        columns = {name: column for name, column in index._asdict().items() if column is not None}
        np.savez(partial / INDEX_FILE, allow_pickle=False, **columns)
        tokens = TokenFile(os.open(partial / TOKENS_FILE, os.O_RDONLY), np.dtype(np.int32))
        seal = _seal(TokenTable(tokens, *index[:2], values=index.values), counts)
        (partial / COUNTS_FILE).write_text(json.dumps({**counts, "sha256": seal}))
        shutil.rmtree(folder, ignore_errors=True)  # a damaged one
        os.rename(partial, folder)
    except FileExistsError:
        pass  # another process was faster
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def clear_cache(cache: Path) -> int:
    """Removes all tables of a cache, and nothing else in the folder; returns their bytes. Runs keep what they read."""
    entries = [entry for entry in cache.glob("*") if TABLE_NAME.fullmatch(entry.name)]
    num_bytes = sum(file.stat().st_size for entry in entries for file in entry.glob("*") if not entry.is_symlink())
    for entry in entries:
        entry.unlink() if entry.is_symlink() else shutil.rmtree(entry, ignore_errors=True)
    return num_bytes


def point_to(link: Path, folder: Path) -> None:
    """Makes a link to a folder beside it, in place of the one that was there."""
    partial = link.with_name(f"{link.name}.{os.getpid()}")
    partial.symlink_to(folder.name)
    partial.replace(link)
