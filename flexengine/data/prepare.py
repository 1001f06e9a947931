"""From sources to sequences: every record is tokenized once, kept in a cache, and cut to the longest sequence."""

import functools
import hashlib
import importlib.metadata
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flexengine.data.records import TokenizedRecord
from flexengine.data.sources import NotFromHubError, Reader, Source
from flexengine.data.store import (
    Cut,
    StoredSequences,
    TokenTable,
    cut_records,
    open_shard,
    open_table,
    point_to,
    table_in_scratch,
    write_table,
)
from flexengine.data.tokenizer import ChatTokenizer

logger = logging.getLogger(__name__)

TOKEN_CODE = ("records.py", "masks.py", "templates.py", "tokenizer.py")
"""What makes tokens of rows."""
SHOWN_NOTES = 8
"""Most remarks about one source: a file may have thousands of columns."""


@dataclass(frozen=True)
class Prepared:
    """The sequences of one source, and what became of its records."""

    table: TokenTable
    cut: Cut
    place: str = ""
    weight: float = 1.0

    @property
    def sequences(self) -> StoredSequences:
        return StoredSequences([(self.table.file, self.cut)])

    def describe(self) -> str:
        """In one line: how many records and tokens are left, and what was cut or left out and why."""
        cut, left_out = self.cut, self.table.left_out
        kept = cut.num_records - cut.num_too_long - cut.num_without_targets
        parts = [f"{kept} of {cut.num_records + sum(left_out.values())} records, {cut.lengths.sum()} tokens"]
        parts += [f"{cut.num_split} split into sequences of --max-seq-len"] if cut.num_split else []
        parts += [f"{cut.num_too_long} dropped as longer than --max-seq-len"] if cut.num_too_long else []
        parts += [f"{cut.num_truncated} truncated to --max-seq-len"] if cut.num_truncated else []
        parts += [f"{cut.num_without_targets} dropped without target tokens"] if cut.num_without_targets else []
        parts += [f"{count} left out, since {reason}" for reason, count in left_out.items()]
        parts += [f"{count} {remark}" for remark, count in self.table.notes.items()]
        parts += [f"weight {self.weight:g}"] if self.weight != 1.0 else []
        return (f"{self.place}: " if self.place else "") + "; ".join(parts)


def prepare_sources(
    sources: Sequence[Source], tokenizer: ChatTokenizer, max_seq_len: int, truncate_long: bool, cache: Path | None
) -> list[Prepared]:
    """The sequences of each source, from the cache where it has them; without a cache from a nameless file.

    Raises ValueError for records that cannot be read, or when a source leaves nothing to train on, saying why.
    """
    return [
        prepare_table(_open(source, tokenizer, cache), max_seq_len, truncate_long, source.place, source.weight)
        for source in sources
    ]


def prepare_sequences(records: Iterable[TokenizedRecord], max_seq_len: int, truncate_long: bool) -> Prepared:
    """The sequences of tokenized records. Raises ValueError when nothing is left to train on, saying why."""
    return prepare_table(table_in_scratch(records), max_seq_len, truncate_long)


def prepare_table(
    table: TokenTable, max_seq_len: int, truncate_long: bool, place: str = "", weight: float = 1.0
) -> Prepared:
    """Cuts records to sequences. Raises ValueError when no sequence is left, saying why."""
    cut = cut_records(table, max_seq_len, truncate_long)
    if not len(cut.lengths):
        remedy = f"\n  works with: --max-seq-len {cut.longest}, or --truncate-long" if cut.num_too_long else ""
        reasons = "".join(f"\n  {count} left out, since {reason}" for reason, count in table.left_out.items())
        raise ValueError(
            f"no record is left to train on: of {cut.num_records + sum(table.left_out.values())}, {cut.num_too_long}"
            f" are longer than --max-seq-len {max_seq_len} tokens (longest: {cut.longest}) and"
            f" {cut.num_without_targets} have no target token{reasons}{remedy}"
        )
    return Prepared(table, cut, place, weight)


def _open(source: Source, tokenizer: ChatTokenizer, cache: Path | None) -> TokenTable:
    if source.is_shard:
        return open_shard(Path(source.place), tokenizer.max_id + 1)
    try:
        reader = Reader(source)
    except NotFromHubError as error:
        table = open_table(_last_of_hub(source, tokenizer, cache).resolve()) if cache is not None else None
        if table is None:
            raise
        logger.warning("%s\n  the tokens that an earlier run left in %s are used", error, cache)
        return table
    counts: dict[str, dict[str, int]] = {}
    if cache is not None:
        folder = cache / _key(reader, tokenizer)
        try:
            table = open_table(folder)
            if table is None:
                write_table(folder, _encoded(reader, tokenizer, counts), counts)
                table = open_table(folder)
            if table is not None:
                if not reader.is_on_disk:
                    point_to(_last_of_hub(source, tokenizer, cache), folder)
                return table
        except OSError as error:
            logger.warning("the data cache %s cannot be used (%s); tokens go to a scratch file", cache, error)
    table = table_in_scratch(_encoded(reader, tokenizer, counts))
    return replace(table, **counts)


def _last_of_hub(source: Source, tokenizer: ChatTokenizer, cache: Path) -> Path:
    """A link in the cache to the tokens of a data set of the hub, as it last was, for runs without a network."""
    place = (source.place, source.config, source.split)
    return cache / f"hub-{_digest(*place, tokenizer.key(), _code_key())}"


def _encoded(reader: Reader, tokenizer: ChatTokenizer, counts: dict[str, dict[str, int]]) -> Iterator[TokenizedRecord]:
    """The records of a source, tokenized. When they end, counts holds `left_out` and `notes` of all of them."""
    tokenizer.left_out, tokenizer.notes = Counter(), Counter()
    yield from tokenizer.encode_records(reader.records())
    unread = {f"values of {key} not read": count for key, count in reader.unread.most_common(SHOWN_NOTES)}
    counts |= {"left_out": dict(tokenizer.left_out), "notes": dict(tokenizer.notes) | unread}


def _key(reader: Reader, tokenizer: ChatTokenizer) -> str:
    return _digest(reader.key(), tokenizer.key(), _code_key())


def _digest(*parts: str | None) -> str:
    """A name in the cache for what decides tokens: the source, the tokenizer and template, and our own code."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


@functools.cache
def _code_key() -> str:
    """A digest of the code that makes tokens of rows, here and in the libraries: another version tokenizes again."""
    sources = [Path(__file__).with_name(name).read_bytes() for name in TOKEN_CODE]
    versions = [importlib.metadata.version(name) for name in ("tokenizers", "transformers", "jinja2")]
    return hashlib.sha256(b"".join([*sources, repr(versions).encode()])).hexdigest()
