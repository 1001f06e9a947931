"""Where records come from: files, folders, data sets of the hub, and shards of tokens, several at once with weights.

A source is written as `PLACE[:SPLIT][[PART]][=WEIGHT]`, such as `org/name:train[:10%]=0.5`. A place is a file of
records (JSON, JSON Lines, CSV, TSV, Parquet, Arrow; .gz), a folder of such files or an id on the Hugging Face hub (both
also `PLACE:CONFIG:SPLIT`), or a shard of tokens (.bin, .npy). A folder is read as the hub's library reads a copy of a
repository: README.md may name configurations and splits.
"""

import hashlib
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from flexengine.checkpoint.atomic import sha256_of
from flexengine.checkpoint.dataset_files import README, check_card, format_of, kind_of, left_aside, select_data_files
from flexengine.checkpoint.dataset_rows import read_rows, without_nulls
from flexengine.checkpoint.manifest import DownloadError
from flexengine.checkpoint.web_file import is_private, name_in
from flexengine.data.bad_records import BadRecords
from flexengine.data.guessed_columns import guess_columns, remark_of
from flexengine.data.parts import SLICE, read_part
from flexengine.data.records import (
    CHAT_NAMES,
    KNOWN_NAMES,
    PAIRS,
    TEXTS,
    Record,
    named_columns,
    parse_record,
    remarks,
)
from flexengine.data.shards import SHARD_SUFFIXES
from flexengine.wording import did_you_mean

logger = logging.getLogger(__name__)

T = TypeVar("T")
RecordKind = Literal["answers", "pair", "ranked", "rated", "labelled", "prompt"]
"""What the records of a source are: single answers to learn, pairs of answers (ranked: with margins), answers with a
verdict, sequences with a label, or prompts."""

WEIGHT = re.compile(r"(.+)=(\d+(?:\.\d*)?|\.\d+)")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
DEFAULT_SPLIT = "train"
WEB = re.compile(r"https?://\S+")
WANTED = (
    "--dataset wants a JSON or JSON Lines file, CSV, Parquet, Arrow, .txt or .pt, a folder of them, an id on the hub,"
    " or an https address of such a file"
)
ONCE = "That can be read only once, and a run may read its data again: write them to a file first"
NO_PLACES = (
    (r"^-$", f"the standard input is not read. {ONCE}"),
    (r"^file://", "write the path alone, without file://"),
    (r"^hf://", "write ORG/NAME, without hf://datasets/"),
    (r"^\w+://", "only https addresses are fetched; download the file first, or name an id on the hub as ORG/NAME"),
    (r"^~", "the shell replaces ~ only outside of quotes; write the whole path"),
    (r"=[\d.,]+%?$", "no such file; a weight is a number behind =, such as =0.5"),
    (r"[*?]", "no such file; the shell replaces patterns only outside of quotes, and a folder can be named as a whole"),
)
"""What a name that is no place looks like -> what to say."""
SHOWN_FILES = 6
"""Most files that a message names."""


class LabelNames(NamedTuple):
    """The labels of a model in the order of its outputs, and what they are (`options/task.py:Problem`)."""

    names: tuple[str, ...] = ()
    problem: str = ""


NO_LABELS = LabelNames()


@dataclass(frozen=True)
class Source:
    """One place of records; weight says how often an epoch sees it (0.5: half of it, 2: twice).

    columns: pairs of the name that a column has in records and its own. max_records: how many are read, the first ones.
    part: the part of the split that is read, as parts.py has it; empty for all.
    kind: what its records are. labels: of the model, where they have some. images: whether those of records are read.
    """

    place: str
    split: str = DEFAULT_SPLIT
    config: str | None = None
    weight: float = 1.0
    columns: tuple[tuple[str, str], ...] = ()
    max_records: int | None = None
    part: str = ""
    kind: RecordKind = "answers"
    labels: LabelNames = NO_LABELS
    images: bool = False

    @property
    def is_shard(self) -> bool:
        """Whether it holds tokens rather than records."""
        return Path(self.place).suffix in SHARD_SUFFIXES


