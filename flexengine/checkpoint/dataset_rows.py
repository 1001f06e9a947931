"""Rows of data files, whatever their format, in order and a bounded piece of a file at a time; and JSON lines of them.

A plain text is given in blocks of lines, and a file of torch.save in the lists and tensors that it holds. JSON stays
JSON: libraries that read it into typed columns add nulls for keys that other rows have, which would change
tool calls and their schemas. Parquet and Arrow are read through pyarrow, and such nulls are taken out.
"""

from __future__ import annotations

import codecs
import csv
import datetime
import gzip
import hashlib
import io
import itertools
import json
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from flexengine.checkpoint.atomic import atomic_file
from flexengine.checkpoint.bounded_process import report_alive
from flexengine.checkpoint.dataset_files import kind_of
from flexengine.checkpoint.dataset_images import with_images
from flexengine.checkpoint.manifest import DownloadError, FileRecord
from flexengine.wording import parse_json, shown

PARQUET_BATCH_ROWS = 1024  # bounds memory to a batch of rows instead of a row group
MAX_ROW_BYTES = 2**26  # one row in memory is several times its bytes; the longest sequence is a quarter of this
READ_BYTES = 2**20
TEXT_BYTES = 2**20  # of a plain text that become one record, which is split into sequences
TORCH_CPU_S, TORCH_BYTES_PER_CPU_S = 20.0, 50e6  # to import torch, and to read a file of it
LONGEST_WORD = 16  # of JSON's names and escapes, which the end of a buffer may cut
ARCHIVES = frozenset({".zst", ".xz", ".bz2", ".lz4", ".zip", ".tar", ".tgz", ".7z"})
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
TURN_KEYS = ({"role", "content"}, {"from", "value"})  # of a turn in the formats of chats that are in use

csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a text field may be as long as a book; the default is 128 KiB


def write_json_lines(files: list[Path], target: Path) -> tuple[FileRecord, int]:
    """Write the rows of `files`, in order, to `target` as UTF-8 JSON lines; returns its record and the row count.

    Memory: one row at a time, except for .json files holding one object, which are parsed whole.
    Raises: DownloadError naming file and row of what cannot be read or expressed in JSON, for a row that is not an
    object and for files without any row; `target` is then left as it was.
    """
    digest = hashlib.sha256()
    num_bytes = num_rows = 0
    with atomic_file(target) as out:
        for path in files:
            for row_number, row in enumerate(_rows_to_write(path), start=1):
                report_alive(path.name)
                where = f"{path.name}, row {row_number}"
                line = _encode(with_images(row, where), where)
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


def _rows_to_write(path: Path) -> Iterator[Any]:
    try:
        for row, _ in read_rows(path):
            if isinstance(row, ValueError):
                raise row
            yield row
    except ValueError as error:
        raise DownloadError(str(error)) from error


def read_rows(path: Path) -> Iterator[tuple[Any, str]]:
    """Rows of a file with the place of each ("FILE, line 3"), for messages.

    The ending of the name tells CSV, TSV, Parquet and Arrow; all else is JSON, as lines or as one array by its content.
    A row that cannot be read, behind which others can, is given as the ValueError that says so.
    Raises: ValueError naming file and place for a file that cannot be read (on), or for a row of more than
    MAX_ROW_BYTES.
    """
    kind = kind_of(path.name)
    _refuse_other_files(path)
    try:
        if kind == "txt":
            with _open(path) as file:
                yield from _text_blocks(file, path)
            return
        if kind == "pt":
            yield from ((row, f"{path}, record {i}") for i, row in enumerate(_torch_rows(path), start=1))
            return
        if kind in ("parquet", "arrow"):
            rows = _parquet_rows(path) if kind == "parquet" else _arrow_rows(path)
            yield from ((without_nulls(row), f"{path}, row {i}") for i, row in enumerate(rows, start=1))
        elif kind in ("csv", "tsv"):
            with io.TextIOWrapper(_open(path), encoding="utf-8-sig", newline="") as file:
                yield from _csv_rows(file, path, "," if kind == "csv" else "\t")
        else:
            with _open(path) as file:
                yield from _json_rows(file, path, lone_object=kind == "json")
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{path}: damaged gzip data ({error}), and so at its source; tell its authors.") from error
    except UnicodeDecodeError as error:
        raise ValueError(_not_text(str(path), error)) from error


