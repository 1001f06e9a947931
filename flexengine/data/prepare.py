"""From sources to sequences: every record is tokenized once, kept in a cache, and cut to the longest sequence."""

import functools
import hashlib
import importlib.metadata
import json
import logging
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from flexengine.checkpoint.bounded_process import report_alive
from flexengine.checkpoint.hub_errors import without_secrets
from flexengine.checkpoint.web_file import fetched
from flexengine.data.bad_records import BadRecords, Policy
from flexengine.data.encoding import encode_records
from flexengine.data.kept_images import PicturedRecord, are_as_they_were
from flexengine.data.labelled import encode_labelled, parse_labelled
from flexengine.data.pictured import encode_with_images
from flexengine.data.preferences import compared_of, encode_compared
from flexengine.data.prompts import TokenizedPrompt, encode_prompts, parse_prompt
from flexengine.data.records import TokenizedRecord
from flexengine.data.shards import open_shard
from flexengine.data.sources import WEB, NotFromHubError, Reader, RecordKind, Source
from flexengine.data.store import (
    Cut,
    StoredSequences,
    TokenTable,
    cut_followed,
    cut_pairs,
    cut_records,
    open_table,
    point_to,
    table_in_scratch,
    write_table,
)
from flexengine.data.token_columns import TokenizedPair, ValuedRecord
from flexengine.data.tokenizer import ChatTokenizer

logger = logging.getLogger(__name__)

TOKEN_CODE = (
    *(
        "records.py",
        "preferences.py",
        "labelled.py",
        "prompts.py",
        "token_columns.py",
        "turn_masks.py",
        "masks.py",
        "templates.py",
        "tokenizer.py",
        "encoding.py",
        "image_places.py",
        "image_processor.py",
        "kept_images.py",
        "pictured.py",
    ),
    *(
        "guessed_columns.py",
        "labelled.py",
        "parts.py",
        "model_folder.py",
        "../checkpoint/tokenizer_files.py",
        "../checkpoint/dataset_rows.py",
    ),
)
"""What makes tokens of files, from this folder."""
HUB_CPU_S = 60.0
"""CPU seconds in which the `datasets` library is imported and finds a data set."""
PAIRS = ("pair", "ranked", "rated")
"""Kinds of records that are two sequences each."""
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
        parts = [f"{self.num_kept} of {_num_records(self.table, cut)} records, {cut.lengths.sum()} tokens"]
        parts += [f"{cut.num_split} split into sequences of --max-seq-len"] if cut.num_split else []
        parts += [f"{cut.num_too_long} dropped as longer than --max-seq-len"] if cut.num_too_long else []
        parts += [f"{cut.num_truncated} truncated to --max-seq-len"] if cut.num_truncated else []
        parts += [f"{cut.num_without_targets} dropped without target tokens"] if cut.num_without_targets else []
        parts += [f"{count} left out, since {reason}" for reason, count in left_out.items()]
        parts += [f"{self.table.num_bad} bad records left out (--bad-records skip)"] if self.table.num_bad else []
        parts += [f"{count} {remark}" for remark, count in self.table.notes.items()]
        parts += [f"weight {self.weight:g}"] if self.weight != 1.0 else []
        return (f"{self.place}: " if self.place else "") + "; ".join(parts)

    @property
    def num_kept(self) -> int:
        """Records that are trained."""
        return self.cut.num_records - self.cut.num_too_long - self.cut.num_without_targets

    @property
    def bad_lines(self) -> list[str]:
        """The first bad records that were left out, a line each with file and line, and how many others there are."""
        return _bad_lines(self.table, self.place)

    def as_json(self) -> dict[str, Any]:
        """What became of the records, as JSON values: counts are in records, `tokens` in tokens."""
        cut = self.cut
        return {
            "place": self.place,
            "weight": self.weight,
            "records": _num_records(self.table, cut),
            "kept": self.num_kept,
            "tokens": int(cut.lengths.sum()),
            "longer_than_max_seq_len": cut.num_too_long,
            "truncated": cut.num_truncated,
            "without_targets": cut.num_without_targets,
            "left_out": self.table.left_out,
            "bad_records": self.table.num_bad,
            "first_bad_records": self.bad_lines,
            "notes": self.table.notes,
        }


def _num_records(table: TokenTable, cut: Cut) -> int:
    """All records of a source, whatever became of them."""
    return cut.num_records + sum(table.left_out.values()) + table.num_bad


def _bad_lines(table: TokenTable, place: str) -> list[str]:
    more = table.num_bad - len(table.bad)
    return [f"{_path(place)}{said}" for said in table.bad] + ([f"and {more} more"] if more else [])


def _path(place: str) -> str:
    """A place as messages about its records begin: without "./" and the like."""
    return place if WEB.fullmatch(place) else str(Path(place)) if place else ""


