"""Readers of instruction data: a JSON list of records, or JSON Lines with one record a line (source `json_sft`).

| record | becomes |
|---|---|
| {"messages": [{"role", "content"}, ...]} | the conversation as it stands |
| {"conversations": [{"from", "value"}, ...]} | the same; human -> user, gpt -> assistant |
| {"instruction", "input"?, "output"} | user: instruction, blank line, input; assistant: output |
| {"prompt", "completion" or "response"} | user, assistant |
| {"question", "answer"} | user, assistant |
| {"text"} | plain text: every token is a target |

Further keys are ignored, except "system" beside the pairs, which becomes a system message.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from flexengine.wording import parse_json, shown

SHOWN_KEYS = 12
"""Keys of a record that a message names."""


class Message(NamedTuple):
    """One turn; role is "system", "user", "assistant" or another word that the chat template knows."""

    role: str
    content: str


@dataclass(frozen=True)
class Record:
    """One training example: a conversation, or plain text (exactly one of the two)."""

    messages: tuple[Message, ...] = ()
    text: str | None = None

    def __post_init__(self) -> None:
        if bool(self.messages) == (self.text is not None):
            raise ValueError("a record holds either messages or text")


ROLE_NAMES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
"""Speaker words of the {"from", "value"} format -> roles of chat templates; other words stay as they are."""

PAIRS = (("instruction", "output"), ("prompt", "completion"), ("prompt", "response"), ("question", "answer"))
"""(question key, answer key) of the single-turn formats, first match wins."""

KNOWN_FORMATS = (
    '{"messages": [{"role", "content"}]}',
    '{"conversations": [{"from", "value"}]}',
    '{"instruction", "input"?, "output"}',
    '{"prompt", "completion" | "response"}',
    '{"question", "answer"}',
    '{"text"}',
)


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


def parse_record(raw: Any, where: str) -> Record:
    """A Record from one decoded JSON value. `where` ("file.jsonl, line 3") opens the message of the ValueError."""
    if not isinstance(raw, dict):
        raise ValueError(f"{where}: a record must be a JSON object, found {type(raw).__name__}")
    if "messages" in raw:
        return _conversation(raw["messages"], "role", "content", where)
    if "conversations" in raw:
        return _conversation(raw["conversations"], "from", "value", where)
    for question_key, answer_key in PAIRS:
        if question_key in raw and answer_key in raw:
            return _pair(raw, question_key, answer_key, where)
    if "text" in raw:
        return Record(text=_string(raw, "text", where))
    raise ValueError(
        f"{where}: unknown record format with keys {_keys(raw)}\n  known formats: {', '.join(KNOWN_FORMATS)}"
    )


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


def _conversation(turns: Any, role_key: str, content_key: str, where: str) -> Record:
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{where}: the conversation must be a list of at least one message, found {shown(turns)}")
    messages = []
    for turn in turns:
        if not isinstance(turn, dict) or role_key not in turn or content_key not in turn:
            found = _keys(turn) if isinstance(turn, dict) else type(turn).__name__
            raise ValueError(f"{where}: a message needs the keys {role_key} and {content_key}, found {found}")
        role = _string(turn, role_key, where)
        messages.append(Message(ROLE_NAMES.get(role, role), _string(turn, content_key, where)))
    return Record(messages=tuple(messages))


def _pair(raw: dict[str, Any], question_key: str, answer_key: str, where: str) -> Record:
    question, answer = _string(raw, question_key, where), _string(raw, answer_key, where)
    if question_key == "instruction" and raw.get("input"):
        question = f"{question}\n\n{_string(raw, 'input', where)}"
    system = (Message("system", _string(raw, "system", where)),) if raw.get("system") else ()
    return Record(messages=(*system, Message("user", question), Message("assistant", answer)))


def _string(raw: dict[str, Any], key: str, where: str) -> str:
    value = raw[key]
    if not isinstance(value, str):
        raise ValueError(f"{where}: {key} must be a string, found {type(value).__name__}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:  # legal in JSON's escapes, but no tokenizer takes it
        raise ValueError(
            f"{where}: {key} holds half of a character (a lone surrogate) at position {error.start}; write the "
            "record again without it"
        ) from None
    return value


def _keys(raw: dict[str, Any]) -> str:
    names = sorted(map(str, raw))
    more = f" and {len(names) - SHOWN_KEYS} more" if len(names) > SHOWN_KEYS else ""
    return (", ".join(shown(name)[1:-1] for name in names[:SHOWN_KEYS]) or "(none)") + more
