"""Records of instruction data: one decoded row of a file becomes a conversation, a text or a list of tokens.

| record | becomes |
|---|---|
| {"messages": [{"role", "content"}, ...]} or {"conversations": [{"from", "value"}, ...]} | the conversation |
| {"prompt": [...], "completion": [...]} (lists of messages) | one conversation; only the completion is trained |
| {"instruction", "input" or "context"?, "output" or "response", "history"?} | earlier pairs, then user, assistant |
| {"prompt", "completion" or "response"}, {"question", "answer"} and other PAIRS | user, assistant |
| {"text"}, {"content"} | plain text: every token is a target |
| {"input_ids", "labels" or a mask} | tokens as they are |

Beside a conversation: "system", "tools" (or "functions"), and "chat_template_kwargs" for the template. A turn may carry
"tool_calls", "reasoning_content", "name", and a key of turn_masks.py that says whether it is trained.
"""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flexengine.data.image_places import ImageSource, take_images
from flexengine.data.token_columns import IGNORE, TOKEN_KEYS, TokenizedRecord, tokens_of
from flexengine.data.turn_masks import TURN_MASKS, is_trained, masks_of_record, refuse_masks
from flexengine.wording import parse_json, shown

__all__ = ["IGNORE", "Message", "Record", "TokenizedRecord", "parse_record", "remarks"]

SHOWN_KEYS = 12
"""Keys of a record that a message names."""


@dataclass(frozen=True)
class Message:
    """One turn; role is "system", "user", "assistant", "tool" or another word that the chat template knows.

    extra holds further keys that templates read (tool_calls, reasoning_content, name, tool_call_id). train says whether
    an assistant's turn is trained; None leaves that to --train-on. in_prompt: train is False because the turn is of a
    prompt, not because the record masks it.
    """

    role: str
    content: str | None
    extra: Mapping[str, Any] = field(default_factory=dict)
    train: bool | None = None
    in_prompt: bool = field(default=False, compare=False)

    def for_template(self) -> dict[str, Any]:
        """The turn as chat templates read it; content that is null stays away, since they test for it so."""
        content = {} if self.content is None else {"content": self.content}
        return {"role": self.role, **content, **self.extra}


@dataclass(frozen=True)
class Record:
    """One training example: a conversation, plain text, or tokens (exactly one of them)."""

    messages: tuple[Message, ...] = ()
    text: str | None = None
    tokens: TokenizedRecord | None = None
    tools: tuple[dict[str, Any], ...] = ()
    template_options: Mapping[str, Any] = field(default_factory=dict)
    where: str = field(default="", compare=False)
    """Where the record was read, for messages about it."""
    images: tuple[ImageSource, ...] = ()
    """In the order of their places in its texts (image_places.py)."""

    def __post_init__(self) -> None:
        if bool(self.messages) + (self.text is not None) + (self.tokens is not None) != 1:
            raise ValueError("a record holds either messages or text or tokens")


ROLE_NAMES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
ROLE_NAMES |= {"ai": "assistant", "chatbot": "assistant", "function_call": "assistant", "tool_call": "assistant"}
ROLE_NAMES |= {"observation": "tool", "function": "tool", "function_response": "tool", "tool_response": "tool"}
"""Other words for a speaker -> roles of chat templates; words that are not listed stay as they are."""
ROLES = ("system", "developer", "user", "assistant", "tool", "ipython")
"""What templates call a speaker; of other words a run says that they are context."""
CALL_ROLES = ("function_call", "tool_call")
"""Speakers whose text is the call itself."""

PAIRS = (
    *(("instruction", "output"), ("prompt", "completion"), ("prompt", "response"), ("question", "answer")),
    *(("prompt", "answer"), ("query", "response"), ("instruction", "response"), ("question", "response")),
    *(("problem", "solution"), ("input", "output")),
)
"""(question key, answer key) of the single-turn formats, first match wins."""
BESIDE_INSTRUCTION = ("input", "context")
"""What follows an instruction in the user's turn, where it is there."""
TEXTS = ("text", "content")
CHAT_NAMES = ("messages", "conversations", "conversation")

