"""`flexengine chat`: a conversation with a model in the terminal, its answers word by word."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from flexengine.commands.generate import (
    add_images,
    add_longest,
    add_sampling,
    add_taken,
    opened,
    plan_for,
    sampling_of,
)
from flexengine.commands.places import add_place
from flexengine.wording import FlagParser

if TYPE_CHECKING:
    from flexengine.api import Engine, Sampling
    from flexengine.data import TokenizerProcess

BEGIN, IMAGE, END = "/new", "/image", "/exit"
THINKING = {"auto": None, "on": True, "off": False}
DIM = "\x1b[2m{}\x1b[22m"
LAST_OF_PROMPT = 16
"""Tokens at the end of a prompt that show whether the template itself begins a thought."""


def main(argv: Sequence[str]) -> int:
    """Talk with the model that a command line names until the input ends; returns the exit status.

    Raises: ValueError for what a person can correct, PlanError where not even one conversation fits.
    """
    arguments = _parser().parse_args(argv)
    from flexengine.api import build  # noqa: PLC0415, loads torch

    images = arguments.max_image_tokens
    model, tokenizer = opened(arguments, images > 0)
    thinking = THINKING[arguments.thinking]
    if thinking is not None:
        tokenizer.encode_prompt("", thinking=thinking)  # refused before anything is loaded
    longest = min(arguments.max_seq_len, model.longest_sequence or arguments.max_seq_len)
    with build(plan_for(arguments, model, longest, longest, 1, images)) as engine:
        conversation = Conversation(engine, tokenizer, arguments.max_new_tokens, sampling_of(arguments), thinking)
        show = functools.partial(_show, hides_thoughts=arguments.hide_thinking)
        if sys.stdin.isatty():
            shows = f"{IMAGE} FILE shows a picture, " if images else ""
            print(f"{model.name}: up to {longest} tokens; {shows}{BEGIN} begins again, {END} or Ctrl-D ends")
        for line in _lines(sys.stdin):
            if line == BEGIN:
                conversation.begin()
            elif line.partition(" ")[0] == IMAGE:
                conversation.show(line.removeprefix(IMAGE).strip(), images)
            else:
                conversation.say(line, show)
                print(flush=True)
    return 0


class Conversation:
    """The turns that were said, and the engine that answers."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: TokenizerProcess,
        max_new_tokens: int,
        sampling: Sampling,
        thinking: bool | None = None,
    ) -> None:
        """thinking: whether the model thinks first; without a word what its template takes."""
        self.messages: list[dict[str, Any]] = []
        self._pictures: list[dict[str, str]] = []
        self._engine, self._tokenizer = engine, tokenizer
        self._max_new_tokens, self._sampling, self._thinking = max_new_tokens, sampling, thinking

    def begin(self) -> None:
        """Forget all that was said and shown."""
        self.messages.clear()
        self._pictures.clear()

    def show(self, path: str, most_tokens: int) -> None:
        """Have the next message be about a picture, too; what is wrong with it is said on stderr."""
        part = {"type": "image", "path": path}
        try:
            if not most_tokens:
                raise ValueError(f"{IMAGE}: begin with --max-image-tokens N, for which the plan then has room")
            self._tokenizer.encode_with_images([{"role": "user", "content": [part]}])
        except ValueError as error:
            print(f"not shown: {error}", file=sys.stderr, flush=True)
        else:
            self._pictures.append(part)

    def say(self, text: str, show: Callable[[str, bool], None]) -> str:
        """Answer a user's message; show gets each piece, and whether it is a thought. Returns the whole answer.

        Where the conversation leaves no room for an answer, its oldest turns are left out of what the model reads; it
        is said on stderr. Raises: ValueError where the message alone leaves none.
        """
        from flexengine.data.answer_text import THOUGHT_MARKS, AnswerText, Thoughts  # noqa: PLC0415, loads torch

        parts = [*self._pictures, {"type": "text", "text": text}]
        self.messages.append({"role": "user", "content": parts if self._pictures else text})
        self._pictures.clear()
        ids, pixels, left_out = self._fitting()
        if left_out:
            print(f"the {left_out} oldest turns no longer fit and are left out ({BEGIN} begins again)", file=sys.stderr)
        answer = AnswerText(self._tokenizer.decode)
        thoughts = Thoughts(self._tokenizer.decode(ids[-LAST_OF_PROMPT:]).rstrip().endswith(THOUGHT_MARKS[0]))

        def tell(_: int, token: int) -> None:
            for part in thoughts.parts_of(answer.add(token)):
                show(*part)

        stop_ids = self._tokenizer.stop_ids
        self._engine.generate(
            [ids], self._max_new_tokens, stop_ids=stop_ids, tell=tell, sampling=self._sampling, images=pixels
        )
        for part in thoughts.parts_of(answer.finish(), is_whole=True):
            show(*part)
        self.messages.append({"role": "assistant", "content": answer.text})
        return answer.text

    def _fitting(self) -> tuple[list[int], dict[str, Any], int]:
        """Ids and pixels of the newest turns that leave room for an answer, and how many older ones were dropped."""
        longest, before = self._engine.plan.request.max_seq_len, len(self.messages)
        while True:
            ids, pixels = self._tokenizer.encode_turns(self.messages, self._thinking)
            given = self._engine.model.given if pixels else None
            fits = len(ids) < longest and (given is None or ids.count(given.token_id) <= given.max_tokens)
            if fits or len(self.messages) == 1:
                return ids, pixels, before - len(self.messages)
            del self.messages[:2]


def _lines(source: TextIO) -> Iterator[str]:
    """What a person says, line by line, until the end of the input or END."""
    while True:
        if source.isatty():
            print("> ", end="", flush=True)
        line = source.readline()
        if not line or line.strip() == END:
            return
        if line.strip():
            yield line.strip()


def _show(piece: str, is_thought: bool, hides_thoughts: bool) -> None:
    """Print a piece of an answer; on a terminal thoughts are dim."""
    if not (is_thought and hides_thoughts):
        print(DIM.format(piece) if is_thought and sys.stdout.isatty() else piece, end="", flush=True)


def _parser() -> FlagParser:
    parser = FlagParser(
        prog="flexengine chat",
        description="Talks with a model, word by word, within memory budgets. It is for trying a model.",
    )
    add_place(parser)
    add_longest(parser, "longest conversation, in tokens")
    add_images(parser)
    add_sampling(parser, max_new_tokens=512)
    parser.add_argument(
        "--thinking",
        choices=tuple(THINKING),
        default="auto",
        help="whether the model thinks before it answers, where its chat template has enable_thinking (default: auto,"
        " as the template has it)",
    )
    parser.add_argument(
        "--hide-thinking", action="store_true", help="leave out what the model thinks (dim on a terminal otherwise)"
    )
    add_taken(parser)
    return parser
