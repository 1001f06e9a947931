"""Records of sequences with a label: a text, a conversation or tokens beside `label`.

| label | what a head learns |
|---|---|
| the name or the number of a class | one of several classes |
| a list of names or numbers, or a 0 or 1 for every class | any number of classes |
| a number | a regression |
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flexengine.data.bad_records import BadRecords
from flexengine.data.encoding import encode_whole, encoded_one_by_one
from flexengine.data.pictured import with_own_images
from flexengine.data.records import IGNORE, Record, parse_record
from flexengine.data.sources import LabelNames
from flexengine.data.token_columns import ValuedRecord
from flexengine.data.tokenizer import ChatTokenizer
from flexengine.wording import shown


class Labelled(NamedTuple):
    """A record with its label as one number: a class, the sum of 2**class over several, or the number itself."""

    record: Record
    value: float


def parse_labelled(
    raw: Any, where: str, unread: Counter[str] | None, names: LabelNames, folder: Path | None = None
) -> Labelled:
    """Read a record with its label; arguments and errors are those of `parse_record`."""
    given = dict(raw) if isinstance(raw, dict) else {}
    label = given.pop("label", None)
    if label is None:
        raise ValueError(f"{where}: the record has no label; --columns label=NAME names the column")
    try:
        value = value_of(label, names)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return Labelled(parse_record(given, where, unread, folder), value)


def value_of(label: Any, names: LabelNames) -> float:
    """The label as one number. Raises ValueError for what is none of the model's labels."""
    if names.problem == "regression":
        if type(label) not in (int, float) or not math.isfinite(label):
            raise ValueError(f"label must be a number, found {shown(label)}")
        return float(label)
    if names.problem == "single_label_classification":
        return float(_class(label, names.names))
    if not isinstance(label, list):
        raise ValueError(f"label must be a list of classes, found {shown(label)}")
    is_vector = len(label) == len(names.names) and all(type(x) in (int, float, bool) and x in (0, 1) for x in label)
    found = [i for i, x in enumerate(label) if x] if is_vector else [_class(x, names.names) for x in label]
    return float(sum(1 << i for i in set(found)))


def _class(label: Any, names: Sequence[str]) -> int:
    if str(label) in names and not isinstance(label, bool):
        return list(names).index(str(label))
    if type(label) is int and 0 <= label < len(names):
        return label
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    raise ValueError(f"label {shown(label)} is none of the model's {len(names)}: {', '.join(names[:8])}{more}")


def encode_labelled(records: Iterable[Labelled], tokenizer: ChatTokenizer, bad: BadRecords) -> Iterator[ValuedRecord]:
    """Ids of each record with its label as value, and behind it its images, where these are read.

    A record that is too long is cut or dropped, never split.
    """

    def encode(one: Labelled) -> list[ValuedRecord]:
        if tokenizer.images is None:
            (ids, _), images = encode_whole(one.record, tokenizer), []
        else:
            (ids, _), *images = with_own_images(one.record, tokenizer)
        return [ValuedRecord(ids, [IGNORE, *ids[1:]], one.value), *images]

    return encoded_one_by_one(records, encode, lambda one: one.record, tokenizer, bad)