KNOWN_FORMATS = (
    '{"messages": [{"role", "content"}]}',
    '{"conversations": [{"from", "value"}]}',
    '{"instruction", "input" | "context"?, "output" | "response"}',
    '{"prompt", "completion" | "response" | "answer"}',
    '{"question", "answer" | "response"}',
    '{"query", "response"}',
    '{"problem", "solution"}',
    '{"input", "output"}',
    '{"text" | "content"}',
    '{"input_ids", "labels"?}',
)
PREFERENCES = (("chosen", "rejected"), ("completion_a", "completion_b"))
MEDIA = ("image", "images", "image_url", "video", "videos", "audio", "audios")
TURN_OPTIONS = ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking")
"""Keys of a turn that reach the template as they are; transformers gives reasoning all three of its names."""
TURN_KEYS = {*TURN_OPTIONS, "role", "content", "from", "value", "tool_calls", "function_call", *TURN_MASKS}
PART_KEYS = {"type", "text"}
CALL_KEYS = {"id", "type", "function", "name", "arguments", "parameters"}
CHAT_KEYS = {"system", "system_prompt", "tools", "functions", "chat_template_kwargs"}

KNOWN_NAMES = ("messages", *dict.fromkeys(key for pair in PAIRS for key in pair), *TEXTS, "input_ids", "labels")
KNOWN_NAMES += ("context", "history", "system", "tools", "chosen", "rejected", "label", "margin")
KNOWN_NAMES += ("ranked", "answers", "scores", "ranks")
"""Names that --columns may give to columns."""


def parse_record(raw: Any, where: str, unread: Counter[str] | None = None, folder: Path | None = None) -> Record:
    """A Record from one decoded row. `where` ("file.jsonl, line 3") opens the message of the ValueError.

    unread counts the keys that were not read, for one report of all of them: they may have been meant to matter. A key
    that may say what is trained is refused instead. folder: that images are relative to; without it they are refused.
    """
    if not isinstance(raw, dict):
        raise ValueError(f"{where}: a record must be a JSON object, found {type(raw).__name__}")
    given = {key: value for key, value in raw.items() if value is not None}
    if not given:
        raise ValueError(f"{where}: the record is empty" + (f" (null: {_keys(raw)})" if raw else ""))
    given, images = (given, ()) if folder is None else take_images(given, folder, where, unread)
    _refuse_other_tasks(given, where)
    inside = Counter[str]()
    record, read = _parse(given, where, inside, raw.keys() - given.keys())
    read |= masks_of_record(given, read, where)
    if unread is not None:
        unread.update(inside)
        unread.update(str(key) for key in given.keys() - read if _says_something(given[key]))
    return replace(record, where=where, images=images)


def named_columns(row: Any, columns: Mapping[str, str], unread: Counter[str] | None = None) -> Any:
    """Give a row with its columns under the names that records have. columns: name of a record -> column of the row.

    A row that has none of these columns stays as it is: it may be of another schema. A column whose name another one
    takes is counted in `unread`.
    """
    if not isinstance(row, dict) or not any(column in row for column in columns.values()):
        return row
    rest = {name: value for name, value in row.items() if name not in columns.values()}
    hidden = rest.keys() & columns.keys()
    if unread is not None:
        unread.update(f"the column {name}, whose name --columns gives to another," for name in hidden if rest[name])
    return {**rest, **{name: row[column] for name, column in columns.items() if column in row}}


def remarks(record: Record) -> Iterator[str]:
    """What a person may not know of a record that is read, in words behind a count: "3 answers are empty"."""
    if record.text is not None and not record.text.strip():
        yield "texts are empty"
    for message in record.messages:
        says = any(message.extra.get(key) for key in ("tool_calls", "reasoning_content", "reasoning", "thinking"))
        says = says or (message.content or "").strip()
        if message.role == "assistant" and message.train is not False and not says:
            yield "answers are empty, so that the model learns to say nothing"
        if message.role not in ROLES:
            yield f"turns have the unknown role {shown(message.role)} and are context"


