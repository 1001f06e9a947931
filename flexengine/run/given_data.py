"""Data that a Python program gives as objects: written once as records to a file, which a run reads as any other.

So a run of objects has all that files have: schemas, columns, bounds, a cache of tokens, and a name in config.yaml from
which it can run again.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from numbers import Integral
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from flexengine.checkpoint.dataset_rows import without_nulls
from flexengine.data import default_cache

WANTED = (
    "give records as mappings (prompt and completion, messages, text, input_ids, ...), texts, lists of token ids, a"
    " data set of them, or a DataLoader"
)
RECORDS_FILE = "records.jsonl"


def place_of(given: Iterable[Any] | str | os.PathLike, name: str, cache: str | None) -> str:
    """Where a run finds data: a name stays one, objects are written to a file of the cache that their contents name.

    name: the argument that gives them. cache: as --data-cache. Raises: ValueError for what holds no records, naming the
    row.
    """
    if isinstance(given, str | os.PathLike):
        return os.fspath(given)
    folder = Path(cache) if cache else default_cache()
    if folder is None:
        raise ValueError(f"{name}: there is no cache folder to write records to; give data_cache")
    folder.mkdir(parents=True, exist_ok=True)
    digest, partial = hashlib.sha256(), None
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix="given-", delete=False) as file:
            partial = Path(file.name)
            for line in _lines(given, name):
                digest.update(line)
                file.write(line)
        target = folder / f"given-{digest.hexdigest()[:32]}" / RECORDS_FILE
        target.parent.mkdir(exist_ok=True)
        partial.replace(target)
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)
    return str(target)


def _lines(given: Iterable[Any], name: str) -> Iterator[bytes]:
    for number, row in enumerate(_rows(given, name), start=1):
        try:
            yield json.dumps(row, ensure_ascii=False, default=_as_list).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}, row {number}: {error}; {WANTED}") from None


def _rows(given: Iterable[Any], name: str) -> Iterator[dict[str, Any]]:
    """The records of an iterable, those of a loader's batches one by one. Raises: ValueError for what has none."""
    if isinstance(given, Mapping):
        raise ValueError(f"{name} is a mapping of {', '.join(map(str, given))}; give one of its data sets")
    if hasattr(given, "to_dict") and hasattr(given, "columns"):
        raise ValueError(f"{name} is a table ({type(given).__name__}); give its to_dict('records')")
    if not isinstance(given, Iterable):
        raise ValueError(f"{name} is {type(given).__name__}; {WANTED}")
    loads = isinstance(given, DataLoader) and given.batch_size is not None
    has_nulls = type(given).__module__.partition(".")[0] == "datasets"  # typed columns add them
    for number, item in enumerate(given, start=1):
        for row in _rows_of_item(item, loads):
            if row is None:
                raise ValueError(f"{name}, item {number} is {type(item).__name__}; {WANTED}")
            yield without_nulls(row) if has_nulls else row


def _rows_of_item(item: Any, is_batch: bool) -> Iterator[dict[str, Any] | None]:
    """The records of one item; None stands for what is none."""
    item = item.tolist() if hasattr(item, "tolist") else item
    if isinstance(item, str):
        yield {"text": item}
    elif isinstance(item, Mapping):
        columns = {key: _plain(value) for key, value in item.items()}
        nested = is_batch or (isinstance(ids := columns.get("input_ids"), list) and ids and isinstance(ids[0], list))
        rows = zip(*columns.values(), strict=True) if nested else [columns.values()]
        yield from (dict(zip(columns, row, strict=True)) for row in rows)
    elif not isinstance(item, list | tuple) or not item:
        yield None
    elif all(isinstance(token, Integral) for token in item):
        yield {"input_ids": [int(token) for token in item]}
    elif all(isinstance(turn, Mapping) and "role" in turn for turn in item):
        yield {"messages": list(item)}
    else:
        yield from chain.from_iterable(_rows_of_item(part, False) for part in item)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _as_list(value: Any) -> Any:
    """What JSON has no form for by itself: tensors, arrays and their numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__} is no part of a record")
