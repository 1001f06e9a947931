"""Data files to JSON lines: one object per line, whatever the source format.

JSON, JSON lines and CSV (plain or gzip) are read here, parquet through pyarrow where it is installed.
"""

from __future__ import annotations

import contextlib
import csv
import datetime
import gzip
import hashlib
import itertools
import json
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from flexengine.checkpoint.atomic import atomic_file
from flexengine.checkpoint.dataset_files import format_of
from flexengine.checkpoint.manifest import DownloadError, FileRecord
from flexengine.wording import parse_json, shown

PARQUET_BATCH_ROWS = 1024  # bounds memory to a batch of rows instead of a row group
TURN_KEYS = ({"role", "content"}, {"from", "value"})  # of a turn in the formats of chats that are in use

csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a text field may be as long as a book; the default is 128 KiB


def write_json_lines(files: list[Path], target: Path) -> tuple[FileRecord, int]:
    """Write the rows of `files`, in order, to `target` as UTF-8 JSON lines; returns its record and the row count.

    Memory: one row at a time, except for .json files holding one array or one object, which are parsed whole.
    Raises: DownloadError naming file and row of what cannot be read or expressed in JSON, for a row that is not an
    object and for files without any row; `target` is then left as it was.
    """
    digest = hashlib.sha256()
    num_bytes = num_rows = 0
    with atomic_file(target) as out:
        for path in files:
            for row_number, row in enumerate(_rows(path), start=1):
                line = _encode(row, f"{path.name}, row {row_number}")
                out.write(line)
                digest.update(line)
                num_bytes, num_rows = num_bytes + len(line), num_rows + 1
        if not num_rows:
            raise DownloadError(
                f"{', '.join(path.name for path in files)}: no rows; choose another --split or --config."
            )
    return FileRecord(num_bytes, digest.hexdigest()), num_rows


def _encode(row: Any, where: str) -> bytes:
    if not isinstance(row, dict):
        raise DownloadError(f"{where}: expected a JSON object, found {type(row).__name__}: {shown(row)}.")
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False, default=_express)
    except (TypeError, ValueError, RecursionError) as error:  # no JSON form, a number that is not finite, too deep
        raise DownloadError(f"{where}: {error}; only text and finite numbers can be written as JSON lines.") from error
    try:
        return text.encode("utf-8") + b"\n"
    except UnicodeEncodeError:  # a lone surrogate, legal in JSON escapes, has no UTF-8 form: keep this row escaped
        return json.dumps(row, default=_express).encode("ascii") + b"\n"


def _express(value: Any) -> str:
    """Values that parquet has and JSON lacks."""
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    raise TypeError(f"a value of type {type(value).__name__} has no JSON form")


def _rows(path: Path) -> Iterator[Any]:
    kind = format_of(path.name)
    try:
        if kind == "parquet":
            yield from _parquet_rows(path)
            return
        with _open_text(path) as file:
            if kind in ("csv", "tsv"):
                yield from _csv_rows(file, path, "," if kind == "csv" else "\t")
            elif kind == "jsonl":
                yield from _line_rows(enumerate(file, start=1), path)
            else:
                yield from _json_rows(file, path)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DownloadError(
            f"{path.name}: damaged gzip data ({error}), and so at its source; tell its authors."
        ) from error
    except UnicodeDecodeError as error:
        raise DownloadError(f"{path.name}: not UTF-8 text ({error.reason} at byte {error.start}).") from error


@contextlib.contextmanager
def _open_text(path: Path) -> Iterator[TextIO]:
    """UTF-8 text of a plain or gzip file, line ends as they are (csv needs that), byte order mark dropped."""
    opener = gzip.open if path.suffix.lower() == ".gz" else open
    with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
        yield file  # type: ignore[misc] # text mode, which the two openers' joint type does not say


def _line_rows(numbered_lines: Iterable[tuple[int, str]], path: Path) -> Iterator[Any]:
    for number, line in numbered_lines:
        if line.strip():
            try:
                yield parse_json(line, f"{path.name}, line {number}")
            except ValueError as error:
                raise DownloadError(f"{error}. The line begins with {line[:80].strip()!r}.") from error


def _json_rows(file: TextIO, path: Path) -> Iterator[Any]:
    """Rows of a .json file: an array of objects, JSON lines, or one object (a row, or around one list of rows)."""
    lines = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
    first = next(lines, (1, ""))
    try:
        value = parse_json(first[1], path.name)
    except ValueError:  # the beginning of a longer value
        value = None
    second = next(lines, None) if isinstance(value, dict) else None
    if second is not None:
        yield from _line_rows(itertools.chain([first, second], lines), path)
        return
    if not isinstance(value, dict):
        try:
            value = parse_json(first[1] + file.read(), path.name)
        except ValueError as error:
            raise DownloadError(f"{error}. It is neither one JSON value nor JSON lines.") from error
    if isinstance(value, dict):
        value = _rows_around(value)
    yield from value if isinstance(value, list) else [value]


def _rows_around(value: dict[str, Any]) -> list[Any]:
    """The one list of objects in `value`, else `value` as the only row: the turns of a conversation are no rows."""
    lists = [item for item in value.values() if isinstance(item, list) and item and isinstance(item[0], dict)]
    is_rows = len(lists) == 1 and not any(turn <= lists[0][0].keys() for turn in TURN_KEYS)
    return lists[0] if is_rows else [value]


def _csv_rows(file: TextIO, path: Path, delimiter: str) -> Iterator[dict[str, str | None]]:
    """Rows by the header's names; values stay text, absent trailing fields are null."""
    reader = csv.DictReader(file, delimiter=delimiter, strict=True)
    try:
        for row in reader:
            if None in row:
                raise DownloadError(f"{path.name}, line {reader.line_num}: more fields than the header names.")
            yield row
    except csv.Error as error:
        raise DownloadError(f"{path.name}, after line {reader.line_num}: not CSV ({error}).") from error


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    parquet = import_parquet()
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=PARQUET_BATCH_ROWS):
                yield from batch.to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's errors for damaged files derive from OSError and ValueError
        raise DownloadError(f"{path.name}: not readable as parquet ({error}).") from error


def import_parquet() -> Any:
    """pyarrow.parquet, which is not a dependency of flexengine.

    Raises: DownloadError saying how to install it.
    """
    try:
        import pyarrow.parquet  # noqa: PLC0415 # type: ignore[import-not-found] - optional
    except ImportError:
        raise DownloadError("the data set is stored as parquet, which needs pyarrow: pip install pyarrow.") from None
    return pyarrow.parquet
