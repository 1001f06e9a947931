"""Records of instruction data: one decoded row of a file becomes a conversation, a text or a list of tokens.

| record | becomes |
|---|---|
| {"messages": [{"role", "content"}, ...]} or {"conversations": [{"from", "value"}, ...]} | the conversation |
| {"prompt": [...], "completion": [...]} (lists of messages) | one conversation; only the completion is trained |
| {"instruction", "input"?, "output", "history"?} | earlier pairs, then user: instruction, input; assistant: output |
| {"prompt", "completion" or "response"}, {"question", "answer"} | user, assistant |
| {"text"} | plain text: every token is a target |
| {"input_ids", "labels" or a mask} | tokens as they are |

Beside a conversation: "system", "tools" (or "functions"), and "chat_template_kwargs" for the template. A turn may carry
"tool_calls", "reasoning_content", "name", and "weight" (0 or 1) or "train", which say whether it is trained.
"""

import contextlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from flexengine.wording import shown

IGNORE = -100
"""Label of a token without loss, as in Hugging Face."""
SHOWN_KEYS = 12
"""Keys of a record that a message names."""


class TokenizedRecord(NamedTuple):
    """One training sequence: one entry per token in both lists; labels unshifted, IGNORE where there is no loss."""

    input_ids: list[int]
    labels: list[int]


@dataclass(frozen=True)
class Message:
    """One turn; role is "system", "user", "assistant", "tool" or another word that the chat template knows.

    extra holds further keys that templates read (tool_calls, reasoning_content, name, tool_call_id). train says whether
    an assistant's turn is trained; None leaves that to --train-on.
    """

    role: str
    content: str | None
    extra: Mapping[str, Any] = field(default_factory=dict)
    train: bool | None = None

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

    def __post_init__(self) -> None:
        if bool(self.messages) + (self.text is not None) + (self.tokens is not None) != 1:
            raise ValueError("a record holds either messages or text or tokens")


ROLE_NAMES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
ROLE_NAMES |= {"observation": "tool", "function": "tool", "function_response": "tool", "function_call": "assistant"}
"""Other words for a speaker -> roles of chat templates; words that are not listed stay as they are."""

PAIRS = (("instruction", "output"), ("prompt", "completion"), ("prompt", "response"), ("question", "answer"))
"""(question key, answer key) of the single-turn formats, first match wins."""

KNOWN_FORMATS = (
    '{"messages": [{"role", "content"}]}',
    '{"conversations": [{"from", "value"}]}',
    '{"instruction", "input"?, "output"}',
    '{"prompt", "completion" | "response"}',
    '{"question", "answer"}',
    '{"text"}',
    '{"input_ids", "labels"?}',
)
PREFERENCES = (("chosen", "rejected"), ("completion_a", "completion_b"))
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
TURN_OPTIONS = ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking")
"""Keys of a turn that reach the template as they are; transformers gives reasoning all three of its names."""
TURN_KEYS = {*TURN_OPTIONS, "role", "content", "from", "value", "tool_calls", "function_call", "weight", "train"}
TOKEN_MASKS = ("assistant_masks", "completion_mask", "loss_mask")
TOKEN_KEYS = {"input_ids", "labels", "attention_mask", "token_type_ids", "length", *TOKEN_MASKS}
CHAT_KEYS = {"system", "system_prompt", "tools", "functions", "chat_template_kwargs"}


def parse_record(raw: Any, where: str, unread: Counter[str] | None = None) -> Record:
    """A Record from one decoded row. `where` ("file.jsonl, line 3") opens the message of the ValueError.

    unread counts the keys that were not read, for one report of all of them: they may have been meant to matter.
    """
    if not isinstance(raw, dict):
        raise ValueError(f"{where}: a record must be a JSON object, found {type(raw).__name__}")
    raw = {key: value for key, value in raw.items() if value is not None}
    unread = Counter() if unread is None else unread
    _refuse_other_tasks(raw, where)
    record, read = _parse(raw, where, unread)
    unread.update(str(key) for key in raw.keys() - read)
    return replace(record, where=where)


