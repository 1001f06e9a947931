"""Where records come from: files, folders, data sets of the hub, and shards of tokens, several at once with weights.

A source is written as `PLACE[:SPLIT][=WEIGHT]`: a file of records (JSON, JSON Lines, CSV, TSV, Parquet, Arrow; .gz),
a folder of such files, an id on the Hugging Face hub (`ORG/NAME[:CONFIG][:SPLIT]`), or a shard of tokens (.bin, .npy).
"""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from flexengine.checkpoint.atomic import sha256_of
from flexengine.checkpoint.dataset_files import format_of, select_data_files
from flexengine.checkpoint.dataset_rows import read_rows, without_nulls
from flexengine.checkpoint.manifest import DownloadError
from flexengine.data.records import Record, parse_record
from flexengine.data.store import SHARD_SUFFIXES

WEIGHT = re.compile(r"(.+)=(\d+(?:\.\d*)?|\.\d+)")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
DEFAULT_SPLIT = "train"
WANTED = "--dataset wants a JSON or JSON Lines file, CSV, Parquet, Arrow, a folder of them, or an id on the hub"


@dataclass(frozen=True)
class Source:
    """One place of records; weight says how often an epoch sees it (0.5: half of it, 2: twice)."""

    place: str
    split: str = DEFAULT_SPLIT
    config: str | None = None
    weight: float = 1.0

    @property
    def is_shard(self) -> bool:
        """Whether it holds tokens rather than records."""
        return Path(self.place).suffix in SHARD_SUFFIXES


def parse_source(text: str) -> Source:
    """The source that an option names. Raises ValueError where there is no such file, folder or id."""
    match = None if os.path.exists(text) else WEIGHT.fullmatch(text)
    name, weight = (match[1], float(match[2])) if match else (text, 1.0)
    if weight <= 0:
        raise ValueError(f"data set {text}: a weight must be more than 0; leave the data set out instead")
    place, *rest = [name] if os.path.exists(name) else name.split(":")
    if len(rest) > 2 or (len(rest) == 2 and os.path.exists(place)):
        raise ValueError(f"data set {text}: too many colons; write PLACE:SPLIT, or ORG/NAME:CONFIG:SPLIT for the hub")
    if not os.path.exists(place) and (not HUB_ID.fullmatch(place) or format_of(place) or place.startswith(".")):
        raise ValueError(f"data set {text}: no such file; {WANTED}")
    config, split = (None, *rest) if len(rest) == 1 else (rest or (None, DEFAULT_SPLIT))
    return Source(place, split or DEFAULT_SPLIT, config, weight)


class Reader:
    """The records of one source, read as they are asked for. Its key changes when they do."""

    def __init__(self, source: Source) -> None:
        """Finds the files, or the data set on the hub. Raises ValueError."""
        self.source = source
        self.unread: Counter[str] = Counter()
        on_disk = os.path.exists(source.place)
        self._files = files_of(source) if on_disk else []
        self._hub = None if on_disk else open_on_hub(source)

    @property
    def is_on_disk(self) -> bool:
        """Whether the source is a file or a folder, rather than on the hub."""
        return self._hub is None

    def key(self) -> str:
        """A digest of the contents."""
        if self._hub is not None:
            return self._hub.key
        parts = [f"{format_of(path.name)} {sha256_of(path)}" for path in self._files]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def records(self) -> Iterator[Record]:
        """Every record, in order. Raises ValueError naming file and place of what cannot be read."""
        found = False
        for row, where in self._rows():
            found = True
            yield parse_record(row, where, self.unread)
        if not found:
            num_bytes = sum(path.stat().st_size for path in self._files)
            raise ValueError(
                f"data set {self.source.place} holds no record ({num_bytes} bytes); --dataset wants one record or more"
            )

    def _rows(self) -> Iterator[tuple[Any, str]]:
        if self._hub is not None:
            yield from self._hub.rows(self.source)
        for path in self._files:
            yield from read_rows(path)


def files_of(source: Source) -> list[Path]:
    """The files of a source on disk: itself, or those of a folder that make up the split."""
    path = Path(source.place)
    if path.is_file():
        return [path]
    names = sorted(str(found.relative_to(path)) for found in path.rglob("*") if found.is_file())
    if not any(map(format_of, names)):
        raise ValueError(f"data set {path}: is a folder; {WANTED}, and it holds no such file")
    try:
        return [path / name for name in select_data_files(names, None, source.split, source.config)]
    except DownloadError as error:
        raise ValueError(f"data set {path}: {str(error).replace('--split', f'--dataset {path}:SPLIT')}") from None


class NotFromHubError(ValueError):
    """The hub does not give a data set, or there is no network."""


class HubRows(NamedTuple):
    """A data set of the hub. Its rows come over the network while they are read; key changes when they do."""

    stream: Iterable[Any]
    key: str

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
        return HubRows(builder.as_streaming_dataset(split=source.split), key)
    except Exception as error:  # of the network, the hub, its loaders: any
        raise _not_from_hub(source, error, "no such file, and not to be had from the hub") from None


def _not_from_hub(source: Source, error: Exception, what: str) -> NotFromHubError:
    found = (str(error).splitlines() or [type(error).__name__])[0][:300]
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
