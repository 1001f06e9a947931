"""Records of preferences: a prompt with answers that are compared, or an answer with a verdict.

| record of a pair | |
|---|---|
| {"prompt", "chosen", "rejected"}: texts, or lists of messages | of lists both answers follow the prompt's messages |
| {"chosen": [...], "rejected": [...]} | the prompt is what both conversations begin with |
| {"messages" or "conversations": [...], "chosen", "rejected"} | answers are messages, lists of them, or texts |
| {"instruction", "input"?, "history"?, "chosen", "rejected"}, {"question", ...}, {"query", ...} | as of one answer |
| any of these with {"margin": number} | for reward models: by how much the chosen answer is to be ahead |

A rated record is one of a single answer (`records.py`) with {"label": true or false}; a pair is two of them. Each side
is read as the record of a single answer, so everything that stands beside a conversation means what it means there.
Only the answer has a loss: what the assistant said before it is context.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from flexengine.data.bad_records import BadRecords
from flexengine.data.encoding import encode_whole
from flexengine.data.masks import LeftOutError
from flexengine.data.records import IGNORE, Message, Record, TokenizedRecord, parse_record
from flexengine.data.sources import Reader
from flexengine.data.token_columns import ValuedRecord
from flexengine.data.tokenizer import ChatTokenizer
from flexengine.wording import shown

SIDES = ("chosen", "rejected")
PROMPTS = ("prompt", "messages", "conversations", "conversation", "instruction", "question", "query")
"""Keys that may hold a prompt beside answers."""
OF_QUESTION = ("question", "query")
ANSWERS_OF_LISTS = ("completion", "response", "answer")
WANTED = (
    'a pair is {"prompt", "chosen", "rejected"} (texts or lists of messages), or {"chosen", "rejected"} as two'
    " conversations with the same beginning; columns of other names are named by --columns chosen=NAME rejected=NAME"
)


@dataclass(frozen=True)
class Answered:
    """A conversation whose last `num_answer_turns` turns are the answer, and whether that is a good one."""

    record: Record
    num_answer_turns: int
    wanted: bool = True

    @property
    def answer(self) -> tuple[Message, ...]:
        """The turns that have a loss."""
        return self.record.messages[-self.num_answer_turns :]

    def followed_by(self, answer: tuple[Message, ...]) -> Record:
        """The prompt with another answer."""
        return replace(self.record, messages=(*self.record.messages[: -self.num_answer_turns], *answer))


@dataclass(frozen=True)
class Compared:
    """Two conversations with the same prompt. wanted: whether the first has a good answer. margin: by how much it is to
    be ahead."""

    first: Record
    second: Record
    wanted: bool = True
    margin: float = 0.0


# ---- parsing -------------------------------------------------------------------------------------------------------


def parse_pair(raw: Any, where: str, unread: Counter[str] | None = None) -> Compared:
    """Read a pair; arguments and errors are those of `parse_record`."""
    chosen, rejected = _sides(raw, where, unread)
    return Compared(chosen.record, rejected.record)


def parse_ranked(raw: Any, where: str, unread: Counter[str] | None = None) -> Compared:
    """Read a pair with its margin, if it has one; arguments and errors are those of `parse_record`."""
    margin = raw.get("margin") if isinstance(raw, dict) else None
    if margin is not None and (type(margin) not in (int, float) or not math.isfinite(margin)):
        raise ValueError(f"{where}: margin must be a number, found {shown(margin)}")
    rest = {key: value for key, value in raw.items() if key != "margin"} if isinstance(raw, dict) else raw
    return replace(parse_pair(rest, where, unread), margin=float(margin or 0))


def parse_rated(raw: Any, where: str, unread: Counter[str] | None = None) -> tuple[Answered, ...]:
    """Read an answer with a verdict, or the two of a pair; arguments and errors are those of `parse_record`."""
    if isinstance(raw, dict) and all(raw.get(side) is not None for side in SIDES):
        chosen, rejected = _sides(raw, where, unread)
        return chosen, replace(rejected, wanted=False)
    given = dict(raw) if isinstance(raw, dict) else {}
    label = given.pop("label", None)
    if not isinstance(label, bool):
        found = "none" if label is None else shown(label)
        raise ValueError(
            f"{where}: a rated answer needs label, true or false, found {found}; --columns label=NAME names the column"
        )
    completion = next((given[key] for key in ANSWERS_OF_LISTS if isinstance(given.get(key), list)), None)
    num_turns = 1 if completion is None else len(completion)
    return (_answered(given, num_turns, where, unread, label),)


def _sides(raw: Any, where: str, unread: Counter[str] | None) -> tuple[Answered, Answered]:
    """Chosen and rejected answer of a pair."""
    if not isinstance(raw, dict):
        raise ValueError(f"{where}: a record must be a JSON object, found {type(raw).__name__}")
    missing = [side for side in SIDES if raw.get(side) is None]
    if missing:
        raise ValueError(f"{where}: the pair has no {' and no '.join(missing)}; {WANTED}")
    given = {key: value for key, value in raw.items() if value is not None}
    answers = [_turns_of(given.pop(side)) for side in SIDES]
    rest, answers = _with_prompt(given, answers, where)
    if answers[0] == answers[1]:
        raise ValueError(f"{where}: chosen and rejected are the same, so there is nothing to prefer; leave it out")
    counters = (unread, None)  # what is not read is counted once
    key = "output" if "instruction" in rest else "answer" if any(name in rest for name in OF_QUESTION) else "completion"
    key = "response" if "query" in rest else key
    chosen, rejected = (
        _answered({**rest, key: answer}, len(answer) if isinstance(answer, list) else 1, where, counter)
        for answer, counter in zip(answers, counters, strict=True)
    )
    return chosen, rejected


def _turns_of(answer: Any) -> Any:
    """An answer that is one message as a list of it."""
    return [answer] if isinstance(answer, dict) else answer


def _with_prompt(given: dict[str, Any], answers: list[Any], where: str) -> tuple[dict[str, Any], list[Any]]:
    """What stands beside the answers, its prompt by the name that single answers have for it, and the answers."""
    names = [name for name in PROMPTS if name in given]
    if all(isinstance(answer, list) and answer for answer in answers):
        shared = sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(*answers, strict=False)))
        beside = {key: value for key, value in given.items() if key != "prompt"}
        if shared and (not names or _says_the_same(given.get("prompt"), answers[0][:shared])):
            shared = min(shared, *(len(answer) - 1 for answer in answers))
            return {**beside, "prompt": answers[0][:shared]}, [answer[shared:] for answer in answers]
    if not names:
        found = "texts" if all(isinstance(answer, str) for answer in answers) else "answers without a common beginning"
        raise ValueError(f"{where}: the pair has no prompt, and chosen and rejected are {found}; {WANTED}")
    conversation = next((name for name in names if name in ("messages", "conversations", "conversation")), None)
    if conversation is not None and "prompt" not in names:
        given = {**given, "prompt": given[conversation]}
        del given[conversation]
    if not isinstance(given.get("prompt"), list):  # a text goes with texts, or all are messages
        texts = [isinstance(answer, str) for answer in answers]
        if not all(texts) and "prompt" in given:
            given = {**given, "prompt": [{"role": "user", "content": given["prompt"]}]}
    return given, answers


def _says_the_same(prompt: Any, turns: Sequence[Any]) -> bool:
    """Whether a prompt that is a text repeats the last of the turns that both conversations begin with."""
    said = turns[-1].get("content", turns[-1].get("value")) if isinstance(turns[-1], dict) else None
    return isinstance(prompt, str) and prompt == said


def _answered(
    raw: dict[str, Any], num_answer_turns: int, where: str, unread: Counter[str] | None, wanted: bool = True
) -> Answered:
    """The conversation of a raw record, of which the last turns alone have a loss."""
    record = parse_record(raw, where, unread)
    if not record.messages:
        kind = "a text" if record.text is not None else "tokens"
        raise ValueError(f"{where}: an answer that is compared needs a prompt, found {kind}; {WANTED}")
    first = len(record.messages) - num_answer_turns
    if first < 1 or record.messages[-1].role != "assistant":
        raise ValueError(
            f"{where}: the answer must end with a turn of the assistant after a prompt, found {len(record.messages)}"
            f" turns, the last of {record.messages[-1].role}"
        )
    messages = [
        replace(message, train=False, in_prompt=True) if i < first and message.role == "assistant" else message
        for i, message in enumerate(record.messages)
    ]
    return Answered(replace(record, messages=tuple(messages)), num_answer_turns, wanted)


def with_others(records: Iterable[tuple[Answered, ...]]) -> Iterator[Compared]:
    """Put the answer of the next record after each one's prompt; the last takes that of the first.

    Raises: ValueError where there is one record alone.
    """
    first = before = None
    for found in records:
        if before is not None:
            yield from _beside(before, found)
        first, before = first or found, found
    if first is None or before is None:
        return
    if first is before:
        where = first[0].record.where
        raise ValueError(f"{where}: the only record; rated answers are compared with those of others: give two or more")
    yield from _beside(before, first)


def _beside(own: tuple[Answered, ...], other: tuple[Answered, ...]) -> Iterator[Compared]:
    for answered in own:
        yield Compared(answered.record, answered.followed_by(other[0].answer), answered.wanted)


def compared_of(reader: Reader, bad: BadRecords) -> Iterable[Compared]:
    """All records of a source as comparisons."""
    if reader.source.kind != "rated":
        return reader.parsed(parse_pair if reader.source.kind == "pair" else parse_ranked, bad)
    return with_others(reader.parsed(parse_rated, bad))


# ---- to tokens -----------------------------------------------------------------------------------------------------


def encode_compared(
    compared: Iterable[Compared], tokenizer: ChatTokenizer, bad: BadRecords
) -> Iterator[TokenizedRecord | ValuedRecord]:
    """Ids and labels of both conversations of each comparison, one behind the other; both or none are left out.

    The label of the first token of the first one, which nothing predicts, says whether its answer is a good one: it is
    IGNORE for one that is not.
    """
    for two in compared:
        try:
            first, second = (encode_whole(record, tokenizer) for record in (two.first, two.second))
        except LeftOutError as error:
            tokenizer.left_out[str(error)] += 1
        except ValueError as error:
            bad.leave_out(ValueError(f"{two.first.where}: {error}" if two.first.where else str(error)))
        else:
            labels = [first.input_ids[0] if two.wanted else IGNORE, *first.labels[1:]]
            yield ValuedRecord(first.input_ids, labels, two.margin) if two.margin else first._replace(labels=labels)
            yield second
