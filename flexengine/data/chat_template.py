"""Tokenizer of a model folder: text to ids, conversations to ids with the targets marked.

Reads tokenizer.json and tokenizer_config.json (or chat_template.jinja) as Hugging Face writes them. Templates run in a
sandbox: they come from downloaded folders. Source of the format: the chat templating page of the transformers
documentation (variables messages, bos_token, eos_token, add_generation_prompt; helpers raise_exception,
strftime_now and tojson; the generation block).
"""

import json
import logging
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from flexengine.data.sources import Message, Record
from flexengine.wording import parse_json, shown

logger = logging.getLogger(__name__)

IGNORE = -100
"""Label of a token without loss, as in Hugging Face."""

FALLBACK_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "### {{ message['role'] | capitalize }}:\n{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}\n\n"
    "{% endfor %}{% if add_generation_prompt %}### Assistant:\n{% endif %}"
)
"""Used when the folder has no chat template."""


class TokenizedRecord(NamedTuple):
    """One training sequence: one entry per token in both lists; labels unshifted, IGNORE where there is no loss."""

    input_ids: list[int]
    labels: list[int]


class Span(NamedTuple):
    """Characters start..end (end excluded) of a rendered conversation."""

    start: int
    end: int


class GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}`: renders its body. (Spans are found by rendering prefixes instead.)"""

    tags = {"generation"}  # noqa: RUF012, jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatTokenizer:
    """The tokenizer and the chat template of one model folder."""

    def __init__(self, tokenizer: Tokenizer, template: str | None, bos_token: str = "", eos_token: str = "") -> None:
        self.tokenizer = tokenizer
        self.has_own_template = template is not None
        self.bos_token, self.eos_token = bos_token, eos_token
        self._template = _compile(template if template is not None else FALLBACK_TEMPLATE)
        self._special_tokens = [t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special]
        self._warned = False

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ChatTokenizer":
        """Reads tokenizer.json and, where present, tokenizer_config.json and chat_template.jinja.

        Raises ValueError when tokenizer.json is missing or unreadable, or when the template does not parse.
        """
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise ValueError(
                f"no tokenizer.json in {folder}; the data cannot be tokenized without it: fetch it with the model, or "
                "train on --data-source synthetic"
            )
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the Rust side raises a bare Exception
            raise ValueError(
                f"{path} cannot be read as a tokenizer: {str(error)[:300]}; fetch tokenizer.json of the model again"
            ) from None
        if tokenizer.get_vocab_size(with_added_tokens=True) == 0:
            raise ValueError(f"{path} holds no token; fetch tokenizer.json of the model again")
        config = _read_config(Path(folder) / "tokenizer_config.json")
        bos, eos = (_token_text(config.get(key)) for key in ("bos_token", "eos_token"))
        return cls(tokenizer, _find_template(Path(folder), config), bos, eos)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a generated answer: the end-of-sequence token and the token that closes an assistant turn."""
        turn = self._render([Message("user", "a"), Message("assistant", "b")])
        closing = [t for t in self._special_tokens if turn.rstrip().endswith(t)]
        ids = (self.tokenizer.token_to_id(token) for token in (self.eos_token, *closing) if token)
        return frozenset(i for i in ids if i is not None)

    @property
    def max_id(self) -> int:
        """The largest token id; a model needs vocab_size > max_id."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values())

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of one user message, ready for the assistant to answer."""
        prompt = self._render([Message("user", text)], add_generation_prompt=True)
        return self.tokenizer.encode(prompt, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def encode_record(self, record: Record) -> TokenizedRecord:
        """Ids and labels: loss on what the assistant says and on the token that ends it, or on all of a plain text.

        A token that only overlaps an answer, such as the space before its first word, counts as part of it.
        """
        if record.text is not None:
            return self._encode_text(record.text)
        rendered, spans = self._render_with_spans(record.messages)
        encoding = self.tokenizer.encode(rendered, add_special_tokens=False)
        labels = [IGNORE] * len(encoding.ids)
        for span in spans:
            for i, (start, end) in enumerate(encoding.offsets):
                if max(start, span.start) < min(end, span.end):
                    labels[i] = encoding.ids[i]
        return TokenizedRecord(encoding.ids, labels)

    def _encode_text(self, text: str) -> TokenizedRecord:
        ids = self.tokenizer.encode(text, add_special_tokens=True).ids
        bos, eos = (self.tokenizer.token_to_id(t) if t else None for t in (self.bos_token, self.eos_token))
        if bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
        if eos is not None and ids[-1:] != [eos]:
            ids = [*ids, eos]
        return TokenizedRecord(ids, list(ids))

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """The text of a conversation. Raises ValueError when the template refuses it or fails on it."""
        try:
            return self._template.render(
                messages=[message._asdict() for message in messages],
                bos_token=self.bos_token,
                eos_token=self.eos_token,
                add_generation_prompt=add_generation_prompt,
            )
        except MemoryError:
            raise
        except Exception as error:  # a template is a program out of a downloaded folder: it may fail in any way
            roles = ", ".join(message.role for message in messages)
            raise ValueError(
                f"the chat template refuses a conversation of {roles}: {error}; change the records or the model's "
                "chat template"
            ) from None

    def _render_with_spans(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """The whole conversation as text, and the span of each assistant turn in it.

        A turn begins where the conversation before it, rendered with the generation prompt, ends; it ends where the
        conversation up to it ends. That needs a template whose output only grows; for one that rewrites earlier turns
        the turns are found by their content, which leaves out what the template adds at the front of a turn.
        """
        rendered = self._render(messages)
        turns = [i for i, message in enumerate(messages) if message.role == "assistant"]
        spans = [self._span_by_prefix(rendered, messages, i) for i in turns]
        if all(spans):
            return rendered, [span for span in spans if span]
        self._warn_unstable()
        return rendered, list(self._spans_by_content(rendered, messages))

    def _span_by_prefix(self, rendered: str, messages: Sequence[Message], i: int) -> Span | None:
        """None when the template is not stable under prefixes at message i, or refuses the prefix."""
        try:
            before = self._render(messages[:i], add_generation_prompt=True)
            up_to = self._render(messages[: i + 1])
        except ValueError:
            return None
        if not (rendered.startswith(up_to) and up_to.startswith(before)):
            return None
        return Span(len(before), len(before) + len(self._without_newline_after_end(up_to[len(before) :])))

    def _without_newline_after_end(self, turn: str) -> str:
        """Cuts the white space that some templates write after the end-of-turn token: no model has to learn it."""
        stripped = turn.rstrip()
        return stripped if any(stripped.endswith(token) for token in self._special_tokens) else turn

    def _spans_by_content(self, rendered: str, messages: Sequence[Message]) -> Iterator[Span]:
        """Assistant contents in order of appearance, each with the special token that follows, if one does."""
        cursor = 0
        for message in messages:
            content = message.content.strip()
            start = rendered.find(content, cursor)
            if start < 0:
                continue  # the template dropped or rewrote this turn: it has no target
            cursor = start + len(content)
            if message.role == "assistant" and content:
                closing = [t for t in self._special_tokens if rendered.startswith(t, cursor)]
                yield Span(start, cursor + max(map(len, closing), default=0))

    def _warn_unstable(self) -> None:
        if not self._warned:
            logger.warning("the chat template rewrites earlier turns; targets are found by the content of each answer")
        self._warned = True


def _read_config(path: Path) -> dict[str, Any]:
    """tokenizer_config.json, {} where there is none. Raises ValueError when it is no JSON object."""
    if not path.is_file():
        return {}
    config = parse_json(path.read_bytes(), path)
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(config).__name__}; fetch the file again")
    return config


def _find_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: no UTF-8 text at byte {error.start}; fetch the file again") from None
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates; the one called "default" is for chats
        named = (entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default")
        template = next((entry.get("template") for entry in named), None)
    if template is not None and not isinstance(template, str):
        raise ValueError(f"{folder}: chat_template in tokenizer_config.json is {shown(template)}, expected a text")
    return template


def _token_text(token: Any) -> str:
    """A special token is stored as its text, as {"content": text, ...}, or as null."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **kwargs: json.dumps(value, ensure_ascii=False, **kwargs)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(
            f"the chat template does not parse: line {error.lineno}: {error}; correct or remove it"
        ) from None
    except RecursionError:
        raise ValueError("the chat template does not parse: it is nested too deep; correct or remove it") from None


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