class TableMaker(Protocol):
    """Makes tokens of sources elsewhere, as `make_table` does with a tokenizer of this process.

    num_ids: ids that the model has rows for.
    """

    num_ids: int

    def make_table(self, source: Source, cache: Path | None, scratch: Path, bad_records: Policy) -> Path: ...


def prepare_sources(
    sources: Sequence[Source],
    tokenizer: ChatTokenizer | TableMaker,
    max_seq_len: int,
    truncate_long: bool,
    cache: Path | None,
    bad_records: Policy = "stop",
) -> list[Prepared]:
    """The sequences of each source, from the cache where it has them; without a cache from a scratch folder.

    Raises ValueError for records that cannot be read, unless bad_records says to skip them, or when a source leaves
    nothing to train on, saying why.
    """
    tables = ((source, _open(_on_disk(source, cache), tokenizer, cache, bad_records)) for source in sources)
    return [
        prepare_table(
            table,
            max_seq_len,
            truncate_long,
            without_secrets(source.place),
            source.weight,
            source.kind,
            source.images,
        )
        for source, table in tables
    ]


def _on_disk(source: Source, cache: Path | None) -> Source:
    """The source with what is on the web in a file. Raises ValueError as `fetched`."""
    return replace(source, place=str(fetched(source.place, cache))) if WEB.fullmatch(source.place) else source


def prepare_sequences(records: Iterable[TokenizedRecord], max_seq_len: int, truncate_long: bool) -> Prepared:
    """The sequences of tokenized records. Raises ValueError when nothing is left to train on, saying why."""
    return prepare_table(table_in_scratch(records), max_seq_len, truncate_long)


def prepare_table(
    table: TokenTable,
    max_seq_len: int,
    truncate_long: bool,
    place: str = "",
    weight: float = 1.0,
    kind: RecordKind = "answers",
    images: bool = False,
) -> Prepared:
    """Cuts records to sequences, or takes them as pairs or prompts. Raises ValueError when nothing is left.

    max_seq_len: of prompts, what is left for them beside their answers. images: whether those of records follow them.
    """
    may_cut = not images and kind != "prompt" and kind not in PAIRS
    cut = cut_records(table, max_seq_len, truncate_long) if may_cut else _cut_whole(table, max_seq_len, kind, images)
    if not len(cut.lengths):
        or_cut = ", or --truncate-long" if may_cut else ""
        needs = f"{cut.longest} more than --max-completion-length" if kind == "prompt" else f"{cut.longest}{or_cut}"
        remedy = f"\n  works with: --max-seq-len {needs}" if cut.num_too_long else ""
        reasons = "".join(f"\n  {count} left out, since {reason}" for reason, count in table.left_out.items())
        if table.num_bad:
            reasons += "\n    ".join([f"\n  {table.num_bad} cannot be read:", *_bad_lines(table, place)])
        raise ValueError(
            f"no record is left to train on: of {_num_records(table, cut)}, {cut.num_too_long}"
            f" are longer than --max-seq-len {max_seq_len} tokens (longest: {cut.longest}) and"
            f" {cut.num_without_targets} have no target token{reasons}{remedy}"
        )
    return Prepared(table, cut, place, weight)


def _cut_whole(table: TokenTable, max_seq_len: int, kind: RecordKind, images: bool) -> Cut:
    if kind in PAIRS:
        return cut_pairs(table, max_seq_len, images)
    return cut_followed(table, max_seq_len, images, prompts=kind == "prompt")


def _open(source: Source, tokenizer: ChatTokenizer | TableMaker, cache: Path | None, bad_records: Policy) -> TokenTable:
    """The tokens of a source. Raises ValueError as `prepare_sources`, also where an earlier run skipped bad records."""
    if source.is_shard:
        if source.columns or source.max_records is not None or source.part:
            given = "--columns" if source.columns else f"--max-records {source.max_records}"
            given = f"the part [{source.part}]" if source.part else given
            raise ValueError(f"data set {source.place}: {given} is about records, and a shard of tokens has none")
        if source.images:
            raise ValueError(f"data set {source.place}: a shard of tokens has no images; leave --max-image-tokens out")
        if source.kind != "answers":
            raise ValueError(
                f"data set {source.place}: a shard of tokens has no answers to compare and no labels; give records that"
                " have, or leave --objective and --task out"
            )
        return open_shard(Path(source.place), tokenizer.num_ids)
    with tempfile.TemporaryDirectory(prefix="flexengine-tokens") as folder:
        scratch = Path(folder, "table")
        if isinstance(tokenizer, ChatTokenizer):
            made = make_table(source, tokenizer, cache, scratch, bad_records)
        else:
            made = tokenizer.make_table(source, cache, scratch, bad_records)
        table = open_table(made)  # it holds the file open, so that the folder may go
    if table is None:
        raise ValueError(f"{made}: the tokens of {source.place} are gone as soon as they were written; start again")
    if table.num_bad and bad_records == "stop":
        BadRecords().leave_out(ValueError(_bad_lines(table, source.place)[0]))
    return table