def _text_blocks(file: BinaryIO, path: Path) -> Iterator[tuple[Any, str]]:
    """Texts of whole lines of about TEXT_BYTES each: a longer text would be in memory several times."""
    block, first = b"", 1
    for number, line in enumerate(iter(lambda: file.readline(MAX_ROW_BYTES + 1), b""), start=1):
        if len(line) > MAX_ROW_BYTES:
            raise ValueError(f"{path}, line {number}: longer than {MAX_ROW_BYTES >> 20} MiB; break the line")
        block += line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if len(block) >= TEXT_BYTES:
            yield {"text": block.decode("utf-8")}, f"{path}, line {first}"
            block, first = b"", number + 1
    if block.strip():
        yield {"text": block.decode("utf-8")}, f"{path}, line {first}"


def _torch_rows(path: Path) -> Iterator[Any]:
    """Records of a file of torch.save: token ids as a tensor, columns of them, or a list of records, ids or texts.

    Only tensors and plain values are read (weights_only), so that no code of the file runs.
    """
    import torch  # noqa: PLC0415 - downloads do without

    report_alive(path.name, TORCH_CPU_S + path.stat().st_size / TORCH_BYTES_PER_CPU_S)
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # a stranger's file: it may fail in any way
        said = " ".join(str(error).split())[:160]
        raise ValueError(
            f"{path}: torch.load with weights_only, which runs no code of the file, does not read it: {said}; save a"
            " tensor of token ids, or lists and dicts of such"
        ) from None
    if isinstance(found, torch.Tensor):
        found = {"input_ids": found}
    if isinstance(found, dict) and "input_ids" in found:
        return map(_plain, _rows_of_columns(found, path))
    if not isinstance(found, (list, tuple)):
        raise ValueError(f"{path}: holds a {type(found).__name__}, expected a tensor, a list, or a dict with input_ids")
    named = {str: "text", list: "input_ids", tuple: "input_ids", torch.Tensor: "input_ids"}
    return (_plain({named[type(row)]: row} if type(row) in named else row) for row in found)


def _plain(row: Any) -> Any:
    """A record with lists in place of tensors."""
    if not isinstance(row, dict):
        return row
    return {str(key): value.tolist() if hasattr(value, "tolist") else value for key, value in row.items()}


def _rows_of_columns(columns: dict[Any, Any], path: Path) -> Iterator[dict[str, Any]]:
    """Rows of columns of the same length; one row where input_ids are those of a single sequence."""
    ids = columns["input_ids"]
    depth = ids.dim() if hasattr(ids, "dim") else 1 + bool(len(ids) and not isinstance(ids[0], int))
    if depth == 1:
        return iter([columns])
    lengths = {str(name): len(column) for name, column in columns.items()}
    if depth != 2 or len(set(lengths.values())) != 1:
        raise ValueError(f"{path}: input_ids are {depth} deep and columns have {lengths} rows; expected one row each")
    return (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))


def _refuse_other_files(path: Path) -> None:
    """Raises ValueError for a file that only stands for the data, or holds them in a form that is not read."""
    if path.suffix.lower() in ARCHIVES:
        raise ValueError(f"{path}: {path.suffix} files are not read; unpack it, or compress the data as .gz")
    with path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise ValueError(f"{path}: is a pointer of Git LFS in place of the data; fetch them with `git lfs pull`")


def _open(path: Path) -> BinaryIO:
    return gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb")  # type: ignore[return-value]


def _not_text(where: str, error: UnicodeDecodeError) -> str:
    return f"{where}: not UTF-8 text: {error.reason} at byte {error.start}; convert the file to UTF-8"


