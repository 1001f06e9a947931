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
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from flexengine.data.bad_records import BadRecords
from flexengine.data.records import IGNORE, TokenizedRecord, parse_record
from flexengine.data.tokenizer import ChatTokenizer

KEYS = ("prompt", "messages", "conversations", "question", "query", "instruction")


class Prompt(NamedTuple):
    """The turns before an answer, as chat templates have them, and all columns of the record."""

    turns: list[dict[str, str]]
    columns: dict[str, Any]


class TokenizedPrompt(NamedTuple):
    """Tokens to go on from, and all columns of the record as JSON values."""

    input_ids: list[int]
    columns: dict[str, Any]

    @property
    def labels(self) -> list[int]:
        """No token has a loss."""
        return [IGNORE] * len(self.input_ids)


def parse_prompt(raw: Any, where: str, _: Counter[str] | None = None) -> Prompt:
    """Read a prompt; every column is kept, so none is counted as unread. Raises: ValueError as `parse_record`."""
    given = raw if isinstance(raw, dict) else {}
    key = next((key for key in KEYS if given.get(key)), None)
    if key is None:
        raise ValueError(
            f"{where}: a record of a prompt has one of {', '.join(KEYS)}, found"
            f" {', '.join(map(str, given)) or type(raw).__name__}; --columns prompt=NAME names the column"
        )
    turns = given[key] if isinstance(given[key], list) else [{"role": "user", "content": given[key]}]
    beside = {name: given[name] for name in ("system", "tools", "functions") if given.get(name)}
    record = parse_record({"messages": turns, **beside}, where)
    if record.tools:
        raise ValueError(f"{where}: tools beside a prompt are not written into it; leave them out")
    if record.messages[-1].role == "assistant":
        raise ValueError(
            f"{where}: the conversation ends with a turn of the assistant, and the model is to write that itself; keep"
            " what stands before it, and the right answer in a column of its own"
        )
    return Prompt([{"role": turn.role, "content": turn.content or ""} for turn in record.messages], given)


def encode_prompts(prompts: Iterable[Prompt], tokenizer: ChatTokenizer, bad: BadRecords) -> Iterator[TokenizedRecord]:
    """Two records of each prompt: its tokens, and the bytes of its columns' JSON, which tables keep behind it."""
    for turns, columns in prompts:
        try:
            ids = tokenizer.encode_prompt(turns)
        except ValueError as error:
            bad.leave_out(error)
            continue
        written = list(json.dumps(columns, ensure_ascii=False, default=str).encode())
        yield TokenizedRecord(ids, ids)
        yield TokenizedRecord(written, written)


def prompt_of(ids: list[int], written: list[int]) -> TokenizedPrompt:
    """A prompt as a table keeps it."""
    return TokenizedPrompt(ids, json.loads(bytes(written)))
