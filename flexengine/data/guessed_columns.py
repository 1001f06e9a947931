"""Columns that have other names than records: what they probably are, where no schema has their names.

A guess is told with a count, as `--columns` may name others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PAIRS = (
    *(("source", "target"), ("src", "tgt"), ("inputs", "targets"), ("inputs", "outputs"), ("input", "target")),
    *(("input", "answer"), ("input", "response"), ("prompt", "output"), ("prompt", "target"), ("question", "output")),
    *(("question", "solution"), ("question", "best_answer"), ("question", "completion"), ("query", "answer")),
    *(("query", "output"), ("instruction", "completion"), ("instruction", "answer"), ("problem", "answer")),
    *(("user", "assistant"), ("human", "assistant"), ("human", "bot"), ("human", "gpt"), ("ask", "reply")),
    *(("context", "response"), ("document", "summary"), ("article", "summary"), ("article", "highlights")),
    *(("dialogue", "summary"), ("post", "summary")),
)
"""(what is asked, what is answered), the first match wins."""
TEXTS = ("body", "document", "article", "passage", "story", "sentence", "code")
CHATS = ("chat", "dialog", "dialogue", "turns")


def guess_columns(row: Any, known: tuple[tuple[str, str], ...], others: tuple[str, ...]) -> dict[str, str]:
    """Guess which columns of a row hold what: name of a record -> column. Empty where the names are known, or nothing
    fits.

    known: pairs of names that records have; others: names that make a record by themselves.
    """
    if not isinstance(row, Mapping) or not all(isinstance(key, str) for key in row):
        return {}
    if any(key in row for key in others) or any(set(pair) <= row.keys() for pair in known):
        return {}
    plain = {key.strip().lower().replace(" ", "_"): key for key in reversed(row)}
    texts = {name: key for name, key in plain.items() if isinstance(row[key], str)}
    for asked, answered in (*known, *PAIRS):
        if asked in texts and answered in texts:
            same = (asked, answered) in known
            names = (asked, answered) if same else ("prompt", "completion")
            beside = ("input", "context", "system") if same else ("system",)
            more = {name: texts[name] for name in beside if name in texts and name not in (asked, answered)}
            return {names[0]: texts[asked], names[1]: texts[answered], **more}
    chats = (*others, *CHATS)
    found = next((plain[name] for name in chats if name in plain and isinstance(row[plain[name]], list)), None)
    if found is not None and _holds_turns(row[found]):
        return {"messages": found}
    found = next((texts[name] for name in ("text", "content", *TEXTS) if name in texts), None)
    return {} if found is None else {"text": found}


def remark_of(columns: Mapping[str, str]) -> str:
    """Say a guess, behind a count of records."""
    said = ", ".join(f"{name}={column}" for name, column in columns.items())
    return f"records whose columns are guessed as {said} (--columns gives others)"


def _holds_turns(value: list[Any]) -> bool:
    return bool(value) and all(isinstance(turn, Mapping) and ("role" in turn or "from" in turn) for turn in value)
