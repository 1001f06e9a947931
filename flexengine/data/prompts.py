"""Records of prompts, which the model itself answers: each with all columns of its record, for those who judge answers.

| record | the prompt |
|---|---|
| {"prompt": text or list of messages, ...} | a user's message, or a conversation that ends with one |
| {"messages" or "conversations": [...], ...} | a conversation that ends with a user's message |
| {"question" or "query" or "instruction": text, ...} | a user's message |
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flexengine.data.bad_records import BadRecords
from flexengine.data.image_places import IMAGES
from flexengine.data.kept_images import KeptImage, packed, unpacked
from flexengine.data.records import IGNORE, Record, TokenizedRecord, parse_record
from flexengine.data.token_columns import ValuedRecord
from flexengine.data.tokenizer import ChatTokenizer, encode_asked

KEYS = ("prompt", "messages", "conversations", "question", "query", "instruction")


class Prompt(NamedTuple):
    """The turns before an answer, as chat templates have them, and all columns of the record."""

    turns: list[dict[str, str]]
    columns: dict[str, Any]
    record: Record


class TokenizedPrompt(NamedTuple):
    """Tokens to go on from, all columns of the record as JSON values, and its images, where these are read.

    turns: of one with images, in whose texts U+FFFC stands for each.
    """

    input_ids: list[int]
    columns: dict[str, Any]
    images: Sequence[KeptImage] = ()
    turns: Sequence[Mapping[str, str]] = ()

    @property
    def labels(self) -> list[int]:
        """No token has a loss."""
        return [IGNORE] * len(self.input_ids)


def parse_prompt(raw: Any, where: str, counts: Counter[str] | None = None, folder: Path | None = None) -> Prompt:
    """Read a prompt; every column is kept, so none is counted as unread. Arguments and errors: see `parse_record`."""
    given = raw if isinstance(raw, dict) else {}
    key = next((key for key in KEYS if given.get(key)), None)
    if key is None:
        raise ValueError(
            f"{where}: a record of a prompt has one of {', '.join(KEYS)}, found"
            f" {', '.join(map(str, given)) or type(raw).__name__}; --columns prompt=NAME names the column"
        )
    turns = given[key] if isinstance(given[key], list) else [{"role": "user", "content": given[key]}]
    names = ("system", "tools", "functions", *(IMAGES if folder is not None else ()))
    beside = {name: given[name] for name in names if given.get(name)}
    record = parse_record({"messages": turns, **beside}, where, counts if folder is not None else None, folder)
    if record.tools:
        raise ValueError(f"{where}: tools beside a prompt are not written into it; leave them out")
    if record.messages[-1].role == "assistant":
        raise ValueError(
            f"{where}: the conversation ends with a turn of the assistant, and the model is to write that itself; keep"
            " what stands before it, and the right answer in a column of its own"
        )
    turns = [{"role": turn.role, "content": turn.content or ""} for turn in record.messages]
    return Prompt(turns, given if folder is None else _without_data(given), record)


def _without_data(value: Any) -> Any:
    """A value of a record without the data of images: who judges answers gets their paths."""
    if isinstance(value, dict):
        return {key: _without_data(item) for key, item in value.items() if key not in ("bytes", "base64")}
    if isinstance(value, (list, tuple)):
        return [_without_data(item) for item in value]
    if isinstance(value, str) and value.startswith("data:image/"):
        return value.partition(",")[0]
    return None if isinstance(value, bytes) else value


def encode_prompts(
    prompts: Iterable[Prompt], tokenizer: ChatTokenizer, bad: BadRecords
) -> Iterator[TokenizedRecord | ValuedRecord]:
    """Two records of each prompt: its tokens, and numbers, which tables keep behind it.

    These are how many bytes the JSON of its columns and turns has, the bytes, and its images. Their value is how many
    tokens stand for images.
    """
    for turns, columns, record in prompts:
        images, found = tokenizer.images, list[KeptImage]()
        try:
            if images is None:
                ids = tokenizer.encode_prompt(turns)
            else:
                ids, found = encode_asked(tokenizer, record)
        except ValueError as error:
            bad.leave_out(ValueError(f"{record.where}: {error}") if record.where else error)
            continue
        written = json.dumps([columns, turns if found else []], ensure_ascii=False, default=str).encode()
        numbers: Any = np.concatenate(([len(written)], np.frombuffer(written, np.uint8), packed(found)))
        placed = 0 if images is None else ids.count(images.row_id)
        yield TokenizedRecord(ids, ids)
        yield ValuedRecord(numbers, numbers, float(placed))


def prompt_of(ids: list[int], numbers: np.ndarray) -> TokenizedPrompt:
    """A prompt as a table keeps it."""
    end = 1 + int(numbers[0])
    columns, turns = json.loads(numbers[1:end].astype(np.uint8).tobytes())
    return TokenizedPrompt(ids, columns, unpacked(numbers[end:]), turns)
