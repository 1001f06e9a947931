"""Which characters of a rendered conversation are trained.

Where the template marks what the assistant generates (`{% generation %}`), those marks decide. Elsewhere a turn is what
the template adds to the conversation before it, with the generation prompt: the model is trained on exactly what it
would be asked to write. That holds only while the whole conversation begins with both renderings, which is checked. A
template that rewrites earlier turns (dropping their reasoning, say) breaks it for those turns; they are context only.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from os.path import commonprefix
from typing import Literal, NamedTuple

from flexengine.data.image_places import PLACE
from flexengine.data.records import Message, Record

TrainOn = Literal["assistant", "last", "all"]
"""What has a loss in a conversation: every turn of the assistant, its last one, or every token."""


class Span(NamedTuple):
    """Characters start..end (end excluded) of a rendered conversation."""

    start: int
    end: int


class Rendered(NamedTuple):
    """A conversation as text, with the spans that the template marks as generated."""

    text: str
    marked: list[Span]


class Marked(NamedTuple):
    """A conversation as text, its trained spans in order, and how many turns the template keeps from being trained.

    is_ended: a special token ends the last span, so that the model learns to stop.
    """

    text: str
    spans: list[Span]
    num_rewritten: int = 0
    is_ended: bool = True


class AddedTokens(NamedTuple):
    """Texts of the tokens that a tokenizer finds before it splits a text: all of them, and the special ones."""

    every: Sequence[str]
    special: Sequence[str]


class LeftOutError(ValueError):
    """A record that would train something else than it says. The message is a reason that records share."""


Render = Callable[[Sequence[Message], bool], Rendered]
"""(messages, add_generation_prompt) -> text; raises ValueError where the template refuses them."""


def mark(record: Record, render: Render, marks: bool, tokens: AddedTokens, train_on: TrainOn) -> Marked:
    """The rendered conversation with its trained spans.

    marks: the template has `{% generation %}`. tokens: the special ones may close a turn.
    Raises LeftOutError for a record that the template loses a part of, or whose answers it rewrites.
    """
    messages = record.messages
    whole = render(messages, False)
    answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
    wanted = [i for i in answers if messages[i].train is not False]
    if train_on == "last":
        wanted = [i for i in wanted if i == answers[-1]]
    if train_on == "all":
        if any(message.train is False and not message.in_prompt for message in messages):
            raise LeftOutError("it masks a turn, and --train-on all trains every token")
        spans, looked_in = [Span(0, len(whole.text))], dict.fromkeys(answers, whole.text)
    elif marks:
        spans = _by_marks(messages, whole, wanted, answers, render)
        looked_in = dict.fromkeys(wanted, "".join(whole.text[span.start : span.end] for span in spans))
    else:
        prefixes = _Prefixes(messages, whole.text, render, tokens)
        found = {i: span for i in wanted if (span := prefixes.span(i)) is not None}
        if wanted and not found:
            raise LeftOutError("the chat template writes the answer otherwise than it asks for it")
        spans, looked_in = list(found.values()), {i: whole.text[s.start : s.end] for i, s in found.items()}
    _check_nothing_is_lost(record, whole.text, looked_in)
    num_rewritten = len(wanted) - len(looked_in) if train_on != "all" else 0
    is_ended = not spans or _is_ended(whole.text[: spans[-1].end], tokens)
    return Marked(whole.text, spans, num_rewritten, is_ended)


def _is_ended(text: str, tokens: AddedTokens) -> bool:
    return text.rstrip().endswith(tuple(tokens.special))


def _by_marks(
    messages: Sequence[Message], whole: Rendered, wanted: list[int], answers: list[int], render: Render
) -> list[Span]:
    """Marked spans of the wanted turns. Which mark is whose is told by counting those of the conversation up to it."""
    if wanted == answers:
        return whole.marked
    bounds = {
        i: (len(render(messages[:i], False).marked) if i else 0, len(render(messages[: i + 1], False).marked))
        for i in wanted
    }
    return [span for first, last in bounds.values() for span in whole.marked[first:last]]


class _Prefixes:
    """Finds the span of a turn by rendering the conversation before it and up to it."""

    def __init__(self, messages: Sequence[Message], text: str, render: Render, tokens: AddedTokens) -> None:
        self._messages, self._text, self._render, self._tokens = messages, text, render, tokens

    def span(self, i: int) -> Span | None:
        """None where the whole conversation does not begin with turn i as it was asked for and answered."""
        try:
            asked = self._render(self._messages[:i], True).text
            last = i + 1 == len(self._messages)
            up_to = self._text if last else self._render(self._messages[: i + 1], False).text
        except ValueError:  # a template may refuse a conversation that it takes when it is longer
            return None
        start = len(asked) if up_to.startswith(asked) else self._start_without_opening(i, asked, up_to)
        end = len(self._shared(up_to))
        if start is None or not start < end or not self._text.startswith(up_to[:start]):
            return None
        return Span(start, start + len(self._without_space_after_end(self._text[start:end])))

    def _start_without_opening(self, i: int, asked: str, up_to: str) -> int | None:
        """Where an answer begins that lacks the end of the generation prompt, as one that opens a reasoning.

        The two must agree to the end of a line or of an added token that the generation prompt wrote.
        """
        common = commonprefix([asked, up_to])  # noqa: RUF071, characters are what is compared
        ends = [at + len(token) for token in (*self._tokens.every, "\n") if (at := common.rfind(token)) >= 0]
        history = self._render(self._messages[:i], False).text if i else ""
        return max(ends) if ends and asked.startswith(history) and max(ends) > len(history) else None

    def _shared(self, up_to: str) -> str:
        """What the whole conversation shares with that up to a turn, which may add tokens that close a conversation."""
        while not self._text.startswith(up_to):
            closing = next((token for token in self._tokens.special if up_to.rstrip().endswith(token)), None)
            if closing is None:
                return ""
            up_to = up_to.rstrip()[: -len(closing)]
        return up_to

    def _without_space_after_end(self, turn: str) -> str:
        """Cuts the white space that some templates write after the end-of-turn token: no model has to learn it."""
        return turn.rstrip() if _is_ended(turn, self._tokens) else turn


# ---- nothing is lost without a word ----------------------------------------------------------------------------


def _check_nothing_is_lost(record: Record, text: str, looked_in: Mapping[int, str]) -> None:
    """Raises LeftOutError where the template does not write what the record holds.

    looked_in: trained turn -> the text that has to hold it. Answers that are context only may be rewritten. Text is
    looked for as templates may write it: without white space around it, or as JSON.
    """
    for tool in record.tools:
        if not _written(str(tool["function"].get("name", "")), text):
            raise LeftOutError("the chat template does not write the record's tools")
    reached: dict[int, int] = {}  # in each text, since turns stand in their order: long conversations have thousands
    for i, message in enumerate(record.messages):
        if message.role == "assistant" and i not in looked_in:
            continue
        inside = looked_in.get(i, text)
        for what, part in _parts(message):
            at = inside.find(part.strip(), reached.get(id(inside), 0))
            if at >= 0:
                reached[id(inside)] = at
            elif not _written(part, inside):
                raise LeftOutError(f"the chat template does not write the {what} of a turn of {message.role}")


def _parts(message: Message) -> Iterator[tuple[str, str]]:
    """(name, text) of everything a turn says. Reasoning inside the content is a part of its own."""
    for part in (message.content or "").replace("<think>", "</think>").replace(PLACE, "</think>").split("</think>"):
        yield "content", part
    for key in ("reasoning_content", "reasoning", "thinking"):
        if isinstance(message.extra.get(key), str):
            yield "reasoning", message.extra[key]
    for call in message.extra.get("tool_calls", ()):
        yield "tool calls", call["function"]["name"]
        arguments = call["function"]["arguments"]
        for value in arguments.values() if isinstance(arguments, dict) else ():
            if isinstance(value, str):
                yield "tool calls", value


def _written(part: str, text: str) -> bool:
    part = part.strip()
    return part in text or json.dumps(part, ensure_ascii=False)[1:-1] in text or json.dumps(part)[1:-1] in text