def parse_columns(given: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Read what --columns says, as NAME=COLUMN with names that records have. Raises ValueError for other names."""
    pairs = [text.partition("=") for text in given]
    wrong = next((text for text, (_, _, column) in zip(given, pairs, strict=True) if not column), None)
    if wrong is not None:
        raise ValueError(f"--columns {wrong}: write NAME=COLUMN, such as prompt=input answer=target")
    names = Counter(name for name, _, _ in pairs)
    for name, count in names.items():
        if name not in KNOWN_NAMES:
            raise ValueError(
                f"--columns {name}=...: records have no {name}{did_you_mean(name, KNOWN_NAMES)}; they have"
                f" {', '.join(KNOWN_NAMES)}"
            )
        if count > 1:
            raise ValueError(f"--columns gives {name} twice; give it once")
    return tuple((name, column) for name, _, column in pairs)


def sources_of(
    places: Sequence[str],
    columns: Sequence[str] = (),
    max_records: int | None = None,
    kind: RecordKind = "answers",
    labels: LabelNames = NO_LABELS,
    images: bool = False,
) -> list[Source]:
    """The sources that options name. Raises ValueError as `parse_source` and `parse_columns`."""
    named = parse_columns(columns)
    given = {"columns": named, "max_records": max_records, "kind": kind, "labels": labels, "images": images}
    return [replace(parse_source(text), **given) for text in places]


def parse_source(text: str) -> Source:
    """The source that an option names. Raises ValueError where there is no such file, folder or id."""
    match = None if os.path.exists(text) else WEIGHT.fullmatch(text)
    name, weight = (match[1], float(match[2])) if match else (text, 1.0)
    if weight <= 0:
        raise ValueError(f"data set {text}: a weight must be more than 0; leave the data set out instead")
    if WEB.fullmatch(text):
        return _on_the_web(*((text, 1.0) if match is None or "?" in match[1] else (name, weight)))
    sliced = None if os.path.exists(name) else SLICE.search(name)
    if sliced is not None:
        try:
            read_part(sliced[1])
        except ValueError as error:
            raise ValueError(f"data set {text}: {error}") from None
        name = name[: sliced.start()]
    place, rest = _place(name)
    _check_place(text, name, place)
    if len(rest) > 2:
        raise ValueError(f"data set {text}: too many colons; write PLACE:SPLIT or PLACE:CONFIG:SPLIT")
    config, split = (None, *rest) if len(rest) == 1 else (rest or (None, DEFAULT_SPLIT))
    if os.path.isfile(place) and (config is not None or split not in ("", DEFAULT_SPLIT)):
        raise ValueError(
            f"data set {text}: {place} is a file, which has no split {':'.join(rest)}; leave :{':'.join(rest)} out, or"
            " name a folder with files for each split"
        )
    return Source(place, split or DEFAULT_SPLIT, config, weight, part="" if sliced is None else sliced[1])


def _on_the_web(url: str, weight: float) -> Source:
    """A file of the web, which is fetched when it is read. Raises ValueError where the address cannot be of one."""
    name = name_in(url)
    if not is_private(url):
        raise ValueError(f"data set {url}: what comes over http may be changed on the way; give an https address")
    if not (kind_of(name) or Path(name).suffix in SHARD_SUFFIXES):
        raise ValueError(f"data set {url}: the address ends in {name or 'no name of a file'}; {WANTED}")
    return Source(url, weight=weight)


def _place(name: str) -> tuple[str, list[str]]:
    """The place that a name begins with, and what follows it after colons. Names of files may have colons too."""
    parts = name.split(":")
    found = (n for n in range(len(parts), 0, -1) if os.path.exists(":".join(parts[:n])))
    end = next(found, 1)
    return ":".join(parts[:end]), parts[end:]


def _check_place(text: str, name: str, place: str) -> None:
    """Raise ValueError, with the reason, where a name can be no source. text: as it was given, with weight and all."""
    if os.path.exists(place):
        if not (os.path.isfile(place) or os.path.isdir(place)):
            raise ValueError(f"data set {text}: {place} is a pipe or a device. {ONCE}")
        return
    if HUB_ID.fullmatch(place) and not format_of(place) and not place.startswith("."):
        return
    reason = next((why for pattern, why in NO_PLACES if re.search(pattern, name)), f"no such file; {WANTED}")
    reason = f"is a link to {os.readlink(place)}, which is not there" if os.path.islink(place) else reason
    raise ValueError(f"data set {text}: {reason}")


class Reader:
    """The records of one source, read as they are asked for. Its key changes when they do."""

    def __init__(self, source: Source) -> None:
        """Finds the files, or the data set on the hub. Raises ValueError."""
        self.source = source
        self.unread: Counter[str] = Counter()
        self.remarks: Counter[str] = Counter()
        on_disk = os.path.exists(source.place)
        self._files = files_of(source) if on_disk else []
        self._hub = None if on_disk else open_on_hub(source)
        self._folder = Path()  # of the file that is being read, which images are relative to

    @property
    def is_on_disk(self) -> bool:
        """Whether the source is a file or a folder, rather than on the hub."""
        return self._hub is None

    def key(self) -> str:
        """A digest of the contents."""
        parts = [f"{kind_of(path.name)} {sha256_of(path)}" for path in self._files]
        parts += [] if self._hub is None else [self._hub.key]
        parts += [f"columns {sorted(self.source.columns)}"] if self.source.columns else []
        parts += [f"first {self.source.max_records}"] if self.source.max_records is not None else []
        parts += [f"part {self.source.part}"] if self.source.part else []
        parts += [self.source.kind, repr(self.source.labels)] if self.source.kind != "answers" else []
        parts += ["images", *(str(path.resolve().parent) for path in self._files)] if self.source.images else []
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @property
    def images_folder(self) -> Path | None:
        """What images of the record in work are relative to; None where images are not read."""
        return self._folder if self.source.images else None

    def records(self, bad: BadRecords | None = None) -> Iterator[Record]:
        """Every record of a single answer, in order, but the bad ones that are skipped.

        Raises ValueError as `parsed`.
        """
        named = dict(self.source.columns)

        def parse(row: Any, where: str, unread: Counter[str]) -> Record:
            columns = named or guess_columns(row, PAIRS, (*CHAT_NAMES, *TEXTS, "input_ids"))
            record = parse_record(named_columns(row, columns, unread), where, unread, self.images_folder)
            self.remarks.update(remarks(record))
            if columns and not named:
                self.remarks[remark_of(columns)] += 1
            return record

        yield from self.parsed(parse, bad or BadRecords())

    def parsed(self, parse: Callable[..., T], bad: BadRecords) -> Iterator[T]:
        """What a parser, such as `parse_record`, makes of every row, but of the bad ones that are skipped.

        Raises ValueError naming file and place of what cannot be read; unless `bad` skips it, at the first.
        """
        found, columns = False, dict(self.source.columns)
        for row, where in islice(self._rows_of_part(), self.source.max_records):
            found = True
            try:
                if isinstance(row, ValueError):
                    raise row
                parsed = parse(named_columns(row, columns, self.unread), where, self.unread)
            except ValueError as error:
                bad.leave_out(error)
                continue
            yield parsed
        if not found:
            num_bytes = sum(path.stat().st_size for path in self._files)
            part = f"[{self.source.part}]" if self.source.part else ""
            raise ValueError(
                f"data set {self.source.place}{part} holds no record ({num_bytes} bytes); --dataset wants one record or"
                " more"
            )

    def _rows_of_part(self) -> Iterator[tuple[Any, str]]:
        """The rows of the part that is read; all are counted before, where its limits follow from their number."""
        if not self.source.part:
            return self._rows()
        part, count = read_part(self.source.part), None
        if part.needs_count:
            count = self._hub.num_rows if self._hub is not None else None
            count = sum(1 for _ in self._rows()) if count is None else count
        return islice(self._rows(), *part.bounds(count))

    def _rows(self) -> Iterator[tuple[Any, str]]:
        if self._hub is not None:
            yield from self._hub.rows(self.source)
        for path in self._files:
            self._folder = path.resolve().parent
            yield from read_rows(path)


def files_of(source: Source) -> list[Path]:
    """The files of a source on disk: itself, or those of a folder that make up the split, as on the hub."""
    path = Path(source.place)
    if path.is_file():
        return [path]
    names = sorted(str(found.relative_to(path)) for found in path.rglob("*") if found.is_file())
    if not any(map(format_of, names)):
        raise ValueError(
            f"data set {path}: is a folder; {WANTED}, and it holds no such file (found {_first(names) or 'nothing'})"
        )
    readme = (path / README).read_text("utf-8", errors="replace") if README in names else None
    try:
        check_card(readme or "")
        chosen = select_data_files(names, readme, source.split, source.config)
    except DownloadError as error:
        said = str(error).replace("with --config", f"with --dataset {path}:CONFIG:SPLIT").replace("--config", "CONFIG")
        said = said.replace("--split", f"--dataset {path}:{f'{source.config}:' if source.config else ''}SPLIT")
        raise ValueError(f"data set {path}: {said}") from None
    if others := left_aside(names, readme, source.split, source.config, chosen):
        logger.warning(
            "data set %s: %d files are of no split, and are not read: %s; read are %s",
            path, len(others), _first(others), _first(chosen),
        )  # fmt: skip
    return [path / name for name in chosen]


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN_FILES]) + (
        f" and {len(names) - SHOWN_FILES} more" if len(names) > SHOWN_FILES else ""
    )


class NotFromHubError(ValueError):
    """The hub does not give a data set, or there is no network."""


class HubRows(NamedTuple):
    """A data set of the hub. Its rows come over the network while they are read; key changes when they do.

    num_rows: how many there are, where the hub says so.
    """

    stream: Iterable[Any]
    key: str
    num_rows: int | None = None

    def rows(self, source: Source) -> Iterator[tuple[Any, str]]:
        """Every row with its place. Raises NotFromHubError when the network or the hub fails on the way."""
        number = 0
        try:
            for number, row in enumerate(self.stream, start=1):
                yield without_nulls(row), f"{source.place}, row {number}"
        except Exception as error:  # of the network, the hub, its loaders: any
            raise _not_from_hub(source, error, f"the stream ended after {number} rows") from None


def open_on_hub(source: Source) -> HubRows:
    """A data set of the hub, through the `datasets` library, which when offline knows what it has in its cache.

    Rows are streamed, since they are read once and kept as tokens. Raises NotFromHubError.
    """
    import datasets  # noqa: PLC0415 - takes a second

    try:
        builder = datasets.load_dataset_builder(source.place, source.config)
        key = f"hub {source.place} {builder.config.name} {source.split} {builder.hash}"  # the hash is the commit
        split = (builder.info.splits or {}).get(source.split)
        stream: Any = builder.as_streaming_dataset(split=source.split)
        for name, feature in (stream.features or {}).items():  # images stay files, which are looked at first
            own = getattr(feature, "feature", feature)
            if isinstance(own, datasets.Image):
                as_file = datasets.Image(decode=False)
                stream = stream.cast_column(name, as_file if own is feature else type(feature)(as_file))
        return HubRows(stream, key, split and split.num_examples)
    except Exception as error:  # of the network, the hub, its loaders: any
        raise _not_from_hub(source, error, "no such file, and not to be had from the hub") from None


def _not_from_hub(source: Source, error: Exception, what: str) -> NotFromHubError:
    found = " ".join(str(error).split())[:300] or type(error).__name__
    return NotFromHubError(
        f"data set {source.place} (split {source.split}): {what}: {found}\n"
        f"  check the name, or fetch it where there is a network: flexengine download dataset {source.place}"
        f"{f' --config {source.config}' if source.config else ''} --split {source.split}"
        f" --target {source.place.split('/')[-1]}.jsonl"
    )


def read_json_sft(path: str | Path) -> list[Record]:
    """All records of a file, in order. Raises ValueError naming file and place, or when it is missing or empty."""
    if not os.path.exists(path):
        raise ValueError(f"data set {path}: no such file; {WANTED}")
    return list(Reader(Source(str(path))).records())
