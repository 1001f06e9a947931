"""Chat templates: conversations as text.

Templates are programs out of downloaded folders: transformers renders them in its sandbox, here under a limit of time
and size.
"""

import contextlib
import dataclasses
import datetime
import functools
import json
import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence

from flexengine.checkpoint.bounded_process import report_alive
from flexengine.data.image_places import PLACE
from flexengine.data.masks import Rendered, Span
from flexengine.data.records import Message, Record

FALLBACK_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "### {{ message['role'] | capitalize }}:\n{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}\n\n"
    "{% endfor %}{% if add_generation_prompt %}### Assistant:\n{% endif %}"
)
"""Used when the folder has no chat template; see `fallback_template`."""
NOW = "strftime_now"
"""The function by which templates ask for today's date."""
DATE_CODES = "aAbBcCdDeFgGhHIjklmMnpPrRsStTuUVwWxXyYzZ"
MARKS_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
TEMPLATE_SECONDS = 20
"""Longest time that one rendering may take: real ones take microseconds a turn, an endless loop takes for ever."""
TEMPLATE_CHARACTERS = 2**28
"""Longest rendering, far above what any sequence length takes."""


class ChatTemplate:
    """The chat template of a model, with the variables that it reads; conversations with tools may have another one.

    date: the day that templates which write today's date see. A run keeps it, so that the same records become the same
    tokens on another day.
    """

    def __init__(self, text: str, variables: Mapping[str, str], tool_text: str | None = None) -> None:
        """Raises ValueError when the template does not parse."""
        self.text, self.tool_text, self.variables = text, tool_text or text, variables
        self.date = today()
        _check_parses(text)

    @property
    def reads_date(self) -> bool:
        """Whether what the template writes depends on the day."""
        return reads_date(self.text) or reads_date(self.tool_text)

    def marks_generation(self, record: Record) -> bool:
        """Whether the record's template marks what the assistant generates."""
        return MARKS_GENERATION.search(self._text_of(record)) is not None

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = False, record: Record | None = None
    ) -> Rendered:
        """A conversation as text with what the template marks. record has the tools and options of the conversation.

        Raises ValueError when the template refuses it.
        """
        from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415 - takes a second

        text = self._text_of(record)
        options = record.template_options if record else {}
        if record is not None:
            report_alive(record.where)  # a conversation is rendered up to each of its answers
        try:
            with time_limit(TEMPLATE_SECONDS):
                texts, marked = render_jinja_template(
                    [[message.for_template() for message in messages]],
                    tools=list(record.tools) or None if record else None,
                    chat_template=_on_date(self.date) + text if reads_date(text) else text,
                    return_assistant_tokens_mask=MARKS_GENERATION.search(text) is not None,
                    add_generation_prompt=add_generation_prompt,
                    **{**self.variables, **options},
                )
            if len(texts[0]) > TEMPLATE_CHARACTERS:
                raise ValueError(f"it wrote {len(texts[0])} characters, the limit is {TEMPLATE_CHARACTERS}")
            texts[0].encode("utf-8")
        except MemoryError:
            raise
        except Exception as error:  # a template is a program out of a downloaded folder: it may fail in any way
            roles = ", ".join(message.role for message in messages[:8]) + (", ..." if len(messages) > 8 else "")
            raise ValueError(
                f"the chat template refuses a conversation of {roles}: {error}; change the records or the model's "
                "chat template"
            ) from None
        return Rendered(texts[0], [Span(int(start), int(end)) for start, end in marked[0]] if marked else [])

    def _text_of(self, record: Record | None) -> str:
        return self.tool_text if record is not None and record.tools else self.text


def fallback_template(begins: bool, end: str) -> str:
    """Return the template of a model that has none, which fits its tokenizer.

    begins: whether the tokenizer puts bos_token before a text. end: the token that ends an answer where the tokenizer
    names none, so that templates cannot read it.
    """
    text = FALLBACK_TEMPLATE if begins else FALLBACK_TEMPLATE.replace("{{ bos_token }}", "")
    return text.replace("{{ eos_token }}", end) if end else text