def make_table(
    source: Source, tokenizer: ChatTokenizer, cache: Path | None, scratch: Path, bad_records: Policy
) -> Path:
    """Tokenize a source unless the cache has its tokens; returns the folder of the table, of the cache or `scratch`."""
    report_alive(source.place, 0.0 if Path(source.place).exists() else HUB_CPU_S)
    try:
        reader = Reader(source)
    except NotFromHubError as error:
        known = _last_of_hub(source, tokenizer, cache).resolve() if cache is not None else None
        if known is None or open_table(known) is None:
            raise
        logger.warning("%s\n  the tokens that an earlier run left in %s are used", error, cache)
        return known
    counts: dict[str, Any] = {}
    if cache is not None:
        folder = cache / _key(reader, tokenizer)
        try:
            found = open_table(folder)
            if found is None or (source.images and not _has_its_images(found, source.kind)):
                write_table(folder, _encoded(reader, tokenizer, counts, bad_records), counts)
            if not reader.is_on_disk:
                point_to(_last_of_hub(source, tokenizer, cache), folder)
            return folder
        except OSError as error:
            logger.warning("the data cache %s cannot be used (%s); tokens go to a scratch file", cache, error)
    write_table(scratch, _encoded(reader, tokenizer, counts, bad_records), counts)
    return scratch


def _last_of_hub(source: Source, tokenizer: ChatTokenizer, cache: Path) -> Path:
    """A link in the cache to the tokens of a data set of the hub, as it last was, for runs without a network."""
    place = (source.place, source.config, source.split, repr(source.columns), repr(source.max_records), source.part)
    place += () if source.kind == "answers" else (source.kind, repr(source.labels))
    place += ("images", tokenizer.images.key()) if tokenizer.images is not None else ()
    return cache / f"hub-{_digest(*place, tokenizer.key(), _code_key())}"


def _encoded(
    reader: Reader, tokenizer: ChatTokenizer, counts: dict[str, Any], bad_records: Policy
) -> Iterator[TokenizedRecord | ValuedRecord]:
    """The records of a source, tokenized. When they end, counts holds what `TokenTable` tells of all of them."""
    tokenizer.left_out, tokenizer.notes = Counter(), Counter()
    bad = BadRecords(bad_records)
    if reader.source.kind == "answers" and reader.source.images:
        yield from encode_with_images(reader.records(bad), tokenizer, bad)
    elif reader.source.kind == "answers":
        yield from encode_records(reader.records(bad), tokenizer, bad)
    elif reader.source.kind == "prompt":
        prompts = reader.parsed(lambda *one: parse_prompt(*one, folder=reader.images_folder), bad)
        yield from encode_prompts(prompts, tokenizer, bad)
    elif reader.source.kind == "labelled":
        names = reader.source.labels
        labelled = reader.parsed(lambda *one: parse_labelled(*one, names=names, folder=reader.images_folder), bad)
        yield from encode_labelled(labelled, tokenizer, bad)
    else:
        yield from encode_compared(compared_of(reader, bad), tokenizer, bad)
    unread = {f"values of {key} not read": count for key, count in reader.unread.most_common(SHOWN_NOTES)}
    remarks = dict(reader.remarks.most_common(SHOWN_NOTES))
    counts |= {"left_out": dict(tokenizer.left_out), "notes": dict(tokenizer.notes) | remarks | unread}
    counts |= {"num_bad": bad.count, "bad": [said.removeprefix(_path(reader.source.place)) for said in bad.first]}


def _has_its_images(table: TokenTable, kind: RecordKind) -> bool:
    """Whether the images that a table was made of lie where they were, as they were."""
    cut = _cut_whole(table, int(table.ends[-1]) if len(table.ends) else 0, kind, images=True)
    rows = StoredSequences([(table.file, cut)])
    with_images = (row for row in rows if isinstance(row, (PicturedRecord, TokenizedPair, TokenizedPrompt)))
    return all(are_as_they_were(row.images) for row in with_images)


def _key(reader: Reader, tokenizer: ChatTokenizer) -> str:
    images = () if tokenizer.images is None else (tokenizer.images.key(),)
    return _digest(reader.key(), tokenizer.key(), _code_key(), *images)


def _digest(*parts: str | None) -> str:
    """A name in the cache for what decides tokens: the source, the tokenizer and template, and our own code."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


@functools.cache
def _code_key() -> str:
    """A digest of the code that makes tokens of rows, here and in the libraries: another version tokenizes again."""
    sources = [(Path(__file__).parent / name).read_bytes() for name in TOKEN_CODE]
    versions = [importlib.metadata.version(name) for name in ("tokenizers", "transformers", "jinja2")]
    return hashlib.sha256(b"".join([*sources, repr(versions).encode()])).hexdigest()
