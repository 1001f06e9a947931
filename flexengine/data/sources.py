"""Readers of instruction data: a JSON list of records, or JSON Lines with one record a line (source `json_sft`)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flexengine.data.records import Record, parse_record
from flexengine.wording import parse_json


def read_json_sft(path: str | Path) -> list[Record]:
    """All records of a .json or .jsonl file, in file order.

    The content decides between the two, not the suffix: a file whose first character is "[" is a list. Blank lines are
    skipped.
    Raises: ValueError naming file and line (in a list: the number of the record) when the file is missing, empty or
    not JSON, or when a record has an unknown format.
    """
    path = Path(path)
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "no such file"
        raise ValueError(f"data set {path}: {found}; --dataset wants a JSON or JSON Lines file")
    records = [parse_record(raw, where) for raw, where in _raw_records(path)]
    if not records:
        num_bytes = path.stat().st_size
        raise ValueError(f"data set {path} holds no record ({num_bytes} bytes); --dataset wants one record or more")
    return records


def _raw_records(path: Path) -> Iterator[tuple[Any, str]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data set {path} is not UTF-8 text: {error.reason} at byte {error.start}; convert the file to UTF-8"
        ) from None
    if text.lstrip().startswith("["):
        values = parse_json(text, path)
        for number, raw in enumerate(values, start=1):
            yield raw, f"{path}, record {number}"
        return
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines: it also cuts at U+2028 inside strings
        if line.strip():
            where = f"{path}, line {number}"
            yield parse_json(line, where), where