def _parse(raw: dict[str, Any], where: str, unread: Counter[str]) -> tuple[Record, set[str]]:
    """The record, and the keys that it was made of."""
    for key in ("messages", "conversations", "conversation"):
        if key in raw:
            return _chat(raw, _turns(raw[key], where, unread), where), {key, *CHAT_KEYS}
    for question_key, answer_key in PAIRS:
        if question_key in raw and answer_key in raw:
            read = {question_key, answer_key, *CHAT_KEYS, *(("input", "history") if answer_key == "output" else ())}
            return _chat(raw, _pair(raw, question_key, answer_key, where, unread), where), read
    if "text" in raw:
        return Record(text=_string(raw, "text", where)), {"text"}
    if "input_ids" in raw:
        return Record(tokens=_tokens(raw, where)), TOKEN_KEYS
    raise ValueError(
        f"{where}: unknown record format with keys {_keys(raw)}\n  known formats: {', '.join(KNOWN_FORMATS)}"
    )


def _refuse_other_tasks(raw: dict[str, Any], where: str) -> None:
    """Refuses records whose other keys say that training on the answer is not what is meant."""
    for preferred, rejected in PREFERENCES:
        if preferred in raw and rejected in raw:
            raise ValueError(
                f"{where}: a preference pair ({preferred}, {rejected}); train learns single answers. To learn the"
                f" preferred ones keep {preferred} as completion (or messages) and leave {rejected} out; for DPO use a"
                " trainer of preferences, such as TRL's DPOTrainer"
            )
    if isinstance(raw.get("label"), bool) and "completion" in raw:
        raise ValueError(
            f"{where}: label says whether the answer is a good one; train learns every answer: keep the good records"
            " only and leave label out"
        )
    media = [key for key in MEDIA if raw.get(key)]
    if media:
        raise ValueError(f"{where}: {media[0]} is not read, train takes text only; leave out records with {media[0]}")


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
    with contextlib.suppress(ValueError):  # tables may hold a conversation as its JSON text
        turns = json.loads(turns) if isinstance(turns, str) else turns
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{where}: the conversation must be a list of at least one message, found {shown(turns)}")
    return [_turn(turn, where, unread) for turn in turns]


def _turn(turn: Any, where: str, unread: Counter[str]) -> Message:
    form = ("from", "value") if isinstance(turn, dict) and "from" in turn else ("role", "content")
    calls = isinstance(turn, dict) and any(turn.get(key) for key in ("tool_calls", "function_call"))
    if not isinstance(turn, dict) or form[0] not in turn or not (form[1] in turn or calls):
        found = _keys(turn) if isinstance(turn, dict) else type(turn).__name__
        raise ValueError(f"{where}: a message needs the keys {form[0]} and {form[1]}, found {found}")
    given = {key: value for key, value in turn.items() if value is not None}
    unread.update(f"{key} of a message" for key in given.keys() - TURN_KEYS)
    word = _string(turn, form[0], where)
    content = _content(given, form[1], where, calls)
    extra = {key: given[key] for key in TURN_OPTIONS if key in given}
    if word == "function_call":  # the call itself is the turn's text
        given, content = {**given, "tool_calls": _list_of(_object(content, where), where)}, None
    elif "function_call" in given:
        given["tool_calls"] = [given["function_call"]]
    if given.get("tool_calls"):
        extra["tool_calls"] = [_call(call, where) for call in _list_of(given["tool_calls"], where)]
    role = ROLE_NAMES.get(word, word)
    return Message(role, content, extra, _trained(given, role, where))


def _content(turn: dict[str, Any], key: str, where: str, calls: bool) -> str | None:
    """The text of a turn: a string, a list of text parts, or null where the turn calls tools instead."""
    value = turn.get(key)
    if value is None and calls:
        return None
    if not isinstance(value, list):
        return _string({key: value}, key, where)
    parts = [{"text": part} if isinstance(part, str) else part for part in value]
    other = next((part for part in parts if not isinstance(part, dict) or "text" not in part), None)
    if other is not None:
        kind = other.get("type", shown(other)) if isinstance(other, dict) else shown(other)
        raise ValueError(f"{where}: {key} has a part that is no text ({kind}); train takes text only")
    return "".join(_string(part, "text", where) for part in parts)