def _says_something(value: Any) -> bool:
    """Whether a value holds more than nulls and empty texts, as columns do that other rows have."""
    if isinstance(value, (dict, list)):
        return any(map(_says_something, value.values() if isinstance(value, dict) else value))
    return value is not None and value != ""


def _parse(raw: dict[str, Any], where: str, unread: Counter[str], nulls: set[str]) -> tuple[Record, set[str]]:
    """The record, and the keys that it was made of. nulls: further keys, without a value."""
    for key in CHAT_NAMES:
        if key in raw:
            return _chat(raw, _turns(raw[key], where, unread), where), {key, *CHAT_KEYS}
    for question_key, answer_key in PAIRS:
        if question_key in raw and answer_key in raw:
            beside = (*BESIDE_INSTRUCTION, "history") if question_key == "instruction" else ()
            read = {question_key, answer_key, *CHAT_KEYS, *beside}
            return _chat(raw, _pair(raw, question_key, answer_key, where, unread), where), read
    for key in TEXTS if "role" not in raw else ():
        if key in raw:
            return Record(text=_string(raw, key, where)), {key}
    if "input_ids" in raw:
        return Record(tokens=tokens_of(raw, where)), {*TOKEN_KEYS}
    without = f" (null: {_keys(nulls)})" if nulls else ""
    raise ValueError(
        f"{where}: unknown record format with keys {_keys(raw)}{without}\n  known formats: {', '.join(KNOWN_FORMATS)};"
        " columns of other names are named by --columns prompt=NAME answer=NAME"
    )


def _refuse_other_tasks(raw: dict[str, Any], where: str) -> None:
    """Refuses records whose other keys say that training on the answer is not what is meant."""
    for preferred, rejected in PREFERENCES:
        if preferred in raw and rejected in raw:
            raise ValueError(
                f"{where}: a preference pair ({preferred}, {rejected}), but single answers are learned: give"
                " --objective dpo (ipo, orpo, simpo or kto), or, to learn the preferred ones, keep"
                f" {preferred} as completion (or messages) and leave {rejected} out"
            )
    if isinstance(raw.get("label"), bool) and "completion" in raw:
        raise ValueError(
            f"{where}: label says whether the answer is a good one, but every answer is learned: give --objective kto,"
            " or keep the good records only and leave label out"
        )
    _refuse_media(raw, where)


def _refuse_media(given: Mapping[str, Any], where: str) -> None:
    media = next((key for key in MEDIA if _says_something(given.get(key))), None)
    if media is not None:
        read = " without --max-image-tokens" if "image" in media else ""
        raise ValueError(f"{where}: {media} is not read, train takes text only{read}; leave out records with {media}")


# ---- conversations ---------------------------------------------------------------------------------------------


def _chat(raw: dict[str, Any], messages: list[Message], where: str) -> Record:
    """A conversation with what stands beside it in the record."""
    system = next((_string(raw, key, where) for key in ("system", "system_prompt") if raw.get(key)), None)
    if system is not None:
        others = [message.content for message in messages if message.role == "system"]
        if others and others != [system]:
            raise ValueError(f"{where}: a system text beside the conversation and another one in it; keep one of them")
        messages = messages if others else [Message("system", system), *messages]
    tools = tuple(_tool(tool, where) for tool in _list_of(raw.get("tools") or raw.get("functions") or [], where))
    options = raw.get("chat_template_kwargs", {})
    if not isinstance(options, dict):
        raise ValueError(f"{where}: chat_template_kwargs must be an object, found {shown(options)}")
    return Record(messages=tuple(messages), tools=tools, template_options=options)


def _turns(turns: Any, where: str, unread: Counter[str]) -> list[Message]:
    if isinstance(turns, str):  # tables may hold a conversation as its JSON text
        turns = _object(turns, where, "a conversation that is a text")
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{where}: the conversation must be a list of at least one message, found {shown(turns)}")
    return [_turn(turn, where, unread) for turn in turns]