def today() -> datetime.date:
    """Return the day at this place, which transformers gives to templates."""
    return datetime.datetime.now().date()


def reads_date(template: str) -> bool:
    """Whether a template asks for today's date."""
    return NOW in template


@functools.cache
def _on_date(date: datetime.date) -> str:
    """Write the start of a template that sees this day, at its beginning, whenever it is rendered.

    A macro takes the place of the function, since transformers gives templates plain values alone. It replaces the
    codes of strftime one by one; "%%" is set aside meanwhile.
    """
    day = datetime.datetime.combine(date, datetime.time())
    codes = [f"%{code}" for code in DATE_CODES] + [f"%-{code}" for code in "dHIjmMSuUVwWy"]
    pairs = [("%%", "\0"), *((code, day.strftime(code)) for code in codes), ("%f", "000000"), ("\0", "%")]
    # The newline after the macro is not written, and keeps what follows at the beginning of a line.
    return (
        f"{{% macro {NOW}(format) %}}{{% set day = namespace(text=format) %}}{{% for code, value in {pairs!r} %}}"
        "{% set day.text = day.text.replace(code, value) %}{% endfor %}{{ day.text }}{% endmacro %}\n"
    )


def variants_of(record: Record, in_parts: bool = False) -> Iterator[Record]:
    """The record, and with tool calls also in the other forms in which templates want these.

    Arguments are an object or its JSON text; the content beside a call is absent or null. in_parts: contents are first
    tried as lists of parts, which templates of models with images may want of texts, too.
    """
    if in_parts:
        yield from variants_of(
            dataclasses.replace(record, messages=tuple(_with_parts(m, record) for m in record.messages))
        )
    if in_parts and record.images:
        return
    yield record
    if any("tool_calls" in message.extra for message in record.messages):
        for text_arguments, null_content in ((True, False), (True, True), (False, True)):
            convert = functools.partial(_with_calls, text_arguments=text_arguments, null_content=null_content)
            yield dataclasses.replace(record, messages=tuple(map(convert, record.messages)))


def _with_parts(message: Message, record: Record) -> Message:
    """A turn whose content is a list of texts and images, in the place of the text with PLACE."""
    if message.content is None:
        return message
    parts: list[dict[str, str]] = []
    for i, text in enumerate(message.content.split(PLACE) if record.images else [message.content]):
        parts += [{"type": "image"}] if i else []
        parts += [{"type": "text", "text": text}] if text or not record.images else []
    return dataclasses.replace(message, extra={**message.extra, "content": parts})


def _with_calls(message: Message, text_arguments: bool, null_content: bool) -> Message:
    if "tool_calls" not in message.extra:
        return message
    calls = [call["function"] for call in message.extra["tool_calls"]]
    if text_arguments:
        calls = [{**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)} for call in calls]
    whole = [{**old, "function": new} for old, new in zip(message.extra["tool_calls"], calls, strict=True)]
    absent = {"content": None} if null_content and message.content is None else {}
    return dataclasses.replace(message, extra={**message.extra, "tool_calls": whole, **absent})


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Ends what runs inside with a ValueError after so long; without effect outside the main thread."""

    def expire(*_: object) -> None:
        raise ValueError(f"it did not end within {seconds} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)


def _check_parses(template: str) -> None:
    """Raises ValueError when a template does not parse."""
    import jinja2  # noqa: PLC0415
    from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415 - takes a second

    try:
        with time_limit(TEMPLATE_SECONDS):
            render_jinja_template([[]], chat_template=template)  # an empty conversation: parsing is what is tried
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(
            f"the chat template does not parse: line {error.lineno}: {error}; correct or remove it"
        ) from None
    except RecursionError:
        raise ValueError("the chat template does not parse: it is nested too deep; correct or remove it") from None
    except Exception:  # whether it takes the records is seen when they are there
        return
