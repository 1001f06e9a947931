"""The text of an answer that grows token by token, up to the first of some texts that end it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

UNFINISHED = "\ufffd"
"""What a tokenizer writes for bytes of a character that later tokens complete."""

THOUGHT_MARKS = ("<think>", "</think>")
"""Around what a model thinks before it answers."""


class AnswerText:
    """Hands on the text of an answer as soon as no later token can change it.

    text: what was handed on. tokens: those so far. ended: whether one of `stop` came, which is no part of the text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        """decode: gives the text of ids. stop: texts that end an answer, none of them empty."""
        self._decode, self._stop = decode, stop
        self.text, self.tokens, self.ended = "", list[int](), False

    def add(self, token: int) -> str:
        """Take the next token; returns the text that is certain with it."""
        self.tokens.append(token)
        return self._hand_on(self._decode(self.tokens), is_whole=False)

    def finish(self) -> str:
        """Return what is left of the text when no token follows."""
        return "" if self.ended else self._hand_on(self._decode(self.tokens), is_whole=True)

    def _hand_on(self, whole: str, is_whole: bool) -> str:
        found = [place for place in map(whole.find, self._stop) if place >= 0]
        self.ended = bool(found)
        if self.ended:
            whole = whole[: min(found)]
        elif not is_whole:
            if whole.endswith(UNFINISHED) or not whole.startswith(self.text):
                return ""
            whole = whole[: len(whole) - self._held(whole)]
        piece = whole[len(self.text) :]
        self.text += piece
        return piece

    def _held(self, whole: str) -> int:
        """Characters at the end that may begin a text that ends the answer."""
        return max((_begun(whole, stop) for stop in self._stop), default=0)


class Thoughts:
    """Parts a text that comes in pieces into what a model thinks, marks and all, and what it says.

    inside: whether the text so far ends within a thought.
    """

    def __init__(self, inside: bool = False) -> None:
        self.inside, self._rest = inside, ""

    def parts_of(self, piece: str, is_whole: bool = False) -> Iterator[tuple[str, bool]]:
        """The parts that are certain with the next piece, and whether each is a thought. is_whole: none follows."""
        rest, self._rest = self._rest + piece, ""
        while rest:
            mark = THOUGHT_MARKS[self.inside]
            before, found, after = rest.partition(mark)
            if not found and not is_whole and (held := _begun(rest, mark)):
                before, self._rest = rest[:-held], rest[-held:]
            if before:
                yield before, self.inside
            if found:
                yield mark, True
                self.inside = not self.inside
            rest = after


def _begun(text: str, mark: str) -> int:
    """How many characters at the end of a text may begin a mark that is not whole yet."""
    return next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)