def _turn(turn: Any, where: str, unread: Counter[str]) -> Message:
    given = {key: value for key, value in turn.items() if value is not None} if isinstance(turn, dict) else {}
    role_key = "from" if "from" in given and "role" not in given else "role"
    text_key = "value" if "value" in given and "content" not in given else "content"
    calls = any(given.get(key) for key in ("tool_calls", "function_call"))
    if role_key not in given or not (text_key in turn or calls):
        found = _keys(given) if isinstance(turn, dict) else type(turn).__name__
        wanted = ("from", "value") if "from" in given else ("role", "content")
        raise ValueError(f"{where}: a message needs the keys {wanted[0]} and {wanted[1]}, found {found}")
    refuse_masks(given, TURN_KEYS, "message", where)
    unread.update(f"{key} of a message" for key in given.keys() - TURN_KEYS if _says_something(given[key]))
    word, role = _speaker(_string(given, role_key, where))
    for key, other, same in (("role", "from", lambda word: _speaker(str(word))[1]), ("content", "value", lambda x: x)):
        if key in given and other in given and same(given[key]) != same(given[other]):
            raise ValueError(f"{where}: {key} and {other} of a message say different things; keep one of them")
    content = _content(given, text_key, role, where, calls, unread)
    extra = {key: given[key] for key in TURN_OPTIONS if key in given}
    if word in CALL_ROLES:
        given, content = {**given, "tool_calls": _list_of(_object(content, where), where)}, None
    elif "function_call" in given:
        given["tool_calls"] = [given["function_call"]]
    if given.get("tool_calls"):
        extra["tool_calls"] = [_call(call, where) for call in _list_of(given["tool_calls"], where)]
    return Message(role, content, extra, is_trained(given, role, where))


def _speaker(word: str) -> tuple[str, str]:
    """The word for a speaker in small letters, and the role that it means; a word that is not known stays as it is."""
    plain = word.strip().lower()
    return plain, ROLE_NAMES.get(plain, plain if plain in ROLES else word)


def _content(turn: dict[str, Any], key: str, role: str, where: str, calls: bool, unread: Counter[str]) -> str | None:
    """The text of a turn: a string, a list of text parts, or null where the turn calls tools instead."""
    value = turn.get(key)
    if value is None and calls:
        return None
    if value is None or isinstance(value, (dict, bool, int, float)):
        refused = " beside a refusal" if turn.get("refusal") else ""
        found = f"null{refused}, and it calls no tool" if value is None else f"{type(value).__name__}: {shown(value)}"
        raise ValueError(
            f"{where}: {key} must be a string, found {found} (a turn of {role});"
            f" {'write what it says, or leave the record out' if value is None else 'write its JSON text'}"
        )
    if not isinstance(value, list):
        return _string(turn, key, where)
    return "".join(_text_of_part(part, key, where, unread) for part in value)


def _text_of_part(part: Any, key: str, where: str, unread: Counter[str]) -> str:
    part = {"text": part} if isinstance(part, str) else part
    if not isinstance(part, dict) or part.get("text") is None:
        kind = part.get("type", shown(part)) if isinstance(part, dict) else shown(part)
        raise ValueError(f"{where}: {key} has a part that is no text ({kind}); train takes text only")
    _refuse_media(part, where)
    refuse_masks({name: value for name, value in part.items() if value is not None}, PART_KEYS, "part", where)
    unread.update(f"{name} of a part" for name in part.keys() - PART_KEYS if _says_something(part[name]))
    return _string(part, "text", where)