def _trained(turn: dict[str, Any], role: str, where: str) -> bool | None:
    """Whether the turn is trained, by its own `weight` (0 or 1) or `train`; None where it says nothing."""
    given = [(key, turn[key]) for key in ("weight", "train") if key in turn]
    for key, value in given:
        if value not in (0, 1):
            raise ValueError(f"{where}: {key} of a message is 0 or 1, found {shown(value)}; other weights are not read")
        if value and role != "assistant" and key == "train":
            raise ValueError(f"{where}: train is set on a turn of {role}; only turns of the assistant can be trained")
    return bool(given[0][1]) if given else None


def _call(call: Any, where: str) -> dict[str, Any]:
    """A tool call as templates read it: {"type", "function": {"name", "arguments"}}, arguments decoded."""
    call = _object(call, where)
    inner = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise ValueError(f"{where}: a tool call needs the name of a function, found {shown(call)}")
    arguments = inner.get("arguments", inner.get("parameters", {}))
    with contextlib.suppress(ValueError):  # a call in another notation: the template shows whether it takes that
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
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


def _object(value: Any, where: str) -> Any:
    """The value of a JSON text: tools and calls are often stored as texts."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"{where}: tools and tool calls must be JSON, found {shown(value)} ({error})") from None


def _pair(raw: dict[str, Any], question_key: str, answer_key: str, where: str, unread: Counter[str]) -> list[Message]:
    if isinstance(raw[question_key], list) or isinstance(raw[answer_key], list):
        return _prompt_and_completion(raw, question_key, answer_key, where, unread)
    question, answer = _string(raw, question_key, where), _string(raw, answer_key, where)
    if answer_key == "output" and raw.get("input"):
        question = f"{question}\n\n{_string(raw, 'input', where)}"
    earlier = raw.get("history") or []
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
        return _turns(given, where, unread) if isinstance(given, list) else [Message(role, _string(raw, key, where))]

    context = [Message(m.role, m.content, m.extra, train=False) for m in side(question_key, "user")]
    return [*context, *side(answer_key, "assistant")]


# ---- tokens and texts ------------------------------------------------------------------------------------------


def _tokens(raw: dict[str, Any], where: str) -> TokenizedRecord:
    """Token ids with their labels: given, by a mask, or all; what attention_mask leaves out is padding."""
    columns = {key: _integers(raw[key], key, where) for key in TOKEN_KEYS - {"length"} if key in raw}
    ids = columns["input_ids"]
    for key, values in columns.items():
        if len(values) != len(ids):
            raise ValueError(f"{where}: {key} has {len(values)} entries, input_ids has {len(ids)}")
    if any(token < 0 for token in ids):
        raise ValueError(f"{where}: input_ids holds a negative number; labels alone may hold {IGNORE}")
    mask = next((columns[key] for key in TOKEN_MASKS if key in columns), [1] * len(ids))
    labels = columns.get("labels") or [token if m else IGNORE for token, m in zip(ids, mask, strict=True)]
    wrong = next((i for i, (a, b) in enumerate(zip(ids, labels, strict=True)) if b not in (a, IGNORE)), None)
    if wrong is not None:
        raise ValueError(
            f"{where}: label {labels[wrong]} at position {wrong} is neither the token {ids[wrong]} nor {IGNORE};"
            " labels are not shifted"
        )
    kept = columns.get("attention_mask", [1] * len(ids))
    rows = [(token, label) for token, label, keep in zip(ids, labels, kept, strict=True) if keep]
    return TokenizedRecord([token for token, _ in rows], [label for _, label in rows])


def _integers(values: Any, key: str, where: str) -> list[int]:
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
        raise ValueError(f"{where}: {key} must be a flat list of integers, found {shown(values)}")
    return values


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
    return (", ".join(shown(name)[1:-1] for name in names[:SHOWN_KEYS]) or "(none)") + more