def _json_rows(file: BinaryIO, path: Path, lone_object: bool) -> Iterator[tuple[Any, str]]:
    """Rows of an array, of JSON lines, or of one object where the file may be one (a row, or around a list of rows)."""
    opening = file.read(READ_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()
    file.seek(0)
    if opening.startswith(b"["):
        yield from _array_rows(io.TextIOWrapper(file, encoding="utf-8-sig"), path)
    elif lone_object and not _is_lines(file, path):
        text = io.TextIOWrapper(file, encoding="utf-8-sig").read(4 * MAX_ROW_BYTES + 1)
        if len(text) > 4 * MAX_ROW_BYTES:
            raise ValueError(f"{path}: one JSON object of more than {4 * MAX_ROW_BYTES >> 20} MiB; write JSON lines")
        try:
            value = parse_json(text, path, unique=True)
        except ValueError as error:
            neither = ". It is neither one JSON value nor JSON lines." if "not valid JSON" in str(error) else ""
            raise ValueError(f"{error}{neither}") from error
        yield from ((row, f"{path}, record {i}") for i, row in enumerate(_rows_around(value), start=1))
    else:
        for number, line in _lines(file, path):
            where = f"{path}, line {number}"
            yield _row_of_line(line, where), where


def _row_of_line(line: bytes, where: str) -> Any:
    """The row of a line, or the ValueError that says why it has none."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        return ValueError(_not_text(where, error))
    try:
        return parse_json(text, where, unique=True)
    except ValueError as error:
        return ValueError(f"{error}\n  The line begins with {text[:80].strip()!r}.")


def _is_lines(file: BinaryIO, path: Path) -> bool:
    """Whether the first line is a JSON value of its own and others follow, or there is no line at all."""
    first_two = [line for _, line in itertools.islice(_lines(file, path), 2)]
    file.seek(0)
    try:
        return not first_two or (isinstance(parse_json(first_two[0], path), dict) and len(first_two) == 2)
    except ValueError:
        return False


def _lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, bytes]]:
    """(number, bytes) of lines that are not blank; a byte order mark is dropped. Only "\\n" ends a line."""
    for number in itertools.count(1):
        raw = file.readline(MAX_ROW_BYTES + 1)
        if not raw:
            return
        if len(raw) > MAX_ROW_BYTES:
            where = f"{path}, line {number}"
            raise ValueError(f"{where}: longer than {MAX_ROW_BYTES >> 20} MiB; split it into several records")
        line = raw.removeprefix(codecs.BOM_UTF8 if number == 1 else b"").strip(b" \t\r\n")
        if line:
            yield number, line


def _array_rows(file: TextIO, path: Path) -> Iterator[tuple[Any, str]]:
    """Values of one JSON array, decoded one at a time from a buffer that holds few of them."""
    repeated: list[str] = []
    decode = json.JSONDecoder(object_pairs_hook=lambda pairs: _noting_repeated(pairs, repeated)).raw_decode
    skip_space = re.compile(r"[ \t\r\n]*").match
    buffer, number = file.read(READ_BYTES), 0
    at = buffer.index("[") + 1
    while True:
        at = skip_space(buffer, at).end()  # pyright: ignore[reportOptionalMemberAccess], it matches anywhere
        more_may_help = True
        try:
            if buffer[at : at + 1] == "]" and not (buffer[at + 1 :] + file.read(READ_BYTES)).strip():
                return
            repeated.clear()
            value, end = decode(buffer, at)
            following = skip_space(buffer, end).end()  # pyright: ignore[reportOptionalMemberAccess]
            if buffer[following : following + 1] in (",", "]"):
                number += 1
                where = f"{path}, record {number}"
                yield ValueError(f"{where}: {shown(repeated[0])} is listed twice") if repeated else value, where
                at = following + (buffer[following] == ",")
                continue
            more_may_help = following == len(buffer)
        except RecursionError:
            more_may_help = False
        except json.JSONDecodeError as error:  # the value may go on in what is read next
            more_may_help = error.msg.startswith("Unterminated") or error.pos > len(buffer) - LONGEST_WORD
        except ValueError:  # a number of too many digits
            more_may_help = False
        more = file.read(max(READ_BYTES, len(buffer) - at)) if more_may_help else ""
        if not more:
            parse_json(f"[{buffer[at : at + MAX_ROW_BYTES]}", path)  # says what is wrong
            raise ValueError(f"{path}: not valid JSON after record {number} of the array; write the file again")
        buffer, at = buffer[at:] + more, 0
        if len(buffer) > 2 * MAX_ROW_BYTES:
            raise ValueError(f"{path}, record {number + 1}: longer than {MAX_ROW_BYTES >> 20} MiB; split it")


def _noting_repeated(pairs: list[tuple[str, Any]], repeated: list[str]) -> dict[str, Any]:
    """The object of a JSON text; a key that it has twice is added to `repeated`."""
    value = dict(pairs)
    if len(value) != len(pairs):
        repeated.extend(_twice([key for key, _ in pairs]))
    return value


def _twice(names: Sequence[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def _check_columns(names: Sequence[str], where: str = "") -> None:
    """Raises ValueError where two columns have one name: a row would keep the last of them."""
    if twice := _twice(names):
        raise ValueError(f"{where}the column {shown(twice[0])} is there twice; rename or remove one")


def _rows_around(value: Any) -> list[Any]:
    """The one list of objects in `value`, else `value` as the only row: the turns of a conversation are no rows."""
    if not isinstance(value, dict):
        return [value]
    lists = [item for item in value.values() if isinstance(item, list) and item and isinstance(item[0], dict)]
    is_rows = len(lists) == 1 and not any(turn <= lists[0][0].keys() for turn in TURN_KEYS)
    return lists[0] if is_rows else [value]


def _csv_rows(file: TextIO, path: Path, delimiter: str) -> Iterator[tuple[Any, str]]:
    """Rows by the header's names; values stay text, absent trailing fields are null."""
    reader = csv.DictReader(file, delimiter=delimiter, strict=True)
    try:
        header = reader.fieldnames or []
        _check_columns(header, f"{path}, line 1: ")
        other = next((mark for mark in ";\t|," if len(header) == 1 and mark != delimiter and mark in header[0]), None)
        if other is not None:
            raise ValueError(
                f"{path}, line 1: the header is one column, {shown(header[0])}; save the file with {delimiter!r}"
                f" between its fields instead of {other!r}"
            )
        for row in reader:
            where = f"{path}, line {reader.line_num}"
            yield ValueError(f"{where}: more fields than the header names.") if None in row else row, where
    except csv.Error as error:
        raise ValueError(f"{path}, after line {reader.line_num}: not CSV ({error}).") from error


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    parquet = import_parquet()
    try:
        with parquet.ParquetFile(path) as file:
            _check_columns(file.schema_arrow.names)
            for batch in file.iter_batches(batch_size=PARQUET_BATCH_ROWS):
                yield from batch.to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's errors for damaged files derive from OSError and ValueError
        raise ValueError(f"{path}: not readable as parquet ({error}).") from error


def _arrow_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of an Arrow file, in either of its forms: a stream, as the `datasets` library saves them, or a file."""
    import_parquet()
    from pyarrow import ipc, memory_map  # noqa: PLC0415

    try:
        with memory_map(str(path)) as file:
            is_file = file.read(6) == b"ARROW1"
            file.seek(0)
            reader = ipc.open_file(file) if is_file else ipc.open_stream(file)
            _check_columns(reader.schema.names)
            batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
            for batch in batches:
                for start in range(0, batch.num_rows, PARQUET_BATCH_ROWS):
                    yield from batch.slice(start, PARQUET_BATCH_ROWS).to_pylist()
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not readable as Arrow ({error}).") from error


def without_nulls(value: Any) -> Any:
    """A row of typed columns without the nulls that stand where other rows have a key."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def import_parquet() -> Any:
    """pyarrow.parquet, which comes with the `datasets` library.

    Raises: DownloadError saying how to install it.
    """
    try:
        import pyarrow.parquet  # noqa: PLC0415 - takes a while
    except ImportError:
        raise DownloadError("the data set is stored as parquet, which needs pyarrow: pip install pyarrow.") from None
    return pyarrow.parquet