def _call(call: Any, where: str) -> dict[str, Any]:
    """A tool call as templates read it: {"type", "function": {"name", "arguments"}}, arguments decoded."""
    call = _object(call, where)
    inner = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise ValueError(f"{where}: a tool call needs the name of a function, found {shown(call)}")
    refuse_masks({**inner, **call}, CALL_KEYS, "tool call", where)
    arguments = inner.get("arguments", inner.get("parameters", {}))
    with contextlib.suppress(ValueError):  # a call in another notation: the template shows whether it takes that
        arguments = parse_json(arguments, where, unique=True) if isinstance(arguments, str) else arguments
    function = {"name": inner["name"], "arguments": arguments}
    identity = {"id": call["id"]} if call.get("id") is not None else {}
    return {**identity, "type": "function", "function": function}


def _tool(tool: Any, where: str) -> dict[str, Any]:
    """A tool as templates read it: {"type": "function", "function": {"name", ...}}."""
    if not isinstance(tool, dict) or not isinstance(tool.get("function", tool), dict):
        raise ValueError(f"{where}: a tool must be the JSON description of a function, found {shown(tool)}")
    return tool if "function" in tool else {"type": "function", "function": tool}


def _list_of(value: Any, where: str) -> list[Any]:
    value = _object(value, where)
    return value if isinstance(value, list) else [value]


def _object(value: Any, where: str, what: str = "tools and tool calls") -> Any:
    """The value of a JSON text: tools, calls and whole conversations are often stored as texts."""
    try:
        return parse_json(value, where, unique=True) if isinstance(value, str) else value
    except ValueError as error:
        found = str(error).removeprefix(f"{where}: ").partition(";")[0]
        raise ValueError(f"{where}: {what} must be JSON, found {shown(value)} ({found})") from None


def _pair(raw: dict[str, Any], question_key: str, answer_key: str, where: str, unread: Counter[str]) -> list[Message]:
    if isinstance(raw[question_key], list) or isinstance(raw[answer_key], list):
        return _prompt_and_completion(raw, question_key, answer_key, where, unread)
    question, answer = _string(raw, question_key, where), _string(raw, answer_key, where)
    for key in BESIDE_INSTRUCTION if question_key == "instruction" else ():
        question += f"\n\n{_string(raw, key, where)}" if raw.get(key) else ""
    earlier = (raw.get("history") or []) if question_key == "instruction" else []
    if not isinstance(earlier, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in earlier):
        raise ValueError(f"{where}: history must be a list of pairs of question and answer, found {shown(earlier)}")
    pairs = [(_string({"history": q}, "history", where), _string({"history": a}, "history", where)) for q, a in earlier]
    turns = [(Message("user", q), Message("assistant", a)) for q, a in [*pairs, (question, answer)]]
    return [message for pair in turns for message in pair]


def _prompt_and_completion(
    raw: dict[str, Any], question_key: str, answer_key: str, where: str, unread: Counter[str]
) -> list[Message]:
    """Lists of messages on either side; what the prompt's assistant said is context."""

    def side(key: str, role: str) -> list[Message]:
        given = raw[key]
        if isinstance(given, list) and given and all(isinstance(item, str) for item in given):
            raise ValueError(f"{where}: {key} is a list of {len(given)} texts; write one text, or a list of messages")
        return _turns(given, where, unread) if isinstance(given, list) else [Message(role, _string(raw, key, where))]

    prompt = side(question_key, "user")
    if any(message.train for message in prompt if message.role == "assistant"):
        raise ValueError(f"{where}: a turn of {question_key} is to be trained; only {answer_key} is, or write messages")
    context = [replace(message, train=False, in_prompt=message.train is not False) for message in prompt]
    return [*context, *side(answer_key, "assistant")]


# ---- what all of them use ---------------------------------------------------------------------------------------


def _string(raw: Mapping[str, Any], key: str, where: str) -> str:
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


def _keys(raw: Iterable[Any]) -> str:
    names = sorted(map(str, raw))
    more = f" and {len(names) - SHOWN_KEYS} more" if len(names) > SHOWN_KEYS else ""
    plain = (shown(name) if name != name.strip() else shown(name)[1:-1] for name in names[:SHOWN_KEYS])
    return (", ".join(plain) or "(none)") + more
