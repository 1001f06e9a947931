"""Records of preferences: a prompt with answers that are compared, or an answer with a verdict.

| record of a pair | |
|---|---|
| {"prompt", "chosen", "rejected"}: texts, or lists of messages | of lists both answers follow the prompt's messages |
| {"chosen": [...], "rejected": [...]} | the prompt is what both conversations begin with |
| {"messages" or "conversations": [...], "chosen", "rejected"} | answers are messages, lists of them, or texts |
| {"instruction", "input"?, "history"?, "chosen", "rejected"}, {"question", ...}, {"query", ...} | as of one answer |
| any of these with {"margin": number} | for reward models: by how much the chosen answer is to be ahead |

A ranking is {"prompt", "ranked": [best, ..., worst]}, or {"prompt", "answers": [...]} with "scores", of which more is
better, or "ranks", of which 1 is best. It becomes a pair of every two answers of different rank.

A rated record is one of a single answer (`records.py`) with {"label": true or false}; a pair is two of them. Each side
is read as the record of a single answer, so everything that stands beside a conversation means what it means there.
Only the answer has a loss: what the assistant said before it is context.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, takewhile
from pathlib import Path
from typing import Any

from flexengine.data.bad_records import BadRecords
from flexengine.data.encoding import encode_whole, encoded_one_by_one
from flexengine.data.pictured import images_behind, tokens_with_images
from flexengine.data.records import IGNORE, Message, Record, TokenizedRecord, parse_record
from flexengine.data.sources import Reader
from flexengine.data.token_columns import ValuedRecord
from flexengine.data.tokenizer import ChatTokenizer
from flexengine.wording import shown

SIDES = ("chosen", "rejected")
RANKINGS = ("ranked", "answers")
"""Keys that hold the answers of a ranking."""
PROMPTS = ("prompt", "messages", "conversations", "conversation", "instruction", "question", "query")
"""Keys that may hold a prompt beside answers."""
OF_QUESTION = ("question", "query")
ANSWERS_OF_LISTS = ("completion", "response", "answer")
WANTED = (
    'a pair is {"prompt", "chosen", "rejected"} (texts or lists of messages), or {"chosen", "rejected"} as two'
    " conversations with the same beginning; columns of other names are named by --columns chosen=NAME rejected=NAME"
)
RANKING_WANTED = (
    'a ranking is {"prompt", "ranked": [best, ..., worst]}, or {"prompt", "answers": [...]} with as many "scores" (more'
    ' is better) or "ranks" (1 is best)'
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


def parse_pair(raw: Any, where: str, unread: Counter[str] | None = None, folder: Path | None = None) -> Compared:
    """Read a pair; arguments and errors are those of `parse_record`."""
    chosen, rejected = _sides(raw, where, unread, folder)
    return Compared(chosen.record, rejected.record)


def parse_ranked(raw: Any, where: str, unread: Counter[str] | None = None, folder: Path | None = None) -> Compared:
    """Read a pair with its margin, if it has one; arguments and errors are those of `parse_record`."""
    margin = raw.get("margin") if isinstance(raw, dict) else None
    if margin is not None and (type(margin) not in (int, float) or not math.isfinite(margin)):
        raise ValueError(f"{where}: margin must be a number, found {shown(margin)}")
    rest = {key: value for key, value in raw.items() if key != "margin"} if isinstance(raw, dict) else raw
    return replace(parse_pair(rest, where, unread, folder), margin=float(margin or 0))


def parse_ranking(
    raw: dict[str, Any], where: str, unread: Counter[str] | None = None, remarks: Counter[str] | None = None,
    folder: Path | None = None,
) -> list[Compared]:  # fmt: skip
    """Read a ranking as a pair of every two answers of different rank, those of the best answer first.

    remarks counts in words what became of rankings. Raises: ValueError for fewer than two answers, two that are the
    same, ranks that are none, and where all answers have the same rank.
    """
    given = {key: value for key, value in raw.items() if value is not None}
    answers, worth = _ranked_answers(given, where)
    for first, second in combinations(range(len(answers)), 2):
        if answers[first] == answers[second]:
            raise ValueError(
                f"{where}: answers {first + 1} and {second + 1} of the ranking are the same; leave one of them out"
            )
    rest, answers = _with_prompt(given, answers, where, "ranking", "its answers", RANKING_WANTED)
    answered = _all_answered(rest, answers, where, unread, folder)
    best_first = sorted(range(len(answers)), key=lambda i: -worth[i])
    every_two = list(combinations(best_first, 2))
    pairs = [Compared(answered[i].record, answered[j].record) for i, j in every_two if worth[i] > worth[j]]
    if not pairs:
        raise ValueError(
            f"{where}: all {len(answers)} answers have the same rank, so there is nothing to prefer; leave it out"
        )
    if remarks is not None:
        remarks["rankings, each a pair of every two answers of different rank"] += 1
        remarks["pairs made of rankings"] += len(pairs)
        if ties := len(every_two) - len(pairs):
            remarks["pairs of equal rank that rankings do not make"] += ties
    return pairs


def _ranked_answers(given: dict[str, Any], where: str) -> tuple[list[Any], list[float]]:
    """Answers of a ranking, and what each is worth, more is better; both are taken out of the record."""
    key = next(key for key in RANKINGS if key in given)
    answers = given.pop(key)
    if not isinstance(answers, list) or len(answers) < 2:
        found = f"{len(answers)}" if isinstance(answers, list) else shown(answers)
        raise ValueError(f"{where}: {key} must be a list of two answers or more, found {found}; {RANKING_WANTED}")
    for i, answer in enumerate(answers, start=1):
        if not isinstance(answer, (str, dict, list)) or answer in ([], {}):
            raise ValueError(f"{where}: answer {i} of {key} must be a text or messages, found {shown(answer)}")
    if key == "ranked":
        return [*map(_turns_of, answers)], [-float(i) for i in range(len(answers))]
    by = next((name for name in ("scores", "ranks") if name in given), None)
    if by is None:
        raise ValueError(f"{where}: answers have neither scores nor ranks; {RANKING_WANTED}")
    numbers = given.pop(by)
    unknown = not isinstance(numbers, list) or any(type(x) not in (int, float) or not math.isfinite(x) for x in numbers)
    if unknown or len(numbers) != len(answers):
        found = shown(numbers) if unknown else f"{len(numbers)}"
        raise ValueError(f"{where}: {by} must be a number for each of the {len(answers)} answers, found {found}")
    return [*map(_turns_of, answers)], [float(x) if by == "scores" else -float(x) for x in numbers]


def is_ranking(raw: Any) -> bool:
    """Whether a record has the answers of a ranking, and neither side of a pair."""
    given = {key for key, value in raw.items() if value is not None} if isinstance(raw, dict) else set()
    return not given.isdisjoint(RANKINGS) and given.isdisjoint(SIDES)


def parse_rated(
    raw: Any, where: str, unread: Counter[str] | None = None, folder: Path | None = None
) -> tuple[Answered, ...]:
    """Read an answer with a verdict, or the two of a pair; arguments and errors are those of `parse_record`."""
    if isinstance(raw, dict) and all(raw.get(side) is not None for side in SIDES):
        chosen, rejected = _sides(raw, where, unread, folder)
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
    return (_answered(given, num_turns, where, unread, folder, label),)


def _sides(raw: Any, where: str, unread: Counter[str] | None, folder: Path | None) -> tuple[Answered, Answered]:
    """Chosen and rejected answer of a pair."""
    if not isinstance(raw, dict):
        raise ValueError(f"{where}: a record must be a JSON object, found {type(raw).__name__}")
    missing = [side for side in SIDES if raw.get(side) is None]
    if missing:
        raise ValueError(f"{where}: the pair has no {' and no '.join(missing)}; {WANTED}")
    given = {key: value for key, value in raw.items() if value is not None}
    answers = [_turns_of(given.pop(side)) for side in SIDES]
    rest, answers = _with_prompt(given, answers, where, "pair", "chosen and rejected", WANTED)
    if answers[0] == answers[1]:
        raise ValueError(f"{where}: chosen and rejected are the same, so there is nothing to prefer; leave it out")
    chosen, rejected = _all_answered(rest, answers, where, unread, folder)
    return chosen, rejected


def _all_answered(
    rest: dict[str, Any], answers: list[Any], where: str, unread: Counter[str] | None, folder: Path | None
) -> tuple[Answered, ...]:
    """The prompt with each answer; what is not read is counted once."""
    key = "output" if "instruction" in rest else "answer" if any(name in rest for name in OF_QUESTION) else "completion"
    key = "response" if "query" in rest else key
    turns = [len(answer) if isinstance(answer, list) else 1 for answer in answers]
    found = tuple(
        _answered({**rest, key: answer}, count, where, None if i else unread, folder)
        for i, (answer, count) in enumerate(zip(answers, turns, strict=True))
    )
    if any(one.record.images != found[0].record.images for one in found):
        raise ValueError(f"{where}: an answer that is compared has images; they stand in the prompt, which all share")
    return found


def _turns_of(answer: Any) -> Any:
    """An answer that is one message as a list of it."""
    return [answer] if isinstance(answer, dict) else answer


def _with_prompt(
    given: dict[str, Any], answers: list[Any], where: str, what: str, sides: str, wanted: str
) -> tuple[dict[str, Any], list[Any]]:
    """What stands beside the answers, its prompt by the name that single answers have for it, and the answers.

    what, sides, wanted: of the message where there is no prompt, what the record is, how it calls its answers, and the
    formats that are read.
    """
    names = [name for name in PROMPTS if name in given]
    if all(isinstance(answer, list) and answer for answer in answers):
        shared = sum(
            1 for _ in takewhile(lambda turns: all(turn == turns[0] for turn in turns), zip(*answers, strict=False))
        )
        beside = {key: value for key, value in given.items() if key != "prompt"}
        if shared and (not names or _says_the_same(given.get("prompt"), answers[0][:shared])):
            shared = min(shared, *(len(answer) - 1 for answer in answers))
            return {**beside, "prompt": answers[0][:shared]}, [answer[shared:] for answer in answers]
    if not names:
        found = "texts" if all(isinstance(answer, str) for answer in answers) else "answers without a common beginning"
        raise ValueError(f"{where}: the {what} has no prompt, and {sides} are {found}; {wanted}")
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
    raw: dict[str, Any], num_answer_turns: int, where: str, unread: Counter[str] | None, folder: Path | None,
    wanted: bool = True,
) -> Answered:  # fmt: skip
    """The conversation of a raw record, of which the last turns alone have a loss."""
    record = parse_record(raw, where, unread, folder)
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
    if reader.source.kind == "rated":

        def rated(raw: Any, where: str, unread: Counter[str]) -> tuple[Answered, ...]:
            return parse_rated(raw, where, unread, reader.images_folder)

        return with_others(reader.parsed(rated, bad))
    parse_one = parse_pair if reader.source.kind == "pair" else parse_ranked

    def parse(raw: Any, where: str, unread: Counter[str]) -> list[Compared]:
        if is_ranking(raw):
            return parse_ranking(raw, where, unread, reader.remarks, reader.images_folder)
        return [parse_one(raw, where, unread, reader.images_folder)]

    return chain.from_iterable(reader.parsed(parse, bad))


# ---- to tokens -----------------------------------------------------------------------------------------------------


def encode_compared(
    compared: Iterable[Compared], tokenizer: ChatTokenizer, bad: BadRecords
) -> Iterator[TokenizedRecord | ValuedRecord]:
    """Ids and labels of both conversations of each comparison, one behind the other; both or none are left out.

    The label of the first token of the first one, which nothing predicts, says whether its answer is a good one: it is
    IGNORE for one that is not, and its value by how much it is to be ahead. Where images are read, they follow as
    numbers, whose value is how many tokens of both stand for them.
    """

    def encode(two: Compared) -> list[TokenizedRecord | ValuedRecord]:
        first, *others = _encoded(two, tokenizer)
        own = first._replace(labels=[first.input_ids[0] if two.wanted else IGNORE, *first.labels[1:]])
        return [ValuedRecord(*own, two.margin) if two.margin else own, *others]

    return encoded_one_by_one(compared, encode, lambda two: two.first, tokenizer, bad)


def _encoded(
    two: Compared, tokenizer: ChatTokenizer
) -> tuple[TokenizedRecord, TokenizedRecord] | tuple[TokenizedRecord, TokenizedRecord, ValuedRecord]:
    """Both conversations of a comparison, and their images where these are read."""
    if tokenizer.images is None:
        return encode_whole(two.first, tokenizer), encode_whole(two.second, tokenizer)
    found, ids = tokenizer.images.taken(two.first, tokenizer.notes)
    first, second = (tokens_with_images(record, ids, tokenizer) for record in (two.first, two.second))
    num_tokens = sum(row.input_ids.count(tokenizer.images.row_id) for row in (first, second))
    return first, second, images_behind(found, num_tokens)
